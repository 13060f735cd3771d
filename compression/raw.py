"""raw/1: the elements as they lie in memory, little endian, row by row. Nothing is lost.

Cost, n = bytes of the tensor: no copy on the CPU in either direction; from and to CUDA one copy
over the bus through pinned memory. A tensor that is not contiguous is made so first (one copy).
"""

from __future__ import annotations

import sys

import torch

from .interface import CodecError, Encoded, Spec

__all__ = ["DTYPES", "RawCodec"]

assert sys.byteorder == "little", "raw/1 is little endian; this machine is not"

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


class RawCodec:
    """See the module."""

    name = "raw/1"

    def error_bound(self, spec: Spec) -> float:
        return 0.0

    def encode(self, tensor: torch.Tensor, key: int = 0) -> Encoded:
        """The buffer is a view of the tensor's memory where that is on the CPU and contiguous, and
        keeps it alive; otherwise of a copy. From CUDA the copy is awaited: the bytes are there
        when this returns."""
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise CodecError(f"raw/1 cannot write {name}: expected one of {', '.join(DTYPES)}")
        if tensor.layout is not torch.strided:
            raise CodecError(f"raw/1 cannot write layout {tensor.layout}: expected a dense tensor")
        flat = tensor.detach().resolve_neg().contiguous()
        if flat.is_cuda:
            staged = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            staged.copy_(flat, non_blocking=True)
            torch.cuda.current_stream(flat.device).synchronize()
            flat = staged
        elif flat.device.type != "cpu":
            raise CodecError(f"raw/1 cannot read memory of device {flat.device}: cpu or cuda")
        if flat.numel() == 0:
            return Encoded(b"", ())
        # Contiguous, but a dimension of one element may have any stride, so the stride is given.
        # numpy has no bfloat16, so the bytes are viewed before they go through it.
        row = flat.as_strided((flat.numel(),), (1,))
        view = row.view(torch.uint8).numpy().data
        return Encoded(b"", (view.toreadonly(),))

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        if spec.dtype not in DTYPES:
            raise CodecError(f"raw/1 has no dtype {spec.dtype!r}: one of {', '.join(DTYPES)}")
        if header:
            raise CodecError(f"raw/1 has an empty header, got {len(header)} bytes")
        if data.nbytes != spec.size_bytes:
            raise CodecError(
                f"raw/1 data of {spec.dtype}{list(spec.sizes)} is {spec.size_bytes} bytes, "
                f"got {data.nbytes}"
            )
        dtype = DTYPES[spec.dtype]
        if data.nbytes == 0:
            return torch.empty(spec.sizes, dtype=dtype, device=device)
        raw = torch.frombuffer(data, dtype=torch.uint8)
        if dtype is torch.bool and bool((raw > 1).any()):
            raise CodecError("raw/1 data of a bool tensor holds bytes other than 0 and 1")
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # never from our own links, whose buffers are aligned
        tensor = raw.view(dtype).view(spec.sizes)
        if torch.device(device).type == "cpu":
            return tensor
        return tensor.pin_memory().to(device, non_blocking=True)

    def size_bytes(self, spec: Spec) -> int:
        return spec.size_bytes
