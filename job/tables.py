"""The tables of job.toml as frozen dataclasses, key by key, but for [train] (`training.py`) and
[plan] (`plan_options.py`); `spec.py` puts them together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .client_options import (
    AGGREGATES,
    Aggregate,
    LocalWork,
    VhlOptions,
    check_weight,
    share_of,
)
from .methods import METHODS as ALLREDUCE
from .methods import method_options
from .partitioning import Partitioning
from .rounds import FEDERATED, GOSSIP, LOCAL, RoundMethod, method_of, options_of
from .settings import Settings, SettingsError, at_least, meant, plain
from .units import Duration

__all__ = [
    "CODEC_ROLES",
    "LIVE",
    "Codec",
    "Data",
    "Model",
    "Output",
    "Recovery",
    "Sync",
]

LIVE = "live:"
"""Start of the factory that stands for a live module; it names the module's class, for people."""

CODEC_ROLES = ("activation", "activation_grad", "grad", "snapshot")
"""Keys of [codec] that fall back to its default."""
METHODS: Mapping[str, tuple[str, ...]] = {
    "allreduce": tuple(ALLREDUCE),
    "local": tuple(LOCAL),
    "gossip": tuple(GOSSIP),
    "federated": tuple(FEDERATED),
    "auto": ("",),
}
"""Of sync.method, by sync.kind; the first one is the default."""
EVERY = 50
"""Steps of a round where the job does not say."""
MOST_NAMES = 200
"""Characters of data.inputs and of data.targets, as in a manifest."""
_CODEC = re.compile(r"[a-z]\w*(\+[a-z]\w*)*(/\d+)?(:[a-z]\w*=[\w.+-]+(,[a-z]\w*=[\w.+-]+)*)?", re.A)

MOST_MANIFEST_BYTES = 64 << 20
"""Of a data set's manifest: 300,000 shards, over a terabyte of text."""


@dataclass(frozen=True, kw_only=True)
class Model(Settings):
    """[model]: what is trained."""

    factory: str
    """ "pkg.mod:fn", "file.py:fn" (looked up in the job's folder first) or "hf:DIR"."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    weights: str | tuple[str, ...] = "init"
    """Starting weights: "init" (what the factory gives), or safetensors: a file, a folder (with an
    index, or of files), a URL of either, or a list of these."""
    where: Literal["submitter", "url"] = "submitter"
    """Who reads them: the submitter, who uploads what the broker lacks, or each peer its own from
    the web ("url": the weights are URLs, and only peers whose owners allow it take part)."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Text in the names of the model's parameters = what stands there in those of the weights."""
    fresh: tuple[str, ...] = ()
    """Globs of parameter names that the weights need not have: they begin as the factory makes
    them."""
    loss: str = "forward"
    """Who computes the loss: "forward" (the module's own), or "pkg:fn" with fn(output, batch),
    where batch has the tensors of a microbatch by name."""
    freeze: tuple[str, ...] = ()
    """Globs of parameter names that get no gradient and no optimizer state."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the operators that autocast covers; weights stay fp32."""
    frozen_dtype: Literal["", "bf16"] = ""
    """What frozen weights are kept in; "": what the factory made them in."""
    trained_dtype: Literal["", "bf16"] = ""
    """What trained weights are kept in, with no fp32 copy beside; "": what the factory made them
    in."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of peft's LoraConfig: all else is frozen; empty: no adapter."""
    sidecars: tuple[str, ...] = ()
    """Files kept beside exported weights; empty: for "hf:" models their config and tokenizer."""

    def check(self) -> None:
        for key in ("frozen_dtype", "trained_dtype"):
            if getattr(self, key) == "bf16" and self.dtype != "bf16":
                raise SettingsError(
                    key,
                    f'is "bf16", and dtype = "{self.dtype}": every product would keep an fp32 copy '
                    'of its weight for each microbatch. Expected dtype = "bf16" with it',
                )
        if not self.factory.startswith((LIVE, "hf:")) and ":" not in self.factory:
            raise SettingsError(
                "factory",
                f'is "{self.factory}": expected "pkg.mod:fn", "file.py:fn" or "hf:DIR"',
            )
        if not self.weights or "" in self.weight_names:
            raise SettingsError("weights", 'is empty: expected "init", or where they are')
        if "init" in self.weight_names and self.weights != "init":
            raise SettingsError("weights", 'has "init" among others: expected it alone')
        if self.where == "url":
            for name in self.weight_names:
                if not name.startswith(("http://", "https://")):
                    raise SettingsError(
                        "where", f'is "url", and weights has "{name}": expected http(s):// of all'
                    )
        for key, value in self.rename.items():
            if not key or not isinstance(value, str):
                raise SettingsError(
                    f"rename.{key}", f"is {value!r}: expected texts of names, not empty on the left"
                )

    @property
    def weight_names(self) -> tuple[str, ...]:
        """`weights` as a list."""
        return (self.weights,) if isinstance(self.weights, str) else self.weights


