"""A safetensors file that is written tensor by tensor, so that no more than one is here at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["write_values"]

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}


def write_values(path: Path, like: Mapping[str, Tensor], value: Callable[[str], Tensor]) -> None:
    """Writes one file. `like` has shapes and dtypes; `value` gives each tensor's values when its
    turn comes, the widest numbers first, so that each lies where its dtype wants it."""
    names = sorted(like, key=lambda name: (-like[name].itemsize, name))
    header: dict[str, Any] = {}
    at = 0
    for name in names:
        tensor = like[name]
        size = tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            given = value(name).detach().contiguous()
            assert (given.shape, given.dtype) == (like[name].shape, like[name].dtype), name
            if given.numel():
                file.write(given.view(-1).view(torch.uint8).numpy().data)
