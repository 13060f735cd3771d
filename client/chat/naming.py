"""What a job says of its tokenizer, its model's config and its files, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...job import Job, SettingsError
from ...net.surroundings import user_path
from ...peer.data.manifest import DataError

__all__ = ["config_of", "path_of", "tokenizer_of"]


def path_of(job: Job, name: str) -> str:
    """A source relative to the job's file."""
    if "://" in name:
        raise SettingsError("data.source", f"is {name!r}: expected files of this machine")
    return str(job.folder.resolve() / user_path(name))


def config_of(job: Job) -> dict[str, Any]:
    """Return what is known of the model's config: of its folder with `model.args`, or of a live
    module; empty for a factory."""
    if job.module is not None:
        config = getattr(job.module, "config", None)
        return config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    if not job.model.factory.startswith("hf:"):
        return {}
    folder = Path(path_of(job, job.model.factory.removeprefix("hf:")))
    path = folder / job.model.args.get("subfolder", "") / "config.json"
    if not path.is_file():
        raise DataError(f'"{job.model.factory}": there is no config.json in {path.parent}')
    config = json.loads(path.read_text(encoding="utf-8"))
    return {**config, **job.model.args}


def tokenizer_of(job: Job) -> Any:
    """The folder of the job's tokenizer, or the live one. Raises SettingsError."""
    named = job.data.tokenizer
    if job.tokenizer is not None and named == "auto":
        return job.tokenizer
    if named == "auto" and not job.model.factory.startswith("hf:"):
        raise SettingsError(
            "data.tokenizer",
            'is "auto", and only a model of factory = "hf:FOLDER" brings one: expected the folder '
            "of a tokenizer",
        )
    folder = Path(path_of(job, job.model.factory.removeprefix("hf:") if named == "auto" else named))
    if not folder.is_dir():
        raise SettingsError("data.tokenizer", f'is "{named}": there is no folder {folder}')
    return folder
