"""A secret shared among some, so many of whom find it again and fewer learn nothing (Shamir 1979):
values of a random polynomial over the integers modulo a prime, which is the secret at 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

__all__ = ["SECRET_BYTES", "join", "split", "weights_at_zero"]

SECRET_BYTES = 32
_PRIME = 2**256 + 297
_BYTES = 33
"""Of a share."""
Draw = Callable[[int], bytes]
"""So many random bytes that nobody can guess."""


def split(secret: bytes, places: Sequence[int], threshold: int, draw: Draw) -> list[bytes]:
    """Return the share of each place, 33 bytes. `secret`: 32 bytes; `places`: distinct, from 1."""
    assert len(secret) == SECRET_BYTES, f"a secret of {len(secret)} bytes"
    assert 0 < threshold <= len(places), f"{threshold} of {len(places)} shares"
    made = [_number(draw) for _ in range(threshold - 1)]
    polynomial = [*made, int.from_bytes(secret, "big")]
    found = []
    for place in places:
        value = 0
        for coefficient in polynomial:
            value = (value * place + coefficient) % _PRIME
        found.append(value.to_bytes(_BYTES, "big"))
    return found


def _number(draw: Draw) -> int:
    """Return one of the integers modulo the prime, any as likely, but for 2^-128."""
    return int.from_bytes(draw(48), "big") % _PRIME


def weights_at_zero(places: Sequence[int]) -> dict[int, int]:
    """Return by place what a share counts for in the secret (Lagrange)."""
    found = {}
    for place in places:
        above, below = 1, 1
        for other in places:
            if other != place:
                above = above * other % _PRIME
                below = below * (other - place) % _PRIME
        found[place] = above * pow(below, -1, _PRIME) % _PRIME
    return found


def join(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes:
    """Return the secret, 32 bytes, by the shares of the places that have weights. Raises ValueError
    where these are no shares of one."""
    total = 0
    for place, weight in weights.items():
        if len(shares[place]) != _BYTES:
            raise ValueError(f"a share of {len(shares[place])} bytes: expected {_BYTES}")
        total += int.from_bytes(shares[place], "big") * weight
    try:
        return (total % _PRIME).to_bytes(SECRET_BYTES, "big")
    except OverflowError:
        raise ValueError("the shares are not of one secret") from None
