"""Going on with a run in another one: what may change, and what may not.

A run, and a checkpoint, may be anybody's. What its job says of its submitter's machine is not even
read (`Job.from_json`): factory, data and outputs are those of the job as it was said here, in this
machine's own record of that very run or on the command line.
"""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...job import LIVE, Job, SettingsError
from ...job.settings import plain
from ...net.blobs.client import BlobClient
from ...net.file_names import is_file_name
from ...peer.data.manifest import Manifest
from ...peer.rounds.methods.round_strategies import STRATEGIES
from ...proto.broker_pb2 import Checkpoint, RunSpec
from ...proto.common_pb2 import BlobRef
from ..access import Access
from ..errors import Refused
from ..files.outside import check_outside
from ..files.records import local_folder, own_job, read_run, record_of
from ..files.sending import there
from ..job_data import read_data, resolved
from ..uploading import transfer
from . import checkpoints
from .broker_calls import BrokerCalls

__all__ = ["GoingOn", "changed", "check_same", "gone_on", "prepared"]

FIXED = (
    *("model", "data", "seed", "train.batch", "train.microbatch", "train.optimizer"),
    *("train.no_muon",),
    *("sync.virtual_data", "sync.vhl.classes", "sync.vhl.features", "sync.vhl.logits"),
)
"""Keys of a job that stay: what follows would be neither the old run nor a new one."""


@dataclass(frozen=True, kw_only=True)
class GoingOn:
    """A run that goes on from a checkpoint, before it has an id; its blobs are at the broker.

    own: its job as it stands on this machine; None where nobody said one here. to: where its
    outputs go. tokens_per_step: of a step of all replicas together. sidecars: a folder with those
    of the run that it goes on from; None: they are not here."""

    spec: RunSpec
    own: Job | None
    to: str
    tokens_per_step: int
    sidecars: Path | None = None

    def record(self, run: str) -> dict[str, Any]:
        """Return what this machine keeps of it once it is a run of that id."""
        found = record_of(run, self.own, self.to, self.spec.data.hash, self.tokens_per_step)
        return found | {"from": {"run": self.spec.resumed.run, "step": self.spec.resumed.step}}


def prepared(
    client: BrokerCalls,
    source: str,
    changes: tuple[str, ...],
    job: Job | None,
    to: Path | str | None,
    say: Callable[[str], None],
) -> GoingOn:
    """Make what goes on from the newest checkpoint of a run, or from one in a folder. `job`: said
    on this machine, in place of what its record has; `to`: where outputs go, and where the record
    is looked for. Raises as `Client.go_on` does."""
    kept = checkpoints.read(source) if checkpoints.is_folder(source) else None
    if kept is not None:
        run, spec, found = kept.checkpoint.run, kept.spec, kept.checkpoint
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
        run, spec, found = source, recalled.spec, recalled.checkpoint
    said, sidecars = _recorded(run, to)
    own = job or said
    _check_outputs(own, changes, sidecars)
    with client.translated():
        if kept is not None:
            spec = checkpoints.upload(client.access, kept, say)
        manifest, before = manifest_of(client.access, spec.data.hash), Job.from_json(spec.job)
        if kept is not None or (job is not None and said is None):
            _bring_data(client.access, own, before, spec, manifest, say)
    if own is not None:
        before = job or before.with_places(own)
    wanted = before.with_changes(changes)
    if job is None:
        check_same(before, wanted)  # a factory or a source by --set, too
    elif said is not None:
        _check_places(said, wanted)
    wanted.check_idle(Job.from_json(spec.job))
    spec, wanted = gone_on(spec, found, wanted, manifest)
    if to is not None:
        wanted = replace(wanted, output=replace(wanted.output, to=str(to)))
    return GoingOn(
        spec=spec,
        own=None if own is None else wanted,
        to=wanted.output.to,
        tokens_per_step=wanted.train.batch * wanted.data.positions,
        sidecars=sidecars,
    )


def _check_outputs(own: Job | None, changes: tuple[str, ...], sidecars: Path | None) -> None:
    """Raise SettingsError where the job, as it stands here, names a log that nothing here can
    write, a Hub that it may not push to, or an export that lacks its config: as at a submission,
    before anything is sent."""
    if own is None:
        for key in (change.partition("=")[0].strip() for change in changes):
            if key.startswith(("log.", "output.format", "output.push")):
                raise SettingsError(
                    key, "is of who submitted the run, from another machine: expected --job FILE"
                )
        return
    wanted = own.with_changes(changes)
    check_outside(wanted)
    if (form := wanted.output.format) == "safetensors":
        return
    config = "config.json" if form == "hf" else "adapter_config.json"
    if sidecars is None or not (sidecars / config).is_file():
        raise SettingsError(
            "output.format",
            f'is "{form}", which needs the {config} that was kept when the run was submitted '
            "(RUN/sidecars), and it is not here: go on where that is (--to FOLDER, of the runs' "
            "folders), or with --set output.format=safetensors",
        )


def _check_places(said: Job, wanted: Job) -> None:
    """Raise SettingsError for another model or other data than the run was submitted with from
    here, which neither broker nor checkpoint can tell."""
    kept = replace(
        said, model=_fetched(said.model, wanted.model), data=_fetched(said.data, wanted.data)
    )
    data = replace(wanted.data, partition=kept.data.partition)
    check_same(kept, replace(kept, model=wanted.model, data=data))


