"""The held-out loss of weights, computed on this machine by the plain module.

It reads the run's own held-out samples (by content hash, from the broker) and the module as its
factory makes it, so it shows what the exported weights are worth to whoever loads them.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

from ...job import Job
from ...net.blobs.client import BlobClient
from ...peer.data.manifest import DataError, Manifest
from ...peer.data.reader import Reader
from ..access import Access
from ..models import models
from ..models.division import loss_and_metrics
from ..submission import transfer

__all__ = ["held_out"]


def held_out(
    access: Access, module: nn.Module, job: Job, data_hash: str, batches: int | None = None
) -> dict[str, float]:
    """Weighted means over `batches` held-out batches (default: the job's eval_batches): "loss", the
    module's metrics, and "weight", the sum of weights. The first batches are those that the run
    itself evaluated.

    `module` has the weights and is as it was afterwards. Raises DataError when nothing is held out,
    BlobTransferError.
    """
    train = job.train
    count = (train.eval_batches if batches is None else batches) * train.microbatches
    text = transfer(access, lambda blobs: blobs.fetch(data_hash))
    manifest = Manifest.from_json(text)
    if not manifest.held_out or not count:
        raise DataError("nothing is held out in this run: set holdout and eval_batches above 0")
    with tempfile.TemporaryDirectory(prefix="shoal-eval-") as name:
        folder = Path(name)
        reader = Reader(manifest, folder.joinpath, seed=job.seed, microbatches=train.microbatches)
        wanted = reader.needs_held_out(range(count), train.microbatch_size)

        sizes = {shard.hash: shard.size_bytes for shard in manifest.shards}

        async def fetch(blobs: BlobClient) -> None:
            for shard in wanted:
                await blobs.fetch_to(shard, folder / shard, most_bytes=sizes[shard])

        transfer(access, fetch)
        return _evaluate(module, job, reader, count)


def _evaluate(module: nn.Module, job: Job, reader: Reader, count: int) -> dict[str, float]:
    sums: dict[str, float] = {}
    weights = 0.0
    modes = {part: part.training for part in module.modules()}
    with models.ready(module, job), torch.no_grad():
        module.eval()
        try:
            for m in range(count):
                batch = reader.held_out(m, job.train.microbatch_size)
                weight, numbers = loss_and_metrics(module(**batch))
                weights += weight
                for name, value in numbers.items():
                    # Without weight it has no say, and the mean over nothing is NaN.
                    sums[name] = sums.get(name, 0.0) + (weight * value if weight else 0.0)
        finally:
            for part, mode in modes.items():
                part.training = mode
    means = {name: total / weights if weights else math.nan for name, total in sums.items()}
    return means | {"weight": weights}
