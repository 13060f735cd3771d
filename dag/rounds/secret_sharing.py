"""A secret shared among some, so many of whom find it again and fewer learn nothing (Shamir 1979):
values of a random polynomial over the integers modulo a prime, which is the secret at 0."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

__all__ = ["SECRET_BYTES", "SHARE_BYTES", "joined", "majority", "split"]

SECRET_BYTES = 32
_PRIME = 2**256 + 297
SHARE_BYTES = 33
M = TypeVar("M", bound=Hashable)


def majority(members: int) -> int:
    """Return a threshold that two sets reach only with a member in both, of so many members, and of
    so many and all but one of them."""
    return members // 2 + 1


def split(
    secret: bytes, places: Iterable[int], threshold: int, draw: Callable[[int], bytes]
) -> list[bytes]:
    """Return the share of each place, 33 bytes. `secret`: 32 bytes; `places`: distinct, from 1;
    `draw`: so many random bytes that nobody can guess."""
    assert len(secret) == SECRET_BYTES, f"a secret of {len(secret)} bytes"
    # Any of the integers modulo the prime as likely, but for 2^-128.
    made = [int.from_bytes(draw(48), "big") % _PRIME for _ in range(threshold - 1)]
    polynomial = [*made, int.from_bytes(secret, "big")]
    found = []
    for place in places:
        value = 0
        for coefficient in polynomial:
            value = (value * place + coefficient) % _PRIME
        found.append(value.to_bytes(SHARE_BYTES, "big"))
    return found


def joined(
    shares: Mapping[M, Mapping[M, bytes]], places: Mapping[M, int], threshold: int
) -> dict[M, bytes]:
    """Return the secrets of all that have places, 32 bytes each, by who has which shares of them.
    Raises ValueError where fewer than the threshold have any, and where these are none of a
    secret."""
    some = [who for who in places if who in shares][:threshold]
    if len(some) < threshold:
        raise ValueError(f"shares of {len(some)}: expected those of {threshold}")
    weights = _weights_at_zero([places[who] for who in some])
    found = {}
    for whose in places:
        total = 0
        for who, weight in zip(some, weights, strict=True):
            share = shares[who].get(whose, b"")
            if len(share) != SHARE_BYTES:
                raise ValueError(f"{who} has no share of the secret of {whose}")
            total += int.from_bytes(share, "big") * weight
        try:
            found[whose] = (total % _PRIME).to_bytes(SECRET_BYTES, "big")
        except OverflowError:
            raise ValueError(f"the shares of {whose} are not of one secret") from None
    return found


def _weights_at_zero(places: Sequence[int]) -> list[int]:
    """Return what the share of each place counts for in the secret (Lagrange)."""
    found = []
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % _PRIME
                below = below * (other - place) % _PRIME
        found.append(above * pow(below, -1, _PRIME) % _PRIME)
    return found
