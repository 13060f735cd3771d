"""One of several processes that train the same model without Shoal, for `race.py`: torch and
hivemind only, as a user would write it.

    rivals.py KIND RANK FOLDER EVERY SECONDS ADDRESS...

KIND: `plain`, an all-reduce of dense fp32 gradients each step (gloo); `hivemind`, gradients
averaged each step by hivemind, in fp16 as in its examples; `hivemind-local`, local steps, and each
EVERY of them the parameters averaged likewise. FOLDER has `race.pt`: module, batches, held-out
batches, settings of AdamW. The first rank evaluates behind each EVERY steps, prints what it came
to, and ends behind SECONDS at the latest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_PATIENCE_S = 90.0

Average = Callable[[list[Tensor]], bool]
"""Puts the mean over all processes in place; whether it could."""


def gloo(rank: int, addresses: Sequence[str]) -> Average:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth"
    address = f"tcp://{addresses[0]}:7200"
    dist.init_process_group("gloo", address, rank=rank, world_size=len(addresses))

    def average(tensors: list[Tensor]) -> bool:
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= len(addresses)
        means = torch.split(flat, [t.numel() for t in tensors])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.copy_(mean.view_as(tensor))
        return True

    return average


def hive(rank: int, addresses: Sequence[str], folder: Path, like: list[Tensor]) -> Average:
    from hivemind import DHT, DecentralizedAverager
    from hivemind.compression import Float16Compression

    first, until = folder / "first.json", time.monotonic() + _PATIENCE_S
    while rank and not first.exists() and time.monotonic() < until:
        time.sleep(0.1)
    dht = DHT(
        json.loads(first.read_text()) if rank else None,
        host_maddrs=[f"/ip4/{addresses[rank]}/tcp/0"],
        start=True,
    )
    if rank == 0:
        (folder / "first.part").write_text(json.dumps([*map(str, dht.get_visible_maddrs())]))
        (folder / "first.part").rename(first)
    averager = DecentralizedAverager(
        [torch.zeros_like(t) for t in like],
        dht,
        prefix="race",
        target_group_size=len(addresses),
        min_group_size=len(addresses),
        allreduce_timeout=_PATIENCE_S,
        compression=Float16Compression(),
        start=True,
    )

    def ahead() -> Any:
        """The next group forms while we compute, as in hivemind's own optimizer."""
        return averager.step(timeout=_PATIENCE_S, wait=False, require_trigger=True)

    control = ahead()

    def average(tensors: list[Tensor]) -> bool:
        nonlocal control
        with averager.get_tensors() as shared:
            for ours, tensor in zip(shared, tensors, strict=True):
                ours.copy_(tensor)
        control.allow_allreduce()
        error, control = control.exception(), ahead()
        if error is None:
            with averager.get_tensors() as shared:
                for ours, tensor in zip(shared, tensors, strict=True):
                    tensor.copy_(ours)
        return error is None

    return average


def main(kind: str, rank: int, folder: Path, every: int, seconds: float, *addresses: str) -> None:
    torch.set_num_threads(1)
    race = torch.load(folder / "race.pt", weights_only=False)
    module: nn.Module = race["module"]
    parameters = [*module.parameters()]
    local = kind == "hivemind-local"
    optimizer = torch.optim.AdamW(parameters, **race["adamw"])
    if kind == "plain":
        average = gloo(rank, addresses)
    else:
        average = hive(rank, addresses, folder, [p.data for p in parameters])
    with torch.no_grad():
        ranks = [torch.full(p.shape, float(rank)) for p in parameters]
        assert average(ranks)  # all are there
        assert all((r == (len(addresses) - 1) / 2).all() for r in ranks)
    began, computed, waited, failed = time.monotonic(), 0.0, 0.0, 0

    def means(tensors: list[Tensor]) -> None:
        nonlocal waited, failed
        at = time.monotonic()
        with torch.no_grad():
            failed += not average(tensors)
        waited += time.monotonic() - at

    def gradients() -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]

    for step, batches in enumerate(race["batches"]):
        at = time.monotonic()
        optimizer.zero_grad()
        module(**batches[rank]).backward()
        computed += time.monotonic() - at
        if not local:
            means(gradients())
        at = time.monotonic()
        torch.nn.utils.clip_grad_norm_(parameters, race["clip"])
        optimizer.step()
        computed += time.monotonic() - at
        if (step + 1) % every:
            continue
        if local:
            means([p.data for p in parameters])
        if rank == 0:
            with torch.no_grad():
                losses = [float(module(**batch)) for batch in race["held_out"]]
            row = {
                "seconds": time.monotonic() - began,
                "step": step + 1,
                "loss": sum(losses) / len(losses),
                "compute_s": computed / (step + 1),
                "sync_s": waited / (step + 1),
                "failed": failed,
            }
            print(json.dumps(row), flush=True)
            if time.monotonic() > began + seconds or row["loss"] <= race["target"]:
                return


if __name__ == "__main__":
    _kind, _rank, _folder, _every, _seconds, *_addresses = sys.argv[1:]
    main(_kind, int(_rank), Path(_folder), int(_every), float(_seconds), *_addresses)
