"""The held-out loss of a run's weights, computed by the peers of its broker: of a model that no
machine of the user's can hold.

What the run was submitted with lies at the broker, and so do its weights: a run that begins with
them takes one step at a learning rate of 0, in which nothing changes, and evaluates. It is ended
then, before it would export what is there already. Nothing is uploaded, fetched or captured.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ...dag.ir.convert import MAX_GRAPH_BYTES, graph_from_bytes
from ...job import Job
from ...job.settings import plain
from ...proto.broker_pb2 import RunSpec, Weights
from ..errors import RecordError, RunFailed
from ..submission import transfer

if TYPE_CHECKING:
    from .session import Client

__all__ = ["evaluated_there"]


def evaluated_there(
    client: Client, run: str, weights: Weights, batches: int | None = None
) -> dict[str, float]:
    """Weighted means over `batches` held-out batches (default: the job's eval_batches), as
    `evaluate.held_out` gives them. Raises RecordError for a model whose step changes more than its
    parameters, RunFailed where the run does not come so far, Refused for another's."""
    spec = _spec(client.recall(run).spec, weights, batches)
    with client.translated():
        graph = transfer(
            client.access, lambda blobs: blobs.fetch(spec.graph.hash, most_bytes=MAX_GRAPH_BYTES)
        )
    running = [b.name for b in graph_from_bytes(graph).buffers if b.update is not None]
    if running:
        raise RecordError(
            f"run {run} has running statistics ({running[0]}), which a step over its data would "
            "change: evaluate it here (without --network)"
        )
    found, why = client.submit_spec(spec), ""
    try:
        for event in client.watch(found, 0):
            if event.HasField("step") and event.step.HasField("evaluation"):
                got = event.step.evaluation
                return {"loss": got.loss, **{m.name: m.value for m in got.metrics}} | {
                    "weight": got.weight
                }
            if event.HasField("state"):
                why = event.state.reason.text
        raise RunFailed(f"run {found}, which evaluates {run}, ended without an evaluation: {why}")
    finally:
        if client.is_open(found):
            client.cancel(found)


def _spec(before: RunSpec, weights: Weights, batches: int | None) -> RunSpec:
    job = Job.from_json(before.job)
    if (not job.train.eval_batches and not batches) or not job.data.holdout:
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
    spec = RunSpec()
    spec.CopyFrom(before)
    for name in ("plan", "resumed", "weights"):
        spec.ClearField(name)
    spec.weights.extend((*weights.starting, *weights.files))
    wanted = Job.from_json(json.dumps(table))
    spec.name, spec.job, spec.steps = wanted.name, wanted.to_json(), 1
    return spec
