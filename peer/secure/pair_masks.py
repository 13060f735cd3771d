"""Masks of a member in one attempt: ChaCha20 by keys that HKDF-SHA256 makes of secrets, of which a
part of the vector has a stretch of its own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ...dag.rounds.vector import Span

__all__ = ["MASK_KEY_BYTES", "Words", "derived", "with_masks"]

MASK_KEY_BYTES = 32
Words = npt.NDArray[np.uint64]
_STRETCH = 1 << 15
"""Elements that are masked at once: they stay in a cache of the processor."""


def derived(secret: bytes, what: str, *about: bytes) -> bytes:
    """Return a key of 32 bytes. `what` and `about`: what it is for, which no two have in common."""
    info = b"".join(len(b).to_bytes(4, "big") + b for b in (f"shoal {what}".encode(), *about))
    return HKDF(algorithm=hashes.SHA256(), length=MASK_KEY_BYTES, salt=None, info=info).derive(
        secret
    )


@lru_cache(maxsize=8)
def _zeros(size: int) -> bytes:
    return bytes(size)


def with_masks(
    values: Words, part: Span, adds: Iterable[bytes], subtracts: Iterable[bytes] = ()
) -> Words:
    """Return values of a part, (elements,), with the masks of these keys added or subtracted,
    modulo 2^64. An attempt's parts are apart from each other: no stretch of a mask is used
    twice."""
    found = values.copy()
    nonce = bytes(4) + part[0].to_bytes(8, "little") + bytes(4)  # four bytes count blocks
    for keys, change in ((adds, np.add), (subtracts, np.subtract)):
        for key in keys:
            stream = Cipher(ChaCha20(key, nonce), None).encryptor()
            for at in range(0, len(found), _STRETCH):
                piece = found[at : at + _STRETCH]
                mask = np.frombuffer(stream.update(_zeros(piece.nbytes)), "<u8")
                change(piece, mask, out=piece)
    return found
