"""A virtual hour of a training run at twelve places, for world.py.

    python benchmarks/worlds/world.py --only hour

The scenario skippipe-12 as it is: 20 T4 cards at SkipPipe's twelve places, links shared max-min;
the broker measures them and plans by itself, every invariant is watched. Only the model is of a
size that is worth so many cards: GPT-2 with 1.5B parameters, 27 windows of 1,024 tokens a step
(benchmarks/planning/graphs.py), tensors as hashes. After an hour of the world's clock the run is
cancelled.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from shoal.benchmarks.planning.graphs import graph_of
from shoal.broker.options import BrokerOptions
from shoal.dag.ir.convert import graph_to_bytes
from shoal.job import Job
from shoal.job.units import Duration
from shoal.peer.data.manifest import Column, Manifest, Shard
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.modelled.virtual_run import run_virtual
from shoal.sim.scenario.catalogue import find
from shoal.sim.scenario.scenario import Scenario

__all__ = ["virtual_hour"]

MODEL, TOKENS, MICROBATCHES = "gpt2-1.5b", 1024, 27


def virtual_hour() -> dict[str, float]:
    """CPU seconds of an hour of the world's clock, from the first peer that joins, and what was
    trained in it."""
    blobs = dict[str, bytes]()

    def blob(data: bytes) -> common_pb2.BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    train = {"steps": 1_000_000, "batch": MICROBATCHES, "microbatch": 1, "eval_every": 0}
    data = {"kind": "text", "length": TOKENS}
    factory = {"factory": "shoal.examples.gpt:gpt"}  # nobody calls it: the graph is below
    job = Job.from_table({"version": 1, "model": factory, "data": data, "train": train})
    nothing = Shard("text", 10**7, 10**7, "0" * 64)  # nobody fetches it
    manifest = Manifest("text", (Column("text", "uint8"),), (nothing,), 10**7, 0, length=TOKENS)
    spec = broker_pb2.RunSpec(
        version=1,
        name=MODEL,
        job=job.to_json(),
        graph=blob(graph_to_bytes(graph_of(MODEL))),
        data=blob(manifest.to_json().encode()),
        microbatches=MICROBATCHES,
        microbatch_size=1,
        steps=1_000_000,
    )
    scenario = replace(Scenario.from_toml(find("skippipe-12")), limit=Duration("1h"))
    with tempfile.TemporaryDirectory() as folder:
        began, wall = time.process_time(), time.perf_counter()
        found = run_virtual(
            scenario, job, spec, blobs, Path(folder), ghost=True, broker_options=BrokerOptions()
        )
        cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
    assert found.late, f"it ended by itself: {found.state.reason.text}"
    committed = [e.at_s for e in found.events if e.HasField("step")]
    return {
        "seconds": wall_s,
        "cpu_seconds": cpu_s,
        "virtual_s": found.now,
        "steps": len(found.losses),
        "step_s": (committed[-1] - committed[0]) / max(1, len(committed) - 1),
        "events": found.world.calls,
        "checks": found.checks,
    }


if __name__ == "__main__":
    print(json.dumps(virtual_hour()))
