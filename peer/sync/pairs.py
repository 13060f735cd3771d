"""Numbers with their places, in vectors of numbers: a place is an integer of the same width whose
bits stand in a number's place. Nobody computes with such a number; it travels as it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["joined", "pack_pairs", "parts_like", "unpack_pairs"]

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def pack_pairs(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """(k,) values and places, both as numbers."""
    return values, places.to(_INTEGERS[values.dtype]).view(values.dtype)


def unpack_pairs(message: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The reverse, from the beginning of a message; places as int64."""
    return message[:k], message[k : 2 * k].view(_INTEGERS[message.dtype]).long()


def joined(parts: Mapping[str, Tensor]) -> Tensor:
    """All of them as a flat vector."""
    return torch.cat([part.reshape(-1) for part in parts.values()])


def parts_like(total: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What lies behind each other in a flat vector, by name and shape, as views."""
    found, at = {}, 0
    for name, part in like.items():
        found[name] = total[at : at + part.numel()].view(part.shape)
        at += part.numel()
    return found
