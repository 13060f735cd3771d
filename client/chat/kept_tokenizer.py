"""The tokenizer that goes with a run's weights: what made the ids that they learned."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...job import Job
from .naming import path_of, tokenizer_of
from .texts import OF_TOKENIZERS, has_tokenizer

__all__ = ["tokenizer_files"]

_FILES = (
    "tokenizer*",
    "vocab*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    *OF_TOKENIZERS,
)
_TEMPLATE = "chat_template.jinja"
"""What transformers read a template from before they look anywhere else."""


def tokenizer_files(job: Job, folder: Path, home: Path | None) -> list[Path]:
    """Return the files of the tokenizer of a job's data, or those in `home`, its model's folder,
    where the data is ids or arrays; with the job's own chat template, if it has one. None for text
    that goes as bytes. What lies in no file is written into `folder`. Raises SettingsError."""
    found: dict[str, Path] = {}
    if job.data.is_records or has_tokenizer(job):
        made = tokenizer_of(job)
        home = made if isinstance(made, Path) else folder / "tokenizer"
        if home != made:
            made.save_pretrained(home)
    elif job.data.kind == "text":
        home = None
    if home is not None:
        for pattern in _FILES:
            found |= {path.name: path for path in sorted(home.glob(pattern)) if path.is_file()}
    if job.data.is_records and job.data.template != "auto":
        found[_TEMPLATE] = folder / _TEMPLATE
        shutil.copyfile(path_of(job, job.data.template), found[_TEMPLATE])
    return [*found.values()]
