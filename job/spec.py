"""The job: everything that a run needs to know, as plain data.

The classes mirror the tables of job.toml, key by key. A job comes from a file (`Job.from_toml`),
from JSON (`Job.from_json`, what a RunSpec carries), or from Python:

    shoal.Job(model=module, data={"source": "books/*.txt"}, steps=300, lr=1e-3)

What is asked for and not built yet is refused by name, never ignored. Nothing here imports torch.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from .clients.client_options import AGGREGATES, Cohorts, share_of
from .job_tables import JobTables
from .log_options import Log
from .plan_options import PlanOptions
from .refusals.idle import idle
from .refusals.unsupported import unsupported
from .rounds import RoundSettings
from .settings import SettingsError, expect, json_object, meant, plain, read_toml
from .stripped import data_without, model_without, output_without, sync_without
from .sync import AUDIT, Sync, with_method
from .tables import LIVE, Codec, Data, Model, Output, Recovery
from .training import LENGTHS, Train, Training
from .words import ELSEWHERE

__all__ = ["MOST_NAME", "Job"]

MOST_NAME = 200
"""Characters of a job's name."""


@dataclass(frozen=True, kw_only=True, init=False)
class Job(JobTables):
    """A whole job. `module` and `folder` are the submitter's own and are not part of its JSON."""

    OF_JOB: ClassVar[bool] = True
    OF_ANOTHER: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(
            ("job", "network", "links", "peers", "limit"),
            "scenarios have it, which `shoal sim FILE` plays, and this was read as a job",
        )
    )

    OURS: ClassVar[frozenset[str]] = frozenset({"module", "folder", "tokenizer", "dataset"})

    module: Any = field(default=None, compare=False, repr=False)
    """The live nn.Module that stands for [model]; None: the factory makes it."""
    folder: Path = field(default=Path(), compare=False, repr=False)
    """Where relative paths and the factory's file are looked up first."""
    tokenizer: Any = field(default=None, compare=False, repr=False)
    """The live tokenizer of transformers; None: the one that [data] names."""
    dataset: Any = field(default=None, compare=False, repr=False)
    """The live sequence of records that stands for data.source; None: files."""

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
        log: Log | Mapping[str, Any] | None = None,
        version: int = 1,
        name: str = "job",
        seed: int = 0,
        priority: int = 0,
        module: Any = None,
        folder: Path | str = ".",
        tokenizer: Any = None,
        dataset: Any = None,
        **train_keys: Any,
    ) -> None:
        """`model`: a table, a factory such as "file.py:fn", or a live module. `data`: a table, or
        its source. Further keywords are keys of [train]. Raises SettingsError."""
        flat = [f.name for f in fields(Train)]
        known = [f.name for f in fields(Job) if f.name not in self.OURS] + flat
        for key in train_keys:
            if key not in flat:
                table, _, called = ELSEWHERE.get(key, "").rpartition(".")
                like = meant(called or key, known)
                if table not in ("", "train"):
                    like = f"; what other programs call so is {called} in [{table}] here"
                raise SettingsError(key, f"is not a known key{like}")
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
            "log": log or {},
            "module": module,
            "folder": Path(folder),
            "tokenizer": tokenizer,
            "dataset": dataset,
        }
        for key, value in given.items():
            object.__setattr__(self, key, value)
        self.__post_init__()

    def check(self) -> None:
        expect(self, "version", self.version == 1, "1")
        if len(self.name) > MOST_NAME or not self.name.isprintable():
            raise SettingsError(
                "name", f"is {self.name[:40]!a}: expected at most {MOST_NAME} printable characters"
            )
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
            _ = self.rounds
        except SettingsError as error:
            raise error.inside("sync") from None
        method = self.sync.of_rounds
        if self.codec.sync != "none" and method is not None and method.own_codec:
            raise SettingsError(
                "codec.sync",
                f'is "{self.codec.sync}", and sync.method = "{self.sync.chosen}" writes what it '
                'exchanges in a way of its own: expected "none"',
            )
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
        self.sync.client_compression.check_links(hosts=self.data.where == "peer")
        for key, problem in unsupported(self):
            raise SettingsError(key, f"is not supported yet: {problem}")

    def check_idle(self, before: Job | None = None) -> None:
        """Raises SettingsError for a key that says something of which nothing would come, unless
        the job `before` has it so. Asked where a job is submitted, and where one goes on: what a
        broker has taken once it takes again."""
        known = [] if before is None else [*idle(before)]
        for key, what in idle(self):
            if (key, what) in known:
                continue
            value: Any = self
            for name in key.split("."):
                value = value[name] if isinstance(value, Mapping) else getattr(value, name)
            said = json.dumps(plain(value))
            raise SettingsError(key, f"is {said}, and changes nothing with {what}: leave it out")

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
    def from_hf(
        cls,
        model: Any,
        tokenizer: Any,
        dataset: Sequence[Mapping[str, Any]],
        data: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> Job:
        """Return the job of live objects: a model and a tokenizer of transformers, and records, a
        `datasets.Dataset` or any sequence of mappings. What the first one has says the kind of all:
        "messages" or "conversations", "text", or else instructions. `data`: further keys of [data];
        `keys`: those of `Job`. Raises SettingsError."""
        try:
            count = -1 if isinstance(dataset, str | Mapping) else len(dataset)
            first = dataset[0] if count > 0 else None
        except (TypeError, LookupError):  # as a generator, a set, a table of pandas
            count = -1
        if count < 0:
            raise SettingsError(
                "data.source",
                f"is a {type(dataset).__name__}: expected a sequence of records, such as one split "
                "of a datasets.DatasetDict",
            )
        if not count:
            raise SettingsError("data.source", "has no record")
        there: frozenset[str] = frozenset(first) if isinstance(first, Mapping) else frozenset()
        kind = "chat" if there & {"messages", "conversations"} else "instructions"
        table = {
            "kind": "text" if "text" in there and kind != "chat" else kind,
            "source": LIVE + type(dataset).__qualname__,
        }
        if "source" in (data or {}):
            raise SettingsError("data.source", "is given beside a dataset: expected one of them")
        if not hasattr(tokenizer, "apply_chat_template"):
            raise SettingsError(
                "data.tokenizer",
                f"is a {type(tokenizer).__name__}: expected a tokenizer of transformers, behind "
                "the model",
            )
        table |= data or {}
        return cls(model=model, data=table, tokenizer=tokenizer, dataset=dataset, **keys)

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
            sync=sync_without(self.sync),
            log=Log(),
            module=None,
            folder=Path(),
            tokenizer=None,
            dataset=None,
        )

    def with_places(self, own: Job) -> Job:
        """Return the job with what `own` says of this machine: its model, data and outputs."""
        return replace(
            self,
            model=own.model,
            data=own.data,
            output=replace(own.output, every=self.output.every, keep=self.output.keep),
            log=own.log,
            folder=own.folder,
        )

    def with_changes(self, changes: Iterable[str]) -> Job:
        """Return the job with some keys changed, each given as KEY=VALUE ("train.lr=1e-4"). A
        `sync.method` of another kind brings its kind along. Raises SettingsError."""
        table: dict[str, Any] = plain(self)
        for change in (changes := list(changes)):
            key, _, text = change.partition("=")
            if key.strip() == "sync.method":  # before all others, which may say more of it
                table["sync"] = with_method(table["sync"], str(_value(text.strip())))
                if table["sync"]["kind"] == "allreduce":
                    table["codec"]["sync"] = "none"
        for change in changes:
            _change(table, change)
        return replace(Job.from_table(table), folder=self.folder)

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
            scales_loss=self.model.dtype == "fp16",
        )

    @property
    def undecided(self) -> bool:
        """Whether the planner says how many replicas it has."""
        return self.sync.kind != "allreduce" and self.plan.replicas == "auto"

    def decided(self, kind: Literal["allreduce", "local"], replicas: int) -> Job:
        """Return the job with what the planner says of it; "local": replicas train apart, as the
        job says."""
        sync, data, codec = self.sync, self.data, self.codec
        if kind == "allreduce":
            sync = replace(
                sync, kind=kind, every="auto", audit=AUDIT, deadline="auto", quorum="100%"
            )
            data, codec = replace(data, partition=None), replace(codec, sync="none")
        elif sync.kind not in ("gossip", "federated"):
            sync = replace(sync, kind=kind)
        plan = replace(self.plan, replicas=replicas)
        return replace(self, plan=plan, sync=sync, data=data, codec=codec)

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
        sparse = self.sync.contribution_codec
        return RoundSettings(
            method=self.sync.chosen,
            options=self.sync.options,
            codec=sparse or self.codec.sync,
            results=self.codec.sync if sparse and self.codec.sync != "none" else "",
            replicas=self.divided,
            seed=self.seed,
            cohorts=self._cohorts,
        )

    @property
    def _cohorts(self) -> Cohorts | None:
        """Clients and cohorts; None: replicas make steps, or how many clients there are is only
        known with the data."""
        sync, partition = self.sync, self.data.partition
        if sync.kind != "federated" or partition is None or partition.clients is None:
            return None
        count = share_of(sync.per_round, partition.clients)
        leaves_out = sync.aggregate in AGGREGATES
        return Cohorts(
            partition=partition,
            labels=self.data.targets,
            clients=partition.clients,
            per_round=count,
            byzantine=share_of(sync.byzantine, count, "byzantine") if leaves_out else 0,
            local=sync.local,
            weight=sync.weight,
            aggregate=sync.aggregate,
            privacy=sync.privacy,
            sends=sync.client_compression,
            vhl=sync.vhl if sync.virtual_data == "vhl" else None,
            secure=sync.secure,
            selected=bool(sync.select),
        )


def _change(table: dict[str, Any], change: str) -> None:
    """Makes one change, KEY=VALUE, in the table of a job. Raises SettingsError."""
    key, equals, text = change.partition("=")
    if not equals:
        raise SettingsError("", f"{change!r} is no change: expected KEY=VALUE, as in train.lr=1e-4")
    *tables, last = key.strip().split(".")
    at = table
    for name in tables:
        at = at.setdefault(name, {})
        if not isinstance(at, dict):
            raise SettingsError(key.strip(), f"is no key: {name} is {at!r}, not a table")
    at[last] = _value(text.strip())
    if key.strip() in {f"train.{length}" for length in LENGTHS}:
        for other in {*LENGTHS} - {last}:
            at.pop(other, None)


def _value(text: str) -> Any:
    """As in a job.toml; what is no TOML is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
