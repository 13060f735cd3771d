"""Names of what is made of a parameter: its blocks and their rows, and its scales.

The rows of a parameter of V rows that is split into P parts: block b (from 0) has the rows

    [⌊V·b / P⌋, ⌊V·(b + 1) / P⌋)

so sizes differ by one at most. The block of `head.weight` is named `head.weight..b/P`. Nothing in a
module can have such a name: `nn.Module` allows neither an empty component nor a dot inside one. The
scales of `head.weight` in 8 bits (quantize.py) are `head.weight..scale`, those of its block
`head.weight..scale..b/P`.
What a user reads and writes (weights files, `no_decay`, exports) knows whole parameters only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = [
    "ParameterBlock",
    "block_of",
    "blocks",
    "grouped",
    "scale_name",
    "weight_of",
    "whole_name",
]

_BLOCK = re.compile(r"(?P<name>.+)\.\.(?P<index>[0-9]{1,9})/(?P<parts>[0-9]{1,9})")
_SCALE = "..scale"


@dataclass(frozen=True, slots=True)
class ParameterBlock:
    """Block `index` (from 0) of `parts` of the user's parameter `name`."""

    name: str
    index: int
    parts: int

    def __str__(self) -> str:
        return f"{self.name}..{self.index}/{self.parts}"

    def rows(self, whole: int) -> tuple[int, int]:
        """Return the piece's rows [start, stop) in a parameter of `whole` rows."""
        return whole * self.index // self.parts, whole * (self.index + 1) // self.parts


def blocks(name: str, parts: int) -> tuple[ParameterBlock, ...]:
    """All blocks of a parameter that is split into `parts`."""
    return tuple(ParameterBlock(name, index, parts) for index in range(parts))


def block_of(name: str) -> ParameterBlock | None:
    """The block that a name means; None: the name of a whole parameter or buffer."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        return None
    block = ParameterBlock(found["name"], int(found["index"]), int(found["parts"]))
    return block if block.index < block.parts and str(block) == name else None


def whole_name(name: str) -> str:
    """The user's name of a parameter, of which `name` may be a block."""
    block = block_of(name)
    return block.name if block else name


def grouped(names: Iterable[str]) -> dict[str, tuple[ParameterBlock, ...]]:
    """The blocks among some names, by their parameter's name, ascending by index."""
    found: dict[str, list[ParameterBlock]] = {}
    for name in names:
        if block := block_of(name):
            found.setdefault(block.name, []).append(block)
    return {name: tuple(sorted(of, key=lambda b: b.index)) for name, of in found.items()}


def scale_name(name: str) -> str:
    """The name of the scales of a weight, or of a block of one."""
    block = block_of(name)
    if block is None:
        return name + _SCALE
    return str(ParameterBlock(block.name + _SCALE, block.index, block.parts))


def weight_of(name: str) -> str:
    """The weight, or block of one, that scales of this name are of; any other name as it is."""
    block = block_of(name)
    if block is None:
        return name.removesuffix(_SCALE)
    return str(ParameterBlock(block.name.removesuffix(_SCALE), block.index, block.parts))
