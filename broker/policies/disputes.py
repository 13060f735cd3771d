"""Members of rounds that are in dispute with one another, and those that lost their place.

- What one member says of another (that nothing comes from it, that its sum is not what others got)
  shows only that something between the two is bad: the link, or one of them. That strikes both
  ends. While the dispute lasts, neither adds up what the other gives or takes.
- Two disputes with two others have one end in common: that one is convicted, and they are settled.
- What the broker sees by itself needs no witness: who says nothing at all, or makes another version
  out of sums that nobody disputes.
- Who is convicted is left out of the round. From the second time on it loses its place in the
  rounds that follow, for twice as many each time, and comes back after them; rounds that it is in
  to the end are forgiven one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ...dag.rounds.wiring import segment_of
from ...proto.broker_pb2 import RoundPlan, RoundReport

__all__ = ["Disputes", "doubted"]

_LASTS, _LASTS_OF_TWO, _MOST_LASTS = 32, 4, 512
"""Rounds of a pair's first dispute, where there are others to add up and where not, and at most."""
_MOST_OUT = 63
"""Rounds that a member is left out of at most."""
_FORGIVEN = 16
"""Rounds to the end for which one conviction is forgiven."""

Pair = frozenset[int]


@dataclass(slots=True)
class _Dispute:
    """`by`: who spoke. until: the round from which on it is forgotten; times: how often there was
    one."""

    by: int
    until: int
    times: int


class Disputes:
    """Disputes among the replicas of one run, by their numbers; not durable. The memory is one
    record for each pair of replicas, at most."""

    def __init__(self) -> None:
        self._round = 0
        self._pairs: dict[Pair, _Dispute] = {}
        self._strikes = Counter[int]()
        self._good = Counter[int]()
        self._out_until: dict[int, int] = {}
        self._left_out = Counter[int]()

    def begin(self, round_: int) -> None:
        """A round begins."""
        self._round = round_

    def accuse(self, by: int, about: int, others: int) -> None:
        """One member says that something between it and another is bad. `others`: how many
        members and joiners there are beside the two."""
        if by == about:
            return
        pair = frozenset((by, about))
        known = self._pairs.get(pair)
        times = known.times + (self._round >= known.until) if known is not None else 1
        lasts = min(_MOST_LASTS, (_LASTS if others else _LASTS_OF_TWO) << min(times - 1, 10))
        self._pairs[pair] = _Dispute(by, self._round + lasts, times)

    def between(self, numbers: Iterable[int]) -> set[Pair]:
        """Pairs of these that are in dispute now."""
        among = set(numbers)
        found = self._pairs.items()
        return {pair for pair, d in found if pair <= among and self._round < d.until}

    def convicted(self, numbers: Iterable[int]) -> list[int]:
        """Return who has disputes with two others of these, whoever has most first: without them
        each of the others has one at most."""
        pairs, found = self.between(numbers), list[int]()
        while pairs:
            have = Counter(n for pair in pairs for n in sorted(pair))
            said = Counter(self._pairs[pair].by for pair in pairs)
            most = max(have, key=lambda n: (have[n], said[n], n))
            if have[most] < 2:
                break
            found.append(most)
            pairs = {pair for pair in pairs if most not in pair}
        return found

    def leaves_out(self, members: Sequence[int]) -> list[int]:
        """Return members without whom somebody can add up what all others give: nobody, where one
        is in no dispute. Of a pair it is who was left out less often; else who spoke."""
        pairs, found = self.between(members), self.convicted(members)
        pairs = {pair for pair in pairs if not pair & set(found)}
        free = set(members) - set(found) - {n for pair in pairs for n in pair}
        if not pairs or free:
            return found
        pair = min(pairs, key=sorted)  # without one of them the other adds up
        by = self._pairs[pair].by
        goes = min(pair, key=lambda n: (self._left_out[n], n != by))
        return [*found, goes, *self.leaves_out([n for n in members if n not in (*found, goes)])]

    def left_out(self, numbers: Iterable[int]) -> None:
        """An attempt goes without these."""
        self._left_out.update(numbers)

    def strike(self, number: int) -> str:
        """Convict a member, which settles its disputes; return what that means for it, for people,
        behind a sentence."""
        self._pairs = {pair: d for pair, d in self._pairs.items() if number not in pair}
        self._strikes[number] += 1
        self._good[number] = 0
        rounds = min(_MOST_OUT, (1 << min(self._strikes[number] - 1, 10)) - 1)
        self._out_until[number] = self._round + 1 + rounds
        if not rounds:
            return ""
        times = f", for the {self._strikes[number]}. time"
        return f"{times}: it is left out of the {rounds} rounds that follow"

    def is_out(self, number: int) -> bool:
        """Whether a replica has no place in the round now."""
        return self._round < self._out_until.get(number, 0)

    def done(self, members: Iterable[int]) -> None:
        """The round is committed, with these members."""
        for number in members:
            self._good[number] += 1
            if self._good[number] >= _FORGIVEN and self._strikes[number]:
                self._strikes[number] -= 1
                self._good[number] = 0


def doubted(
    number: int,
    like: int,
    made: Mapping[int, Mapping[PeerId, RoundReport]],
    plans: Mapping[PeerId, RoundPlan],
) -> set[PeerId]:
    """Peers that gave a replica those segments of its version that differ from another replica's
    of the same round: who added them up, or whose version it took. `made`: by replica, what its
    holders say; `plans`: by peer, what it did."""
    theirs = {span: part for span, part, _ in _parts(made.get(like, {}), plans)}
    return {
        by
        for span, part, by in _parts(made.get(number, {}), plans)
        if theirs.get(span, part) != part
    }


def _parts(
    said: Mapping[PeerId, RoundReport], plans: Mapping[PeerId, RoundPlan]
) -> list[tuple[tuple[int, int], int, PeerId]]:
    """By segment that is known to a replica's holders: its span, its hash, and who gave it."""
    found = []
    for peer, report in said.items():
        plan = plans.get(peer)
        if plan is None or len(report.parts) != len(plan.segments):
            continue
        for segment, part in zip(plan.segments, report.parts, strict=True):
            sources = (v.source for v in segment.versions if v.destination == peer)
            by = PeerId(next(sources, segment_of(segment).takes_from(peer)))
            found.append(((segment.start, segment.stop), part, by))
    return found
