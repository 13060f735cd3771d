"""The files that go with an export: a model's config, and what makes ids of text and back."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from ..job import Job
from .chat.naming import path_of, tokenizer_of
from .chat.texts import OF_TOKENIZERS, has_tokenizer
from .models.adapters import AdapterError, save_config
from .models.factories import find, is_hugging_face

__all__ = ["sidecars_of", "tokenizer_files"]

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


def sidecars_of(module: nn.Module, job: Job, folder: Path) -> tuple[Path, ...]:
    """The files that go with an export: those of the job, or a Hugging Face model's config (as it
    is, whatever `args` changed in it) and the tokenizer and template that made the ids of the data;
    besides, an adapter's config. What is not there yet is written into `folder`. Raises as
    `save_config` and `tokenizer_files`."""
    folder.mkdir()
    try:
        adapter = save_config(module, folder)
    except AdapterError:
        if job.output.format == "peft":
            raise
        adapter = ()
    if job.model.sidecars:
        own = (find(p, job.folder, "model.sidecars") for p in job.model.sidecars)
        return (*own, *adapter)
    if not is_hugging_face(module):
        return adapter
    module.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
    found, home = {path.name: path for path in sorted(folder.iterdir())}, None
    if job.model.factory.startswith("hf:"):
        home = find(job.model.factory.removeprefix("hf:"), job.folder, "model.factory")
        found |= {path.name: path for path in home.glob("generation_config.json")}
    found |= {path.name: path for path in tokenizer_files(job, folder, home)}
    return tuple(found.values())


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
