"""A candidate compiled: its peers numbered in the order of their first share, its program, the work
of its actions and the bytes of its messages.

Candidates whose stages are wired alike (the same stages send to the same stages) have the same
program but for bytes and work. A search shifts cuts thousands of times and meets few wirings: the
program of each is compiled once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.memory import Moments, live_moments
from ...dag.cost.pace import IntervalWork, Vectors, action_work
from ...dag.cost.program import FRAME_BYTES, Program, compile_program
from ...dag.cost.speed import Speeds, Work
from ...dag.cost.unshared import Unshared
from ...dag.exchange.collective import Hop
from ...dag.exchange.wiring import Exchange, Exchanges
from ...dag.ir.graph import Graph
from ...dag.plan.cut import Stage, TiedGroup
from ...dag.plan.plan import PeerId, Plan, Visits
from ...dag.plan.visit_lists import halved_of
from ...dag.schedule.flow import Flow, Role, Transfer
from ...dag.schedule.schedule import Action, listed

__all__ = ["FRAME_CALLS", "FRAME_MOVES", "Structure", "Wiring", "units", "wiring_key"]

FRAME_CALLS = 300
FRAME_MOVES = 18
"""What a frame costs the CPU at each of its ends, in kernels' fixed times, and in bytes moved for
each of its bytes: encoding, headers, gRPC, acknowledgements, decoding. The first as CPU seconds of
two peers that train a GPT of width 32 on a quiet machine, without those that they report as
compute: 1.8 ms for each end of a frame of 16 KiB; and 1 ms (to 2.5 ms) by which a visit with one
frame takes longer than its thread computes, since the link holds the interpreter: together 300
times the 9 us of a kernel. The second over frames of 8 KiB to 2 MiB. They stand for how fast Python
and memory are on this CPU."""


@dataclass(frozen=True)
class Wiring:
    """What all structures of one wiring have in common."""

    visits: Visits
    program: Program
    """With the bytes of the first structure that needed it."""
    unshared: Unshared
    message_row: tuple[int, ...]
    """By message, the number of its row: messages of one row have equal bytes."""
    rows: tuple[tuple[Transfer, ...], ...]
    """By row, the transfers of one of its messages."""
    port: dict[str, tuple[int, int]]
    """By value: the stage that makes it, its place among what that stage sends."""
    action_row: tuple[int, ...]
    """By action; actions of one row take equally long."""
    kinds: tuple[tuple[int, Action], ...]
    """By row of actions: position of the peer, and one of them (of visits, microbatch 0)."""
    exchanges: Exchanges
    hops: dict[Transfer, tuple[Exchange, Hop]]
    """Of the transfers in `rows`."""
    shared: frozenset[Transfer]
    """Those among them whose tensor is encoded once for all of its receivers."""
    end_rows: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
    """By end of a message: row of its action, row of the message, 1 / actions of that row."""
    held: tuple[tuple[int, ...], ...]
    """By position of a peer, its stages."""
    moments: tuple[Moments, ...]
    """By position of a peer, the moments at which it may keep most (dag/cost/memory.py)."""
    halved: frozenset[tuple[PeerId, int]]
    """Peers and stages where weights' gradients are apart."""

    @classmethod
    def of(cls, plan: Plan, stages: tuple[Stage, ...], tied: tuple[TiedGroup, ...]) -> Wiring:
        plan = plan if plan.visits else listed(plan, stages)
        flow = Flow(plan, stages, tied)
        program = compile_program(flow, lambda transfer: 0)
        rows: dict[tuple[Hashable, ...], int] = {}
        samples: list[tuple[Transfer, ...]] = []
        message_row: list[int] = []
        # Between the same two stages a microbatch that leaves those between them out carries more.
        beside = _beside(plan)
        for giver, taker, lane in zip(program.giver, program.taker, program.lane, strict=True):
            a, b = program.actions[giver], program.actions[taker]
            near = not beside or (a.stage, b.stage) in beside[a.microbatch]
            key = (lane, _alike(a), _alike(b), near)
            if key not in rows:
                rows[key] = len(rows)
                source, to = program.peers[program.owner[giver]], program.owner[taker]
                samples.append(
                    tuple(
                        t
                        for t in flow.gives(source, a)
                        if t.destination == program.peers[to]
                        and t.role is program.lanes[lane][2]
                        and flow.taken_by[t] == b
                    )
                )
            message_row.append(rows[key])
        kinds: dict[tuple[int, Action], int] = {}
        action_row = tuple(
            kinds.setdefault((i, _alike(action)), len(kinds))
            for i, action in zip(program.owner, program.actions, strict=True)
        )
        has_backward = [s.has_backward for s in stages]
        port = {p.value: (k, n) for k, s in enumerate(stages) for n, p in enumerate(s.sends)}
        return cls(
            plan.visits,
            program,
            Unshared(program),
            tuple(message_row),
            tuple(samples),
            port,
            action_row,
            tuple(kinds),
            flow.exchanges,
            {t: flow.hops[t] for row in samples for t in row if t.role is Role.SYNC},
            frozenset(t for row in samples for t in row if flow.is_shared(t)),
            _ends(program, action_row, message_row),
            held := tuple(plan.stages_of(peer) for peer in program.peers),
            tuple(
                tuple(
                    moment
                    for kind in filter(None, (flow, flow.full))
                    for moment in live_moments(kind.actions(peer), own, has_backward)
                )
                for peer, own in zip(program.peers, held, strict=True)
            ),
            halved_of(plan),
        )

    def ends(self, sizes: Sequence[float]) -> NDArray[np.float64]:
        """By row of actions, the mean sum over the messages that one gives and takes, given what
        counts of each row of messages."""
        action, message, share = self.end_rows
        weights = share * np.asarray(sizes, dtype=np.float64)[message]
        found: NDArray[np.float64] = np.bincount(action, weights, len(self.kinds)).astype(
            np.float64
        )
        return found


