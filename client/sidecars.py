"""The files that go with an export: a model's config, and what makes ids of text and back."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..job import Job
from .chat.naming import tokenizer_of
from .chat.samples import template_of
from .chat.texts import OF_TOKENIZERS, has_tokenizer
from .models.adapters import AdapterError, save_config
from .models.factories import find, is_hugging_face

__all__ = ["sidecars_of"]

_BESIDE = (
    *("tokenizer*", "vocab*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *OF_TOKENIZERS,
)
"""The files of a tokenizer in a folder of Hugging Face."""
_TEMPLATE = "chat_template.jinja"
"""Where transformers look for a template first."""


def sidecars_of(module: nn.Module, job: Job, folder: Path) -> tuple[Path, ...]:
    """The files that go with an export: those of the job, or a Hugging Face model's config (as it
    is, whatever `args` changed in it) and the tokenizer and template that made the ids of the data;
    besides, an adapter's config. What is not there yet is written into `folder`. Raises as
    `save_config`, `tokenizer_of` and `template_of`."""
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
    words = _words(job, folder)
    return tuple({path.name: path for path in (*sorted(folder.iterdir()), *words)}.values())


def _words(job: Job, folder: Path) -> tuple[Path, ...]:
    """The files of the tokenizer that made a job's ids; of other data those beside the model."""
    home: Path | None = None
    found: list[Path] = []
    if job.model.factory.startswith("hf:"):
        home = find(job.model.factory.removeprefix("hf:"), job.folder, "model.factory")
        found += home.glob("generation_config.json")
    if job.data.is_records or has_tokenizer(job):
        named = tokenizer_of(job)
        if not isinstance(named, Path):
            named.save_pretrained(folder)
            named = None
        home = named
    if home is not None:
        found += (path for pattern in _BESIDE for path in sorted(home.glob(pattern)))
    if job.data.is_records and job.data.template != "auto":
        text = template_of(job).tokenizer.chat_template
        (folder / _TEMPLATE).write_text(text, encoding="utf-8")
        found = [path for path in found if not path.name.startswith("chat_template")]
    return tuple(path for path in found if path.is_file())
