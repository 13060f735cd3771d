"""The best division for each number of replicas.

Of up to EVERY peers all divisions are judged, those that leave peers out included. Of more, the
best of the seeds (gather.py) are improved by moves, the first that helps, until none does or the
budget is spent: a peer goes to another replica, out, in, or alone; two change places; two replicas
become one; one becomes two. All that by closed formulas (rough.py); the best that come of it are
judged by the event calculation, and the best of these is improved once more. Budgets count the
peers of sets and the replicas of divisions that were looked at, never seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .division import NEAR, Division, Judge
from .gather import Group, gathered, seeds
from .pace import Paces

__all__ = ["EVERY", "best_divisions", "every_division", "improved", "nearest", "searched"]

EVERY = 5
"""Most peers whose divisions are all judged: 203 for five."""
BUDGET = 40_000
"""Of the search by closed formulas."""
JUDGED = 1_500
"""Of what is judged by the event calculation."""
KEPT = 3
"""Divisions of each number of replicas that are judged."""
NEAREST = 3
"""Replicas that a peer or a replica may go to: those with the fastest links to it."""
BEGUN = 4
"""Numbers of replicas whose best seed is improved."""
MOST_SWAPPED = 16
"""Peers up to which any two change places."""
_BETTER = 1 + 1e-9

Groups = tuple[Group, ...]


def best_divisions(judge: Judge, count: int | None = None) -> list[Division]:
    """For each number of replicas that was looked at and may be, the best, and the best without a
    slow link inside where that is another; most samples/s first. `count`: so many replicas and no
    others."""
    found = _Best()
    n = len(judge.request.offers)
    if n <= EVERY:
        for division in every_division(range(n)):
            if division and count in (None, len(division)) and judge.allows(len(division)):
                found.add(judge.of(division))
        return found.ranked()
    return searched(judge, count)


def searched(judge: Judge, count: int | None = None) -> list[Division]:
    """Form replicas by search, of any number of peers."""
    found, limit = _Best(), judge.spent + JUDGED
    for division in _roughly(judge.roughly(), count):
        found.add(judge.of(division.peers))
        if judge.spent >= limit // 2:
            break
    ranked = found.ranked()
    if ranked:
        improved(judge, ranked[0], len(ranked[0].peers), limit, found)
    return found.ranked()


def _roughly(judge: Judge, count: int | None) -> list[Division]:
    """Different divisions by closed formulas, the best of each number first."""
    found = _Best(KEPT)
    counts = _counts(judge) if count is None else [count]
    for groups in seeds(judge.paces, counts):
        found.add(judge.of(groups))
    limit = judge.spent + BUDGET
    begun = [(start, count) for start in found.ranked()[:BEGUN]]
    if count is None and not all(map(judge.allows, range(1, judge.most + 1))):
        # Moves change the number by one, mostly to one that may not be: so also without.
        begun += [(start, len(start.peers)) for start, _ in begun]
    for k, (start, fixed) in enumerate(begun):
        share = judge.spent + (limit - judge.spent) // (len(begun) - k)
        improved(judge, start, fixed, share, found)
    return [d for d in found.ranked() if judge.allows(len(d.peers))]


class _Best:
    """The best `most` divisions of each number of replicas, with and without slow links inside."""

    def __init__(self, most: int = 1) -> None:
        self.most = most
        self.by: dict[tuple[int, bool], list[Division]] = {}

    def add(self, division: Division | None) -> None:
        if division is None:
            return
        these = self.by.setdefault((len(division.peers), division.slow > 0), [])
        if all(division.peers != d.peers for d in these):
            these.append(division)
            these.sort(key=lambda d: -d.samples_per_s)
            del these[self.most :]

    def ranked(self) -> list[Division]:
        """First of each number the best, then the second, and so on; most samples/s first."""
        ranks = [(i, d) for these in self.by.values() for i, d in enumerate(these)]
        ranks.sort(key=lambda x: (x[0], -x[1].samples_per_s, len(x[1].peers)))
        return [d for _, d in ranks]


def every_division(peers: Sequence[int]) -> Iterator[list[set[int]]]:
    """All ways of putting some of the peers into groups."""
    if not peers:
        yield []
        return
    head, rest = peers[0], peers[1:]
    for groups in every_division(rest):
        yield groups
        yield [{head}, *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], group | {head}, *groups[i + 1 :]]


def _counts(judge: Judge) -> list[int]:
    """Numbers of replicas that seeds are made for."""
    n = len(judge.request.offers)
    most = min(judge.most, len(gathered(judge.paces, [frozenset({p}) for p in range(n)])))
    found = {1, 2, 3, 4, most, *(len(g) for g in judge.paces.islands)}
    size = most
    while size > 4:
        size = size * 2 // 3
        found.add(size)
    may = [c for c in range(1, most + 1) if judge.allows(c)]
    return sorted({max(c for c in may if c <= wanted) for wanted in found if 1 <= wanted <= most})


def improved(judge: Judge, start: Division, count: int | None, limit: int, found: _Best) -> None:
    """Look for a division that no move makes better, as far as `limit` goes. `found` hears of
    all."""
    best, again = start, True
    while again:
        again = False
        for groups in _moves(judge.paces, best, count):
            if judge.spent >= limit:
                return
            other = judge.of(groups, NEAR * best.samples_per_s)
            if other is None or (count is not None and len(other.peers) != count):
                continue
            found.add(other)
            if other.samples_per_s > best.samples_per_s * _BETTER:
                best, again = other, True
                break


def _moves(paces: Paces, division: Division, count: int | None) -> Iterator[Groups]:
    groups = division.peers
    free = count is None
    inside = {p for g in groups for p in g}
    outside = sorted(set(range(len(paces.rooms))) - inside, key=lambda p: (-paces.speed[p], p))
    slowest = division.exchange.members
    if free:
        once = (r for r, h in enumerate(division.steps) if h == 1)  # who would slow it is here
        for r in {*slowest, *once}:
            if len(groups) > 1:
                yield _without(groups, r)
    for p in outside:
        if free and paces.may_hold([p]):
            yield (*groups, frozenset({p}))
        for r in nearest(paces, [p], groups):
            yield _with(groups, r, groups[r] | {p})
    order = sorted(range(len(groups)), key=lambda r: (r not in slowest, -division.paces[r].seconds))
    for r in order:
        for p in sorted(groups[r], key=lambda p: (paces.speed[p], p)):
            rest = groups[r] - {p}
            if not rest:
                continue
            for to in nearest(paces, [p], groups):
                yield _with(_with(groups, r, rest), to, groups[to] | {p})
            if free and paces.may_hold([p]):
                yield (*_with(groups, r, rest), frozenset({p}))
            yield _with(groups, r, rest)
    if free:
        for r in order:
            for to in nearest(paces, groups[r], groups):
                yield _merged(groups, r, to)
            for parts in _halves(paces, groups[r]):
                yield (*_without(groups, r), *parts)
    else:
        for r in order:
            for parts in _halves(paces, groups[r]):
                more = (*_without(groups, r), *parts)
                for a, group in enumerate(more):
                    for b in nearest(paces, group, more):
                        yield _merged(more, a, b)
    yield from _swaps(paces, groups, outside)


def _swaps(paces: Paces, groups: Groups, outside: Sequence[int]) -> Iterator[Groups]:
    few = len(paces.rooms) <= MOST_SWAPPED
    for r, group in enumerate(groups):
        for p in sorted(group):
            for q in outside[: None if few else NEAREST]:
                yield _with(groups, r, group - {p} | {q})
            others = range(len(groups)) if few else nearest(paces, [p], groups)
            for to in others:
                if to == r or (few and to < r):
                    continue
                for q in sorted(groups[to]):
                    one = _with(groups, r, group - {p} | {q})
                    yield _with(one, to, groups[to] - {q} | {p})


def nearest(paces: Paces, peers: Sequence[int] | Group, groups: Groups) -> list[int]:
    """The replicas with the fastest links to some peers, without those that these are."""
    mine = sorted(peers)
    rate = {
        r: float(paces.rate[mine][:, sorted(g)].max())
        for r, g in enumerate(groups)
        if not g & set(mine)
    }
    return sorted(rate, key=lambda r: (-rate[r], r))[:NEAREST]


def _halves(paces: Paces, group: Group) -> Iterator[tuple[Group, Group]]:
    """By islands of fast links; and the fastest peer alone."""
    if len(group) < 2:
        return
    for grouping in paces.islands[:3]:
        parts = [frozenset(g) & group for g in grouping]
        largest = max(parts, key=lambda g: (len(g), -min(g, default=0)))
        if largest != group:
            yield largest, group - largest
    first = min(group, key=lambda p: (-paces.speed[p], p))
    yield frozenset({first}), group - {first}
    by_speed = sorted(group, key=lambda p: (-paces.speed[p], p))
    yield frozenset(by_speed[::2]), frozenset(by_speed[1::2])


def _with(groups: Groups, r: int, group: Group) -> Groups:
    return (*groups[:r], group, *groups[r + 1 :])


def _without(groups: Groups, r: int) -> Groups:
    return (*groups[:r], *groups[r + 1 :])


def _merged(groups: Groups, a: int, b: int) -> Groups:
    return (*(g for i, g in enumerate(groups) if i not in (a, b)), groups[a] | groups[b])