def _fetched(had: Any, has: Any) -> Any:
    """A table of a record, in which a Hub is a folder by now, and a live object none, with the
    names that those have in another one."""
    both = ((f.name, getattr(had, f.name), getattr(has, f.name)) for f in fields(has))
    named = {k: v for k, was, v in both if f"{was}".startswith(LIVE) or f"{v}".startswith("hf://")}
    return replace(had, **named)


def _recorded(run: str, to: Path | str | None) -> tuple[Job | None, Path | None]:
    """Return the job of a run that this machine submitted, as it was said here, whatever a broker
    or a checkpoint has of it; and the folder of its sidecars."""
    places = dict.fromkeys((local_folder(to or "runs"), Path("runs")))
    for folder in (place / run for place in places if is_file_name(run)):
        if (job := own_job(read_run(folder))) is not None:
            there = folder / "sidecars"
            return job, there if there.is_dir() else None
    return None, None


def manifest_of(access: Access, name: str) -> Manifest:
    """The manifest that the broker has under a hash."""
    return Manifest.from_json(transfer(access, lambda blobs: blobs.fetch(name)))


def _bring_data(
    access: Access,
    own: Job | None,
    before: Job,
    spec: RunSpec,
    manifest: Manifest,
    say: Callable[[str], None],
) -> None:
    """Store the data of a checkpoint, if it is read on this machine; else the broker must have it.
    Raises BlobTransferError, SettingsError when the job's source has other data by now."""
    if before.data.where == "peer":
        return
    if own is None:
        refs = [BlobRef(hash=s.hash, size_bytes=s.size_bytes) for s in manifest.shards]
        if lacks := len(refs) - len(transfer(access, lambda blobs: there(blobs, refs))):
            raise SettingsError(
                "data.source",
                f"of this checkpoint's run lies with its submitter, and {lacks} of its "
                f"{len(manifest.shards)} shards are not at the broker: name a job of your own that "
                "has the same data here (--job job.toml)",
            )
        return
    with tempfile.TemporaryDirectory(prefix="shoal-data-") as name:
        data = read_data(own, Path(name), say, None)
        found = hashlib.sha256(data.manifest.to_json().encode()).hexdigest()
        if found != spec.data.hash:
            raise SettingsError(
                "data.source",
                f"has other data than the checkpoint was made with: the manifest's hash is "
                f"{found[:12]}, expected {spec.data.hash[:12]}",
            )

        async def store(blobs: BlobClient) -> None:
            for path in data.shards.values():
                await blobs.store(path)

        transfer(access, store)


def check_same(before: Job, after: Job) -> None:
    """Raises SettingsError for a key that may not change and does."""
    if key := changed(before, after):
        had, has = _at_or_none(before, key), _at_or_none(after, key)
        raise SettingsError(
            key,
            f"is {json.dumps(has)}, and the run had {json.dumps(had)}: it may not change when a "
            "run goes on",
        )


def changed(before: Job, after: Job) -> str:
    """The first key that may not differ and does; empty: none."""
    of = (job.sync.of_rounds for job in (before, after))
    made = any(method is not None and method.features for method in of)
    for key in (*FIXED, *(("sync.method", "sync.options") if made else ())):
        had, has = _at(plain(before), key), _at(plain(after), key)
        if had != has:
            return _first(key, had, has)
    return "sync.method" if _reads_otherwise(before, after) else ""


def _reads_otherwise(before: Job, after: Job) -> bool:
    """Whether what replicas share of one method has a name with another one, which means something
    else by it: one's momentum is a sum of moves, and another's their mean."""
    chosen = [job.sync.chosen for job in (before, after)]
    slots = [{*STRATEGIES[name].slots} if name in STRATEGIES else set() for name in chosen]
    return chosen[0] != chosen[1] and bool(slots[0] & slots[1])


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


def gone_on(spec: RunSpec, found: Checkpoint, job: Job, manifest: Manifest) -> tuple[RunSpec, Job]:
    """The spec of a run that goes on from a checkpoint of another one, and its job. Microbatches,
    and matrices that Muon leaves, stay as they were where the job leaves them open. Raises
    SettingsError for a key that may not change."""
    before = Job.from_json(spec.job)
    kept = ("microbatch", "no_muon")
    left = {key: getattr(before.train, key) for key in kept if getattr(job.train, key) == "auto"}
    job = replace(job, train=replace(job.train, **left))
    mine, was = job.data.partition, before.data.partition
    if was is not None and (mine is None or replace(mine, clients=was.clients) == was):
        job = replace(job, data=replace(job.data, partition=was))  # data says how many clients
    job = resolved(job, manifest)
    check_same(before, job.without_places())
    out = copy.deepcopy(spec)
    out.ClearField("plan")
    out.name, out.job, out.steps = job.name, job.to_json(), job.train.steps or 0
    out.resumed.CopyFrom(found)
    return out, job


def _at_or_none(job: Job, key: str) -> Any:
    try:
        return _at(plain(job), key)
    except AttributeError:
        return None
