"""The job: everything that a run needs to know, as plain data.

The classes mirror the tables of job.toml, key by key. A job comes from a file (`Job.from_toml`),
from JSON (`Job.from_json`, what a RunSpec carries), or from Python:

    shoal.Job(model=module, data={"source": "books/*.txt"}, steps=300, lr=1e-3)

What is asked for and not built yet is refused by name, never ignored. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from .clients.client_options import LEAST_MEMBERS, Cohorts
from .methods import METHODS
from .plan_options import PlanOptions
from .rounds import RoundSettings, method_of
from .settings import Settings, SettingsError, json_object, meant, plain, read_toml
from .stripped import data_without, model_without, output_without
from .sync import Sync
from .tables import LIVE, Codec, Data, Model, Output, Recovery
from .training import LENGTHS, Train, Training

__all__ = ["Job"]


@dataclass(frozen=True, kw_only=True, init=False)
class Job(Settings):
    """A whole job. `module` and `folder` are the submitter's own and are not part of its JSON."""

    version: int
    """Of the format; 1."""
    name: str
    """For people."""
    seed: int
    """Of everything random."""
    priority: int
    """Higher goes first when runs compete for peers."""
    model: Model
    """What is trained."""
    data: Data
    """On what."""
    train: Train
    """How."""
    plan: PlanOptions
    """Where."""
    codec: Codec
    """Compressed how."""
    sync: Sync
    """Synchronised how."""
    recovery: Recovery
    """And when a peer is lost."""
    output: Output
    """What is left."""
    OURS: ClassVar[frozenset[str]] = frozenset({"module", "folder"})

    module: Any = field(default=None, compare=False, repr=False)
    """The live nn.Module that stands for [model]; None: the factory makes it."""
    folder: Path = field(default=Path(), compare=False, repr=False)
    """Where relative paths and the factory's file are looked up first."""

    def __init__(
        self,
        *,
        model: Any,
        data: Data | Mapping[str, Any] | str | None = None,
        train: Train | Mapping[str, Any] | None = None,
        plan: PlanOptions | Mapping[str, Any] | None = None,
        codec: Codec | Mapping[str, Any] | None = None,
        sync: Sync | Mapping[str, Any] | None = None,
        recovery: Recovery | Mapping[str, Any] | None = None,
        output: Output | Mapping[str, Any] | None = None,
        version: int = 1,
        name: str = "job",
        seed: int = 0,
        priority: int = 0,
        module: Any = None,
        folder: Path | str = ".",
        **train_keys: Any,
    ) -> None:
        """`model`: a table, a factory such as "file.py:fn", or a live module. `data`: a table, or
        its source. Further keywords are keys of [train]. Raises SettingsError."""
        flat = [f.name for f in fields(Train)]
        known = [f.name for f in fields(Job) if f.name not in self.OURS] + flat
        for key in train_keys:
            if key not in flat:
                what = f"is not a known key{meant(key, known)}"
                raise SettingsError(key, what)
        if isinstance(model, str):
            model = {"factory": model}
        elif not isinstance(model, Model | Mapping):
            model, module = {"factory": LIVE + type(model).__qualname__}, model
        if train_keys and isinstance(train, Train):
            raise SettingsError("train", f"is given together with {', '.join(train_keys)}: use one")
        if isinstance(train, Mapping):
            train = {**train, **train_keys}
        given: dict[str, Any] = {
            "version": version,
            "name": name,
            "seed": seed,
            "priority": priority,
            "model": model,
            "data": {"source": data} if isinstance(data, str) else data or {},
            "train": train or train_keys,
            "plan": plan or {},
            "codec": codec or {},
            "sync": sync or {},
            "recovery": recovery or {},
            "output": output or {},
            "module": module,
            "folder": Path(folder),
        }
        for key, value in given.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    def check(self) -> None:
        if self.version != 1:
            raise SettingsError("version", f"is {self.version}: expected 1")
        if self.sync.kind == "gossip" and self.plan.replicas == 1:
            raise SettingsError(
                "plan.replicas",
                f'is {self.plan.replicas!r} with sync.kind = "gossip", in which replicas meet in '
                "pairs: expected 2 or more",
            )
        stays = self.data.where == "peer"
        if self.sync.kind == "federated" and self.data.partition is None and not stays:
            raise SettingsError(
                "data.partition",
                'is missing: sync.kind = "federated" needs it, to say which client has which '
                "samples",
            )
        try:
            _ = self._cohorts
        except SettingsError as error:
            raise error.inside("sync") from None
        method = self.sync.of_rounds
        if self.codec.sync != "none":
            if method is not None and method.own_codec:
                self._refuse_codec(f'sync.method = "{self.sync.chosen}"')
            if self.sync.client_compression.sparse:
                self._refuse_codec(f'sync.compression = "{self.sync.compression}"')
        if method is not None and method.normalises and self.train.optimizer != "sgd":
            raise SettingsError(
                "train.optimizer",
                f'is "{self.train.optimizer}" with sync.method = "{self.sync.chosen}", which '
                "divides a client's move by what its steps of SGD count for; of no other optimizer "
                'is that known: expected "sgd"',
            )
        if self.train.steps is not None and self.plan.reroutes:
            before, since = self.plan.full_steps(self.train.steps)
            if before >= since:
                raise SettingsError(
                    "plan.skip_warmup" if before else "plan.skip_fade_out",
                    f"leaves no step to plan.skip and plan.reorder: with plan.skip_warmup and "
                    f"plan.skip_fade_out {before + self.train.steps - since} of {self.train.steps} "
                    "steps visit all stages; expected fewer",
                )
        for key, problem in _not_built(self):
            raise SettingsError(key, f"is not supported yet: {problem}")

    def _refuse_codec(self, because: str) -> None:
        raise SettingsError(
            "codec.sync",
            f'is "{self.codec.sync}", and {because} writes what it exchanges in a way of its own: '
            'expected "none"',
        )

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Job:
        unknown = [k for k in table if k not in {f.name for f in fields(cls)} - cls.OURS]
        if unknown:
            super().from_table({unknown[0]: None})  # raises, and names the key that was meant
        for key in ("version", "model", "train"):
            if key not in table:
                wanted = "exactly one of " + ", ".join(f"train.{key}" for key in LENGTHS)
                what = {"version": "1", "model": 'a table with "factory"', "train": wanted}[key]
                raise SettingsError(key, f"is missing: expected {what}")
        return cls(**table)

    @classmethod
    def from_toml(cls, path: str | Path) -> Job:
        """The job in a file; its folder is where the factory and relative paths are looked up.

        Raises SettingsError with file and line, OSError when the file cannot be read.
        """
        path = Path(path)
        job = read_toml(cls, path, {"name": path.stem})
        return replace(job, folder=path.resolve().parent)

    def without_places(self) -> Job:
        """Return the job without its live module and all that it names on its submitter's machine
        (factory, files, data, outputs): nothing is imported, read or written by what is left."""
        return replace(
            self,
            model=model_without(self.model),
            data=data_without(self.data),
            output=output_without(self.output),
            module=None,
            folder=Path(),
        )

    def with_places(self, own: Job) -> Job:
        """Return the job with what `own` says of this machine: its model, data and outputs."""
        return replace(
            self,
            model=own.model,
            data=own.data,
            output=replace(self.output, to=own.output.to, format=own.output.format),
            folder=own.folder,
        )

    def to_json(self) -> str:
        """The job as a RunSpec carries it: without places (`without_places`)."""
        return json.dumps(plain(self.without_places()))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """A job that came from a broker or a checkpoint, and so from anybody: what it says of
        places is dropped. Raises SettingsError."""
        return cls.from_table(json_object(text)).without_places()

    def resolved(self, steps: int) -> Job:
        """Return the job with its length in steps and its microbatch size as a number, whatever
        they were given as."""
        known = self.train.lasting(steps)
        return replace(self, train=replace(known, microbatch=self.train.microbatch_size))

    @property
    def training(self) -> Training:
        """What a peer needs. Needs `steps` (see `resolved`)."""
        return Training(
            seed=self.seed,
            train=self.train,
            rebuilds=self.recovery.rebuilds,
            rounds=self.rounds,
            skip_scaling=self.plan.skip_scaling,
        )

    @property
    def replicas(self) -> int:
        """Among so many the batch is divided; 1 while that is undecided."""
        return 1 if self.plan.replicas == "auto" else self.plan.replicas

    @property
    def divided(self) -> int:
        """Among so many replicas a batch is divided; 1 in federated training, where it is a
        client's."""
        return 1 if self.sync.kind == "federated" else self.replicas

    @property
    def undecided(self) -> bool:
        """Whether the planner says how many replicas it has."""
        return self.sync.kind != "allreduce" and self.plan.replicas == "auto"

    def decided(self, kind: Literal["allreduce", "local"], replicas: int) -> Job:
        """Return the job with what the planner says of it; "local": replicas train apart, as the
        job says."""
        sync, data = self.sync, self.data
        if kind == "allreduce":
            sync, data = replace(sync, kind=kind, every="auto"), replace(data, partition=None)
        elif sync.kind not in ("gossip", "federated"):
            sync = replace(sync, kind=kind)
        plan = replace(self.plan, replicas=replicas)
        return replace(self, plan=plan, sync=sync, data=data)

    @property
    def one_of_many(self) -> Job:
        """The job that each of several replicas is planned as, whoever has the data."""
        if self.sync.kind not in ("gossip", "federated"):
            return self.decided("local", 1)
        sync = Sync(kind="local", method="average")
        data = replace(self.data, partition=None, where="submitter", keep_local="none")
        train = self.train if self.train.rounds is None else self.train.lasting(self.train.rounds)
        plan = replace(self.plan, replicas=1)
        return replace(self, plan=plan, sync=sync, data=data, train=train)

    @property
    def rounds(self) -> RoundSettings | None:
        """What replicas exchange between their steps; None: nothing."""
        if self.sync.kind in ("allreduce", "auto"):
            return None
        return RoundSettings(
            method=self.sync.chosen,
            options=self.sync.options,
            codec="nonzero" if self.sync.client_compression.sparse else self.codec.sync,
            replicas=self.divided,
            seed=self.seed,
            cohorts=self._cohorts,
        )

    @property
    def _cohorts(self) -> Cohorts | None:
        """Clients and cohorts; None: replicas make steps."""
        sync, partition = self.sync, self.data.partition
        if sync.kind != "federated" or partition is None:
            return None
        return Cohorts.of(
            partition,
            self.data.targets,
            sync.per_round,
            sync.byzantine,
            local=sync.local,
            weight=sync.weight,
            aggregate=sync.aggregate,
            privacy=sync.privacy,
            sends=sync.client_compression,
            secure=sync.secure,
        )


