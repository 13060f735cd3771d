"""The table [sync] of job.toml: what is exchanged, by which kind and method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .clients.client_compression import (
    ClientCompression,
    ClientLinks,
    Compression,
    CompressionOptions,
)
from .clients.client_options import (
    AGGREGATES,
    AdaptiveOptions,
    Aggregate,
    check_weight,
    share_of,
)
from .clients.client_privacy import ClientPrivacy, check_masked
from .clients.local_work import FedImproOptions, LocalWork, VhlOptions
from .methods import METHODS as ALLREDUCE
from .methods import method_options
from .rounds import FEDERATED, GOSSIP, LOCAL, RoundMethod, method_of, options_of
from .settings import Settings, SettingsError, at_least, default_of, expect, meant
from .units import Duration

__all__ = ["AUDIT", "METHODS", "Sync", "with_method"]

METHODS: Mapping[str, tuple[str, ...]] = {
    "allreduce": tuple(ALLREDUCE),
    "local": tuple(LOCAL),
    "gossip": tuple(GOSSIP),
    "federated": tuple(FEDERATED),
    "auto": ("",),
}
"""Of sync.method, by sync.kind; the first one is the default."""
_OF_CLIENTS = (
    *("per_round", "local", "weight", "aggregate", "byzantine", "over_select", "select"),
    *("privacy", "compression", "compression_options", "client_links", "client_feedback"),
    *("virtual_data", "secure"),
)
"""Keys of [sync] that are for kind = "federated" alone."""
AUDIT = 0.05
"""Share of sums that are added up again where the job does not say."""
EVERY = 50
"""Steps of a round where the job does not say."""


@dataclass(frozen=True, kw_only=True)
class Sync(Settings):
    """[sync]: what holders of a stage exchange in each update, and replicas between their own."""

    kind: Literal["allreduce", "local", "gossip", "federated", "auto"] = "allreduce"
    """"allreduce": equal weights after every step. "local": replicas train apart and meet in
    rounds. "gossip": the same, and each meets one other in a round. "federated": clients with data
    of their own ([data.partition]) train from the same weights, and the mean of what some of them
    came to is a round. "auto": that of the first two which `shoal plan` recommends, with its first
    method."""
    method: str = ""
    """Of the kind; "": its first one. allreduce: `job/methods.py`. local: `job/rounds.py`. gossip:
    `job/gossip.py`. federated: `job/clients/client_options.py`."""
    every: int | Literal["auto"] = "auto"
    """Steps of `batch` samples in a round; "auto": 50, of an allreduce 1."""
    deadline: Duration | Literal["auto"] = "auto"
    """How long a round waits for the local work of its replicas; "auto": twice what that is
    expected to take."""
    quorum: int | str = "100%"
    """Of how many replicas, or of which share of them, the work makes a round, before its deadline.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method."""
    per_round: int | str = "10%"
    """federated: how many clients are in a round, or which share of them."""
    over_select: float = 1.0
    """federated, of data that stays with its hosts: how many times as many clients as `per_round`
    are asked. The first to come make the round."""
    select: str = ""
    """federated: a rule of one's own for who is in a round, "file.py:function" or
    "package.module:function", which runs where the job is submitted; "": a function of (seed,
    round)."""
    local: LocalWork = field(default_factory=lambda: LocalWork(passes=1))
    """federated: how long a client trains in a round."""
    weight: Literal["samples", "equal"] = "samples"
    """federated: what a client counts for in the mean."""
    aggregate: Aggregate = "mean"
    """federated: what is made of what clients came to; all but "mean" bear with clients that are
    wrong."""
    byzantine: int | str = "20%"
    """federated: how many clients of a round may be wrong, or which share of them, for
    "trimmed-mean", "krum" and "multi-krum"."""
    privacy: ClientPrivacy | None = None
    """federated: what versions may tell of a client; None: whatever they tell."""
    compression: Compression = "none"
    """federated: what a client sends of its update. "topk": the same share for all. "bcrs": as much
    as its link carries while the slowest of the round sends the least share. "bcrs+opwa": likewise,
    and numbers that few clients sent count for more."""
    compression_options: CompressionOptions = field(default_factory=CompressionOptions)
    """federated: of the compression."""
    client_links: ClientLinks | None = None
    """federated: the links of clients, which bcrs goes by."""
    client_feedback: Literal["none", "ef"] = "none"
    """federated: what becomes of what a client does not send. "none": it is lost. "ef": the client
    adds it to what it moves in its next round."""
    virtual_data: Literal["none", "vhl"] = "none"
    """federated: labelled noise that clients train on besides."""
    vhl: VhlOptions = field(default_factory=VhlOptions)
    """Of virtual_data = "vhl"."""
    secure: bool = False
    """federated: whether what a peer gives to the mean is masked, so that nobody sees it but in the
    sum of all."""
    audit: float = AUDIT
    """Share of the sums of a round, each of what one member adds up, that a second member adds up
    again where peers have certificates; 0: none. Without effect where that tells nothing: of sums
    with masks or noise, of rows of clients, and between two."""
    collective: Literal["auto", "all-to-all", "two-level", "ring", "tree", "hierarchical"] = "auto"
    """By what the holders of a stage add up gradients; auto: the planner chooses by the predicted
    time."""

    def check(self) -> None:
        known = METHODS[self.kind]
        if self.kind == "auto":
            for key in ("method", "options"):
                if getattr(self, key):
                    raise SettingsError(
                        key,
                        'is given with kind = "auto", which chooses: leave it out, or name a kind',
                    )
        if self.chosen not in known:
            other = [kind for kind, methods in METHODS.items() if self.method in methods]
            raise SettingsError(
                "method",
                f'is "{self.method}"'
                + (f', of kind "{other[0]}"' if other else meant(self.method, known))
                + f': expected, with kind = "{self.kind}", one of {", ".join(known)}',
            )
        self._check_federated()
        if self.every != "auto":
            at_least(self, 1, "every")
        if self.kind == "auto":
            pass
        elif self.kind != "allreduce":
            try:
                options_of(self.chosen, self.options)
            except SettingsError as error:
                raise error.inside("options") from None
            if isinstance(self.overlap, int) and self.overlap >= self.steps:
                raise SettingsError(
                    "options.overlap",
                    f"is {self.overlap}: expected fewer steps than a round has, {self.steps}",
                )
            if self.every != "auto" and self.fragments > self.every:
                raise SettingsError(
                    "options.fragments",
                    f"is {self.fragments}: expected at most one for each of {self.every} steps",
                )
        else:
            method_options(self.chosen, self.options)
            if self.every not in (1, "auto"):
                raise SettingsError(
                    "every",
                    f'is {self.every} with kind = "allreduce", whose weights are equal '
                    'after every step: expected 1, or kind = "local"',
                )
        self._check_audit()
        expect(self, "deadline", self.deadline == "auto" or self.deadline > 0, "more than no time")
        self.needed(100)

    def _check_audit(self) -> None:
        expect(self, "audit", 0 <= self.audit <= 1, "a share from 0 to 1")
        if self.audit in (0, AUDIT):
            return
        why = ""
        if self.kind in ("allreduce", "gossip"):
            why = f'kind = "{self.kind}": no third one has what two of them add up'
        elif self.secure:
            why = "secure: nobody may see again what is masked"
        elif self.privacy is not None:
            why = "privacy: whoever adds up adds noise that nobody else knows"
        elif self.aggregate != "mean":
            why = f'aggregate = "{self.aggregate}": what is made of one sum hangs on all others'
        if why:
            raise SettingsError("audit", f"is {self.audit} with {why}; leave it out")

    def _check_federated(self) -> None:
        share_of(self.per_round, 100)
        if self.virtual_data == "none" and self.vhl != VhlOptions():
            raise SettingsError("vhl", 'is for virtual_data = "vhl": leave it out, or set that')
        if self.kind == "federated":
            if self.every != "auto":
                raise SettingsError(
                    "every",
                    f"is {self.every}, and a client's work in a round is local: leave it out",
                )
            check_weight(self.aggregate, self.weight)
            expect(self, "over_select", 1 <= self.over_select < math.inf, "at least 1")
            if self.select and ":" not in self.select:
                raise SettingsError(
                    "select",
                    f'is "{self.select}": expected "file.py:function" or "package.module:function"',
                )
            share_of(self.byzantine, 100, "byzantine")
            self._check_privacy()
            if self.aggregate not in AGGREGATES and self.byzantine != "20%":
                raise SettingsError(
                    "byzantine",
                    f'is {self.byzantine}, and aggregate = "{self.aggregate}" leaves nobody out: '
                    f"expected one of {', '.join(AGGREGATES)}, or leave it out",
                )
            _ = self.client_compression
            return
        for key in _OF_CLIENTS:
            if getattr(self, key) != default_of(Sync, key):
                raise SettingsError(
                    key, f'is for kind = "federated", and this is "{self.kind}": leave it out'
                )

    def _check_privacy(self) -> None:
        if self.privacy is None:
            return
        if self.weight != "equal":
            raise SettingsError(
                "weight",
                f'is "{self.weight}" with privacy, where no client may count for more than another:'
                ' expected "equal"',
            )
        if self.aggregate != "mean":
            raise SettingsError(
                "aggregate",
                f'is "{self.aggregate}" with privacy: how much one client changes of that, whatever'
                ' the others are, is not bounded by clip; expected "mean"',
            )
        check_masked(self.privacy, secure=self.secure)

    @property
    def client_compression(self) -> ClientCompression:
        """What clients send. Raises SettingsError."""
        return ClientCompression(
            **{f.name: getattr(self, f.name) for f in fields(ClientCompression)}
        )

    @property
    def contribution_codec(self) -> str:
        """Return what contributions of clients that send a part of their update are encoded with;
        empty: they send all, or all the same part."""
        return "nonzero" if self.client_compression.sparse and not self.secure else ""

    @property
    def chosen(self) -> str:
        """Return the method that the table names."""
        return self.method or METHODS[self.kind][0]

    @property
    def of_rounds(self) -> RoundMethod | None:
        """The record of the method between replicas; None: there are no rounds, or none is chosen
        yet."""
        return method_of(self.chosen) if self.kind not in ("allreduce", "auto") else None

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep something from one of their rounds to the next."""
        return self.client_feedback == "ef" or self.has_controls

    @property
    def has_controls(self) -> bool:
        """Whether what clients keep are control variates, whose mean all replicas share."""
        return self.of_rounds is not None and self.of_rounds.controls

    @property
    def within(self) -> str:
        """The method by which a replica's own holders have equal weights after every step."""
        return self.chosen if self.kind == "allreduce" else "exact"

    @property
    def steps(self) -> int:
        """Steps of a round: of several fragments each is exchanged once in `every` steps."""
        if self.every != "auto":
            return max(1, self.every // self.fragments)
        one = self.kind in ("allreduce", "federated")  # steps of a federated run are its rounds
        return 1 if one else max(1, EVERY // self.fragments)

    @property
    def remembered(self) -> int:
        """Rounds whose pairs decide who meets whom."""
        if self.kind != "gossip":
            return 0
        return int(getattr(options_of(self.chosen, self.options), "recent", 1))

    @property
    def overlap(self) -> int | str:
        """Steps of the next round that are made while one is exchanged."""
        found: int | str = self._option("overlap", 0)
        return found

    @property
    def fragments(self) -> int:
        """How many the model has; a round exchanges one of them."""
        found: int = self._option("fragments", 1)
        return found

    @property
    def apart(self) -> bool:
        """Whether stages have other weights than the version behind a round."""
        return self.fragments > 1 or bool(self._option("mix", 0.0))

    def _option(self, name: str, without: Any) -> Any:
        if self.kind != "local":
            return without
        return getattr(options_of(self.chosen, self.options), name, without)

    def asked(self, per_round: int) -> int:
        """How many clients are asked in a round that is to be of so many."""
        return math.ceil(round(per_round * self.over_select, 6))

    def needed(self, replicas: int) -> int:
        """How many of so many replicas make a round with their work, at least 1. Raises
        SettingsError."""
        return min(share_of(self.quorum, replicas, "quorum", "replicas"), replicas)

    def idle(self, replicas: int | str) -> Iterator[tuple[str, str]]:
        """Yield (key, with what) for each key that says something of which nothing would come.
        `replicas`: how many are in a round, if the job says so."""
        quorum, options = self.quorum, self.options
        if self.kind == "allreduce":
            for key in ("deadline", "quorum"):
                if getattr(self, key) != getattr(Sync, key):
                    yield key, 'sync.kind = "allreduce", where replicas exchange nothing'
        elif isinstance(quorum, int) and isinstance(replicas, int) and quorum > replicas:
            yield "quorum", f"{replicas} replicas in a round, which are all without it"
        usual = AdaptiveOptions.betas
        if self.chosen == "fedadagrad" and options.get("betas", usual)[1] != usual[1]:
            yield "options.betas", "fedadagrad but for the first, as it adds squares up"
        if self.chosen == "fedimpro" and options.get("weight") == 0:
            for known in fields(FedImproOptions):
                name, usual_one = known.name, known.default
                if name != "weight" and options.get(name, usual_one) != usual_one:
                    yield f"options.{name}", "weight = 0, which leaves fedavg"
        yield from ((f"vhl.{key}", what) for key, what in self.vhl.idle())
        sends = self.compression_options
        if sends.gamma == 1 and sends.overlap_degree != CompressionOptions.overlap_degree:
            yield "compression_options.overlap_degree", "gamma = 1, which changes no number"
        if sends.least_ratio == 1 and self.client_feedback == "ef":
            yield "client_feedback", "least_ratio = 1, where clients send all"


def with_method(table: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the table [sync] of a job that is to have another method: of that method's kind, and
    without options that are of the other one alone. A method that there is not changes nothing."""
    kind = next((kind for kind, methods in METHODS.items() if method and method in methods), None)
    if kind is None or method == table.get("method"):
        return dict(table)
    of: Any = ALLREDUCE[method] if kind == "allreduce" else method_of(method).options
    known = {f.name for f in fields(of)}
    options = {k: v for k, v in table.get("options", {}).items() if k in known}
    found = {**table, "kind": kind, "method": method, "options": options}
    if kind == "allreduce":  # after every step, by nobody else
        found |= {"every": "auto", "audit": AUDIT, "deadline": "auto", "quorum": "100%"}
    return found
