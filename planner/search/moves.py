"""Moves to other structures: what the local search tries from a candidate.

In one pipeline: a cut shifts; a share goes to its neighbours; a new peer takes a part of a share;
the first peer takes the last operators too, where a weight is tied; a share recomputes or does not.
Between pipelines: microbatches move; a pipeline ends and its peers go free; two become one; one is
split; a free peer becomes a pipeline. And: another schedule.

By themselves (`exchange_moves`): where peers cut what they hold for the sake of an exchange.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..cost.candidate import Candidate, Pipeline, StageShare
from ..cost.cost_model import CostModel
from .search import SearchSpace

__all__ = [
    "all_moves",
    "chain_moves",
    "even_pipeline",
    "exchange_moves",
    "joined",
    "with_pipeline",
]

MOST_CUTS = 24
"""Positions at which a new share is tried."""
MOST_LOANS = 3
"""Shares of a pipeline in which a middle is lent."""
MOST_EXCHANGED = 8
"""Shares of a pipeline that are cut for the sake of an exchange."""
MOST_SHARES = 64
"""Beyond, only the shares of the busiest peers are moved."""


def all_moves(judge: CostModel, candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    yield from schedule_moves(candidate, space)
    yield from share_moves(judge, candidate)
    if space.pipelines is None:
        yield from pipeline_moves(judge, candidate)
    yield from chain_moves(judge, candidate, space)
    yield from recompute_moves(candidate, space)


def with_pipeline(candidate: Candidate, p: int, pipeline: Pipeline) -> Candidate:
    """The candidate with another pipeline in place p."""
    pipelines = (*candidate.pipelines[:p], pipeline, *candidate.pipelines[p + 1 :])
    return replace(candidate, pipelines=pipelines)


def chain_moves(judge: CostModel, candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Moves inside each pipeline."""
    used = set(candidate.peers)
    free = next((p for p in range(len(judge.offers)) if p not in used), None)
    for p, pipeline in enumerate(candidate.pipelines):
        moves = [_shifts(judge, pipeline)]
        if space.stages is None:
            moves.append(_removals(pipeline))
            if free is not None:
                moves.append(_insertions(judge, pipeline, free))
            if space.repeats:
                moves += [_loans(judge, pipeline, free), _returns(judge, pipeline)]
        for other in itertools.chain(*moves):
            yield with_pipeline(candidate, p, other)


