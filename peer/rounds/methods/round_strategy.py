"""A strategy between replicas: what each gives of what it moved, and what becomes of the mean.

    contribution    each replica's own, of all that it trained since the version that it began with
    (the exchange)  the weighted mean of all, the same bits for everybody
    apply           the next version, and the next shared state
    left            the replica's own next state, when its contribution counted

All are functions, so that an exchange that failed is done again from the same state; what counts
as the state is the caller's to say. All replicas must come to the same version, to the bit, on
whatever they compute: so the formula of `apply` is made of single multiplications, additions and
subtractions of float32, each of which IEEE 754 rounds in one way (no `alpha=`, no `addcmul`, no
reduction).

What replicas promise in gossip is less: each goes on from a version of its own
(`gossip_rounds.py`).

A new one is a file that overrides some of these, a line in `round_strategies.py`, and its options
in `job/rounds.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from torch import Tensor

from ....dag.rounds.vector import RunVector, Span
from ....dag.rounds.wiring import AUDIT, GATHER, GIVE, RESULT, VERSION
from ....job.rounds import RoundSettings, options_of
from ....job.settings import Settings
from ...secure.shared_positions import SharedPositions
from ..coding import CountedCoding, MultiplesCoding, PartCoding, SideBySide

__all__ = ["MeanOfBuffers", "RoundStrategy", "State", "WholeOfBuffers"]

State = Mapping[str, Tensor]
"""What is remembered of an entry of the vector, by slot; each as long as the entry."""


class RoundStrategy:
    """The plain mean, which the others are variations of. Tensors are flat, float32, and nobody
    writes into those that are given."""

    slots: ClassVar[tuple[str, ...]] = ()
    """Names of the state of each entry that all replicas share; it begins with zeros."""
    own_slots: ClassVar[tuple[str, ...]] = ()
    """Names of the state of each entry that a replica has by itself; it begins with zeros."""
    codecs: tuple[str, str] | None = None
    """Texts of those that write contributions and results, in place of the job's `codec.sync`."""
    mix = 0.0
    """What stays of the local weights where a version comes into the stages."""
    side_by_side: bool = False
    """Whether a result is all contributions as they came, which is smaller than their mean."""
    gives_values: ClassVar[bool] = False
    """Whether a contribution is what is in the stages, and not what moved."""
    apart: ClassVar[bool] = False
    """Whether replicas go on with versions of their own."""

    def __init__(self, options: Settings, seed: int = 0) -> None:
        """`seed`: the run's."""
        self.options, self.seed = options, seed

    @classmethod
    def of(cls, settings: RoundSettings) -> Self:
        """Return the one that a run asks for, with its options."""
        return cls(options_of(settings.method, settings.options), settings.seed)

    def codings(
        self,
        settings: RoundSettings,
        vector: RunVector,
        positions: SharedPositions | None = None,
    ) -> dict[int, PartCoding]:
        """Return how contributions, results and versions are written, by hop, before a plan says
        more. `positions`: of the numbers that are given; None: all. Raises CodecError for a codec
        that rounds cannot have."""
        if self.codecs is None:
            given = result = PartCoding(vector, settings.codec)
            if settings.results:
                result = PartCoding(vector, settings.results)
        else:
            given, result = (PartCoding(vector, text, least=0) for text in self.codecs)
        whole = PartCoding(vector, "none", rows=1 + len(self.slots) + (positions is not None))
        if settings.secure:
            given = result = MultiplesCoding(vector, positions.kept if positions else _length)
        if settings.overlap:
            given = CountedCoding(vector, settings.codec)
        if self.side_by_side:
            result = SideBySide(given)
        sums = given if settings.secure else MultiplesCoding(vector, _length)
        return {GIVE: given, RESULT: result, VERSION: whole, AUDIT: given, GATHER: sums}

    def begin(self, number: int, *, gathers: bool) -> None:
        """What follows is of this round; `gathers`: of gossip, all meet in it."""

    def planned(self, share: float, to_gradient: float) -> None:
        """What comes is of an exchange with moves of so large a share of all clients; `to_gradient`
        as `LocalSteps` has it."""

    def coding(self, vector: RunVector) -> PartCoding | None:
        """What writes contributions and results of this round alone; None: the same as ever."""
        return None

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        """Return what is given of the entry `value`, which stood at `base` and is `now`; `own`: all
        its state."""
        return base - now

    def left(self, value: str, given: Tensor, heard: Tensor, mean: Tensor) -> State:
        """The replica's own next state, of a contribution that others `heard` as encoded, and of
        the mean that came back."""
        return {}

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """The next version after `base`, by the mean of all contributions, and the next state."""
        return base - mean, {}

    def meet(
        self, value: str, base: Tensor, given: Tensor, mean: Tensor, state: State
    ) -> tuple[Tensor, State]:
        """As `apply`, where it makes a difference what this replica has `given` itself."""
        return self.apply(value, base, mean, state)


class MeanOfBuffers(RoundStrategy):
    """Shared state, of which there is none, stays as it began."""

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return base - mean, state


class WholeOfBuffers(MeanOfBuffers):
    """The exchange finds what all go on with: of integers the largest, and of statistics the mean
    where replicas do not begin a round with the same ones."""

    gives_values = True

    def contribution(self, value: str, base: Tensor, now: Tensor, own: State) -> Tensor:
        return now

    def apply(self, value: str, base: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        return mean, state


def _length(part: Span) -> int:
    """Return how many numbers a part has."""
    return part[1] - part[0]
