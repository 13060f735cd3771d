"""Action lists as numbers: what the event calculation plays, compiled once for a plan's structure.

A program knows nothing of speeds or links, so a search compiles one for each way to cut and plays
it for every choice of peers.

- An action is a number; those of one peer follow each other in the order of its list.
- A message is all that one action gives to one other action on another peer, under one role.
  Transfers within a peer need no message: the order of its list already puts them first.
- A lane is a directed pair of peers and a role: its messages go one after another, while lanes of
  the same pair share it (as `net/links/outbox.py` does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..plan.action import TRAITS, Action
from ..plan.plan import PeerId
from ..schedule.flow import Flow, Role, Transfer

__all__ = ["FRAME_BYTES", "Program", "compile_program"]

FRAME_BYTES = 400
"""What a frame costs besides its content: header, acknowledgement, credit."""


@dataclass(frozen=True, slots=True)
class Program:
    """A plan's action lists as numbers, compiled once for the event calculation. `K` actions, `T`
    messages, `L` lanes."""

    peers: tuple[PeerId, ...]
    first: tuple[int, ...]
    """By peer: number of its first action; one more entry at the end."""
    actions: tuple[Action, ...]
    owner: tuple[int, ...]
    """By action: position of its peer."""
    needs: tuple[int, ...]
    """By action: messages that it waits for."""
    gives: tuple[tuple[int, ...], ...]
    """By action: messages that it gives, in order."""
    giver: tuple[int, ...]
    taker: tuple[int, ...]
    """By message: actions."""
    size_bytes: tuple[int, ...]
    """By message, frames' headers included."""
    lane: tuple[int, ...]
    """By message."""
    lanes: tuple[tuple[int, int, Role], ...]
    """By lane: positions of source and destination, and the role."""
    peak_live: dict[tuple[int, int], int]
    """By (position of the peer, stage): most microbatches between forward and backward."""


def compile_program(flow: Flow, size_bytes: Callable[[Transfer], int]) -> Program:
    """The training step of a plan. `size_bytes` gives the encoded bytes of a transfer's tensor."""
    peers = flow.plan.peers
    place = {peer: i for i, peer in enumerate(peers)}
    actions: list[Action] = []
    owner: list[int] = []
    first: list[int] = []
    number: dict[tuple[int, Action], int] = {}
    for i, peer in enumerate(peers):
        first.append(len(actions))
        for action in flow.actions(peer):
            number[i, action] = len(actions)
            actions.append(action)
            owner.append(i)
    first.append(len(actions))

    needs = [0] * len(actions)
    gives: list[tuple[int, ...]] = []
    giver: list[int] = []
    taker: list[int] = []
    sizes: list[int] = []
    lane: list[int] = []
    lanes: dict[tuple[int, int, Role], int] = {}
    for at, (i, action) in enumerate(zip(owner, actions, strict=True)):
        merged: dict[tuple[int, int], int] = {}  # (lane, taker) -> message
        for transfer in flow.gives(peers[i], action):
            if transfer.is_local:
                continue
            j = place[transfer.destination]
            to = number[j, flow.taken_by[transfer]]
            key = (lanes.setdefault((i, j, transfer.role), len(lanes)), to)
            if key not in merged:
                merged[key] = len(giver)
                giver.append(at)
                taker.append(to)
                sizes.append(0)
                lane.append(key[0])
                needs[to] += 1
            sizes[merged[key]] += size_bytes(transfer) + FRAME_BYTES
        gives.append(tuple(merged.values()))
    return Program(
        peers,
        tuple(first),
        tuple(actions),
        tuple(owner),
        tuple(needs),
        tuple(gives),
        tuple(giver),
        tuple(taker),
        tuple(sizes),
        tuple(lane),
        tuple(lanes),
        _peak_live(flow, actions, owner),
    )


def _peak_live(flow: Flow, actions: list[Action], owner: list[int]) -> dict[tuple[int, int], int]:
    live: dict[tuple[int, int], int] = {}
    peak: dict[tuple[int, int], int] = {}
    for i, action in zip(owner, actions, strict=True):
        key = (i, action.stage)
        if keeps := TRAITS[action.kind].keeps:
            live[key] = live.get(key, 0) + keeps
            peak[key] = max(peak.get(key, 0), live[key])
            if keeps > 0 and not flow.stages[action.stage].has_backward:
                live[key] -= keeps  # nothing is kept behind its forward
    return peak
