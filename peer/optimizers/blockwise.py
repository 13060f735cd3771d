"""Moments of AdamW in 8 bits: block-wise dynamic quantisation (Dettmers et al. 2021, 2110.02861,
sections 2 and 3), with the blocks of 256 and the tables that bitsandbytes has.

    scale_b = max |x| in the block b        code_i: which number of a table is next to x_i / scale_b

A table has 256 numbers between -1 and 1, or 0 and 1, that are dense near 0: seven decades, each
with twice as many as the one below. Second moments are rounded up from below the least number: a 0
there under a first moment that is none would divide that by eps alone, and a weight that gets
small gradients beside large ones in its block makes steps of any size.

All is one operation of float32 after the other, and codes are bytes, each of which the table has a
number for: holders come to the same bits, and no state that a stranger made up reads out of bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...dag.cost.optimizer_states import BLOCK, blocks

__all__ = ["SCALE", "SIGNED", "check_state", "decoded", "dynamic_table", "encoded"]

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's moments, and whether there are numbers below 0."""
SCALE = "_scale"
"""What the name of a moment's scales ends with."""
_DECADES = 7


@lru_cache
def dynamic_table(signed: bool) -> Tensor:
    """Return the 256 numbers of a code, ascending, float32 on the host: of decade k = 0 … 6 the
    middles of 2^k (unsigned 2^(k+1)) equal parts of [0.1, 1], times 10^(k-6), of both signs; 0
    and 1."""
    found = [0.0, 1.0]
    for k in range(_DECADES):
        parts = 2**k if signed else 2 ** (k + 1)
        middles = [10.0 ** (k - 6) * (0.1 + 0.9 * (j + 0.5) / parts) for j in range(parts)]
        found += middles + [-m for m in middles] * signed
    return torch.tensor(sorted(found), dtype=torch.float32)


@lru_cache
def _ends(signed: bool) -> Tensor:
    """Return where a code ends, 255 numbers: half way to the next one, of what has no sign the
    first at 0."""
    table = dynamic_table(signed)
    ends = (table[1:] + table[:-1]) / 2
    if not signed:
        ends[0] = 0.0
    return ends


@lru_cache
def _first_codes(signed: bool) -> Tensor:
    """Return the code of the lowest float32 number whose upper 16 bits are i, int32 (65536,):
    among those numbers ends one code at most."""
    upper = torch.arange(1 << 16, dtype=torch.int32)
    rest = (upper >= 1 << 15).int() * 0xFFFF  # below 0 more is lower
    lowest = ((upper << 16) + rest).view(torch.float32)
    return torch.bucketize(lowest, _ends(signed), out_int32=True)


def _codes(shares: Tensor, signed: bool) -> Tensor:
    """Return the code of each number, finite or NaN, int32 of its shape."""
    ends = _ends(signed).to(shares.device, shares.dtype)
    if shares.dtype is not torch.float32 or shares.device.type != "cpu":
        return torch.bucketize(shares, ends, out_int32=True)
    # The same without a search, in a quarter of the time.
    flat = shares.view(-1)
    upper = (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
    first = _first_codes(signed).index_select(0, upper)
    behind = flat > torch.cat([ends, ends.new_tensor([torch.inf])]).index_select(0, first)
    return first.add_(behind).view_as(shares)


def encoded(moment: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 (n,), and scales, float32 (blocks,), of a flat moment that begins
    with a block. One that holds a NaN or an infinity has such a scale: nothing in it is finite
    afterwards."""
    n = moment.numel()
    rows = pad(moment, (0, -n % BLOCK)).view(-1, BLOCK)
    scales = rows.abs().amax(1).float()
    shares = rows / scales.to(rows.dtype)[:, None]  # NaN in a block of zeros, whose scale is 0
    return _codes(shares, signed).to(torch.uint8).view(-1)[:n], scales


def decoded(codes: Tensor, scales: Tensor, *, signed: bool, dtype: torch.dtype) -> Tensor:
    """Return the moment that these are of, (n,)."""
    n = codes.numel()
    table = dynamic_table(signed).to(codes.device, dtype)
    rows = table.index_select(0, pad(codes, (0, -n % BLOCK)).int()).view(-1, BLOCK)
    return rows.mul_(scales.to(dtype)[:, None]).view(-1)[:n]


def check_state(name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError for what is no whole state of a parameter's: another peer may have made it
    up."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"step": ((), torch.float32)}
    for part in SIGNED:
        shapes[part] = tuple(parameter.shape), torch.uint8
        shapes[part + SCALE] = (blocks(parameter.numel()),), torch.float32
    if state.keys() != shapes.keys():
        raise ValueError(
            f"the state of {name} in 8 bits has {', '.join(sorted(state)) or 'nothing'}: expected "
            f"{', '.join(sorted(shapes))}"
        )
    for part, (shape, dtype) in shapes.items():
        found = state[part]
        if (tuple(found.shape), found.dtype) != (shape, dtype):
            raise ValueError(
                f"{part} of {name} in 8 bits is {tuple(found.shape)} of {found.dtype}: expected "
                f"{shape} of {dtype}"
            )
        if dtype is torch.float32 and bool((found < 0).any()):
            raise ValueError(f"{part} of {name} in 8 bits has a number below 0: expected none")
