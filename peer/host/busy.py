"""How much of its speed a CPU thread keeps while every core of the machine computes.

Two virtual cores are often one real one, and all of them share caches and memory: a peer's speeds,
measured alone, are not those that it has beside others. Measured with a mixture of a transformer's
kernels in every thread at once, against the same mixture in one.
"""

from __future__ import annotations

import os
import threading
import time
from statistics import median

import torch

__all__ = ["busy_share"]

ROUNDS = 4
LEAST = 0.2


def busy_share(seconds: float = 0.4, cores: int | None = None) -> float:
    """Between LEAST and 1; 1 on a machine with one core. Takes about `seconds`."""
    count = cores or os.cpu_count() or 1
    if count < 2:
        return 1.0
    span = seconds / (2 * ROUNDS)
    shares = []
    for _ in range(ROUNDS):
        alone = _rate(1, span)
        shares.append(_rate(count, span) / alone)
    return min(1.0, max(LEAST, median(shares)))


def _rate(threads: int, seconds: float) -> float:
    """Mixtures per CPU second of a thread, the mean over threads."""
    begin, results = threading.Barrier(threads), [0.0] * threads

    def run(i: int) -> None:
        torch.set_num_threads(1)  # holds for this thread
        a, w = torch.rand(256, 256), torch.rand(256, 1024)
        out = torch.empty(256, 1024)
        done = 0
        begin.wait()
        started, computed = time.perf_counter(), time.thread_time()
        while time.perf_counter() - started < seconds or not done:
            torch.mm(a, w, out=out)
            torch.nn.functional.gelu(out).add_(out)
            done += 1
        # Of its own CPU time: what other programs take of the machine is not meant.
        results[i] = done / max(time.thread_time() - computed, 1e-9)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(results) / threads
