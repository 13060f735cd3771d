"""What codecs cost and lose on this machine: bytes, speed and error of each, on given tensors.

Speeds are of dense bytes, so that codecs and links compare: a codec pays on a link when its own
time stays below the transfer that it saves.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compression.codec import Stream, parse
from ..dag.ir.graph import TensorSpec
from ..job.words import columns

__all__ = ["CODECS", "CodecRow", "gaussian", "machine", "measure", "table"]

CODECS = (
    "lossless",
    "bf16",
    "fp16",
    "int8",
    "int6",
    "int4",
    "int2",
    "topk:ratio=10",
    "topk:ratio=100",
    "topk:ratio=10,select=histogram",
    "topk:ratio=100,select=histogram",
    "topk:ratio=100,select=gaussian",
    "topk:ratio=100,values=int8",
    "randomk:ratio=100",
    "lowrank:rank=8",
    "ef+topk:ratio=100",
    "delta+int8",
)
"""What `shoal bench codecs` shows by itself."""
WIDTH = 1024
"""Elements of a row of the Gaussian tensor; it has as many rows as it takes."""
LEAST_S = 0.2
"""A codec is timed for at least so long."""
MOST_TIMES = 50
"""And at most so often."""
LEAST_TIMES = 3


@dataclass(frozen=True, kw_only=True)
class CodecRow:
    """One codec on one kind of tensor. Times are medians; sizes and errors are of the worst tensor
    for what the codec announces, and of the last tensor of a stream for what it loses."""

    codec: str
    """The text that was asked for."""
    name: str
    """In full, as it goes with every frame."""
    bytes_per_element: float
    """Of the last tensor, header included."""
    announced_over_encoded: float
    """`size_bytes` over what `encode` gave."""
    encode_gb_per_s: float
    """10^9 dense bytes a second."""
    decode_gb_per_s: float
    """10^9 dense bytes a second."""
    error: float
    """‖decoded − tensor‖₂ / ‖tensor‖₂; 0: bit for bit the same."""
    error_of_rest: float | None
    """The same error over what is left of the tensor without its mean over tokens; None where
    there are no tokens."""


def measure(text: str, tensors: Sequence[Tensor], *, features: int | None = None) -> CodecRow:
    """Encodes and decodes the tensors (of one shape and dtype, one after the other, as a link would
    carry them), again and again until the time is known. `features`: the dimension of an
    activation's features; each vector along it belongs to one token (or pixel).

    Raises CodecError for a text that names no codec, or a tensor that it cannot write.
    """
    codec = parse(text)
    first = tensors[0]
    spec = TensorSpec(tuple(first.shape), str(first.dtype).removeprefix("torch."))
    sender, receiver = Stream(codec), Stream(codec)
    encode_s: list[float] = []
    decode_s: list[float] = []
    began = time.perf_counter()
    while _wanted(encode_s, began, len(tensors)):
        tensor, key = tensors[len(encode_s) % len(tensors)], len(encode_s)
        start = _now(first.device)
        encoded = sender.encode(tensor, key)
        encode_s.append(_now(first.device) - start)
        data = memoryview(bytearray(b"".join(encoded.buffers)))
        start = _now(first.device)
        decoded = receiver.decode(spec, encoded.header, data, first.device)
        decode_s.append(_now(first.device) - start)
    size = encoded.size_bytes + len(encoded.header)
    lost = torch.linalg.vector_norm((decoded.double() - tensor.double()).flatten())
    dense = tensor.numel() * tensor.element_size()
    warm = slice(1, None)  # the first one finds caches and allocators cold
    return CodecRow(
        codec=text,
        name=codec.name,
        bytes_per_element=size / max(1, tensor.numel()),
        announced_over_encoded=codec.size_bytes(spec) / max(1, encoded.size_bytes),
        encode_gb_per_s=dense / max(statistics.median(encode_s[warm]), 1e-9) / 1e9,
        decode_gb_per_s=dense / max(statistics.median(decode_s[warm]), 1e-9) / 1e9,
        error=_over(lost, tensor),
        error_of_rest=None if features is None else _over(lost, _centred(tensor, features)),
    )


def _wanted(times: Sequence[float], began: float, tensors: int) -> bool:
    """Whether to go on: every tensor has its turn, and the medians stand on a few."""
    if len(times) <= max(LEAST_TIMES, tensors):
        return True
    return len(times) < MOST_TIMES and time.perf_counter() - began < LEAST_S


def _now(device: torch.device) -> float:
    """The clock, after all that the device was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _over(lost: Tensor, whole: Tensor) -> float:
    norm = torch.linalg.vector_norm(whole.double().flatten())
    return float(lost / norm) if norm else float(lost)


def _centred(tensor: Tensor, features: int) -> Tensor:
    """Less its mean over all tokens: what tells one token from another."""
    by_token = tensor.double().movedim(features, -1).flatten(0, -2)
    return by_token - by_token.mean(0)


def gaussian(elements: int, device: str | torch.device = "cpu", count: int = 3) -> list[Tensor]:
    """Standard normal fp32 tensors of about so many elements: whole rows of WIDTH, or one row that
    is shorter. The same on every machine."""
    width = min(WIDTH, elements)
    shape = (elements // width, width)
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    return [t.to(device) for t in drawn]


def machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What the speeds are of."""
    where = torch.device(device)
    return {
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else str(where),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "torch": torch.__version__,
    }


COLUMNS = ("codec", "bytes/element", "encode GB/s", "decode GB/s", "relative L2")


def table(rows: Sequence[CodecRow]) -> Iterator[str]:
    """The rows as lines; the error without the mean over tokens where some row has it."""
    rest = any(r.error_of_rest is not None for r in rows)
    cells = [[*COLUMNS, *(["without mean"] if rest else [])]]
    for r in rows:
        line = [r.codec, f"{r.bytes_per_element:.3f}", _speed(r.encode_gb_per_s)]
        line += [_speed(r.decode_gb_per_s), _error(r.error)]
        cells.append(line + ([_error(r.error_of_rest)] if rest else []))
    return columns(cells)


def _speed(gb_per_s: float) -> str:
    return f"{gb_per_s:.3g}" if gb_per_s < 1000 else "no copy"


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.2g}" if error else "0"
