"""The step-time estimate: one event calculation over action lists, for planner, preview, simulator
and report alike (docs/architecture.md, "One cost model").

    program = compile_program(flow, sizes)
    estimate = summarize(program, play(program, seconds, network), network)

The step begins at a standstill: its time is from the first action to the end of the last update.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..plan.plan import PeerId
from .network import Network
from .play import Timeline
from .program import Program

__all__ = ["Critical", "LinkUse", "PeerUse", "StepEstimate", "summarize"]


@dataclass(frozen=True, slots=True)
class PeerUse:
    """Seconds that a peer computes in a step, those in which it waits for a core left out, and the
    share of the step in which it has nothing to compute."""

    compute_s: float
    bubble: float


@dataclass(frozen=True, slots=True)
class LinkUse:
    """What a directed link carries in a step: bytes with headers, and seconds in which it sends."""

    size_bytes: int
    busy_s: float


@dataclass(frozen=True, slots=True)
class Critical:
    """A part of the chain of actions and messages that the step time hangs on: a peer that computes
    (`destination` None), or a link, waiting for its turn included. `seconds`: summed."""

    peer: PeerId
    destination: PeerId | None
    seconds: float

    def __str__(self) -> str:
        if self.destination is None:
            return f"{self.peer} computes"
        return f"{self.peer} -> {self.destination}"


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """What a step takes. `critical`: the heaviest part first; its seconds add up to the step's."""

    step_s: float
    peers: dict[PeerId, PeerUse]
    links: dict[tuple[PeerId, PeerId], LinkUse]
    critical: tuple[Critical, ...]


def summarize(program: Program, played: Timeline, network: Network) -> StepEstimate:
    """A played program in words of its plan."""
    step_s = played.step_s
    peers: dict[PeerId, PeerUse] = {}
    for i, peer in enumerate(program.peers):
        ids = range(program.first[i], program.first[i + 1])
        busy = sum(played.end[a] - played.start[a] for a in ids)
        computed = sum(played.computed[a] for a in ids)
        peers[peer] = PeerUse(computed, max(0.0, 1 - busy / step_s) if step_s else 0.0)
    carried: dict[tuple[int, int], list[int]] = {}
    for message, lane in enumerate(program.lane):
        i, j, _ = program.lanes[lane]
        carried.setdefault((i, j), []).append(message)
    links = {
        (program.peers[i], program.peers[j]): LinkUse(
            sum(program.size_bytes[m] for m in messages),
            _covered(
                (played.sent[m], played.arrived[m] - float(network.latency_s[i, j]))
                for m in messages
            ),
        )
        for (i, j), messages in carried.items()
    }
    return StepEstimate(step_s, peers, links, _critical(program, played))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that intervals cover together."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _critical(program: Program, played: Timeline) -> tuple[Critical, ...]:
    """Walks back from the last action to the beginning, by what each one waited for."""
    found: dict[tuple[PeerId, PeerId | None], float] = {}
    if not program.actions:
        return ()
    at = max(range(len(program.actions)), key=lambda a: played.end[a])
    while True:
        i = program.owner[at]
        key: tuple[PeerId, PeerId | None] = (program.peers[i], None)
        found[key] = found.get(key, 0.0) + played.end[at] - played.start[at]
        message = played.cause[at]
        if message >= 0:
            giver = program.giver[message]
            key = (program.peers[program.owner[giver]], program.peers[i])
            found[key] = found.get(key, 0.0) + played.start[at] - played.end[giver]
            at = giver
        elif at > program.first[i]:
            at -= 1
        else:
            break
    parts = [Critical(peer, to, s) for (peer, to), s in found.items() if s > 0]
    return tuple(sorted(parts, key=lambda c: -c.seconds))
