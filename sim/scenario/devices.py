"""Published numbers of common devices, and the speeds that a planner may expect of them.

    speed(class) = share(class) · published peak      seconds = Σ amount / speed + calls · overhead

FLOP/s are those of plain fp32 (no tensor cores, no sparsity), as the vendor publishes them at boost
clock: 2 · cores · clock. A real card is measured at join instead (docs/planning.md); this
table stands for peers that exist only in a file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...dag.cost.speed import Speeds

__all__ = ["DEVICES", "DeviceDatasheet"]

GiB = 2**30

PRODUCT = 0.5
"""Share of the peak in matrix products: cuBLAS reaches 0.7 to 0.9 of it on large square ones, and a
microbatch's are smaller. The λ of `C_p(op) = FLOPs(op) / (λ · peak_p) + t0_p`."""
CONVOLUTION = 0.4
"""Convolutions: the same arithmetic behind a rearrangement of the input."""
ATTENTION = 0.35
"""Fused attention in fp32: products of head width (64), between them an exponential."""
MEMORY = 0.8
"""Share of the published bandwidth that a copy of a large array reaches."""
SPECIAL = 0.6
"""The same, for operators that reduce and compute an exponential per element."""
GPU_CALL_S = 10e-6
"""Launching a kernel from Python: 5 to 15 us, one after another."""
CPU_CALL_S = 5e-6
"""Calling an operator on a CPU: dispatch only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceDatasheet:
    """A device as its vendor describes it."""

    flops: float
    """Peak fp32 FLOP/s."""
    memory_bandwidth: float
    """Peak bytes/s of its memory."""
    memory_bytes: int | None = None
    """Size of its memory; None: whatever the peer says."""
    overhead_s: float = GPU_CALL_S
    """Fixed seconds of each kernel."""

    @property
    def speeds(self) -> Speeds:
        return Speeds(
            product=PRODUCT * self.flops,
            convolution=CONVOLUTION * self.flops,
            attention=ATTENTION * self.flops,
            memory=MEMORY * self.memory_bandwidth,
            special=SPECIAL * self.memory_bandwidth,
            call_s=self.overhead_s,
        )


def _card(tflops: float, gigabytes_per_s: float, memory_gib: int) -> DeviceDatasheet:
    return DeviceDatasheet(
        flops=tflops * 1e12,
        memory_bandwidth=gigabytes_per_s * 1e9,
        memory_bytes=memory_gib * GiB,
    )


DEVICES: dict[str, DeviceDatasheet] = {
    # One core of a server CPU with AVX2 at 3 GHz, 2 units · 8 numbers · 2 FLOPs, and its share of
    # the memory's bandwidth.
    "cpu-1": DeviceDatasheet(flops=96e9, memory_bandwidth=18e9, overhead_s=CPU_CALL_S),
    # Consumer cards: the vendor's reference boards.
    "gtx-1060": _card(4.37, 192, 6),  # 1280 cores · 1.708 GHz; the model with 6 GB
    "gtx-1070": _card(6.46, 256, 8),  # 1920 · 1.683
    "gtx-1080-ti": _card(11.34, 484, 11),  # 3584 · 1.582
    "gtx-1660-super": _card(5.03, 336, 6),  # 1408 · 1.785
    "rtx-2060": _card(6.45, 336, 6),  # 1920 · 1.680
    "rtx-2070": _card(7.46, 448, 8),  # 2304 · 1.620
    "rtx-2080-ti": _card(13.45, 616, 11),  # 4352 · 1.545
    "rtx-3060": _card(12.74, 360, 12),  # 3584 · 1.777
    "rtx-3070": _card(20.31, 448, 8),  # 5888 · 1.725
    "rtx-3080": _card(29.77, 760, 10),  # 8704 · 1.710
    "rtx-3090": _card(35.58, 936, 24),  # 10496 · 1.695
    "rtx-4060": _card(15.11, 272, 8),  # 3072 · 2.460
    "rtx-4070": _card(29.15, 504, 12),  # 5888 · 2.475
    "rtx-4080": _card(48.74, 717, 16),  # 9728 · 2.505
    "rtx-4090": _card(82.58, 1008, 24),  # 16384 · 2.520
    # Datacenter cards: data sheets.
    "t4": _card(8.1, 320, 16),
    "v100": _card(14.0, 900, 16),  # PCIe
    "a10": _card(31.2, 600, 24),
    "l4": _card(30.3, 300, 24),
    "a100-40": _card(19.5, 1555, 40),
    "h100-pcie": _card(51.0, 2000, 80),
}
"""By the name that a scenario's `device` gives."""