def exchange_moves(
    judge: CostModel, candidate: Candidate, space: SearchSpace
) -> Iterator[Candidate]:
    """A share is cut in two on its peer, so that the gradients of its end are given while its
    beginning does its backward; such a cut moves, or goes. A cut of one pipeline is one of all, so
    the first stands for them."""
    first = candidate.pipelines[0]
    if len(candidate.pipelines) < 2 or space.stages is not None or not space.repeats:
        return
    known = {s.stop for pipeline in candidate.pipelines for s in pipeline}
    for i, s in enumerate(first[:MOST_EXCHANGED]):
        done = judge.backward_s[s.peer, s.start : s.stop + 1] - judge.backward_s[s.peer, s.start]
        for part in (0.25, 0.5, 0.75):
            at = s.start + int(done.searchsorted(part * done[-1]))
            if s.start < at < s.stop and at not in known:
                cut = replace(s, stop=at), replace(s, start=at)
                yield with_pipeline(candidate, 0, (*first[:i], *cut, *first[i + 1 :]))
    for i in range(len(first) - 1):
        left, right = first[i], first[i + 1]
        if left.peer == right.peer:
            whole = replace(left, stop=right.stop)
            yield with_pipeline(candidate, 0, (*first[:i], whole, *first[i + 2 :]))
            for at in ((left.start + left.stop) // 2, (right.start + right.stop) // 2):
                if left.start < at < right.stop and at != left.stop:
                    moved = replace(left, stop=at), replace(right, start=at)
                    yield with_pipeline(candidate, 0, (*first[:i], *moved, *first[i + 2 :]))


def _shifts(judge: CostModel, pipeline: Pipeline) -> Iterator[Pipeline]:
    """A cut moves by 1, 2, 4, … operators; a run of cuts moves by one (a share passes on)."""
    for i in range(len(pipeline) - 1):
        left, right = pipeline[i], pipeline[i + 1]
        reach = 1
        while reach < max(2, judge.operators // 2):
            for at in (left.stop - reach, left.stop + reach):
                if left.start < at < right.stop:
                    both = replace(left, stop=at), replace(right, start=at)
                    yield (*pipeline[:i], *both, *pipeline[i + 2 :])
            reach *= 2
    # One more operator for share i, one less for share j, and all cuts between move along.
    for i, j in itertools.permutations(range(len(pipeline)), 2):
        if abs(i - j) < 2 or len(pipeline) > 8:
            continue
        by, low, high = (1, i, j) if i < j else (-1, j, i)
        moved = list(pipeline)
        for k in range(low, high):
            at = moved[k].stop + by
            moved[k] = replace(moved[k], stop=at)
            moved[k + 1] = replace(moved[k + 1], start=at)
        if all(s.start < s.stop for s in moved):
            yield tuple(moved)


def _removals(pipeline: Pipeline) -> Iterator[Pipeline]:
    for i, share in enumerate(pipeline):
        if i > 0:
            before = replace(pipeline[i - 1], stop=share.stop)
            yield joined((*pipeline[: i - 1], before, *pipeline[i + 1 :]))
        if i + 1 < len(pipeline):
            after = replace(pipeline[i + 1], start=share.start)
            yield joined((*pipeline[:i], after, *pipeline[i + 2 :]))
        if 0 < i < len(pipeline) - 1 and share.stop - share.start > 1:
            middle = (share.start + share.stop) // 2
            ends = replace(pipeline[i - 1], stop=middle), replace(pipeline[i + 1], start=middle)
            yield joined((*pipeline[: i - 1], *ends, *pipeline[i + 2 :]))


def joined(shares: Sequence[StageShare]) -> Pipeline:
    """Neighbours of one peer become one share."""
    found: list[StageShare] = []
    for s in shares:
        if found and found[-1].peer == s.peer:
            found[-1] = replace(found[-1], stop=s.stop)
        else:
            found.append(s)
    return tuple(found)


def _insertions(judge: CostModel, pipeline: Pipeline, peer: int) -> Iterator[Pipeline]:
    n = judge.operators
    cuts = {s.stop for s in pipeline}
    inner = [x for x in range(1, n) if x not in cuts]
    if len(inner) > MOST_CUTS:
        # The middle of each share, as far as there is room.
        inner = [(s.start + s.stop) // 2 for s in pipeline if s.stop - s.start > 1][:MOST_CUTS]
    for x in inner:
        i = next(i for i, s in enumerate(pipeline) if s.start < x < s.stop)
        s = pipeline[i]
        new = StageShare(peer, s.start, x, s.recompute)
        yield (*pipeline[:i], new, replace(s, start=x), *pipeline[i + 1 :])
        new = StageShare(peer, x, s.stop, s.recompute)
        yield (*pipeline[:i], replace(s, stop=x), new, *pipeline[i + 1 :])


def _returns(judge: CostModel, pipeline: Pipeline) -> Iterator[Pipeline]:
    """The first peer takes the last operators, or the last one the first."""
    first, last = pipeline[0], pipeline[-1]
    if first.peer == last.peer:
        return
    size = last.stop - last.start
    for back in dict.fromkeys((1, 2, 3, size // 4, size // 2)):
        if 0 < back < size:
            at = last.stop - back
            yield (*pipeline[:-1], replace(last, stop=at), replace(first, start=at, stop=last.stop))
    yield (*pipeline[:-1], replace(first, start=last.start, stop=last.stop))
    size = first.stop - first.start
    for front in dict.fromkeys((1, 2, size // 4)):
        if 0 < front < size:
            yield (replace(last, start=0, stop=front), replace(first, start=front), *pipeline[1:])


def _loans(judge: CostModel, pipeline: Pipeline, free: int | None) -> Iterator[Pipeline]:
    """A peer keeps both ends of its share and another one takes the middle."""
    if len(pipeline) > MOST_LOANS:
        return
    own = judge.both_s
    others = [p for p in {s.peer for s in pipeline} | ({free} if free is not None else set())]
    for i, s in enumerate(pipeline):
        size = s.stop - s.start
        if size < 3:
            continue
        row = own[s.peer, s.start : s.stop + 1] - own[s.peer, s.start]
        whole = max(float(row[-1]), 1e-30)
        for front, back in ((0.25, 0.5), (0.5, 0.75), (0.25, 0.75), (0.4, 0.6), (0.1, 0.9)):
            a = s.start + min(max(1, int((row / whole).searchsorted(front))), size - 2)
            b = s.start + min(max(a - s.start + 1, int((row / whole).searchsorted(back))), size - 1)
            for peer in sorted(others):
                if peer != s.peer:
                    middle = StageShare(peer, a, b, s.recompute)
                    ends = replace(s, stop=a), replace(s, start=b)
                    yield joined((*pipeline[:i], ends[0], middle, ends[1], *pipeline[i + 1 :]))


def recompute_moves(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    if len(space.recompute) < 2:
        return
    shares = [s for p in candidate.pipelines for s in p]
    for value in (False, True):
        if any(s.recompute is not value for s in shares):
            yield candidate.recomputing(value)
    if len(shares) > MOST_SHARES:
        return
    for p, pipeline in enumerate(candidate.pipelines):
        for i, s in enumerate(pipeline):
            other = replace(s, recompute=not s.recompute)
            yield with_pipeline(candidate, p, (*pipeline[:i], other, *pipeline[i + 1 :]))


def schedule_moves(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    for schedule in space.schedules:
        if schedule != candidate.schedule:
            yield replace(candidate, schedule=schedule)


def share_moves(judge: CostModel, candidate: Candidate) -> Iterator[Candidate]:
    """Microbatches between pipelines."""
    count = len(candidate.pipelines)
    for a, b in itertools.permutations(range(count), 2):
        if count > 12 and abs(a - b) > 2:
            continue
        for many in (1, 2, 4):
            if candidate.microbatches[a] > many:
                m = list(candidate.microbatches)
                m[a] -= many
                m[b] += many
                yield replace(candidate, microbatches=tuple(m))


def even_pipeline(
    judge: CostModel,
    peers: Sequence[int],
    recompute: bool = False,
    end: int | None = None,
    begin: int = 0,
) -> Pipeline | None:
    """The operators from `begin` before `end` (None: all), cut so that each peer takes about
    equally long; None: more peers than operators."""
    n, k = judge.operators if end is None else end, len(peers)
    if k > n - begin:
        return None
    seconds = judge.both_s - judge.both_s[:, begin : begin + 1]
    whole = [max(float(seconds[p, n]), 1e-30) for p in peers]
    speed = [1 / w for w in whole]
    shares: list[StageShare] = []
    start, part = begin, 0.0
    for i, p in enumerate(peers):
        part += speed[i] / sum(speed)
        stop = n
        if i + 1 < k:
            at = int((seconds[p] / whole[i]).searchsorted(part - 1e-12))
            stop = min(max(at, start + 1), n - (k - 1 - i))
        shares.append(StageShare(p, start, stop, recompute))
        start = stop
    return tuple(shares)


def pipeline_moves(judge: CostModel, candidate: Candidate) -> Iterator[Candidate]:
    """Another number of pipelines."""
    count = len(candidate.pipelines)
    used = set(candidate.peers)
    free = [p for p in range(len(judge.offers)) if p not in used]
    pipelines, ms = candidate.pipelines, candidate.microbatches
    if count > 1:
        for p in range(count):
            rest = (*pipelines[:p], *pipelines[p + 1 :])
            left = [*ms[:p], *ms[p + 1 :]]
            for _ in range(ms[p]):  # to whom has least
                left[left.index(min(left))] += 1
            yield replace(candidate, pipelines=rest, microbatches=tuple(left))
        for a, b in itertools.combinations(range(count), 2):
            if count > 6 and b - a > 1:
                continue
            peers = list(dict.fromkeys(s.peer for s in (*pipelines[a], *pipelines[b])))
            one = even_pipeline(judge, peers)
            if one is not None:
                keep = [i for i in range(count) if i not in (a, b)]
                yield replace(
                    candidate,
                    pipelines=(*(pipelines[i] for i in keep), one),
                    microbatches=(*(ms[i] for i in keep), ms[a] + ms[b]),
                )
    if count >= judge.request.microbatches:
        return
    for p, pipeline in enumerate(pipelines):
        peers = list(dict.fromkeys(s.peer for s in pipeline))
        if ms[p] < 2 or len(peers) < 2:
            continue
        by_speed = sorted(peers, key=lambda x: (judge.forward_s[x, -1], x))
        half = len(peers) // 2
        groups: list[tuple[list[int], list[int]]] = [
            (peers[:half], peers[half:]),
            (by_speed[:1], [x for x in peers if x != by_speed[0]]),
            (peers[:1], peers[1:]),
            (peers[-1:], peers[:-1]),
            (peers[::2], peers[1::2]),
        ]
        for these, those in groups:
            one, two = even_pipeline(judge, these), even_pipeline(judge, those)
            if one is None or two is None:
                continue
            rate = [
                sum(1 / float(judge.forward_s[x, -1] + 1e-30) for x in g) for g in (these, those)
            ]
            m = min(max(1, round(ms[p] * rate[0] / sum(rate))), ms[p] - 1)
            yield replace(
                candidate,
                pipelines=(*pipelines[:p], one, two, *pipelines[p + 1 :]),
                microbatches=(*ms[:p], m, ms[p] - m, *ms[p + 1 :]),
            )
    most = max(range(count), key=lambda i: ms[i])
    if ms[most] > 1:
        for peer in sorted(free, key=lambda x: (judge.forward_s[x, -1], x))[:4]:
            counts = [*ms, 1]
            counts[most] -= 1
            yield replace(
                candidate,
                pipelines=(*pipelines, (StageShare(peer, 0, judge.operators),)),
                microbatches=tuple(counts),
            )
