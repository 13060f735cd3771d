"""Going on with a run in another one: what may change, and what may not."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...job import Job, SettingsError
from ...job.settings import plain
from ...peer.data.manifest import Manifest
from ...proto.broker_pb2 import Checkpoint, RunSpec
from ..errors import Refused
from ..files.records import read_run
from ..job_data import resolved
from ..submission import bring_data, transfer
from . import checkpoints

if TYPE_CHECKING:
    from .session import Client

__all__ = ["changed", "gone_on", "prepared", "with_changes"]

FIXED = ("model", "data", "seed", "train.batch", "train.microbatch", "train.optimizer")
"""Keys of a job that stay: what follows would be neither the old run nor a new one."""


def prepared(
    client: Client,
    source: str,
    changes: tuple[str, ...],
    job: Job | None,
    runs: Path,
    say: Callable[[str], None],
) -> tuple[RunSpec, Job, int]:
    """What goes on from the newest checkpoint of a run, or from one in a folder: its spec, with all
    that it needs at the broker, its job, and the tokens of a step. `runs`: where this machine keeps
    what it knows of runs. Raises as `Client.go_on` does."""
    if checkpoints.is_folder(source):
        kept = checkpoints.read(source)
        folder, found = Path(kept.folder), kept.checkpoint
        with client.translated():
            spec = checkpoints.upload(client.access, kept, say)
            bring_data(client.access, _job_of(spec, folder), spec.data.hash, say)
    else:
        if client.is_open(source):
            raise Refused(
                f"run {source} has not ended, and with changes another run would go on beside it: "
                f"`shoal cancel {source}` first, or `shoal resume {source}` goes on as it was"
            )
        recalled = client.recall(source)
        if not recalled.HasField("checkpoint"):
            raise Refused(
                f"run {source} has no checkpoint: its job makes none (output.every), or it ended "
                "before the first"
            )
        spec, found = recalled.spec, recalled.checkpoint
        folder = Path(read_run(runs / source).get("folder", "."))
    with client.translated():
        text = transfer(client.access, lambda blobs: blobs.fetch(spec.data.hash))
    manifest = Manifest.from_json(text)
    wanted = with_changes(job or _job_of(spec, folder), changes)
    spec = gone_on(spec, found, wanted, manifest)
    wanted = _job_of(spec, wanted.folder)
    return spec, wanted, wanted.train.batch * (manifest.length or 1)


def _job_of(spec: RunSpec, folder: Path) -> Job:
    return replace(Job.from_json(spec.job), folder=folder)


def with_changes(job: Job, changes: Iterable[str]) -> Job:
    """A job with some keys changed, each given as KEY=VALUE ("train.lr=1e-4"). Raises
    SettingsError."""
    table: dict[str, Any] = plain(job)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals:
            raise SettingsError(
                "", f"{change!r} is no change: expected KEY=VALUE, as in train.lr=1e-4"
            )
        *tables, last = key.strip().split(".")
        at = table
        for name in tables:
            at = at.setdefault(name, {})
            if not isinstance(at, dict):
                raise SettingsError(key.strip(), f"is no key: {name} is {at!r}, not a table")
        at[last] = _value(text.strip())
        if key.strip() in ("train.steps", "train.tokens", "train.passes"):
            for other in {"steps", "tokens", "passes"} - {last}:
                at.pop(other, None)
    return replace(Job.from_table(table), folder=job.folder)


def _value(text: str) -> Any:
    """As in a job.toml; what is no TOML is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def changed(before: Job, after: Job) -> str:
    """The first key that may not differ and does; empty: none."""
    for key in FIXED:
        had, has = _at(plain(before), key), _at(plain(after), key)
        if had != has:
            return _first(key, had, has)
    return ""


def _at(table: Any, key: str) -> Any:
    for name in key.split("."):
        table = table.get(name)
    return table


def _first(key: str, had: Any, has: Any) -> str:
    if isinstance(had, Mapping) and isinstance(has, Mapping):
        for name in dict.fromkeys((*had, *has)):
            if had.get(name) != has.get(name):
                return _first(f"{key}.{name}", had.get(name), has.get(name))
    return key


def gone_on(spec: RunSpec, found: Checkpoint, job: Job, manifest: Manifest) -> RunSpec:
    """The spec of a run that goes on from a checkpoint of another one. Microbatches stay as they
    were, where the job leaves them to the planner. Raises SettingsError for a key that may not
    change."""
    before = Job.from_json(spec.job)
    if job.train.microbatch == "auto":
        job = replace(job, train=replace(job.train, microbatch=before.train.microbatch))
    job = resolved(job, manifest)
    if key := changed(before, job):
        had, has = _at_or_none(before, key), _at_or_none(job, key)
        raise SettingsError(
            key,
            f"is {json.dumps(has)}, and the run had {json.dumps(had)}: it may not change when a "
            "run goes on",
        )
    out = RunSpec()
    out.CopyFrom(spec)
    out.ClearField("plan")
    out.name, out.job, out.steps = job.name, job.to_json(), job.train.steps or 0
    out.resumed.CopyFrom(found)
    return out


def _at_or_none(job: Job, key: str) -> Any:
    try:
        return _at(plain(job), key)
    except AttributeError:
        return None