@dataclass(frozen=True, kw_only=True)
class Data(Settings):
    """[data]: what it is trained on."""

    kind: Literal["text", "tokens", "arrays"] = "text"
    """Bytes of files, token ids, or named arrays (npz, safetensors)."""
    source: str = ""
    """Path, glob or URL; empty: the sources of Python's standard library."""
    holdout: float = 0.05
    """Share of the samples that is never trained on, in [0, 1)."""
    where: Literal["submitter", "peer"] = "submitter"
    """Where the data lies when the run is submitted."""
    keep_local: Literal["none", "inputs", "labels"] = "none"
    """What never leaves the peer that owns it."""
    tokenizer: Literal["auto", "bytes"] = "auto"
    """What makes ids of text: "bytes", each byte its own; "auto" is that too, and refuses a model
    whose folder has a tokenizer of its own."""
    length: int = 128
    """Positions in one sample of text or tokens."""
    inputs: str = "x"
    """Argument of the model's forward that takes the inputs; of arrays several, with commas."""
    partition: Partitioning | None = None
    """How samples are divided among clients, of sync.kind = "federated" ([data.partition])."""
    targets: str = "y"
    """Argument of the model's forward that takes the targets; empty: none."""

    def check(self) -> None:
        if not 0.0 <= self.holdout < 1.0:
            raise SettingsError("holdout", f"is {self.holdout}: expected a share in [0, 1)")
        at_least(self, 1, "length")
        if self.tokenizer != "auto" and self.kind != "text":
            raise SettingsError(
                "tokenizer", f'is "{self.tokenizer}", and {self.kind} are numbers already: leave it'
            )
        if self.where == "peer" and not self.source:
            raise SettingsError(
                "source", 'is empty: with where = "peer" it is the name of a data set of a peer'
            )
        if self.where != "peer" and self.keep_local != "none":
            raise SettingsError(
                "keep_local",
                f'is "{self.keep_local}" with where = "{self.where}": only data of a peer can stay '
                'there (where = "peer")',
            )
        self._check_names()

    @property
    def way(self) -> str:
        """How a peer shall read its data, as JSON: the table without who is which client."""
        return json.dumps(plain(replace(self, partition=None)))

    def _check_names(self) -> None:
        """Names are normalised here, once: whoever reads them later compares them as they are."""
        inputs = tuple(name.strip() for name in self.inputs.split(","))
        targets = self.targets.strip()
        for key, names in (("inputs", inputs), ("targets", (targets,) if targets else ())):
            if (size := len(getattr(self, key))) > MOST_NAMES:
                raise SettingsError(key, f"has {size} characters: expected at most {MOST_NAMES}")
            for name in names:
                if not name.isidentifier():
                    raise SettingsError(
                        key,
                        f"is {getattr(self, key)!r}, where {name!r} cannot be an argument of the "
                        "model's forward: expected a name of letters, digits and underscores"
                        + (", or several with commas between them" if key == "inputs" else ""),
                    )
        if targets in inputs:
            raise SettingsError("targets", f'is "{targets}" as inputs is: expected another name')
        if len(set(inputs)) < len(inputs):
            raise SettingsError("inputs", f'is "{self.inputs}": expected each name once')
        if len(inputs) > 1 and self.kind in ("text", "tokens"):
            raise SettingsError(
                "inputs", f'is "{self.inputs}": expected one name, for {self.kind} is one sequence'
            )
        object.__setattr__(self, "inputs", ",".join(inputs))
        object.__setattr__(self, "targets", targets)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Arguments of the model's forward that take inputs, in order."""
        return tuple(self.inputs.split(","))


