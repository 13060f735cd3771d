"""Which devices this host has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["find_devices"]

_GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA, the same under WSL, AMD


def find_devices() -> tuple[str, ...]:
    """Devices of this host, one peer each: ("cuda:0", "cuda:1"), or ("cpu",) without a GPU.

    Asks a short-lived process, so that a supervisor never loads torch; hosts without a GPU's device
    node do not even need that.
    """
    if not any(Path(node).exists() for node in _GPU_NODES):
        return ("cpu",)
    count = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    cards = int(count.stdout) if count.returncode == 0 else 0
    return tuple(f"cuda:{i}" for i in range(cards)) or ("cpu",)
