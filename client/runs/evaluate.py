"""The held-out loss of weights, computed on this machine by the plain module.

It reads the run's own held-out samples (by content hash, from the broker) and the module as its
factory makes it, so it shows what the exported weights are worth to whoever loads them.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...dag.ir.convert import MAX_GRAPH_BYTES, graph_from_bytes
from ...dag.ir.graph import Graph
from ...job import Job
from ...job.settings import plain
from ...net.blobs.client import BlobClient
from ...peer.data.manifest import DataError, Manifest
from ...peer.data.reader import Reader
from ...proto.broker_pb2 import Evaluation, RunSpec, Weights
from ..access import Access
from ..errors import RecordError, RunFailed
from ..files.records import own_job, read_run
from ..models import models
from ..models.division import loss_and_metrics
from ..uploading import transfer
from .broker_calls import BrokerCalls
from .resume import check_same, manifest_of

__all__ = ["evaluated", "evaluated_there", "evaluation_spec", "held_out", "one_evaluation"]


def evaluated(
    client: BrokerCalls, run: str, folder: Path, module: nn.Module | None, job: Job | None
) -> tuple[Job, str]:
    """Return the job that says what of a run is evaluated and how, and the hash of the data's
    manifest. Factories are taken from this machine only: `job`, or the record of a run submitted
    here. Raises RecordError where there is neither, nor a module; SettingsError."""
    record = read_run(folder)
    own = job or own_job(record)
    if own is None and module is None:
        raise RecordError(
            f"there is no job of this machine in {folder}/run.json, and that of somebody "
            "else's run is not used here: evaluate where the run was submitted from, pass the "
            "folder that holds the runs' folders (--to), name the job here (--job job.toml), "
            "or let the peers evaluate it (--network)"
        )
    if own is not None and job is None:
        return replace(own, module=module), str(record["data"])
    spec = client.recall(run).spec
    before = Job.from_json(spec.job)
    if job is not None:
        train = replace(job.train, microbatch=before.train.microbatch)
        job = replace(job, train=train)
        check_same(before, job.without_places())
        before = replace(before.with_places(job), module=job.module)
    return replace(before, module=module or before.module), spec.data.hash


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
    manifest = manifest_of(access, data_hash)
    if not manifest.held_out or not count:
        raise DataError("nothing is held out in this run: set holdout and eval_batches above 0")
    _check_there(manifest, train.batch, batches)
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


def _check_there(manifest: Manifest, batch: int, batches: int | None) -> None:
    """Raise DataError where so many batches would have held-out samples of arrays twice."""
    there = manifest.different_held_out
    if manifest.kind == "arrays" and batches and batches > max(1, there // batch):
        raise DataError(
            f"{there} samples are held out, and {batches} batches of {batch} would have some of "
            f"them twice: expected at most {max(1, there // batch)}"
        )


def _evaluate(module: nn.Module, job: Job, reader: Reader, count: int) -> dict[str, float]:
    sums: dict[str, float] = {}
    weights = 0.0
    modes = {part: part.training for part in module.modules()}
    with models.ready(module, job), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.seed)  # what is drawn in eval mode, too, is the same each time
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


# The held-out loss of a run's weights, computed by the peers of its broker: of a model that no
# machine of the user's can hold.
#
# What the run was submitted with lies at the broker, and so do its weights: a run that begins with
# them takes one step at a learning rate of 0, in which nothing changes, and evaluates. It is ended
# then, before it would export what is there already. Nothing is uploaded, fetched or captured.


def evaluated_there(
    client: BrokerCalls, run: str, weights: Weights, batches: int | None = None
) -> dict[str, float]:
    """Weighted means over `batches` held-out batches (default: the job's eval_batches), as
    `evaluate.held_out` gives them. Raises RecordError for a model whose step changes more than its
    parameters, RunFailed where the run does not come so far, Refused for another's."""
    spec = evaluation_spec(client.recall(run).spec, weights, batches)
    with client.translated():
        if batches:
            batch = Job.from_json(spec.job).train.batch
            _check_there(manifest_of(client.access, spec.data.hash), batch, batches)
        graph = graph_of(client.access, spec)
    running = [b.name for b in graph.buffers if b.update is not None]
    if running:
        raise RecordError(
            f"run {run} has running statistics ({running[0]}), which a step over its data would "
            "change: evaluate it here (without --network)"
        )
    got = one_evaluation(client, client.submit_spec(spec), run)
    return {"loss": got.loss, **{m.name: m.value for m in got.metrics}} | {"weight": got.weight}


def graph_of(access: Access, spec: RunSpec) -> Graph:
    """The full graph of a run."""
    size = MAX_GRAPH_BYTES
    return graph_from_bytes(
        transfer(access, lambda blobs: blobs.fetch(spec.graph.hash, most_bytes=size))
    )


def one_evaluation(client: BrokerCalls, found: str, run: str) -> Evaluation:
    """Wait for the evaluation of a run that is there for that, and end it. `run`: whose model it
    evaluates. Raises RunFailed."""
    why = ""
    try:
        for event in client.watch(found, 0):
            if event.HasField("step") and event.step.HasField("evaluation"):
                return event.step.evaluation
            if event.HasField("state"):
                why = event.state.reason.text
        raise RunFailed(f"run {found}, which evaluates {run}, ended without an evaluation: {why}")
    finally:
        if client.is_open(found):
            client.cancel(found)


def evaluation_spec(
    before: RunSpec,
    weights: Weights,
    batches: int | None = None,
    plan: Mapping[str, Any] | None = None,
) -> RunSpec:
    """The run of one step that changes nothing and evaluates the weights of another one. `plan`: in
    place of its [plan]. Raises RecordError where nothing is held out."""
    job = Job.from_json(before.job)
    if (not job.train.eval_batches and not batches) or not job.data.holds_out:
        raise RecordError("nothing is held out in this run: set holdout and eval_batches above 0")
    table = plain(job)
    table["name"] = f"evaluation of {job.name}"[:200]
    table["train"] |= {
        "steps": 1,
        "lr": 0.0,
        "warmup": 0,
        "schedule": "constant",
        "optimizer": "sgd",  # which keeps nothing
        "momentum": 0.0,
        "eval_every": 1,
        "eval_batches": batches or job.train.eval_batches,
    }
    table["output"] |= {"every": 0}
    table["plan"] = plain(job.plan.in_order) if plan is None else dict(plan)
    table["sync"], table["plan"]["replicas"] = {}, "auto"  # a run of one step has no rounds
    spec = copy.deepcopy(before)
    for name in ("plan", "resumed", "weights"):
        spec.ClearField(name)
    spec.weights.extend((*weights.starting, *weights.files))
    wanted = Job.from_json(json.dumps(table))
    spec.name, spec.job, spec.steps = wanted.name, wanted.to_json(), 1
    return spec
