"""What a peer may see of a network: its state, the runs that it works for, and its own share.

Whoever lends a machine has a peer's certificate and no other. Of others he sees who is there and
with what: no address, no data, no terms of an owner, and of no run that is not his peer's anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..proto.broker_pb2 import Description, PeerShare, PeerState, Profile, RunState
from ..proto.common_pb2 import Reason
from .records.submitted import run_of

__all__ = ["for_lender"]


def for_lender(found: Description, peer: str, shares: Iterable[PeerShare]) -> Description:
    """Return the part of a description that a peer may see, with its shares."""
    own = list(shares)
    worked_for = {share.run for share in own} | {
        run_of(p.run)[0] for p in found.peers if p.peer == peer and p.run
    }
    return Description(
        broker=found.broker,
        peers=[p if p.peer == peer else _other(p, worked_for) for p in found.peers],
        runs=[_standing(r) for r in found.runs if r.run in worked_for],
        links=[k for k in found.links if peer in (k.source, k.destination)],
        public=found.public if found.HasField("public") else None,
        shares=own,
    )


def _other(state: PeerState, worked_for: set[str]) -> PeerState:
    """Another peer: who it is, with which device, and whether it takes part."""
    profile = state.profile
    return PeerState(
        peer=state.peer,
        profile=Profile(
            name=profile.name,
            place=profile.place,
            device=profile.device,
            device_memory_bytes=profile.device_memory_bytes,
        ),
        address="not told" if state.address else "",
        run=state.run if run_of(state.run)[0] in worked_for else "",
        silent_s=state.silent_s,
        membership=state.membership,
        closed=Reason(code=state.closed.code) if state.HasField("closed") else None,
    )


def _standing(state: RunState) -> RunState:
    """How a run stands; why, in words, may tell of its submitter's files."""
    found = RunState()
    found.CopyFrom(state)
    for reason in (found.reason, *(r.reason for r in found.replicas)):
        reason.text = ""
    return found
