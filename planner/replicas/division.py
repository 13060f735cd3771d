"""Peers divided into replicas, and how many samples a second such a division trains.

    samples/s = every · batch / (slowest replica's local steps + what the exchange shows)

An exchange shows all of its seconds, or, where rounds overlap, those that the next round's local
work does not hide. Samples count alike whoever trains them and however old the weights are: how
much a sample teaches is not part of it (`preferred` says what is).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

from .copies import CopyingPaces
from .pace import Pace, Paces
from .rough import RoughPaces
from .rounds import Contribution, at_least, contributions, local_steps

__all__ = ["NEAR", "Division", "Judge", "preferred"]

NEAR = 0.95
"""A division with so much of the most samples/s is as good."""
PAIRS = 1000
"""Pairs of peers whose exchange is as much work as a peer of a set."""


@dataclass(frozen=True, slots=True)
class Division:
    """`peers[r]` train as replica r, `steps[r]` local steps of `microbatches` in a round."""

    peers: tuple[frozenset[int], ...]
    """Those with a share of the model only, in the order of the first of them."""
    paces: tuple[Pace, ...]
    microbatches: int
    steps: tuple[int, ...]
    local_s: float
    exchange: Contribution
    samples_per_s: float

    @property
    def slow(self) -> int:
        """Slow links inside of replicas."""
        return sum(p.slow for p in self.paces)


class Judge:
    """What divisions of one request are worth, by rounds of `every` global steps and so many bytes
    of contributions for each trained number."""

    def __init__(
        self,
        paces: Paces,
        every: int,
        bytes_per_parameter: float,
        *,
        overlap: float = 0.0,
        goes_whole: bool = False,
    ) -> None:
        """`goes_whole`: as of `contributions`."""
        self.paces, self.every, self.overlap = paces, every, overlap
        self._goes_whole = goes_whole
        self._paces: Paces | RoughPaces | CopyingPaces = paces
        self._tried = 0
        self.request = paces.judge.request
        self.size_bytes = bytes_per_parameter * self.request.graph.trained_elements
        """Of a contribution."""
        self.most = min(self.request.microbatches, len(self.request.offers))
        """Replicas: each takes one microbatch of a global step at least."""
        self._known: dict[frozenset[frozenset[int]], Division | None] = {}

    def roughly(self) -> Judge:
        """Divide by closed formulas alone, for a search."""
        found = copy(self)
        found._paces, found._known = RoughPaces(self.paces), {}
        found._goes_whole = False  # places are looked for where few divisions are left
        return found

    def copying(self, pause_s: float) -> Judge:
        """Divide with what snapshots cost."""
        found = copy(self)
        found._paces, found._known = CopyingPaces(self.paces, pause_s), {}
        return found

    def paced(self, pace: Pace) -> Pace:
        """The pace of a plan that somebody made, as `of` counts it."""
        return self._paces.copying(pace) if isinstance(self._paces, CopyingPaces) else pace

    @property
    def spent(self) -> int:
        """Peers of sets and replicas of divisions that were looked at: what budgets count."""
        return self._paces.spent + self._tried

    @property
    def batch(self) -> int:
        return self.request.microbatches * self.request.microbatch_size

    def allows(self, replicas: int) -> bool:
        """Whether so many can be: each gets an equal part of a step's microbatches."""
        return self.request.microbatches % replicas == 0

    def of(self, groups: Iterable[Collection[int]], above: float = 0.0) -> Division | None:
        """None: some group cannot hold the model, or they are too many, or it cannot train more
        than `above` samples/s."""
        every = [frozenset(g) for g in groups]
        key = frozenset(every)
        if key in self._known:
            return self._known[key]
        self._tried += len(every)
        paces, m = self._paced(every)
        if paces and self._at_most(paces, m) <= above:
            return None
        self._tried += sum(len(p.peers) for p in paces) ** 2 // PAIRS
        self._known[key] = self.valued(paces, m) if paces else None
        return self._known[key]

    def _at_most(self, paces: Sequence[Pace], microbatches: int) -> float:
        """Samples/s, if exchanges took no time."""
        return microbatches * self.request.microbatch_size * sum(1 / p.seconds for p in paces)

    def _paced(self, groups: list[frozenset[int]]) -> tuple[list[Pace], int]:
        if not 1 <= len(groups) <= self.most or not all(map(self.paces.may_hold, groups)):
            return [], 0
        # Of a number that `allows` refuses, which a search passes through, nearly an equal part.
        m = max(1, round(self.request.microbatches / len(groups)))
        paces = []
        for group in groups:
            pace = self._paces.of(group, m)
            if pace is None:
                return [], 0
            paces.append(pace)
        return paces, m

    def valued(self, paces: Iterable[Pace], microbatches: int) -> Division:
        """The value of replicas with local steps of so many microbatches."""
        found = sorted(paces, key=lambda p: min(p.peers))
        total = self.every * len(found)
        steps = local_steps(at_least([p.seconds for p in found]), total)
        local_s = max(h * p.seconds for h, p in zip(steps, found, strict=True))
        exchange = self.exchange(found)
        round_s = local_s + self.shown(local_s, exchange.seconds)
        return Division(
            tuple(p.peers for p in found),
            tuple(found),
            microbatches,
            steps,
            local_s,
            exchange,
            self.every * self.batch / round_s,
        )

    def exchange(self, paces: Iterable[Pace]) -> Contribution:
        """The exchange of their contributions, by what each peer holds."""
        judge = self.paces.judge
        slots = [[(a, b, h) for a, b, h, _ in p.candidate.slots()] for p in paces]
        held = self.paces.fence.rows.trainable_bytes
        return contributions(
            *(slots, judge.network, judge.rates, held, self.size_bytes),
            goes_whole=self._goes_whole,
        )

    def shown(self, local_s: float, exchange_s: float) -> float:
        """Seconds of an exchange in which nobody trains."""
        return max(0.0, exchange_s - self.overlap * local_s)


def preferred(divisions: Iterable[Division]) -> Division:
    """Among those with nearly the most samples/s, first those without a slow link inside a replica,
    for a cut between replicas avoids it; then the one with fewest replicas, for it is nearest to
    plain training with the whole batch."""
    found = list(divisions)
    most = max(d.samples_per_s for d in found)
    near = [d for d in found if d.samples_per_s >= NEAR * most]
    return min(near, key=lambda d: (d.slow > 0, len(d.peers), -d.samples_per_s))
