"""Members of sums with masks in the virtual world, where all runs are the same: what is random
follows from who draws it. The masks are those of daemons."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from ...dag.plan.plan import PeerId
from ...peer.secure.secure_member import SecureMember
from .identities import NamedMember

__all__ = ["known_member"]


def known_member(peer: PeerId, run: str, round_: int) -> SecureMember:
    """Return the part of a peer in a round, whose secrets are the same every time."""
    return SecureMember(NamedMember(peer), run, round_, _drawn(f"{peer}\0{run}\0{round_}"))


def _drawn(seed: str) -> Callable[[int], bytes]:
    drawn = 0

    def draw(size: int) -> bytes:
        nonlocal drawn
        drawn += 1
        return hashlib.shake_256(f"{seed}\0{drawn}".encode()).digest(size)

    return draw