_CHAINED = '"auto", "gpipe" and "1f1b" are'
_TIMED = ("listed", "zero-bubble")
"""Schedules that only one planner lists."""


def _not_listed(job: Job) -> Iterator[tuple[str, str]]:
    """What says how deep a pipeline is, where nobody asks the planner that lists visits."""
    plan, why = job.plan, ""
    if plan.scheduler != "auto":
        why = f'with scheduler = "{plan.scheduler}"'
    elif job.sync.kind != "allreduce":
        why = f'with sync.kind = "{job.sync.kind}"'
    elif job.recovery.swaps:
        why = 'with "neighbour+" in recovery.ladder'
    if why and plan.schedule in _TIMED:
        yield "plan.schedule", f"{_CHAINED}, {why}"
    if not why and plan.schedule not in ("auto", *_TIMED):
        why = f'with schedule = "{plan.schedule}"'
    if why and plan.in_flight != "auto":
        yield "plan.in_flight", f'"auto" is, {why}'


def _not_rerouted(job: Job) -> Iterator[tuple[str, str]]:
    """What cannot be beside microbatches that leave stages out or visit them in another order."""
    plan = job.plan
    if not plan.reroutes:
        return
    key, none = ("plan.skip", "0") if plan.skip != 0 else ("plan.reorder", "false")

    def beside(what: str, instead: str) -> tuple[str, str]:
        return key, f"{none} is, with {what}; to keep {key}, {instead}"

    if job.sync.kind != "allreduce":
        yield beside(f'sync.kind = "{job.sync.kind}"', 'set sync.kind = "allreduce"')
    if job.recovery.swaps:
        ladder = "recovery.ladder"
        what = f'"neighbour+" in {ladder}, which has routes of its own'
        yield beside(what, f'take "neighbour+" out of {ladder}')
    if plan.scheduler == "swarm":
        yield beside('scheduler = "swarm"', 'set plan.scheduler = "auto"')
    if job.data.where == "peer":
        yield beside('data.where = "peer"', 'set data.where = "submitter"')
    if plan.pipelines not in (1, "auto"):
        keep = f"to keep {plan.pipelines}, leave {key} out"
        yield "plan.pipelines", f'1 and "auto" are, with {key}; {keep}'
    if plan.schedule == "interleaved":
        allowed = f'{_CHAINED}, and "listed" and "zero-bubble", with {key}'
        yield "plan.schedule", f'{allowed}; to keep "interleaved", leave {key} out'


