"""What a peer does in a step, from its flow: its actions, and what each takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

from ...dag.plan.action import Action
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Flow, Transfer

__all__ = ["PeerProgram", "programs_of"]


@dataclass(frozen=True)
class PeerProgram:
    """One peer's action list with what each action takes and gives; the same in every
    step of one kind."""

    actions: tuple[Action, ...]
    takes: tuple[tuple[Transfer, ...], ...]
    gives: tuple[tuple[Transfer, ...], ...]
    taker: dict[Transfer, int]
    """Index of the action that consumes each transfer."""

    @staticmethod
    def of(flow: Flow, peer: PeerId, actions: tuple[Action, ...]) -> PeerProgram:
        """Raises AssertionError when two actions consume one transfer: the flow is wrong."""
        takes = tuple(tuple(flow.takes(peer, a)) for a in actions)
        gives = tuple(tuple(flow.gives(peer, a)) for a in actions)
        taker: dict[Transfer, int] = {}
        for i, transfers in enumerate(takes):
            for transfer in transfers:
                assert transfer not in taker, f"{transfer} is taken by two actions of {peer}"
                taker[transfer] = i
        return PeerProgram(actions, takes, gives, taker)


def programs_of(flow: Flow, peer: PeerId) -> tuple[PeerProgram, PeerProgram, PeerProgram]:
    """The programs of a peer's training steps, of its full ones (`Flow.at`), and of its
    evaluations. Raises AssertionError where one of training shares a transfer with one of these."""
    full = flow if flow.full is None else flow.full
    train = PeerProgram.of(flow, peer, tuple(flow.actions(peer)))
    whole = train if full is flow else PeerProgram.of(full, peer, tuple(full.actions(peer)))
    evaluate = PeerProgram.of(flow, peer, tuple(flow.evaluation_actions(peer)))
    overlap = [t for t in evaluate.taker if t in train.taker or t in whole.taker]
    assert not overlap, f"training and evaluation share the transfer {overlap[0]}"
    return train, whole, evaluate
