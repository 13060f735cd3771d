"""SkipPipe's simulation of a step, made anew: theirs to the millisecond, its habits included.

Blagoev et al. 2025 (arXiv 2502.19913); code github.com/gensyn-ai/skippipe, commit 7f20d8a, MIT.

- A microbatch goes forward along its nodes, back to the first one for the loss, to the last one,
  and backward the same way. An edge takes its delay; edges never wait for each other.
- A node does one job at a time: forwards of `forward_s`, the loss a quarter of that, backwards one
  and a half. Behind a job it rests 0.13 s (0.09 s behind a microbatch that began there). What comes
  meanwhile is put off to the end of the rest.
- A forward takes one of the node's places, a backward gives it back. A forward that finds none asks
  again 0.1 s later. A microbatch of the next wave begins when that of its lane is back.
- Time goes on in ticks of one second. In each, nodes take turns by number, up to 15 times, and do
  what is due in that second. So a node may do a job before one that is due earlier, but comes from
  a node with a higher number.

Theirs never comes back to what was not done in its second, and then never ends; here it is done in
the next one. Their own schedules are not touched by that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import floor

__all__ = ["Launch", "replay", "waves"]

TURNS = 15
REST_S, FIRST_REST_S = 0.13, 0.09
RETRY_S = 0.1
STUCK_S = 10_000
"""Where their simulation ends."""
WAVE_S = 2.5
"""How much later than a wave the next one is ready."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One microbatch: its nodes in order, when it is ready, and its lane at the first node, in
    which one microbatch is on its way at a time."""

    lane: int
    nodes: tuple[int, ...]
    ready_s: float


@dataclass(slots=True)
class _Job:
    """One job of a microbatch on its way through the node that it is at."""

    sent: Launch
    step: int
    """0 to L - 1: forwards; L: the loss; L + 1 to 2 L: backwards."""
    at_s: float
    came_s: float
    fresh: bool
    """Whether it begins here."""
    number: int
    """Of the microbatch."""


@dataclass(slots=True)
class _Node:
    room: int
    due: list[_Job] = field(default_factory=list)
    rested_s: float = 0.0
    lanes: set[int] = field(default_factory=set)


def waves(
    lanes: Sequence[tuple[tuple[int, ...], float]], count: int, *, later_s: float = WAVE_S
) -> list[Launch]:
    """Each lane, (nodes, second at which it is ready), `count` times."""
    return [
        Launch(lane, nodes, wave * later_s + ready_s)
        for lane, (nodes, ready_s) in enumerate(lanes)
        for wave in range(count)
    ]


def replay(
    sent: Iterable[Launch],
    delay_s: Sequence[Sequence[float]],
    forward_s: float,
    memory: int,
) -> list[float]:
    """The second at which each microbatch is through, its last backward included. `delay_s`: (N, N)
    by edge. Raises ValueError for microbatches that wait for each other's places."""
    nodes = [_Node(memory) for _ in delay_s]
    order = list(sent)
    for m, one in enumerate(order):
        nodes[one.nodes[0]].due.append(_Job(one, 0, one.ready_s, 10_000.0, True, m))
    ends = [0.0] * len(order)
    left, tick = len(order), 0
    while left:
        for _ in range(TURNS):
            changed = False
            for k, node in enumerate(nodes):
                if node.due:
                    moved, ended = _turn(k, nodes, tick, delay_s, forward_s, ends)
                    changed |= moved
                    left -= ended
            if not changed:
                break
        tick += 1
        for node in nodes:
            for job in node.due:
                job.at_s = max(job.at_s, float(tick))
        if tick == STUCK_S:
            raise ValueError(f"{left} of {len(order)} microbatches wait for each other's places")
    return ends


def _turn(
    k: int,
    nodes: Sequence[_Node],
    tick: int,
    delay_s: Sequence[Sequence[float]],
    forward_s: float,
    ends: list[float],
) -> tuple[bool, int]:
    """What node k does in its turn: whether anything changed, and how many microbatches ended."""
    node, changed, ended = nodes[k], False, 0
    node.due.sort(key=lambda job: (job.at_s, job.came_s))
    done = set[int]()
    for i, job in enumerate(node.due):
        if floor(job.at_s) != tick:
            continue
        if job.at_s < node.rested_s:
            job.at_s, changed = node.rested_s, True
            continue
        length = len(job.sent.nodes)
        if job.step < length and node.room <= 0:
            job.at_s, changed = job.at_s + RETRY_S, True
            continue
        if job.step == 0 and job.sent.lane in node.lanes:
            continue
        took_s = forward_s * (1 if job.step < length else 0.25 if job.step == length else 1.5)
        if job.step < length:
            node.room -= 1
        elif job.step > length:
            node.room += 1
        if job.step == 0:
            node.lanes.add(job.sent.lane)
        end = job.at_s + took_s
        if job.step == 2 * length:
            node.lanes.discard(job.sent.lane)
            ends[job.number] = end
            ended += 1
        else:
            step = job.step + 1
            place = step % length if step <= length else 2 * length - step
            to = job.sent.nodes[place]
            came = end + delay_s[k][to]
            nodes[to].due.append(_Job(job.sent, step, came, came, False, job.number))
        rest_s = FIRST_REST_S if job.fresh else REST_S
        node.rested_s = end + rest_s
        for other in node.due:
            if other.number != job.number and job.at_s <= other.at_s < node.rested_s:
                other.at_s = node.rested_s
        done.add(i)
    if done:
        node.due = [job for i, job in enumerate(node.due) if i not in done]
    return changed or bool(done), ended
