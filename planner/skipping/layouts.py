"""Where to cut a model whose blocks may be left out, and who holds what.

    before | blocks | blocks | blocks | behind
       0       1        2        3        4       stages; the inner ones may be left out

Two kinds:

    rows      the asked planner's pipelines: the first peer of each also holds what stands before
              the blocks, its last one what stands behind them
    circle    the ends of the model, and maybe some blocks, on one peer or on several that share
              them, the rest in equal stages: so the labels stay where the data begins, and every
              microbatch comes back there (SkipPipe)

All stages are whole blocks, so a microbatch without one is a microbatch of a smaller model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from ...dag.analysis.skippable import Bypass, describe_skippable, skippable_blocks
from ...dag.ir.graph import Graph
from ..base.interface import NoPlan, PlanRequest
from ..cost.candidate import Candidate, StageShare
from ..cost.cost_model import CostModel

__all__ = ["StageLayout", "circles", "refuse_impossible_routes", "row_of_blocks", "rows", "window"]

ROUNDED = 0.01
"""By so much a microbatch may leave more out than asked: 0.33 is a third."""
MOST_FIRST = 3
"""Peers that share the ends of a circle, at most."""
MOST_INNER = 48
"""Stages that the blocks of a row are cut into, at most, so that a share can be left out."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """cuts: of the operators, one more than stages. lines: ways through all stages in order, each
    offers by number; empty: that many are to be found (`sizes`). out: inner stages that each
    microbatch leaves out. share: of the model's blocks that it leaves out."""

    cuts: tuple[int, ...]
    lines: tuple[tuple[int, ...], ...]
    out: int
    share: float
    sizes: tuple[int, ...] = ()
    """Of a circle: peers of the ends, then of each inner stage."""

    @property
    def inner(self) -> int:
        """Stages that may be left out."""
        return len(self.cuts) - 3

    def held(self, holders: Sequence[Sequence[int]]) -> StageLayout:
        """The layout over these holders by stage, each line over one of each in turn."""
        ways = range(max(map(len, holders)))
        lines = tuple(tuple(of[w % len(of)] for of in holders) for w in ways)
        return StageLayout(self.cuts, lines, self.out, self.share)

    def candidate(self, microbatches: int, recompute: bool) -> Candidate:
        """All stages in order, each line with as many microbatches."""
        spans = list(pairwise(self.cuts))
        lines = tuple(
            tuple(StageShare(p, a, b, recompute) for p, (a, b) in zip(line, spans, strict=True))
            for line in self.lines
        )
        each, more = divmod(microbatches, len(lines))
        return Candidate(lines, tuple(each + (w < more) for w in range(len(lines))))


def row_of_blocks(graph: Graph) -> list[Bypass]:
    """The longest row of blocks that can be left out, each taking what the one before it makes."""
    best: list[Bypass] = []
    found: list[Bypass] = []
    for block in skippable_blocks(graph):
        follows = found and found[-1].stop == block.start and found[-1].made == block.taken
        found = ([*found, block] if follows else [block]) if not block.why_not else []
        best = found if len(found) > len(best) else best
    return best


def refuse_impossible_routes(request: PlanRequest) -> None:
    """Raises NoPlan where no layout could do what the options ask for."""
    found = row_of_blocks(request.graph)
    if len(found) < 2:
        why = "; ".join(describe_skippable(request.graph))
        raise NoPlan(
            "plan.skip and plan.reorder: of this model's blocks that follow each other, "
            f"{len(found)} can be left out: expected 2 or more ({why})",
            "model",
        )
    share, least = request.options.skip, 1 / len(found)
    if share and share + ROUNDED < least:
        why = "; ".join(describe_skippable(request.graph))
        raise NoPlan(
            f"plan.skip = {share:g} leaves out no whole stage: one of {len(found)} blocks that "
            f"follow each other is the least, so expected {least:.2g} or more ({why})",
            "model",
        )
    scaled = next((b for b in found if b.clamped), None)
    if scaled is not None and request.options.stochastic_depth:
        raise NoPlan(
            f'plan.skip_scaling is "stochastic-depth", and {scaled.name} {scaled.why_not_scaled}; '
            'expected "renormalise" or "sum" for this model',
            "model",
        )
    stages = request.options.stages
    if stages is not None and not 2 <= stages <= len(found):
        raise NoPlan(
            f"plan.stages is {stages}: expected 2 to {len(found)}, as many as there are blocks "
            "that can be left out (plan.skip, plan.reorder)",
            "model",
        )


def window(inner: int, out: int) -> int:
    """The fewest microbatches that can visit each of the inner stages equally often, if each leaves
    `out` of them out."""
    return inner // gcd(inner, inner - out)


def _left_out(share: float, blocks: int, inner: int, of: int) -> int:
    """The most of `inner` stages, of `blocks` blocks in all, that leave at most a share of all `of`
    blocks out; one at least is visited."""
    return min(inner - 1, int((share + ROUNDED) * of * inner / blocks))


