"""What every codec asks of a tensor, a spec and bytes, and how bytes come out of and into tensors.

`codec` is always the word and version that the message names, e.g. "topk/1". Whatever cannot be
taken raises CodecError with what was expected and what came.

A tensor on CUDA is encoded there; only the bytes that go on the wire cross the bus, through pinned
memory. The other way the bytes cross, and are decoded on the device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .interface import CodecError, Encoded, Spec

__all__ = [
    "DTYPES",
    "FLOATING",
    "MAX_ELEMENTS",
    "PIECE",
    "as_dtype",
    "check_length",
    "check_state",
    "count",
    "dtype_name",
    "dtype_of",
    "encoded",
    "flat",
    "from_bytes",
    "pack_exponent",
    "split",
    "times_power",
    "unpack_exponent",
    "views",
]

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
"""Every dtype that may cross a wire, by torch's name without `torch.`."""

FLOATING = tuple(name for name, dtype in DTYPES.items() if dtype.is_floating_point)
"""Those that lossy codecs take."""

MAX_ELEMENTS = 1 << 48
"""No tensor has as many; a shape that claims so is nonsense."""

PIECE = {"cpu": 1 << 17, "cuda": 1 << 24}
"""By type of device, elements to work on at once: on the CPU what stays in its cache."""


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def dtype_of(codec: str, spec: Spec, allowed: Sequence[str] = FLOATING) -> torch.dtype:
    """The dtype of the spec. Raises CodecError unless its name is in `allowed`."""
    if spec.dtype not in allowed:
        raise CodecError(f"{codec} has no dtype {spec.dtype!r}: expected {', '.join(allowed)}")
    return DTYPES[spec.dtype]


def count(codec: str, spec: Spec) -> int:
    """Elements of such a tensor. Raises CodecError for a size below 0 or a product of 2^48 or
    more."""
    sizes = spec.sizes
    if any(size < 0 for size in sizes):
        raise CodecError(f"{codec}: shape {list(sizes)} has a negative size: expected 0 or more")
    # Zeros are left out of the limit's product: torch multiplies the others for the strides.
    if math.prod(size or 1 for size in sizes) >= MAX_ELEMENTS:
        raise CodecError(
            f"{codec}: shape {list(sizes)} has too many elements: expected fewer than 2^48"
        )
    return math.prod(sizes)


def check_length(codec: str, what: str, expected: int, got: int) -> None:
    """Raises CodecError unless `what`, e.g. "header" or "data of float32[3]", has exactly the
    expected bytes."""
    if got != expected:
        how = "truncated" if got < expected else "trailing bytes"
        raise CodecError(f"{codec} {what}: expected {expected} bytes, got {got} ({how})")


def check_state(codec: str, state: Mapping[str, Tensor], *names: str) -> None:
    """Raises CodecError unless these are the tensors of the state."""
    if state.keys() != {*names}:
        raise CodecError(
            f"{codec}: expected a state of {' and '.join(names)}, got {', '.join(sorted(state))}"
        )


def flat(codec: str, tensor: Tensor, allowed: Sequence[str] = FLOATING) -> Tensor:
    """The elements in row order, 1-D with stride 1, on the tensor's device, without a gradient; a
    view where they lie so in memory, else a copy. Raises CodecError for a dtype not in `allowed`,
    a sparse layout, and devices other than CPU and CUDA."""
    name = dtype_name(tensor)
    if name not in allowed:
        raise CodecError(f"{codec} cannot write {name}: expected one of {', '.join(allowed)}")
    if tensor.layout is not torch.strided:
        raise CodecError(f"{codec} cannot write layout {tensor.layout}: expected a dense tensor")
    if tensor.device.type not in ("cpu", "cuda"):
        raise CodecError(f"{codec} cannot read memory of device {tensor.device}: cpu or cuda")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Contiguous, but a dimension of one element may have any stride, so the stride is given.
    return dense.as_strided((dense.numel(),), (1,))


def views(*tensors: Tensor) -> tuple[memoryview, ...]:
    """The bytes of each tensor, 1-D with stride 1 and of any dtype; empty ones are left out. On the
    CPU views of their memory, which they keep alive; from CUDA copies in pinned memory, there when
    this returns."""
    staged = []
    device = None
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        # numpy has no bfloat16, so the bytes are viewed before they go through it.
        row = tensor.view(torch.uint8)
        if row.is_cuda:
            device = row.device
            pinned = torch.empty(row.shape, dtype=torch.uint8, pin_memory=True)
            row = pinned.copy_(row, non_blocking=True)
        staged.append(row)
    if device is not None:
        torch.cuda.current_stream(device).synchronize()
    return tuple(row.numpy().data.toreadonly() for row in staged)


def encoded(header: bytes, *tensors: Tensor) -> Encoded:
    """The bytes of these tensors behind `header`; see `views`."""
    return Encoded(header, views(*tensors))


def from_bytes(data: memoryview, device: str | torch.device = "cpu") -> Tensor:
    """`data` as uint8 on `device`: on the CPU its own memory, on CUDA a copy through pinned
    memory."""
    if data.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device=device)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if torch.device(device).type == "cpu":
        return raw
    return raw.pin_memory().to(device, non_blocking=True)


def as_dtype(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of `raw` (uint8, 1-D) as elements of `dtype`; copied only where they are not
    aligned. Their number must be a multiple of the element's."""
    if raw.numel() == 0:
        return torch.empty(0, dtype=dtype, device=raw.device)
    # A slice starts anywhere in its storage, and torch views only at multiples of the item.
    if raw.data_ptr() % dtype.itemsize or raw.storage_offset() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def split(codec: str, raw: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """`raw` cut into parts of these bytes. Raises CodecError unless they are all of it."""
    check_length(codec, "data", sum(sizes), raw.numel())
    return tuple(torch.split(raw, list(sizes)))


def times_power(x: Tensor, exponent: int) -> Tensor:
    """x · 2^exponent as float64. Two steps, because 2^1073 is no float64."""
    half = exponent // 2
    return x.double() * 2.0**half * 2.0 ** (exponent - half)


def pack_exponent(exponent: int) -> bytes:
    """The header of a codec that scales the whole tensor by a power of two."""
    return struct.pack("<h", exponent)


def unpack_exponent(codec: str, header: bytes) -> int:
    """Raises CodecError for a header of another length, and beyond any float64 (±1,100)."""
    check_length(codec, "header", 2, len(header))
    (exponent,) = struct.unpack("<h", header)
    if abs(exponent) > 1100:
        raise CodecError(f"{codec} header: scale 2^{exponent}, expected an exponent of ±1100")
    return int(exponent)
