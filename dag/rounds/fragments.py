"""Fragments of a run's vector, of which rounds exchange one at a time (Streaming DiLoCo): block i
of the model is in fragment i mod N, and so strided over its depth; what is in no block is in the
first one. The first number in a parameter's name is that of its block: `h.3.attn.weight` is of
block 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["blocks", "fragment_of"]

_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


def fragment_of(name: str, fragments: int) -> int:
    """That of a parameter or buffer, from 1."""
    found = _BLOCK.search(name)
    return int(found[1]) % fragments + 1 if found else 1


def blocks(names: Iterable[str]) -> int:
    """How many blocks there are."""
    return len({found[1] for name in names if (found := _BLOCK.search(name))})