def _beside(plan: Plan) -> list[set[tuple[int, int]]]:
    """By microbatch, the stages that follow each other on its route, both ways round; empty where
    all microbatches visit all stages in order."""
    orders = [[v.stage for v in route] for route in plan.routes]
    if all(order == list(range(len(plan.stages))) for order in orders):
        return []
    return [{p for a, b in pairwise(order) for p in ((a, b), (b, a))} for order in orders]


def _alike(action: Action) -> Action:
    """Return a key, the same for all actions of a peer that take equally long."""
    return action if action.content is not None else Action(action.kind, 0, action.stage)


def _ends(
    program: Program, action_row: Sequence[int], message_row: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    rows = np.array(action_row, dtype=np.int64)
    ends = np.array([*program.giver, *program.taker], dtype=np.int64)
    action = rows[ends]
    return action, np.array([*message_row, *message_row], np.int64), 1.0 / np.bincount(rows)[action]


def units(speeds: Speeds, cpu: bool) -> NDArray[np.float64]:
    """Seconds per unit of every column of `Structure.work`; shape (8,). Where frames are handled by
    the cores that compute (`cpu`), they take of their time."""
    frame_s = (
        FRAME_CALLS * speeds.call_s / speeds.slowed,
        FRAME_MOVES / speeds.memory / speeds.slowed,
    )
    return np.concatenate((speeds.per_unit, frame_s if cpu else (0.0, 0.0)))


def wiring_key(
    plan: Plan, stages: tuple[Stage, ...], tied: tuple[TiedGroup, ...]
) -> tuple[Hashable, ...]:
    """Equal for structures of one wiring."""
    return (
        plan.visits or plan.schedule,
        plan.routes,
        plan.full,
        tuple(slot.holders for slot in plan.stages),
        plan.exchanges,
        plan.without_norm,
        tuple(
            (
                s.has_backward,
                s.makes_loss,
                len(slot.holders) > 1 and (bool(s.trainable), bool(s.statistics)),
                tuple((p.targets, p.grad_targets) for p in s.sends),
            )
            for s, slot in zip(stages, plan.stages, strict=True)
        ),
        tuple(group.stages for group in tied),
    )


class Structure:
    """A compiled candidate: its wiring, with the work of its actions and the bytes of its
    messages."""

    def __init__(
        self,
        plan: Plan,
        stages: tuple[Stage, ...],
        tied: tuple[TiedGroup, ...],
        wiring: Wiring,
        graph: Graph,
        totals: IntervalWork,
        optimizer_slots: int,
    ) -> None:
        self.plan, self.stages, self.wiring = plan, stages, wiring
        vectors = Vectors(plan, stages, tied, graph)
        self.vectors = vectors

        def here(t: Transfer) -> int:
            if t.role is Role.SYNC:
                return vectors.size(*wiring.hops[t]) + FRAME_BYTES
            k, n = wiring.port[t.value]
            return stages[k].sends[n].spec.size_bytes + FRAME_BYTES

        self.row_bytes = [sum(map(here, row)) for row in wiring.rows]
        self.size_bytes = tuple(self.row_bytes[r] for r in wiring.message_row)
        work = action_work(
            plan,
            stages,
            wiring.exchanges,
            vectors,
            totals,
            optimizer_slots=optimizer_slots,
            halved=wiring.halved,
        )
        peers = wiring.program.peers
        rows = [work(peers[i], action) for i, action in wiring.kinds]
        self.work = np.column_stack(
            (
                np.array(rows, dtype=np.float64).reshape(len(rows), len(Work._fields)),
                wiring.ends([len(row) for row in wiring.rows]),
                wiring.ends(self.row_bytes),
            )
        )
        """By row of actions: its work, and the frames and bytes that its peer gives for it and
        takes; see `units`."""
        self.work_owner = np.array([i for i, _ in wiring.kinds], dtype=np.int64)

    @property
    def program(self) -> Program:
        return replace(self.wiring.program, size_bytes=self.size_bytes)

    @property
    def peak_live(self) -> dict[tuple[int, int], int]:
        """By (position of the peer, stage): most microbatches between forward and backward."""
        return self.wiring.program.peak_live

    def row_seconds(self, per_unit: NDArray[np.float64]) -> NDArray[np.float64]:
        """By row of actions, given the seconds per unit of work of every peer: (..., peers,
        classes) gives (..., rows)."""
        found: NDArray[np.float64] = (self.work * per_unit[..., self.work_owner, :]).sum(-1)
        return found

    def seconds(self, per_unit: NDArray[np.float64]) -> list[float]:
        """The duration of every action."""
        each = self.row_seconds(per_unit).tolist()
        return [each[r] for r in self.wiring.action_row]