def _not_federated(job: Job) -> Iterator[tuple[str, str]]:
    """What cannot be beside clients that train by themselves."""
    partition, federated = job.data.partition, 'with sync.kind = "federated"'
    if job.sync.kind != "federated":
        if job.train.rounds is not None:
            yield "train.rounds", f"it is {federated}; here, steps, tokens or passes"
        if partition is not None:
            yield "data.partition", f"it is {federated}; leave it out, or set the kind"
        return
    if job.data.kind != "arrays":
        yield "data.kind", f'"arrays" is, {federated}'
    yield from _not_clients(job, partition.kind if partition is not None else "by-peer")
    for key, most in (("stages", job.plan.stages), ("pipelines", job.plan.pipelines)):
        if most not in (1, "auto"):
            yield f"plan.{key}", f"1 is, {federated}: a client is trained on one peer"
    if job.sync.aggregate != "mean":
        with_it = f'with sync.aggregate = "{job.sync.aggregate}"'
        if job.codec.sync != "none":
            yield "codec.sync", f'"none" is, {with_it}'
        if method_of(job.sync.chosen).normalises:
            yield "sync.method", f"all others are, {with_it}: fednova is a mean of scaled moves"
    if job.sync.client_compression.sparse:
        with_it = f'with sync.compression = "{job.sync.compression}"'
        if job.sync.aggregate != "mean":
            yield "sync.aggregate", f'"mean" is, {with_it}'
        if method_of(job.sync.chosen).normalises:
            yield "sync.method", f"all others are, {with_it}: fednova scales moves by itself"
    if job.sync.privacy is not None:
        yield from _not_private(job)
    if job.sync.secure:
        yield from _not_secure(job)


