"""What this host offers to runs: devices, memory, speeds.

Shares are deliberately below what is there: a peer keeps what it announced (I4) while its owner
goes on using the machine.

    device "cuda"   9/10 of the memory that is free on the card, less what libraries take there;
                    of the host, half of what is free per card
    device "cpu"    half of the memory that is free, and a fifth of it as "host besides"
"""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...proto import broker_pb2, graph_pb2

if TYPE_CHECKING:
    from ...dag.cost.speed import Speeds

__all__ = [
    "available_host_bytes",
    "find_devices",
    "host_id",
    "measure",
    "software",
    "speeds_to_proto",
]

WORKSPACE_BYTES = 72 << 20
"""What libraries of matrices and convolutions take on a card, besides what plans count: 68 to 73 MB
on an H200 (benchmarks/gpu/whole.py), and less before Hopper by torch's own settings."""
_FALLBACK_BYTES = 2 * 2**30
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def measure(
    device: str,
    *,
    core: bool = False,
    memory_bytes: int | None = None,
    speeds: Path | None = None,
    stretch: float = 1.0,
    network: bytes = b"",
    **stated: Any,
) -> broker_pb2.Profile:
    """The profile of one device; takes about a second, and no time where the file `speeds` has
    what was measured before (peer/host/speeds_file.py). `memory_bytes`: the owner's limit in
    place of the share, of which libraries take theirs on a card. `stretch`: the device takes so
    many times as long, and stands for a machine of its own. `network`: that the profile is for, see
    `host_id`. `stated`: fields of the profile as the owner has set them, such as its name.
    Raises ValueError for a device that is not here."""
    import torch

    from ..sync.optimizer import warm_up
    from .speeds_file import known_speeds

    at = torch.device(device)
    free_host = available_host_bytes()
    if at.type == "cuda":
        cards = torch.cuda.device_count()
        if (at.index or 0) >= cards:
            raise ValueError(f"device {device}: this host has {cards} CUDA devices")
        model = f"cuda {torch.cuda.get_device_name(at)}"
        free, _ = torch.cuda.mem_get_info(at)
        on_device, besides = free * 9 // 10, free_host // (2 * cards)
        most = on_device if memory_bytes is None else memory_bytes
        memory_bytes = max(0, most - WORKSPACE_BYTES)
    elif at.type == "cpu":
        model = f"cpu {platform.processor() or platform.machine()}"
        on_device, besides = free_host // 2, free_host // 5
    else:
        raise ValueError(f'device {device}: expected "cpu" or "cuda:N"')
    threads = torch.get_num_threads() if at.type == "cpu" else 0
    found = known_speeds(at, model, speeds, meanwhile=warm_up)
    alone = stretch != 1.0  # emulated: what its neighbours compute is none of its business
    if alone:
        found = replace(found.slower(stretch), busy=1.0)
    return broker_pb2.Profile(
        **stated,
        device=model,
        device_memory_bytes=on_device if memory_bytes is None else memory_bytes,
        host_memory_bytes=besides,
        flops_per_s=found.product,
        operator_set=graph_pb2.CORE if core else graph_pb2.FULL,
        software=software(),
        speeds=speeds_to_proto(found),
        host="" if alone else host_id(network),
        cores=1 if alone else os.cpu_count() or 0,
        threads=threads,
    )


def host_id(network: bytes) -> str:
    """An id that all peers on this machine share, in containers and network namespaces too: they
    share its cores. It comes from the kernel's boot, which names and addresses do not change; empty
    where the system has no such number, and the peer counts as alone on its machine.

    Keyed by it and made for one network (its authority's fingerprint): so it can neither be guessed
    by who is not on this machine, nor be recognised in another network or after a restart."""
    boot = _boot()
    if not boot:
        return ""
    return hmac.new(boot.encode(), b"shoal host " + network, hashlib.sha256).hexdigest()[:32]


def _boot() -> str:
    """Random bits of this boot of the kernel; empty: none are known."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        pass
    asked = {
        "Darwin": ("sysctl", "-n", "kern.bootsessionuuid"),
        "Windows": ("reg", "query", r"HKLM\SOFTWARE\Microsoft\Cryptography", "/v", "MachineGuid"),
    }.get(platform.system())
    if asked is None:
        return ""
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=5.0, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    words = done.stdout.split()
    return words[-1] if words else ""


def speeds_to_proto(speeds: Speeds) -> broker_pb2.Speeds:
    """As they stand in a profile."""
    return broker_pb2.Speeds(
        product_flops_per_s=speeds.product,
        convolution_flops_per_s=speeds.convolution,
        attention_flops_per_s=speeds.attention,
        memory_bytes_per_s=speeds.memory,
        special_bytes_per_s=speeds.special,
        call_s=speeds.call_s,
        error=speeds.error,
        busy=speeds.busy,
        slowed=speeds.slowed,
    )


def available_host_bytes() -> int:
    """Memory that can be used without swapping, within the limits of the container around us."""
    free = _meminfo()
    limit, used = (
        _number(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current")
    )
    if limit is not None:
        free = min(free, max(0, limit - (used or 0)))
    return free


def software() -> str:
    """ "shoal 0.2.0, torch 2.13.0, Linux x86_64"."""
    found = []
    for package in ("shoal", "torch"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} from a checkout")
    return ", ".join([*found, f"{platform.system()} {platform.machine()}"])


def _meminfo() -> int:
    """MemAvailable of Linux; elsewhere half of the memory that is built in."""
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError):
        return _FALLBACK_BYTES


def _number(path: Path) -> int | None:
    """The number in a file of the kernel's; None when it is not there or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# Which devices this host has.

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