@dataclass(frozen=True, kw_only=True)
class Codec(Settings):
    """[codec]: how tensors are compressed on links.

    Of each role "none", "lossless", "adatopk" (ratios by how slow a link is), "auto" (what the
    planner finds to shorten the step within error_budget), or a codec's text for all links, such as
    "bf16", "int8:block=128" or "topk:ratio=50".
    """

    default: str = "none"
    """Codec of every role without its own."""
    activation: str | None = None
    """Of forward values; None: default."""
    activation_grad: str | None = None
    """Of their gradients; None: default."""
    grad: str | None = None
    """Of parameter gradients; None: default."""
    sync: str = "none"
    """Of what replicas exchange in rounds: "none", or a codec's text."""
    snapshot: str | None = None
    """Of snapshots, "none" or "lossless"; None: "lossless" unless the default is "none"."""
    ratio: float = 100.0
    """How many times fewer bytes "adatopk" sends on the slowest link, at least 1."""
    error_budget: float = 0.0
    """Relative L2 error that "auto" may make in a tensor that crosses a link; 0: none at all."""
    feedback: Literal["none", "ef", "ef21", "dgc", "ahead"] = "ef"
    """Error feedback of the codec of grad; lossless ones have no error to feed back. "ef21": of
    changes against what both ends have; "dgc": of momentum in place of gradients; "ahead": of
    updates in their place, each holder training where its unsent ones would bring it."""

    def check(self) -> None:
        for key in ("default", "sync", *CODEC_ROLES):
            text = getattr(self, key)
            if text is not None and not _CODEC.fullmatch(text):
                raise SettingsError(
                    key,
                    f'is "{text}": expected "none", "lossless", "adatopk", "auto" or the text of a '
                    'codec such as "bf16", "int8:block=128", "ef+topk:ratio=50"',
                )
        at_least(self, 1, "ratio")
        at_least(self, 0, "error_budget")

    @property
    def snapshots(self) -> Literal["none", "lossless"]:
        """How snapshots are written. They are exact, whatever other tensors lose on their way:
        where those are compressed at all, snapshots are losslessly."""
        return "none" if self.of("snapshot") == "none" else "lossless"

    def of(self, role: str) -> str:
        """Return the text that is asked for one of CODEC_ROLES."""
        own: str | None = getattr(self, role)
        return self.default if own is None else own


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
    `job/gossip.py`. federated: `job/client_options.py`."""
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
    virtual_data: Literal["none", "vhl"] = "none"
    """federated: labelled noise that clients train on besides."""
    vhl: VhlOptions = field(default_factory=VhlOptions)
    """Of virtual_data = "vhl"."""
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
        if self.deadline != "auto" and not self.deadline > 0:
            raise SettingsError("deadline", f"is {self.deadline}: expected more than no time")
        self.needed(100)

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
            if not 1 <= self.over_select < math.inf:
                raise SettingsError("over_select", f"is {self.over_select}: expected at least 1")
            share_of(self.byzantine, 100, "byzantine")
            if self.aggregate not in AGGREGATES and self.byzantine != "20%":
                raise SettingsError(
                    "byzantine",
                    f'is {self.byzantine}, and aggregate = "{self.aggregate}" leaves nobody out: '
                    f"expected one of {', '.join(AGGREGATES)}, or leave it out",
                )
            return
        usual = {"per_round": "10%", "local": LocalWork(passes=1), "weight": "samples"}
        usual |= {"aggregate": "mean", "byzantine": "20%", "over_select": 1.0}
        usual |= {"virtual_data": "none"}
        for key, value in usual.items():
            if getattr(self, key) != value:
                raise SettingsError(
                    key, f'is for kind = "federated", and this is "{self.kind}": leave it out'
                )

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

    def needed(self, replicas: int) -> int:
        """How many of so many replicas make a round with their work, at least 1. Raises
        SettingsError."""
        if isinstance(self.quorum, int):
            at_least(self, 1, "quorum")
            return min(self.quorum, replicas)
        share = self.quorum.removesuffix("%")
        if share == self.quorum or not share.isdecimal() or not 0 < int(share) <= 100:
            raise SettingsError(
                "quorum",
                f'is "{self.quorum}": expected a number of replicas, or a share such as "80%"',
            )
        return max(1, -(-replicas * int(share) // 100))


@dataclass(frozen=True, kw_only=True)
class Recovery(Settings):
    """[recovery]: what may be done when a peer is lost."""

    ladder: tuple[str, ...] = ("sibling", "snapshot", "checkpoint")
    """The allowed rungs, best first."""
    snapshot_every: int | Literal["auto"] = "auto"
    """Steps between snapshots."""
    warm_spares: int | Literal["auto"] = "auto"
    """Pool peers that hold a snapshot already."""
    lease: Duration | None = None
    """Silence after which one of its peers counts as lost; the broker's own by default: 10 s."""
    when_short: Literal["pause", "fail"] = "pause"
    """What a run does while too few peers are there."""

    @property
    def spares(self) -> int:
        """How many peers of the pool keep copies, if there are so many."""
        return 1 if self.warm_spares == "auto" else self.warm_spares

    @property
    def rebuilds(self) -> bool:
        """Whether a lost stage may be made anew from its neighbours."""
        return "neighbour" in self.ladder or self.swaps

    @property
    def swaps(self) -> bool:
        """Whether the first two and the last two stages change places in half the microbatches, so
        that each can stand in for the other."""
        return "neighbour+" in self.ladder

    def check(self) -> None:
        known = ("sibling", "snapshot", "neighbour", "neighbour+", "checkpoint")
        for rung in self.ladder:
            if rung not in known:
                raise SettingsError("ladder", f"has {rung!r}: expected some of {', '.join(known)}")
        if self.snapshot_every != "auto":
            at_least(self, 1, "snapshot_every")
        if self.warm_spares != "auto":
            at_least(self, 0, "warm_spares")
        if self.lease is not None and not 0 < self.lease < math.inf:
            raise SettingsError("lease", f'is "{self.lease}": expected more than no time')


@dataclass(frozen=True, kw_only=True)
class Output(Settings):
    """[output]: what is left afterwards."""

    to: str = "runs/"
    """Folder; the run's own folder in it is called after its id."""
    every: int | Literal["auto"] = "auto"
    """Steps between checkpoints, from which `shoal resume` goes on; 0: none, weights at the end;
    "auto": as many as take half an hour."""
    keep: int = 2
    """How many checkpoints are kept, with the broker and in the run's folder."""
    format: Literal["safetensors", "hf", "peft"] = "safetensors"
    """One safetensors file, a folder that `from_pretrained` takes ("hf:" models), or the adapter
    alone as peft's does."""

    def check(self) -> None:
        if self.every != "auto":
            at_least(self, 0, "every")
        at_least(self, 1, "keep")