def _not_secure(job: Job) -> Iterator[tuple[str, str]]:
    """What sums with masks cannot be of."""
    if job.codec.sync != "none":
        why = "what is masked are the 64 bits of integers, of which a codec may lose none"
        yield "codec.sync", f'"none" is, with sync.secure: {why}'
    if job.plan.replicas != "auto" and job.plan.replicas < LEAST_MEMBERS:
        why = "of the sum of two each knows the other's part"
        yield "plan.replicas", f'{LEAST_MEMBERS} or more are, or "auto", with sync.secure: {why}'


def _not_private(job: Job) -> Iterator[tuple[str, str]]:
    """What would tell of clients beside the noisy sums, or more than their noise hides."""
    if method_of(job.sync.chosen).normalises:
        why = "fednova scales moves by clients' numbers of samples, which no noise hides"
        yield "sync.method", f"all others are, with sync.privacy: {why}"
    if job.sync.client_compression.sparse:
        why = "clients' largest numbers are chosen by what they moved, which no noise hides"
        yield "sync.compression", f'"none" is, with sync.privacy: {why}'
    if job.codec.sync != "none":
        why = "a codec rounds what was clipped, and so may make it longer"
        yield "codec.sync", f'"none" is, with sync.privacy: {why}'
    if job.sync.over_select != 1:
        yield "sync.over_select", "1 is, with sync.privacy, whose mean is over per_round clients"
    if job.output.every not in (0, "auto"):
        why = "a run that went on from a checkpoint would begin with a new budget"
        yield "output.every", f'with sync.privacy, only 0 is, as "auto" stands for there: {why}'
    if job.data.partition is not None and job.data.partition.held_out:
        why = "what single clients come to on their own samples is told without noise"
        yield "data.partition.held_out", f"0 is, with sync.privacy: {why}"
    if job.data.where == "peer" and job.data.holdout:
        why = "what versions come to on the hosts' own data is told without noise"
        yield "data.holdout", f'0 is, with sync.privacy and data.where = "peer": {why}'


