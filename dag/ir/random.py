"""Counter-based randomness: a mask is a function of (seed, step, microbatch, operator, element).

Neither the plan nor the card changes a mask (I1): everything is arithmetic on 32-bit
integers, which wraps in the same way on every device. One hash gives 16 bits to each of two
neighbouring elements, so that a probability is met to 2^-17. Per element the hash costs about a
quarter of torch's own CPU dropout. On a card with Triton dropout is one launch (`fused.py`).

    bits[2i], bits[2i+1] = halves of mix(premix(i) ^ word(key, operator))

`premix(i)` is the same in every call and is kept per device. Shifts on int32 copy the sign; between
two multiplications that costs one bit of entropy and nothing else, but after the last one it
would bias the upper half, so the last operation is a multiplication.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = [
    "OPERATORS",
    "ROUNDED",
    "Table",
    "attention",
    "bernoulli",
    "bernoulli_like",
    "dropout",
    "exponential",
    "feature_dropout",
    "rand",
    "randn",
    "rounded",
    "rounding_key",
    "step_key",
    "table",
]

_M1, _M2, _M3 = 0x7FEB352D, 0x846CA68B - 2**32, 0x2C1B3C6D  # odd, spread the bits well
_LEVELS = 1 << 16
_log = logging.getLogger(__name__)


class Table:
    """Per device premix(0), premix(1), …, as long as the longest mask so far needed. Whoever runs
    random operators again and again holds it (`table`); with the last holder it is gone."""

    def __init__(self) -> None:
        self.words: dict[torch.device, Tensor] = {}


_tables: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()


def table() -> Table:
    """The one that there is, or a new one; without a holder nothing is kept between calls."""
    return _tables.setdefault("the one", Table())


def step_key(seed: int, step: int, microbatch: int) -> int:
    """The key of one microbatch of one step: 63 well-mixed bits of its three arguments."""
    words = struct.pack("<qqq", seed, step, microbatch)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


def _word(key: int, operator: int) -> int:
    """A signed 32-bit integer from a step key and an operator's number."""
    x = (key ^ (operator + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x = (x ^ x >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return ((x ^ x >> 31) & 0xFFFFFFFF) - 2**31


def _premix(count: int, device: torch.device) -> Tensor:
    # Where only shapes are computed, no real tensor may come in and no other one be kept.
    shapes_only = device.type == "meta" or _get_current_dispatch_mode() is not None
    shared = None if shapes_only else _tables.get("the one")
    kept = shared.words.get(device) if shared else None
    if kept is not None and kept.numel() >= count:
        return kept[:count]
    x = torch.arange(count, dtype=torch.int32, device=device)
    x = (x ^ ((x >> 16) & 0xFFFF)) * _M1
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _M2
    x = x ^ ((x >> 16) & 0xFFFF)
    if shared:
        shared.words[device] = x
    return x


def _hash(count: int, operator: int, key: int, device: torch.device) -> Tensor:
    """`count` int32 words."""
    return _mixed(_premix(count, device) ^ _word(key, operator))


def _mixed(x: Tensor) -> Tensor:
    """Mix 64-bit words, in place."""
    x *= _M1
    x ^= x >> 16
    x *= _M2
    x ^= x >> 15
    x *= _M3
    return x


def _below(p: float, shape: Sequence[int], operator: int, key: int, device: torch.device) -> Tensor:
    """bool tensor of `shape`, each element true with probability p."""
    count = math.prod(shape)
    bits = _hash((count + 1) // 2, operator, key, device).view(torch.int16)[:count]
    level = round(p * _LEVELS)
    if level >= _LEVELS:
        return torch.ones(shape, dtype=torch.bool, device=device)
    return (bits < level - _LEVELS // 2).view(shape)


def dropout(x: Tensor, p: float, operator: int, *, key: int) -> Tensor:
    """x with each element zero with probability p, the others divided by 1 - p. Saves one byte per
    element for the backward pass."""
    if p == 0.0:
        return x
    if p >= 1.0:
        return x * 0.0
    scale, level = 1.0 / (1.0 - p), round(p * _LEVELS)
    real = x.is_cuda and _get_current_dispatch_mode() is None
    if real and level < _LEVELS and (fused := _fused()) and fused.takes(x):
        word, multipliers = _word(key, operator), (_M1, _M2, _M3)
        made: Tensor = fused.dropout(x, scale, level - _LEVELS // 2, word, multipliers)
        return made
    drop = _below(p, x.shape, operator, key, x.device)
    return (x * scale).masked_fill_(drop, 0.0)  # of the product, not of x


@functools.cache
def _fused() -> Any:
    """The module, once its masks were right here; None where there is no Triton or no compiler."""
    try:
        from . import fused

        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = torch.linspace(-3, 3, 4099, device="cuda").to(dtype)
            made = fused.dropout(x, 1.3, 0, 5, (_M1, _M2, _M3))
            halves = _mixed(_premix(2050, x.device) ^ 5).view(torch.int16)[:4099]
            if not torch.equal(made, (x * 1.3).masked_fill_(halves < 0, 0.0)):
                raise RuntimeError(f"its masks are others in {dtype}")
    except Exception as error:  # whatever a compiler says: there is another way
        _log.info("dropout is not fused on this card: %s: %s", type(error).__name__, error)
        return None
    return fused


def feature_dropout(x: Tensor, p: float, operator: int, *, key: int) -> Tensor:
    """As `dropout`, with one decision per (sample, channel): whole feature maps are dropped."""
    if p >= 1.0:
        return x * 0.0
    shape = (*x.shape[:2], *(1 for _ in x.shape[2:]))
    keep = ~_below(p, shape, operator, key, x.device)
    return x * keep.to(x.dtype).mul_(1.0 / (1.0 - p))


def attention(
    query: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
    operator: int,
    *,
    key: int,
) -> Tensor:
    """scaled_dot_product_attention with dropout p on the attention weights.

    query (…, H, L, E), k (…, H, S, E), v (…, H, S, F); mask broadcasts to (…, H, L, S): bool (true:
    attend) or added to the scores. A row that may attend to nothing gives zeros, as in torch."""
    if gqa:
        k = k.repeat_interleave(query.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(query.shape[-3] // v.shape[-3], -3)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ k.transpose(-2, -1)
    if causal:
        allow = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allow, -math.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    # Only a mask can leave a row with nothing to attend to.
    softmax = torch.softmax if mask is None else torch._safe_softmax
    weights = softmax(scores, -1, dtype=torch.float32).to(v.dtype)  # as autocast does
    return dropout(weights, p, operator, key=key) @ v


def bernoulli(
    size: Sequence[int],
    p: float,
    operator: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    key: int,
) -> Tensor:
    """Ones with probability p, else zeros."""
    return _below(p, size, operator, key, torch.device(device)).to(dtype)


def bernoulli_like(p: Tensor, operator: int, *, key: int) -> Tensor:
    """Ones with the probability that `p` holds for each element, else zeros; of p's dtype."""
    draws = rand(p.shape, operator, device=p.device, key=key)
    return (draws < p.detach()).to(p.dtype)


def rand(
    size: Sequence[int],
    operator: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    key: int,
) -> Tensor:
    """Uniform in [0, 1), multiples of 2^-24."""
    words = _hash(math.prod(size), operator, key, torch.device(device))
    upper = (words >> 8).to(torch.float32)  # signed 24 bits, exact in float32
    return upper.add_(2.0**23).mul_(2.0**-24).to(dtype).view(tuple(size))


def randn(
    size: Sequence[int],
    operator: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    key: int,
) -> Tensor:
    """Standard normal (Box-Muller). Equal on every device up to the rounding of log and cos."""
    n = math.prod(size)
    draws = rand((2 * n,), operator, device=device, key=key)
    radius = draws[:n].neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
    return (radius * draws[n:].mul_(2 * math.pi).cos_()).to(dtype).view(tuple(size))


def exponential(
    size: Sequence[int],
    rate: float,
    operator: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    key: int,
) -> Tensor:
    """Exponential with this rate, greater than 0 everywhere (Gumbel noise takes its logarithm)."""
    draws = rand(size, operator, device=device, key=key)
    return draws.add_(2.0**-25).log_().div_(-rate).clamp_(min=2.0**-25).to(dtype)


ROUNDED = 1 << 20
"""Elements that share one number of the hash: so the table of premixes stays small."""


def rounding_key(seed: int, step: int, name: str) -> int:
    """The key of one tensor of one step: 63 well-mixed bits."""
    words = struct.pack("<qq", seed, step) + name.encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


def rounded(x: Tensor, first: int, *, key: int) -> Tensor:
    """A flat float32 tensor in bfloat16, rounded stochastically: up with the probability of the
    part that is cut off, so that the mean is `x` and what is too small for one step adds up over
    many. `first`: the number of its first element in the whole tensor, on which and on the key its
    random bits depend, 16 for each. What is not finite stays what it is."""
    parts, at = [], first
    ends = tuple(range(ROUNDED - first % ROUNDED, x.numel(), ROUNDED))
    for part in torch.tensor_split(x, ends):
        chunk, begin = divmod(at, ROUNDED)
        bits = _hash(ROUNDED // 2, chunk, key, x.device).view(torch.int16)
        add = bits[begin : begin + part.numel()].to(torch.int32) + 2**15
        whole = (part.contiguous().view(torch.int32) + add) & -(2**16)
        found = whole.view(torch.float32)
        parts.append(torch.where(part.isfinite(), found, part).to(torch.bfloat16))
        at += part.numel()
    return torch.cat(parts) if len(parts) != 1 else parts[0]


OPERATORS: dict[str, Callable[..., Any]] = {
    made.__name__: made
    for made in (
        *(dropout, feature_dropout, attention, bernoulli, bernoulli_like),
        *(rand, randn, exponential),
    )
}
"""The functions behind `shoal.NAME.default`."""
