"""How much memory this process may still take, and whoever would take more is stopped before."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...peer.host.profile import available_host_bytes

__all__ = ["TooLargeError", "Within", "free_bytes"]


class TooLargeError(MemoryError):
    """What was about to be allocated is more than there is."""


def free_bytes() -> int:
    """What can be taken without swapping, within the limits of the container and of the process
    (`ulimit -v`)."""
    free = available_host_bytes()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        free = min(free, max(0, limit - pages * resource.getpagesize()))
    return free


class Within(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """While it is entered, tensors made of nothing are counted, and TooLargeError is raised in
    front of the one with which they would be more than there was memory for at the beginning."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self.free, self.taken = free_bytes(), 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        made_of_nothing = not any(isinstance(t, Tensor) for t in tree_leaves((args, kwargs)))
        here = device is None or torch.device(device).type == "cpu"
        takes_device = any(a.name == "device" for a in func._schema.arguments)
        if made_of_nothing and takes_device and here:
            on_meta = {k: v for k, v in kwargs.items() if k != "generator"} | {"device": "meta"}
            meta = func(*args, **on_meta)
            size = sum(t.nbytes for t in tree_leaves(meta) if isinstance(t, Tensor))
            if self.taken + size > self.free:
                raise TooLargeError(
                    f"{self.taken / 2**30:.1f} GiB of weights so far and {size / 2**30:.1f} GiB "
                    f"more, where {self.free / 2**30:.1f} GiB are free"
                )
            self.taken += size
        return func(*args, **kwargs)