def _not_clients(job: Job, kind: str) -> Iterator[tuple[str, str]]:
    """What cannot be of clients whose data is where the job says. kind: of their partition."""
    where = f'with sync.kind = "federated" and data.where = "{job.data.where}"'
    if job.data.where != "peer" and kind in ("by-key", "by-peer"):
        yield "data.partition.kind", f'"iid", "dirichlet" and "shards" are, {where}'
    if job.data.where == "peer" and kind != "by-peer":
        yield "data.partition", f"none is, {where}: each host that has the data is a client"
    if job.data.where != "peer" and job.sync.over_select != 1:
        why = "peers train the clients of a partition by turns, so that none is there first"
        yield "sync.over_select", f"1 is, {where}: {why}"
    method = job.sync.of_rounds
    if job.data.where == "peer" and method is not None and method.normalises:
        why = "no host knows how many samples others have, which its move is brought to"
        yield "sync.method", f"any but {job.sync.chosen!r} is, {where}: {why}"
    if job.data.where == "peer" and job.sync.client_compression.sparse:
        yield "sync.compression", f'"none" is, {where}: clients have the links of their hosts'


def _not_built(job: Job) -> Iterator[tuple[str, str]]:
    """(key, what to do) for every key that asks for what this version cannot do."""
    if job.sync.kind == "allreduce" and job.plan.replicas not in (1, "auto"):
        kinds = 'sync.kind = "local" and "gossip"'
        yield "plan.replicas", f"several are with {kinds}; here, plan.pipelines"
    if job.sync.kind == "auto" and job.plan.replicas != "auto":
        yield "plan.replicas", '"auto" is, with sync.kind = "auto"'
    if job.sync.kind != "allreduce":
        with_it = f'with sync.kind = "{job.sync.kind}"'
        if job.recovery.rebuilds:
            yield "recovery.ladder", f'{with_it}, all rungs but "neighbour" are'
        kept = job.sync.kind in ("local", "federated") and not job.sync.apart
        if job.output.every not in (0, "auto") and not kept:
            also = f' and method = "{job.sync.chosen}"' if job.sync.apart else ""
            yield "output.every", f'{with_it}{also}, only 0 is, as "auto" stands for there'
        if job.data.where == "peer" and job.sync.kind != "federated":
            yield "data.where", f'{with_it}, "submitter" is'
        if job.train.microbatches % job.divided:
            yield (
                "plan.replicas",
                f"a divisor of the {job.train.microbatches} microbatches of a step is",
            )
    yield from _not_federated(job)
    yield from _not_listed(job)
    yield from _not_rerouted(job)
    if job.plan.scheduler == "swarm":
        if job.plan.pipelines != "auto":
            yield "plan.pipelines", '"auto" is, with scheduler = "swarm"'
        if job.plan.schedule == "interleaved":
            yield "plan.schedule", f'{_CHAINED}, with scheduler = "swarm"'
        if job.recovery.swaps:
            yield "recovery.ladder", 'with scheduler = "swarm", all rungs but "neighbour+" are'
    if job.recovery.swaps and job.plan.pipelines not in (1, "auto"):
        yield "plan.pipelines", '1 is, with "neighbour+" in recovery.ladder'
    stages = job.plan.stages
    if job.recovery.swaps and stages != "auto" and stages < 4:
        yield "plan.stages", '4 or more are, with "neighbour+" in recovery.ladder'
    if job.recovery.swaps and job.plan.schedule == "interleaved":
        yield "plan.schedule", f'{_CHAINED}, with "neighbour+" in recovery.ladder'
    if job.recovery.swaps and job.data.where == "peer":
        yield "recovery.ladder", '"neighbour" is, where data stays with a peer'
    codec = job.codec
    if job.sync.within != "exact":
        own = METHODS[job.sync.within].COLLECTIVE
        if own and job.sync.collective not in ("auto", own):
            yield "sync.collective", f'"auto" is, for "{job.sync.within}" exchanges by {own} alone'
        with_it = f'"none" is, for sync.method = "{job.sync.within}" encodes gradients itself'
        if codec.grad not in (None, "none"):
            yield "codec.grad", with_it
        if codec.feedback not in ("ef", "none"):
            yield "codec.feedback", with_it
        if job.sync.within == "demo" and (job.train.optimizer, job.train.momentum) != ("sgd", 0):
            yield (
                "train.optimizer",
                '"sgd" with momentum 0 is, for sync.method = "demo" steps itself',
            )
    if codec.feedback == "dgc" and (job.train.optimizer, job.train.momentum > 0) != ("sgd", True):
        yield "codec.feedback", '"dgc" keeps the momentum of SGD: it is with optimizer = "sgd"'
    if codec.snapshot not in (None, "none", "lossless", codec.default):
        yield "codec.snapshot", 'snapshots are exact: "none" and "lossless" are'