def rows(judge: CostModel, lines: Sequence[Sequence[int]], share: float) -> Iterator[StageLayout]:
    """Rows over the peers of pipelines in their order, the first one of each with what stands
    before the blocks and the last one with what stands behind. `share`: of the blocks, at most left
    out."""
    named = row_of_blocks(judge.request.graph)
    asked = judge.request.options.stages
    longest = max(map(len, lines))
    for finer in range(1, MOST_INNER):
        inner = asked or longest * finer
        if inner > min(len(named), MOST_INNER):
            return
        if inner < 2:
            continue
        out = _left_out(share, len(named), inner, len(named))
        if share and not out:
            continue
        counts = _even(len(named), inner)
        if len(lines) == 1:
            counts = _balanced(judge, lines[0][:inner], named, inner, 1 - out / inner)
        starts = [named[sum(counts[:i])].start for i in range(inner)]
        owned = [_owners(judge, line[:inner], (*starts, named[-1].stop)) for line in lines]
        yield _layout(judge, named, starts, [(o[0], *o, o[-1]) for o in owned], out)
        if asked or not share or out / inner > 0.75 * share:
            return


def _even(count: int, parts: int) -> list[int]:
    each, more = divmod(count, parts)
    return [each + (i < more) for i in range(parts)]


def _owners(judge: CostModel, line: Sequence[int], bounds: Sequence[int]) -> tuple[int, ...]:
    """By inner stage its peer: each peer of a line has some that follow each other, so that the
    longest part is as short as it can be."""
    each, inner = judge.both_s, len(bounds) - 1
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for k, p in enumerate(line):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        for i, (longest, found) in best.items():
            for j in range(i + 1, inner - (len(line) - k - 1) + 1):
                start, stop = bounds[i], bounds[j]
                start = 0 if k == 0 else start
                stop = judge.operators if k == len(line) - 1 else stop
                way = max(longest, float(each[p, stop] - each[p, start])), (*found, *[p] * (j - i))
                after[j] = min(way, after.get(j, way))
        best = after
    return best[inner][1]


def _balanced(
    judge: CostModel, peers: Sequence[int], named: Sequence[Bypass], inner: int, visits: float
) -> list[int]:
    """Blocks by inner stage, so that the longest part of a peer is as short as it can be; `visits`:
    the share of the microbatches that go through a stage."""
    n, each = len(peers), judge.both_s
    parts = _even(inner, n)
    bounds = [b.start for b in named] + [named[-1].stop]

    def seconds(k: int, i: int, j: int) -> float:
        p = peers[k]
        found = float(each[p, bounds[j]] - each[p, bounds[i]]) * visits
        if k == 0:
            found += float(each[p, bounds[0]])
        if k == n - 1:
            found += float(each[p, judge.operators] - each[p, bounds[-1]])
        return found

    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for k in range(n):
        after: dict[int, tuple[float, tuple[int, ...]]] = {}
        rest = sum(parts[k + 1 :])
        for i, (longest, counts) in best.items():
            for j in range(i + parts[k], len(named) - rest + 1):
                way = max(longest, seconds(k, i, j)), (*counts, j - i)
                after[j] = min(way, after.get(j, way))
        best = after
    shared = zip(best[len(named)][1], parts, strict=True)
    return [count for blocks, p in shared for count in _even(blocks, p)]


def circles(judge: CostModel, share: float) -> Iterator[StageLayout]:
    """Circles whose holders are to be found. `share`: of the blocks, at most left out."""
    named, offers = row_of_blocks(judge.request.graph), len(judge.offers)
    asked, count = judge.request.options.stages, judge.request.microbatches
    for inner in (asked,) if asked else range(2, min(len(named), offers - 1) + 1):
        seen = set()
        for at_ends in (0, len(named) // (inner + 1)):
            blocks = len(named) - at_ends
            if at_ends in seen or blocks < inner:
                continue
            seen.add(at_ends)
            out = _left_out(share, blocks, inner, len(named))
            if share and not out:
                continue
            counts = _even(blocks, inner)
            starts = [named[at_ends + sum(counts[:i])].start for i in range(inner)]
            for first in range(1, MOST_FIRST + 1):
                others = -(-first * (inner - out) // inner)
                if first + others * inner > offers or first > count:
                    break
                sizes = (first, *[others] * inner)
                found = _layout(judge, named, starts, (), out)
                yield StageLayout(found.cuts, (), out, found.share, sizes)


def _layout(
    judge: CostModel,
    named: Sequence[Bypass],
    starts: Sequence[int],
    lines: Sequence[tuple[int, ...]],
    out: int,
) -> StageLayout:
    cuts = (0, *starts, named[-1].stop, judge.operators)
    inside = sum(b.start >= starts[0] for b in named)
    share = out * inside / len(starts) / len(named)
    return StageLayout(cuts, tuple(lines), out, share)
