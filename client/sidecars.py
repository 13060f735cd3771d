"""The files that go with an export: a model's config, and what makes ids of text and back; and
exports that could not be made."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import nn

from ..dag.ir.graph import Graph
from ..job import Job, SettingsError
from ..job.words import some_of
from .chat.naming import path_of, tokenizer_of
from .chat.texts import OF_TOKENIZERS, has_tokenizer
from .models.adapters import AdapterError, is_adapted, save_config
from .models.factories import find, is_hugging_face
from .models.fitting import OF_LAYERS
from .models.tasks import known_class

__all__ = ["check_base", "check_format", "sidecars_of", "tokenizer_files"]

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
    config: Any = copy.deepcopy(module.config)
    if name := known_class(module):  # that which is trained, whichever wrote the folder
        config.architectures = [name]
    config.save_pretrained(folder)
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


def check_format(job: Job, module: nn.Module) -> None:
    """Raise SettingsError for an export that could not be made: better now than after the run."""
    if job.output.format == "peft" and not is_adapted(module):
        raise SettingsError(
            "output.format",
            'is "peft", and the model has no adapter: expected `model.lora`, a factory that makes '
            "one with peft, or another format",
        )
    kept = [Path(name).name for name in job.model.sidecars]
    there = "config.json" in kept if kept else is_hugging_face(module)
    if job.output.format == "hf" and not there:
        raise SettingsError(
            "output.format",
            'is "hf", and nothing brings the config.json that goes with such an export: expected a '
            'Hugging Face model, one among model.sidecars, or format = "safetensors"',
        )


def check_base(job: Job, graph: Graph, known: Collection[str], say: Callable[[str], None]) -> None:
    """Raise SettingsError for an adapter over a base of which part would be nowhere: it begins as
    the factory makes it, and stays so; in another format that is said. `known`: what files or the
    adapter have."""
    trained = [p.name for p in graph.parameters if p.trainable]
    is_adapter = any(fnmatch(name, glob) for name in trained for glob in OF_LAYERS)
    if job.output.format != "peft" and not is_adapter:
        return
    read = {name for operator in graph.operators for name in operator.reads}
    frozen = [p.name for p in graph.parameters if not p.trainable and f"param:{p.name}" in read]
    lost = [name for name in frozen if name not in known]
    if lost and job.output.format != "peft":
        say(
            f"{some_of(lost, 3)} begin fresh and stay so: an adapter trains them by modules_to_save"
        )
    elif lost:
        raise SettingsError(
            "output.format",
            f'is "peft", and {some_of(lost, 3)} begin fresh and are not trained, so neither the '
            "base's files nor the adapter would have them: train them, too (modules_to_save of "
            'model.lora), or take format = "hf"',
        )
