"""The files that go with an export: a model's config, and what makes ids of text and back."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..job import Job
from .chat.kept_tokenizer import tokenizer_files
from .models.adapters import AdapterError, save_config
from .models.factories import find, is_hugging_face

__all__ = ["sidecars_of"]


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
