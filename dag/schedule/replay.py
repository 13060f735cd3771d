"""Replays action lists: each peer works through its own list and waits, at an action, for what it
takes. Clocks tell what must have happened before each frame is given.

Which peer is faster does not matter: what is ready stays ready, so if one replay gets to the end,
every execution does, and if one gets stuck, all do.

`peak_slots` counts frames of one role on one link that were sent and not yet consumed; a frame is
consumed when the action that takes it has finished. The number is exact: after action i of the
source, all frames given so far may be outstanding except those whose taking must have happened
before i (a chain of lists and transfers leads from it to i), and the execution in which only what i
depends on has happened attains that. Replaying with vector clocks finds these chains.

A fast peer may be in the next step while a slow one still has frames of this one to consume, but
nobody ends a step before everyone has begun it: all wait for the norm of all, or for gradients that
do (`dag/exchange/wiring.py`). So no more than two steps overlap, and `slots` replays two, with and
without evaluations.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..plan.action import Action, ScheduleError
from ..plan.cut import Stage, TiedGroup
from ..plan.plan import PeerId, Plan
from .flow import Flow, Role

__all__ = ["Link", "Replay", "slots", "slots_of"]

Link = tuple[PeerId, PeerId, Role]
"""Source, destination and role of frames."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of a list with its transfers as numbers: equal transfers of different rounds are
    different ones. What stays within a peer has no link."""

    round: int
    action: Action
    takes: tuple[int, ...]
    gives: tuple[int, ...]


class Replay:
    """Works through lists whose entries are (round, action): equal actions of different rounds are
    different actions, with frames of their own."""

    def __init__(self, flow: Flow, lists: Mapping[PeerId, Sequence[tuple[int, Action]]]) -> None:
        self.flow = flow
        self.transfers = tuple(flow.taken_by)
        self.peers = tuple(lists)
        place = {peer: i for i, peer in enumerate(lists)}
        numbers = {transfer: i for i, transfer in enumerate(self.transfers)}
        self.lists: list[list[_Entry]] = []
        # The position in its taker's list at which each frame is taken.
        self.taken_at: dict[int, int] = {}
        known: dict[tuple[PeerId, Action], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for peer, entries in lists.items():
            own: list[_Entry] = []
            for i, (number, action) in enumerate(entries):
                if (peer, action) not in known:
                    known[peer, action] = (
                        tuple(numbers[t] for t in flow.takes(peer, action)),
                        tuple(numbers[t] for t in flow.gives(peer, action)),
                    )
                base = number * len(self.transfers)
                takes, gives = (tuple(base + t for t in part) for part in known[peer, action])
                own.append(_Entry(number, action, takes, gives))
                self.taken_at.update(dict.fromkeys(takes, i))
            self.lists.append(own)
        # A frame that these lists never take counts to the end: lists may stop within a round.
        self.never = sum(map(len, self.lists))
        # By transfer: where it goes, or -1 where it stays; and its link.
        self.goes_to = [-1 if t.is_local else place[t.destination] for t in self.transfers]
        self.link: list[Link] = [(t.source, t.destination, t.role) for t in self.transfers]
        self.peak_slots: dict[Link, int] = {}
        self.at = [0] * len(self.peers)
        self.given: dict[int, NDArray[np.int32] | None] = {}  # with its giver's clock, if it leaves
        # clock[p, q]: how many actions of q are known to have happened when p is where it is.
        # Dense, as the norm's hub hears of everyone and everyone hears of it.
        self.clock = np.zeros((len(self.peers), len(self.peers)), np.int32)
        self.outstanding: dict[Link, list[int]] = {}  # heaps of positions in the taker's list

    def run(self) -> Iterator[tuple[PeerId, int, Action]]:
        """Yields (peer, round, action) in an order that works; raises ScheduleError when stuck."""
        waiting: dict[int, int] = {}
        ready = list(range(len(self.peers)))[::-1]
        while ready:
            peer = ready.pop()
            entries = self.lists[peer]
            while self.at[peer] < len(entries):
                entry = entries[self.at[peer]]
                missing = next((t for t in entry.takes if t not in self.given), None)
                if missing is not None:
                    waiting[missing] = peer
                    break
                self._perform(peer, entry)
                for transfer in entry.gives:
                    woken = waiting.pop(transfer, None)
                    if woken is not None and woken != peer:
                        ready.append(woken)
                yield self.peers[peer], entry.round, entry.action
        if waiting:
            raise ScheduleError("deadlock: " + "; ".join(self._why(*w) for w in waiting.items()))

    def _perform(self, peer: int, entry: _Entry) -> None:
        clock = self.clock[peer]
        for transfer in entry.takes:
            theirs = self.given.pop(transfer)
            if theirs is not None:
                np.maximum(clock, theirs, out=clock)
        self.at[peer] += 1
        clock[peer] = self.at[peer]
        snapshot: NDArray[np.int32] | None = None
        for transfer in entry.gives:
            kind = transfer % len(self.transfers)
            if self.goes_to[kind] < 0:
                self.given[transfer] = None
                continue
            if snapshot is None:
                snapshot = clock.copy()
            self.given[transfer] = snapshot
            self._count(transfer, self.link[kind], int(clock[self.goes_to[kind]]))

    def _count(self, transfer: int, link: Link, known: int) -> None:
        """One more frame is outstanding; those taken among the `known` first actions are not."""
        positions = self.outstanding.setdefault(link, [])
        heapq.heappush(positions, self.taken_at.get(transfer, self.never))
        while positions[0] < known:
            heapq.heappop(positions)
        self.peak_slots[link] = max(self.peak_slots.get(link, 0), len(positions))

    def _why(self, number: int, peer: int) -> str:
        transfer = self.transfers[number % len(self.transfers)]
        action = self.lists[peer][self.at[peer]].action
        giver = self.flow.given_by[transfer]
        source = self.peers.index(transfer.source)
        at, entries = self.at[source], self.lists[source]
        stuck = (
            f", which is at {entries[at].action}" if at < len(entries) else ", which is at its end"
        )
        name = self.peers[peer]
        return f"{name} waits in {action} for {transfer} of {giver} of {transfer.source}{stuck}"


def slots(plan: Plan, stages: Sequence[Stage], tied: Sequence[TiedGroup]) -> dict[Link, int]:
    """Receive slots that every link needs, by role, over any number of steps and evaluations."""
    return slots_of(Flow(plan, stages, tied))


def slots_of(flow: Flow) -> dict[Link, int]:
    """Return the slots for the flow of a whole plan. Where it has full steps, a peer may be in such
    a step while another is in one of the others, so a link has the slots of both."""
    found = _slots_of_one(flow)
    of_full = slots_of(flow.full) if flow.full is not None else {}
    return {link: found.get(link, 0) + of_full.get(link, 0) for link in {**found, **of_full}}


def _slots_of_one(flow: Flow) -> dict[Link, int]:
    plan = flow.plan
    training = {p: flow.actions(p) for p in plan.peers}
    evaluating = {p: flow.evaluation_actions(p) for p in plan.peers}
    runs = [[(0, training), (1, training)]]
    if plan.evaluation_routes:
        runs.append([(0, training), (0, evaluating), (1, training), (1, evaluating)])
    found: dict[Link, int] = {}
    for rounds in runs:
        tagged = {p: [(i, a) for i, lists in rounds for a in lists[p]] for p in plan.peers}
        replay = Replay(flow, tagged)
        for _ in replay.run():
            pass
        for link, peak in replay.peak_slots.items():
            found[link] = max(peak, found.get(link, 0))
    return found
