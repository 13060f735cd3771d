"""Where the search of `auto` begins: plans of many shapes, each made in closed form.

One pipeline: the fastest k peers for every k, in the order of the widest path, cut by the dynamic
programme of `planner/network/pathcut.py`, which leaves out who costs more than it adds.
Several pipelines: the strongest peers alone, each community a pipeline, strong ones alone beside
the weak ones as one pipeline, and one member of every community in each pipeline, so that the
holders of a stage are inside an island of fast links (Holmes). Interleaved: the same peers in
rounds. Where the end of the model reads a weight of its beginning: the first peer takes the end as
well, so that the weight's gradients need no link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.plan.plan import ScheduleName
from ...dag.schedule.orders.schedules import interleaves
from ..cost.candidate import Candidate, Pipeline, StageShare
from ..cost.cost_model import CostModel
from ..cost.rows import RowBuilder
from ..network.communities import groupings, rates
from ..network.order import widest_path
from .moves import even_pipeline
from .search import SearchSpace

__all__ = ["Seeds", "tied_ends", "tied_tail"]

MOST_CHAIN = 12
"""Peers of one pipeline that are tried in every number."""
MOST_PATH = 48
"""Peers of the longest path that is cut."""
MOST_CLOSED = 8
"""Peers of a pipeline whose first one also takes the end."""


class Seeds:
    """Makes the candidates that the search of `auto` begins with."""

    def __init__(self, judge: CostModel, space: SearchSpace) -> None:
        self.judge, self.space = judge, space
        # By operators and links alone: from there the search ends at better plans.
        self.rows = RowBuilder(judge, updates=False)
        self.m = judge.request.microbatches
        self.rate = rates(judge.network)
        latency = judge.network.latency_s
        finite = np.where(np.isfinite(self.rate), self.rate, 1e30)
        # Seconds of a message of the size that a cut of this graph has.
        size = self.rows.typical_bytes
        self.link_s: NDArray[np.float64] = size / finite + (latency + latency.T) / 2
        speed = judge.forward_s[:, -1] + judge.backward_s[:, -1]
        self.by_speed = sorted(range(len(judge.offers)), key=lambda p: (speed[p], p))
        # `op-fence`, whose plans the search begins from too, knows large requests better.
        self.large = len(judge.offers) > 16 or judge.operators > 128

    def all(self) -> Iterator[Candidate]:
        """In no order of merit; what the space forbids comes too."""
        one = self.space.pipelines in (None, 1)
        if one:
            for pipeline in self.single():
                for schedule in self.space.schedules:
                    if interleaves(schedule):
                        continue
                    yield Candidate((pipeline,), (self.m,), schedule)
            if any(map(interleaves, self.space.schedules)):
                yield from self.interleaved()
            if self.space.repeats:
                yield from self.closed()
        # Of large requests `op-fence` and the groupings know several pipelines better.
        if self.space.pipelines != 1 and self.m > 1 and (self.space.pipelines or not self.large):
            for pipelines in self.several():
                shares = self.shared_out(pipelines)
                if shares is not None:
                    schedule = next(iter(self.space.schedules))
                    yield Candidate(pipelines, shares, schedule)

    # ------------------------------------------------------------ one pipeline

    def single(self) -> Iterator[Pipeline]:
        n, judge = self.judge.operators, self.judge
        stages = self.space.stages
        if stages is None:
            for p in self.by_speed[:3]:
                yield (StageShare(p, 0, n, self.space.recompute[0]),)
                if len(self.space.recompute) > 1:
                    yield (StageShare(p, 0, n, True),)
        most = min(len(self.by_speed), n, MOST_CHAIN)
        counts = [2, 4, 8, 12] if self.large else list(range(2, most + 1))
        for k in [k for k in counts if k <= most] if stages is None else [stages]:
            order = self.ordered(self.by_speed[:k])
            for again in self.space.recompute:
                for pipeline in (
                    self.rows.row(order, self.m, False, again, exactly=True),
                    even_pipeline(judge, order, again),
                ):
                    if pipeline is not None:
                        yield pipeline
        if stages is None:
            for peers in self.prefixes():
                order = self.ordered(peers)
                for again in self.space.recompute:
                    found = self.rows.row(order, self.m, False, again)
                    if found is not None:
                        yield found

    def prefixes(self) -> Iterator[list[int]]:
        """The fastest, those with most memory, and each community."""
        yield self.by_speed[:MOST_PATH]
        rooms = [o.device_memory_bytes for o in self.judge.offers]
        if len(rooms) > 2:
            yield sorted(self.by_speed, key=lambda p: -rooms[p])[: min(len(rooms), 8)]
        for grouping in self.communities():
            for group in grouping[:3]:
                if len(group) > 1:
                    yield list(group)[:MOST_PATH]

    def communities(self) -> list[tuple[tuple[int, ...], ...]]:
        if self.large:
            return []
        return [g for g, _ in zip(groupings(self.rate), range(4), strict=False) if len(g) > 1]

    def ordered(self, peers: Sequence[int]) -> list[int]:
        if len(peers) < 3:
            return list(peers)
        at = np.ix_(peers, peers)
        return [peers[i] for i in widest_path(self.rate[at], self.link_s[at])]

    def interleaved(self) -> Iterator[Candidate]:
        """Candidates of the same peers in two and three rounds, or in as many as are asked for."""
        stages = self.space.stages
        name: ScheduleName = "interleaved"
        for k in range(2, min(len(self.by_speed), 8) + 1):
            order = self.ordered(self.by_speed[:k])
            for places in (2 * k, 3 * k) if stages is None else (stages,):
                one = even_pipeline(self.judge, [order[i % k] for i in range(places)])
                if one is not None and k < places and self.m > 1:
                    yield Candidate((one,), (self.m,), name)

    def closed(self) -> Iterator[Candidate]:
        """The first peer takes the end of the model, from the last reader of a weight that its
        beginning reads, too; each peer in turn is the first, for few peers."""
        n, tail = self.judge.operators, tied_tail(self.judge)
        if tail is None:
            return
        for k in range(2, min(len(self.by_speed), MOST_CLOSED) + 1):
            order = self.ordered(self.by_speed[:k])
            for turn in range(k if k <= 4 else 1):
                line = [*order[turn:], *order[:turn]]
                shares = even_pipeline(self.judge, line, end=tail)
                if shares is not None:
                    pipeline = (*shares, StageShare(line[0], tail, n))
                    # Coming back waits least where visits take turns.
                    for schedule in reversed(self.space.schedules):
                        yield Candidate((pipeline,), (self.m,), schedule)

    # ------------------------------------------------------------ several

    def several(self) -> Iterator[tuple[Pipeline, ...]]:
        asked = self.space.pipelines
        most = min(len(self.by_speed), self.m)
        for count in [asked] if asked else range(2, min(most, 8) + 1):
            if count <= most:
                for groups in self.grouped(count):
                    for again in self.space.recompute:
                        made = [self.pipeline(g, again) for g in groups]
                        pipelines = tuple(p for p in made if p is not None)
                        if len(pipelines) == len(made):
                            yield pipelines
        for grouping in self.communities():
            yield from self.islands(grouping)

    def pipeline(self, group: Sequence[int], recompute: bool) -> Pipeline | None:
        stages = self.space.stages
        if stages is not None:
            order = self.ordered(group[:stages])
            return even_pipeline(self.judge, order, recompute) if len(order) == stages else None
        if len(group) == 1:
            return (StageShare(group[0], 0, self.judge.operators, recompute),)
        order = self.ordered(list(group)[:MOST_PATH])
        found = self.rows.row(order, self.m, False, recompute)
        return found or even_pipeline(self.judge, order, recompute)

    def grouped(self, count: int) -> Iterator[list[list[int]]]:
        peers = self.by_speed
        yield [[p] for p in peers[:count]]
        if len(peers) > count:
            yield [[p] for p in peers[: count - 1]] + [peers[count - 1 :]]
            # Balanced: the next fastest to the group with the least speed.
            speed = [1 / max(float(self.judge.forward_s[p, -1]), 1e-30) for p in peers]
            groups: list[list[int]] = [[] for _ in range(count)]
            total = [0.0] * count
            for p, s in zip(peers, speed, strict=True):
                i = total.index(min(total))
                groups[i].append(p)
                total[i] += s
            yield groups
            yield [peers[i::count] for i in range(count)]
        for grouping in self.communities():
            if len(grouping) == count:
                yield [list(g) for g in grouping]

    def islands(self, grouping: tuple[tuple[int, ...], ...]) -> Iterator[tuple[Pipeline, ...]]:
        """Stage k inside island k: pipeline r takes the r-th fastest member of every island."""
        place = {p: i for i, p in enumerate(self.by_speed)}
        ranked = [sorted(g, key=lambda p: place[p]) for g in grouping]
        for least in (2, 3, 4):
            big = [g for g in ranked if len(g) >= least]
            width = min((len(g) for g in big), default=0)
            asked = self.space.pipelines
            if width < 2 or len(big) < 2 or width > self.m or (asked and width < asked):
                continue
            width = asked or width
            heads = self.ordered([g[0] for g in big])
            order = [next(g for g in big if g[0] == h) for h in heads]
            # One cut for all, by the slowest holder of every stage.
            for again in self.space.recompute:
                lead = even_pipeline(self.judge, [g[width - 1] for g in order], again)
                if lead is not None:
                    yield tuple(
                        tuple(
                            StageShare(order[k][r], s.start, s.stop, again)
                            for k, s in enumerate(lead)
                        )
                        for r in range(width)
                    )

    def shared_out(self, pipelines: tuple[Pipeline, ...]) -> tuple[int, ...] | None:
        """Microbatches of each pipeline, one by one to whoever would be done first."""
        if len(pipelines) > self.m:
            return None
        seconds = self.judge.both_s
        each = [
            [float(seconds[s.peer, s.stop] - seconds[s.peer, s.start]) for s in p]
            for p in pipelines
        ]
        counts = [1] * len(pipelines)
        for _ in range(self.m - len(pipelines)):
            done = [sum(e) + c * max(e) for e, c in zip(each, counts, strict=True)]
            counts[done.index(min(done))] += 1
        return tuple(counts)


def tied_tail(judge: CostModel) -> int | None:
    """The operator from which on the end of the model reads a weight that its first half reads as
    well; None where there is none (`tied_ends`)."""
    ends = tied_ends(judge)
    return None if ends is None else ends[1]


def tied_ends(judge: CostModel) -> tuple[int, int] | None:
    """The operator behind the last one of the first half that reads a weight which the end of the
    model reads as well, and the first one there; None where there is no such weight, and where all
    of its readers lie within one half."""
    half, readers = judge.operators // 2, judge.request.graph.readers
    weights = (at for value, at in readers.items() if value.startswith("param:"))
    both = [at for at in weights if at[0] < half <= at[-1]]
    if not both:
        return None
    heads = max(i for at in both for i in at if i < half)
    return heads + 1, min(at[-1] for at in both)
