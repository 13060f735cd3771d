"""What a sender knows of the other end: its own bytes, decoded as they are decoded there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .checks import dtype_name
from .interface import CodecError, Encoded, Spec

__all__ = ["TensorShape", "all_finite", "check_finite", "echo", "narrowed", "shape_of", "wide"]


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A `Spec` of a tensor at hand or of a part of one."""

    sizes: tuple[int, ...]
    dtype: str
    size_bytes: int


def shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(
        tuple(tensor.shape), dtype_name(tensor), tensor.numel() * tensor.element_size()
    )


class Decoder(Protocol):
    """A codec without state, or a stream."""

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> Tensor: ...


def echo(decoder: Decoder, spec: Spec, encoded: Encoded, device: str | torch.device) -> Tensor:
    """What decoding gives at the other end. Costs a copy of the encoded bytes, for `decode` takes
    its buffer over. Raises CodecError, for a codec that does not read what it wrote."""
    data = torch.empty(encoded.size_bytes, dtype=torch.uint8).numpy().data
    at = 0
    for buffer in encoded.buffers:
        data[at : at + buffer.nbytes] = buffer
        at += buffer.nbytes
    return decoder.decode(spec, encoded.header, data, device)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of such numbers are made in: float32, or float64 for float64."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor as `dtype`; finite numbers that are too large for it become its largest ones, what
    is not finite stays so. The tensor itself where the dtypes agree."""
    most = torch.finfo(dtype).max
    if most >= torch.finfo(tensor.dtype).max:
        return tensor.to(dtype)
    found = tensor.to(dtype)
    over = found.isinf() & tensor.isfinite()
    return torch.where(over, tensor.clamp(-most, most).to(dtype), found)


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; one pass, without a mask."""
    if tensor.numel() == 0:
        return True
    return bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def check_finite(codec: str, tensor: Tensor) -> None:
    """Raises CodecError for NaN and infinities."""
    if not all_finite(tensor):
        bad, n = tensor.numel() - int(tensor.isfinite().sum()), tensor.numel()
        raise CodecError(f"{codec} expected finite numbers, got {bad} of {n} NaN or infinite")
