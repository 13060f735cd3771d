"""What `auto` tries, by role and class of link: codec_table.json, which
`benchmarks/learning/learning.py --write-table` makes of learning runs.

    {"activation": {"fast": [{"codec": "int8:block=256", "error": 0.0071}, …], "slow": […]}, …}

for each role of CODED_ROLES. A ladder goes from no error to much; `error` is the relative L2 error
that is typical of such tensors, not the codec's bound. One that hurts learning on a link is not in
its ladder, whatever budget is given. A link is slow when, uncompressed, it carries its
role for longer in a step than the busiest peer computes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ...compression.codec import Encoded, Stream, parse
from ...compression.sparse.support import Support
from ...dag.ir.graph import TensorSpec
from ..base.interface import CODED_ROLES

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CLASSES",
    "COSTS",
    "PATH",
    "WRAPPERS",
    "Cost",
    "LinkClass",
    "Rung",
    "Table",
    "cost_of",
    "is_lossless",
    "read",
    "table",
    "typical_error",
    "typical_share",
]

LinkClass = Literal["fast", "slow"]
CLASSES: tuple[LinkClass, ...] = ("fast", "slow")
PATH = Path(__file__).with_name("codec_table.json")


class Rung(NamedTuple):
    """One codec of a ladder, and its typical error."""

    codec: str
    error: float


Table = Mapping[str, Mapping[LinkClass, tuple[Rung, ...]]]
"""By role and class of link, the ladder."""


@cache
def table() -> Table:
    """The committed one."""
    return read(json.loads(PATH.read_text()))


def read(found: Any) -> Table:
    """Raises ValueError for what is no table: roles, classes or fields that are missing or unknown,
    errors that are not finite or fall, codecs that there are not."""
    result: dict[str, dict[LinkClass, tuple[Rung, ...]]] = {}
    _same_keys(found, CODED_ROLES, "the table")
    for role in CODED_ROLES:
        _same_keys(found[role], CLASSES, role)
        result[role] = {}
        for kind in CLASSES:
            where = f"{role} on {kind} links"
            ladder = []
            for rung in found[role][kind]:
                _same_keys(rung, Rung._fields, where)
                parse(rung["codec"])
                error = float(rung["error"])
                if not (math.isfinite(error) and error >= 0):
                    raise ValueError(f"{where}: {rung['codec']} has error {error}")
                ladder.append(Rung(rung["codec"], error))
            for a, b in pairwise(ladder):
                if a.error > b.error:
                    raise ValueError(
                        f"{where}: {a.codec} with error {a.error} stands before {b.codec} with "
                        f"{b.error}: expected ascending errors"
                    )
            result[role][kind] = tuple(ladder)
    return result


def _same_keys(found: Any, expected: tuple[str, ...], where: str) -> None:
    keys = list(found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or set(keys) != set(expected):
        raise ValueError(f"{where} has {keys}: expected {', '.join(expected)}")


# What encoding and decoding cost, and how far off a codec typically is.
#
# seconds(end) = (moves(end) + kept(end) / ratio) · bytes of the tensor / memory speed of the peer
#                    + calls · call_s
#
# `moves` are bytes moved for each byte of the uncompressed tensor, so that one table serves every
# device of a kind. Measured on one core of a busy CPU with 18 GB/s of memory speed
# (dag/cost/speed.py), over fp32 tensors of 1 and 10 MB: the median of what the two sizes took, the
# least of nine tries each. A GPU's are counted from the passes that its kernels make over the
# tensor, not measured.


class Cost(NamedTuple):
    """Bytes moved for each byte of the tensor."""

    encode: float
    decode: float
    calls: float = 0.0
    """Kernels of each end, for each tensor."""


COSTS: Mapping[str, tuple[Cost, Cost]] = {
    # word: (on CPU cores, on a GPU)
    "raw": (Cost(0, 0), Cost(0, 0)),
    "bf16": (Cost(5, 3, 5), Cost(2, 2, 5)),
    "fp16": (Cost(6, 10, 5), Cost(2, 2, 5)),
    "int8": (Cost(14, 5, 10), Cost(8, 4, 10)),
    "int6": (Cost(19, 12, 20), Cost(11, 7, 20)),
    "int4": (Cost(16, 7, 15), Cost(10, 6, 15)),
    "int2": (Cost(15, 10, 15), Cost(10, 6, 15)),
    "lossless": (Cost(50, 30, 10), Cost(60, 60, 30)),
    "e3m0": (Cost(90, 28, 20), Cost(16, 8, 20)),
    "chunks": (Cost(200, 20, 30), Cost(40, 6, 30)),
    "nonzero": (Cost(35, 26, 10), Cost(6, 4, 10)),
    "topk": (Cost(60, 6, 30), Cost(30, 4, 30)),
    "support": (Cost(4, 6, 10), Cost(2, 3, 10)),
    "randomk": (Cost(12, 9, 20), Cost(6, 4, 20)),
    "lowrank": (Cost(30, 6, 10), Cost(4, 2, 10)),
}
"""By word of a codec. So a core encodes and decodes 3.6 and 6 GB/s by bf16, 1.3 and 3.6 by int8,
0.36 and 0.6 by lossless, 0.27 and 2.1 by top-k at ratio 100."""
KEPT: Mapping[str, tuple[float, float]] = {"topk": (600, 240), "randomk": (60, 60)}
"""What the elements that are kept cost besides, encoding and decoding: sorting, coding indices."""
WRAPPERS: Mapping[str, tuple[float, float]] = {"ef": (25, 2), "efd": (25, 2), "delta": (100, 2)}
"""What a wrapper adds, encoding and decoding, besides the decoding of what it has encoded."""
_DEAREST = (
    Cost(*map(max, *(c for c, _ in COSTS.values()))),
    Cost(*map(max, *(g for _, g in COSTS.values()))),
)
"""Of a word without a row of its own."""
_RATIO = re.compile(r"\bratio=([\w.+-]+)")
_USUAL_RATIO = 100.0
"""Of a sparse codec whose text has none."""


@lru_cache(maxsize=1024)
def cost_of(text: str, gpu: bool) -> Cost:
    """The cost of the codec that a text names. A wrapper decodes what it has encoded, to know what
    was lost."""
    head, _, parameters = text.partition(":")
    *wrappers, word = (part.partition("/")[0] for part in head.split("+"))
    encode, decode, calls = COSTS.get(word, _DEAREST)[gpu]
    if word in KEPT:
        given = _RATIO.search(parameters)
        ratio = float(given[1]) if given else _USUAL_RATIO
        more = KEPT[word]
        # On a GPU a selected element costs about what it does on a core, relative to its memory.
        encode, decode = encode + more[0] / ratio, decode + more[1] / ratio
    for wrapper in wrappers:
        more = WRAPPERS.get(wrapper, WRAPPERS["ef"])
        encode, decode, calls = encode + decode + more[0], decode + more[1], 2 * calls
    return Cost(encode, decode, calls)


def is_lossless(text: str) -> bool:
    """Whether the codec of a text gives every tensor back bit for bit."""
    codec = parse(text)
    return all(
        codec.error_bound(TensorSpec((4096,), dtype)) == 0.0
        for dtype in ("float32", "bfloat16", "float16")
    )


@lru_cache(maxsize=1024)
def typical_share(text: str, dtype: str) -> float:
    """Bytes that an exact codec makes of a tensor of Gaussian numbers, over those that it has. Its
    own `size_bytes` is a bound, which for incompressible bits is no less than the tensor."""
    if not TensorSpec((1,), dtype).is_floating:
        return 1.0
    encoded, spec, _ = _typical(text, dtype)
    return min(1.0, (encoded.size_bytes + len(encoded.header)) / spec.size_bytes)


@lru_cache(maxsize=1024)
def typical_error(text: str) -> float:
    """Relative L2 error of a tensor of Gaussian numbers, encoded once: what is typical of
    activations and gradients without outliers, far below `error_bound`."""
    import torch

    codec = parse(text)
    if isinstance(codec, Support):  # exact, apart from how its numbers are written
        return typical_error(codec.values.text)
    encoded, spec, tensor = _typical(text, "float32")
    data = memoryview(bytearray(b"".join(encoded.buffers)))
    found = Stream(codec).decode(spec, encoded.header, data)
    error = float(torch.linalg.vector_norm(found - tensor) / torch.linalg.vector_norm(tensor))
    return error if math.isfinite(error) else 1.0


def _typical(text: str, dtype: str) -> tuple[Encoded, TensorSpec, Tensor]:
    """Gaussian numbers, encoded once."""
    import torch

    rng = torch.Generator().manual_seed(1)
    spec = TensorSpec((64, 1024), dtype)
    tensor = torch.randn(spec.sizes, generator=rng).to(getattr(torch, dtype))
    return Stream(parse(text)).encode(tensor.clone(), 1), spec, tensor
