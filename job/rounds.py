"""What replicas do between their own steps: the methods of [sync] with their options, and what of
that peers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .clients.client_options import (
    AdaptiveOptions,
    Cohorts,
    FedAvgMOptions,
    FedAvgOptions,
    FedBuffOptions,
    FedNovaOptions,
    FedProxOptions,
    ScaffoldOptions,
)
from .clients.client_privacy import ClientPrivacy
from .clients.local_work import FedImproOptions
from .gossip import NoLocoOptions, PairOptions, SapsOptions, SapsOuterOptions
from .settings import Settings, SettingsError, at_least, at_most, expect

__all__ = [
    "FEDERATED",
    "GOSSIP",
    "LOCAL",
    "SUM_BYTES",
    "AverageOptions",
    "DilocoOptions",
    "RoundMethod",
    "RoundSettings",
    "SparseLocoOptions",
    "StreamingOptions",
    "method_of",
    "options_of",
]

_WRITTEN_ALIKE = ("none", "bf16", "fp16", "int8", "int4", "nonzero")
"""Codecs whose bytes follow from each number and the largest ones alone."""
SUM_BYTES = 8
"""Of each number, of a sum of what clients came to that a pipeline has trained so far."""


@dataclass(frozen=True, kw_only=True)
class AverageOptions(Settings):
    """average: every replica goes on from the mean of all."""

    overlap: int | Literal["auto"] = 0
    """Steps of the next round that are made while this one is exchanged; "auto": as many as the
    last exchange took."""

    def check(self) -> None:
        expect(self, "overlap", self.overlap == "auto" or self.overlap >= 0, '0, more, or "auto"')


@dataclass(frozen=True, kw_only=True)
class DilocoOptions(Settings):
    """diloco: what replicas moved on the mean is a gradient for an outer SGD with Nesterov
    momentum."""

    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum, in [0, 1)."""
    overlap: int | Literal["auto"] = 0
    """Steps of the next round that are made while this one is exchanged; "auto": as many as the
    last exchange took."""

    def check(self) -> None:
        expect(self, "overlap", self.overlap == "auto" or self.overlap >= 0, '0, more, or "auto"')
        expect(self, "lr", self.lr > 0, "more than 0")
        expect(self, "momentum", 0 <= self.momentum < 1, "a number in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class StreamingOptions(DilocoOptions):
    """streaming-diloco: DiLoCo of a fragment of the model in each round, beside local steps."""

    lr: float = 0.4
    """Outer learning rate."""
    overlap: int | Literal["auto"] = "auto"
    """Steps of the next round that are made while this one is exchanged; "auto": as many as the
    last exchange took."""
    fragments: int = 2
    """Of the model's blocks; each is exchanged once in `every` steps."""
    mix: float = 0.5
    """What stays of the local weights where a version lands, in [0, 1)."""
    bits: int = 4
    """Of each number that is given, with int8 for the result; or 32 for both as they are."""

    def check(self) -> None:
        super().check()
        at_least(self, 1, "fragments")
        expect(self, "mix", 0 <= self.mix < 1, "a number in [0, 1)")
        expect(self, "bits", self.bits in (4, 32), "4 or 32")

    @property
    def codec(self) -> str:
        """What contributions are encoded with."""
        return "e3m0" if self.bits == 4 else "none"


@dataclass(frozen=True, kw_only=True)
class SparseLocoOptions(Settings):
    """sparse-loco: replicas give the largest numbers of each chunk of what they moved, and keep the
    rest for later rounds."""

    density: float = 1 / 64
    """Share of the numbers that is given, in (0, 1]."""
    bits: int = 2
    """Of each number that is given: 2, or 32 for as it is."""
    decay: float = 0.95
    """What stays of the rest from round to round, in [0, 1]."""
    lr: float = 1.0
    """Outer learning rate."""
    chunk: int = 4096
    """Neighbouring numbers of which the largest are given, at most 2^20."""
    result_density: float = 0.0
    """Share of the numbers that comes back, the largest of the mean, in (0, 1]; the others stay
    with who gave them. 0: all that was given comes back."""

    @property
    def codec(self) -> str:
        """The text of that which writes contributions."""
        return self._chunks(self.density)

    @property
    def result_codec(self) -> str:
        """The text of that which writes results, where not all that was given comes back."""
        return self._chunks(self.result_density)

    def _chunks(self, density: float) -> str:
        return f"chunks:density={density!r},chunk={self.chunk},bits={self.bits}"

    def check(self) -> None:
        expect(self, "density", 0 < self.density <= 1, "a number in (0, 1]")
        expect(self, "result_density", 0 <= self.result_density <= 1, "a number in [0, 1]")
        expect(self, "bits", self.bits in (2, 32), "2 or 32")
        expect(self, "decay", 0 <= self.decay <= 1, "a number in [0, 1]")
        expect(self, "lr", self.lr > 0, "more than 0")
        at_least(self, 1, "chunk")
        at_most(self, 1 << 20, "chunk")


@dataclass(frozen=True, kw_only=True)
class RoundMethod:
    """What there is to know of a method of rounds, but for its formulas: these are a strategy of
    peers (`peer/rounds/methods/`) and, once more, a plain loop (`sim/plain/`)."""

    options: type[Settings]
    kept: int
    """How many times all that is exchanged is kept from round to round, in fp32: the version, and
    state."""
    own_codec: bool = False
    """Whether it writes what it exchanges in a way of its own, and takes no `codec.sync`."""
    pairs: str = ""
    """Of gossip: the rule of `broker/policies/pairs/selection.py` by which pairs are found."""
    alike: bool = False
    """Of gossip: whether both of a pair come to the same version."""
    normalises: bool = False
    """Of federated training: whether a client's move is divided by what its local steps count for,
    which is known of SGD alone."""
    controls: bool = False
    """Of federated training: whether each client has a control variate, which it keeps from one of
    its rounds to the next."""
    buffered: bool = False
    """Of federated training: whether a client that is not ready when a version is made goes on, and
    counts for a later one."""
    features: bool = False
    """Of federated training: whether clients train on features too that are drawn by statistics of
    all (`dag/transforms/feature_statistics.py`)."""


LOCAL: Mapping[str, RoundMethod] = {
    "diloco": RoundMethod(options=DilocoOptions, kept=2),
    "average": RoundMethod(options=AverageOptions, kept=1),
    "sparse-loco": RoundMethod(options=SparseLocoOptions, kept=2, own_codec=True),
    "streaming-diloco": RoundMethod(options=StreamingOptions, kept=2, own_codec=True),
}
"""Methods of kind "local"."""


def _in_pairs(
    options: type[Settings], pairs: str, *, kept: int = 1, alike: bool = False
) -> RoundMethod:
    """What replicas give each other in gossip are weights, of which a codec would lose at each
    meeting."""
    return RoundMethod(options=options, kept=kept, own_codec=True, pairs=pairs, alike=alike)


GOSSIP: Mapping[str, RoundMethod] = {
    "saps": _in_pairs(SapsOptions, "saps"),
    "random-pairs": _in_pairs(PairOptions, "random-pairs", alike=True),
    "ring": _in_pairs(PairOptions, "ring", alike=True),
    "noloco": _in_pairs(NoLocoOptions, "random-pairs", kept=2),
    "saps-outer": _in_pairs(SapsOuterOptions, "saps", kept=2),
}
"""Methods of kind "gossip"."""
FEDERATED: Mapping[str, RoundMethod] = {
    "fedavg": RoundMethod(options=FedAvgOptions, kept=1),
    "fedprox": RoundMethod(options=FedProxOptions, kept=1),
    "fednova": RoundMethod(options=FedNovaOptions, kept=1, normalises=True),
    "scaffold": RoundMethod(options=ScaffoldOptions, kept=2, controls=True),
    "fedavgm": RoundMethod(options=FedAvgMOptions, kept=2),
    "fedadam": RoundMethod(options=AdaptiveOptions, kept=3),
    "fedyogi": RoundMethod(options=AdaptiveOptions, kept=3),
    "fedadagrad": RoundMethod(options=AdaptiveOptions, kept=3),
    "fedbuff": RoundMethod(options=FedBuffOptions, kept=1, buffered=True),
    "fedimpro": RoundMethod(options=FedImproOptions, kept=1, features=True),
}
"""Methods of kind "federated"."""


def method_of(name: str) -> RoundMethod:
    """The record of a method. Raises SettingsError."""
    known = {**LOCAL, **GOSSIP, **FEDERATED}
    if name not in known:
        raise SettingsError("method", f'is "{name}": expected one of {", ".join(known)}')
    return known[name]


def options_of(method: str, options: Mapping[str, Any]) -> Settings:
    """The options of a method, read strictly. Raises SettingsError."""
    return method_of(method).options.from_table(options)


@dataclass(frozen=True, kw_only=True)
class RoundSettings(Settings):
    """What a peer needs to know of rounds between replicas."""

    method: str
    """As in [sync]."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method."""
    codec: str = "none"
    """What contributions and results are encoded with."""
    results: str = ""
    """What results are encoded with, where contributions are written in another way; empty: as
    these are."""
    replicas: int = 1
    """Among so many a batch is divided."""
    seed: int = 0
    """The run's: of what is random in the method."""
    cohorts: Cohorts | None = None
    """Of federated training: whose data is trained on; None: a step's samples are the run's."""

    @property
    def fragments(self) -> int:
        """How many the vector has; a round exchanges one of them."""
        found: int = getattr(options_of(self.method, self.options), "fragments", 1)
        return found

    @property
    def most_rows(self) -> int:
        """How many clients' contributions, each by itself, one peer gives at most; 0: it gives one,
        of its local work."""
        return self.cohorts.per_round if self.cohorts and self.cohorts.by_client else 0

    @property
    def adds_alike(self) -> bool:
        """Whether all who add up the same contributions write the same bytes: no secret is in the
        sum, no client's row by itself, and no codec that rounds by the order of its own additions
        or finds the largest numbers as it likes."""
        options = options_of(self.method, self.options)
        own: str = getattr(options, "result_codec", "")
        passes_on = isinstance(options, SparseLocoOptions) and not options.result_density
        codec = (self.results or self.codec) if passes_on or not own else own
        known = codec.partition(":")[0] in _WRITTEN_ALIKE
        return known and not (self.secure or self.privacy is not None or self.most_rows)

    @property
    def goes_whole(self) -> bool:
        """Whether numbers go as they are, all of them. Then no bit hangs on where parts begin, and
        peers near each other may add up what they give first: a sum takes no more than two."""
        compressed = self.cohorts is not None and self.cohorts.sends.compression != "none"
        own = method_of(self.method).own_codec or self.codec != "none"
        return not (own or compressed or self.most_rows)

    @property
    def keeps_given(self) -> bool:
        """Whether a contribution may be in snapshots, which go to other peers: of many clients it
        is too much, and of clients that noise hides it has none yet. What masks hide goes nowhere
        without them."""
        return not self.most_rows and self.privacy is None and not self.secure

    @property
    def keeps_state(self) -> bool:
        """Whether clients keep something from one of their rounds to the next."""
        feedback = self.cohorts is not None and self.cohorts.sends.feedback
        return feedback or method_of(self.method).controls

    @property
    def secure(self) -> bool:
        """Whether what peers give to a sum is masked."""
        return self.cohorts is not None and self.cohorts.secure

    @property
    def privacy(self) -> ClientPrivacy | None:
        """How clients are hidden in the sum; None: they are not."""
        return self.cohorts.privacy if self.cohorts is not None else None

    @property
    def overlap(self) -> tuple[float, int] | None:
        """(gamma, D), where it counts how many clients sent a number; else None."""
        return self.cohorts.sends.overlap if self.cohorts else None

    @property
    def kept_bytes(self) -> int:
        """From round to round, of each number that is exchanged: the version, the method's state,
        and the last version's move where that says what is sent."""
        moved = self.cohorts is not None and self.cohorts.shares_positions
        return 4 * (method_of(self.method).kept + moved)

    @property
    def stepping_bytes(self) -> int:
        """At most, beside the optimizer's state, of each of these numbers while steps are made:
        with overlap a fragment is exchanged meanwhile."""
        overlaps = self._overlap != 0
        return self.kept_bytes + (self._exchanged // self.fragments if overlaps else 0)

    @property
    def exchange_bytes(self) -> int:
        """Beside that, while a round is exchanged and no step is made."""
        return self.kept_bytes + self._exchanged - self.stepping_bytes

    def summed_bytes(self, stages: int) -> int:
        """Bytes beside that, of each number, in a plan of so many stages: of clients that a
        pipeline trains one after the other."""
        return SUM_BYTES if self.cohorts is not None and stages > 1 else 0

    def overlap_of(self, steps: int) -> float:
        """The share of a round of so many steps beside which the exchange before it may go on."""
        return 1.0 if self._overlap == "auto" else min(1.0, self._overlap / steps)

    @property
    def _overlap(self) -> int | Literal["auto"]:
        found: int | Literal["auto"]
        found = getattr(options_of(self.method, self.options), "overlap", 0)
        return found

    @property
    def _exchanged(self) -> int:
        """What was taken down and is written, what came back, the version that is made of it, and
        the sum of a replica's share of the vector. Where each client's contribution comes by
        itself, one peer at most has taken down all of a round, and one gets them, and puts them
        side by side."""
        if self.most_rows:
            return 12 * self.most_rows + 4 + self.kept_bytes
        codec = self.contribution_codec
        written = 0 if codec == "none" else 2 if codec in ("bf16", "fp16") else 1
        rows = 2 if self.overlap else 1  # numbers, and how many sent them
        taken = rows * (4 + written + 8 // max(2, self.replicas))
        if self.secure:  # integers of 64 bits go, and others come in place of a mean
            taken += 16
        return taken + 4 + self.kept_bytes

    @property
    def contribution_codec(self) -> str:
        """The text of that which writes contributions: the method's own, or the job's."""
        own: str = getattr(options_of(self.method, self.options), "codec", self.codec)
        return own

    def check(self) -> None:
        options = options_of(self.method, self.options)
        at_least(self, 1, "replicas")
        if isinstance(options, FedBuffOptions) and self.cohorts is not None:
            try:
                options.wanted(self.cohorts.per_round)
            except SettingsError as error:
                raise error.inside("options") from None
