"""The data of a job on the submitter's side: read from its source into a manifest and shards, and
held against what the job wants of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..dag.capture.proof import Alone
from ..job import Job, SettingsError
from ..job.clients.partitioning import Partitioning
from ..job.tables import Data
from ..job.words import count_of
from ..net.surroundings import user_path
from ..peer.data.manifest import Manifest
from ..peer.data.partition import partition_of
from ..peer.data.reader import Reader
from ..peer.data.sampler import steps_for
from ..peer.data.sources import check_apart, resolve
from .chat.fetched_files import FETCHED, fetched
from .chat.samples import read_records
from .chat.texts import OF_TOKENIZERS, has_tokenizer, read_text

__all__ = [
    "AskPeers",
    "ClientSizes",
    "JobData",
    "check_tokenizer",
    "client_sizes",
    "example",
    "read_data",
    "reader_of",
    "resolved",
    "with_clients",
]

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class JobData:
    """A job's data: shard files by hash; or none of them here, and `local`, the inputs of the model
    whose data stays with its peers."""

    manifest: Manifest
    shards: dict[str, Path] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    of_clients: tuple[Manifest, ...] = ()
    """Of federated training on data of peers, the manifest of each host, `manifest` first."""

    @property
    def least(self) -> Manifest:
        """The manifest that holds out fewest."""
        return min((self.manifest, *self.of_clients), key=lambda m: m.different_held_out)


AskPeers = Callable[[Data], JobData]
"""Gets the manifest of data that peers keep."""


def read_data(job: Job, folder: Path, say: Say, ask: AskPeers | None) -> JobData:
    """Read a job's data into shards in `folder`, or ask the peers that keep it for its manifest.
    Raises SettingsError, DataError."""
    data = job.data
    if data.where == "peer":
        if ask is None:
            raise SettingsError(
                "data.where",
                'is "peer", and there is no broker here whose peers have it: to try the job, give '
                'it data of your own with where = "submitter"',
            )
        say(f"asking the peers that have the data {data.source!r}")
        return ask(data)
    say("reading the data")

    def brought(named: str, key: str) -> str:
        if not named.startswith(FETCHED):
            return named
        say(f"fetching {named}")
        return fetched(named, folder / key)

    check_apart(data.source, data.validation if "://" in data.validation else "")
    source = brought(data.source, "fetched")
    validation = brought(data.validation, "validation")
    data = replace(data, source=source, validation=validation)
    job = replace(job, data=data)
    if data.is_records:
        return JobData(**read_records(job, folder, say))
    source, validation = (
        str(job.folder.resolve() / user_path(name)) if name and "://" not in name else name
        for name in (source, validation)  # relative to the job's file, as the factory is
    )
    if data.kind == "text" and (text := read_text(job, folder, source, validation)) is not None:
        return JobData(**text)
    manifest, shards = resolve(
        folder,
        kind=data.kind,
        source=source,
        holdout=data.holdout,
        length=data.length,
        inputs=data.inputs,
        targets=data.targets,
        key=data.partition.key if data.partition is not None else "",
        validation=validation,
    )
    return JobData(manifest=manifest, shards=shards)


@dataclass(frozen=True, slots=True)
class ClientSizes:
    """Samples of each client of federated training: those that it trains on, and of a partition
    those that it holds out. Nothing of other training."""

    trained: tuple[int, ...] = ()
    held_out: tuple[int, ...] = ()

    def alone(self, job: Job) -> Alone:
        """Return why a batch of a client has one sample: `train.batch` leaves it over."""
        batch, steps = job.train.batch, job.sync.local.steps

        def left(sizes: tuple[int, ...], does: str, most: int = 0) -> str:
            for n in filter(None, sizes):
                reached = batch == 1 or not 0 < most < -(-n // batch)
                if n % batch == 1 % batch and reached:
                    return f"a client {does} {n} samples, and in batches of {batch} one is alone"
            return ""

        if job.sync.virtual_data != "none":  # whose noise is in every batch
            return Alone(evaluated=left(self.held_out, "holds out"))
        return Alone(left(self.trained, "trains on", steps), left(self.held_out, "holds out"))


def client_sizes(job: Job, data: JobData) -> ClientSizes:
    """Return how many samples clients have. Raises SettingsError, DataError."""
    if job.sync.kind != "federated":
        return ClientSizes()
    if data.of_clients:
        sizes = ClientSizes(tuple(m.train for m in data.of_clients))
    else:
        assert job.data.partition is not None, "checked by the job"
        found = partition_of(job.data.partition, job.data.targets, reader_of(job, data))
        trained = found.sizes - found.held_out_sizes
        sizes = ClientSizes(tuple(trained.tolist()), tuple(found.held_out_sizes.tolist()))
    job.sync.local.check_walked(sizes.trained, job.train.batch)
    return sizes


def with_clients(job: Job, found: JobData) -> tuple[Job, JobData]:
    """Return the job with a client for each host that has its data, or for each key that samples
    have, and that data; as they are where training is not federated, or the job says how many
    clients there are. Raises SettingsError for hosts whose data is not alike, and for fewer clients
    than a round has; DataError for keys that cannot be used."""
    if job.sync.kind != "federated" or job.data.where != "peer":
        found, divided = replace(found, of_clients=()), job.data.partition
        if job.sync.kind != "federated" or divided is None or divided.kind != "by-key":
            return job, found
        count = len(partition_of(divided, job.data.targets, reader_of(job, found)))
        divided = replace(divided, clients=count)
        return replace(job, data=replace(job.data, partition=divided)), found
    first = found.manifest
    for other in found.of_clients:
        if (other.kind, other.fields) != (first.kind, first.fields):
            raise SettingsError(
                "data.source",
                f'is "{job.data.source}", which its hosts have in different forms: '
                f"{_form(first)} and {_form(other)}; expected the same inputs everywhere",
            )
        if not other.train:
            raise SettingsError(
                "data.source",
                f'is "{job.data.source}", of which a host has no sample to train on: expected at '
                "least one on each",
            )
    count, asked = len(found.of_clients), job.data.partition
    if asked is not None and asked.clients not in (None, count):
        raise SettingsError(
            "data.partition.clients",
            f'is {asked.clients}, and {count_of(count, "host")} of "{job.data.source}" answered: '
            "each is a client, leave it out",
        )
    partition = Partitioning(kind="by-peer", clients=count)
    return replace(job, data=replace(job.data, partition=partition)), found


def _form(manifest: Manifest) -> str:
    """What samples are made of, for people."""
    return ", ".join(f"{n} {s.dtype}{list(s.sizes)}" for n, s in manifest.fields.items())


def check_tokenizer(job: Job, module: nn.Module | None = None) -> None:
    """Raise SettingsError for text that would go as bytes to a model made with a tokenizer: one
    the folder of whose weights has the files of one. module: the job's, when it is made;
    transformers keep in it where it was loaded from."""
    if job.data.kind != "text" or job.data.tokenizer != "auto" or has_tokenizer(job):
        return
    names = [n for n in job.model.weight_names if n != "init"]
    if job.model.factory.startswith("hf:"):
        names.append(job.model.factory.removeprefix("hf:"))
    config = getattr(module, "config", None)
    names.append(str(getattr(config, "_name_or_path", "") or ""))
    for name in names:
        if not name or "://" in name:
            continue
        for path in (job.folder / user_path(name), user_path(name)):
            folder = path if path.is_dir() else path.parent
            if not path.exists():
                continue
            for pattern in OF_TOKENIZERS:
                for found in sorted(folder.glob(pattern)):
                    raise SettingsError(
                        "data.tokenizer",
                        f'is "auto", the model has a tokenizer of its own ({found}), and text '
                        f'would reach it as bytes: expected tokenizer = "{found.parent}", or '
                        'tokenizer = "bytes" to train on bytes all the same',
                    )


def reader_of(job: Job, data: JobData) -> Reader:
    """A reader of data whose shards are here."""
    return Reader(data.manifest, data.shards.__getitem__, seed=job.seed, microbatches=1)


def example(manifest: Manifest) -> dict[str, Tensor]:
    """A microbatch of two zero samples: only its shapes and dtypes count."""
    return {
        name: torch.zeros((2, *spec.sizes), dtype=getattr(torch, spec.dtype))
        for name, spec in manifest.fields.items()
    }


def resolved(job: Job, manifest: Manifest, say: Say = lambda line: None) -> Job:
    """Return the job with its length in steps. Without held-out data it evaluates nothing, and an
    evaluation has no more whole batches than samples of arrays are held out: none counts twice."""
    train = job.train
    steps = train.known_steps or steps_for(
        manifest,
        train.batch,
        passes=train.passes,
        tokens=train.tokens,
        length=job.data.length if job.data.is_records else 0,
    )
    job = job.resolved(steps)
    if not manifest.held_out:
        if train.stop.evaluates:
            raise SettingsError(
                "train.stop",
                "goes by held-out losses, and no samples are held out: expected a data.holdout, or "
                "`time` alone",
            )
        return replace(job, train=replace(job.train, eval_every=0))
    if not job.train.evaluated_batches:
        return job
    batches, there = job.train.eval_batches, manifest.different_held_out
    wanted = f"train.eval_batches = {batches} of {train.batch} samples"
    if batches * train.batch <= there:
        return job
    if manifest.kind != "arrays":
        say(f"held-out: {wanted} are drawn from {there} windows: some count twice")
        return job
    if there < train.batch:
        say(f"held-out: a batch of {train.batch} has {there} samples to evaluate: some count twice")
    else:
        say(
            f"held-out: only {there // train.batch * train.batch} of {there} samples are "
            f"evaluated, as whole batches: with {wanted}, some would count twice"
        )
    fits = max(1, there // train.batch)
    return replace(job, train=replace(job.train, eval_batches=fits))
