"""What encoding and decoding cost, and how far off a codec typically is.

    seconds(end) = moves(end) · bytes of the tensor / memory speed of the peer + calls · call_s

as bytes moved for each byte of the uncompressed tensor, so that one table serves every device of
a kind: codecs read and write, and compute little. Measured on fp32 activations of 4 to 40 MB, the
CPU on one core whose memory speed (dag/speed.py) was 10 GB/s; a GPU's are counted from the passes
that its kernels make over the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from ...compression.codec import parse
from ...compression.stream import Stream
from ...dag.graph import TensorSpec

__all__ = ["COSTS", "Cost", "cost_of", "is_lossless", "typical_error"]


class Cost(NamedTuple):
    """Bytes moved for each byte of the tensor."""

    encode: float
    decode: float
    calls: float = 0.0
    """Kernels of each end, for each tensor."""


COSTS: Mapping[str, tuple[Cost, Cost]] = {
    # word: (on CPU cores, on a GPU)
    "raw": (Cost(0.0, 0.0), Cost(0.0, 0.0)),
    "bf16": (Cost(2.0, 2.0, 2), Cost(1.5, 1.5, 2)),
    "fp16": (Cost(2.0, 2.0, 2), Cost(1.5, 1.5, 2)),
    "int8": (Cost(10.0, 10.0, 10), Cost(8.0, 4.0, 10)),
    "int4": (Cost(20.0, 15.0, 15), Cost(10.0, 6.0, 15)),
    "int2": (Cost(20.0, 15.0, 15), Cost(10.0, 6.0, 15)),
    "lossless": (Cost(25.0, 25.0, 10), Cost(60.0, 60.0, 30)),
    "topk": (Cost(40.0, 8.0, 30), Cost(30.0, 4.0, 30)),
    "randomk": (Cost(10.0, 8.0, 20), Cost(10.0, 4.0, 20)),
    "lowrank": (Cost(8.0, 4.0, 10), Cost(4.0, 2.0, 10)),
}
"""By word of a codec. At 10 GB/s: bf16 5 GB/s, int8 1 GB/s, lossless 0.4 GB/s each way, exact top-k
0.25 GB/s to encode."""
_DEAREST = (
    Cost(*map(max, *(c for c, _ in COSTS.values()))),
    Cost(*map(max, *(g for _, g in COSTS.values()))),
)
"""Of a word without a row of its own."""
WRAPPER = 3.0
"""Passes over the tensor that a wrapper adds to either end: a sum, a difference, a copy."""


@lru_cache(maxsize=1024)
def cost_of(text: str, gpu: bool) -> Cost:
    """Of a codec's text. A wrapper decodes what it has encoded, to know what was lost."""
    head = text.partition(":")[0]
    *wrappers, word = (part.partition("/")[0] for part in head.split("+"))
    encode, decode, calls = COSTS.get(word, _DEAREST)[gpu]
    for _ in wrappers:
        encode, decode, calls = encode + decode + WRAPPER, decode + WRAPPER, 2 * calls
    return Cost(encode, decode, calls)


def is_lossless(text: str) -> bool:
    """Whether the codec of a text gives every tensor back bit for bit."""
    codec = parse(text)
    return all(
        codec.error_bound(TensorSpec((4096,), dtype)) == 0.0
        for dtype in ("float32", "bfloat16", "float16")
    )


@lru_cache(maxsize=1024)
def typical_error(text: str) -> float:
    """Relative L2 error of a tensor of Gaussian numbers, encoded once: what is typical of
    activations and gradients without outliers, far below `error_bound`."""
    import torch

    rng = torch.Generator().manual_seed(1)
    spec = TensorSpec((64, 1024), "float32")
    tensor = torch.randn(spec.sizes, generator=rng)
    codec = parse(text)
    encoded = Stream(codec).encode(tensor.clone(), 1)
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    found = Stream(codec).decode(spec, encoded.header, data)
    error = float(torch.linalg.vector_norm(found - tensor) / torch.linalg.vector_norm(tensor))
    return error if math.isfinite(error) else 1.0
