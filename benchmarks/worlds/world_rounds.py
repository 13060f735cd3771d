"""1,000 ghosts that train apart in replicas of 8 and meet in rounds, for world.py.

    python benchmarks/worlds/world.py --only rounds
    python benchmarks/worlds/world_rounds.py 125             one case: REPLICAS

Peers, network and model are those of world.py. Each replica has a place of its own, and a pipeline
of 8 stages over it, which the broker plans, one replica after the other. ROUNDS rounds have 5 local
steps of 8 microbatches each. The hash of every version, and every hash that is exported, is
compared with that of a plain loop, or the case fails.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from shoal.benchmarks.worlds.world import SIZE, STAGES, graph_of
from shoal.broker.events import RunId
from shoal.broker.options import BrokerOptions
from shoal.dag.ir.convert import graph_to_bytes
from shoal.job import Job
from shoal.net.transports.memory import steady
from shoal.peer.data.manifest import Column, Manifest, Shard
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import read_export

__all__ = ["many_replicas"]

ROUNDS, STEPS, MICROBATCHES = 3, 5, 8


def many_replicas(replicas: int) -> dict[str, float]:
    """`gib` is the process's peak of memory."""
    graph, blobs, each = graph_of(), dict[str, bytes](), replicas * MICROBATCHES

    def blob(data: bytes) -> common_pb2.BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    steps = ROUNDS * STEPS
    job = Job.from_table(
        {
            "version": 1,
            "model": {"factory": "shoal.examples.gpt:gpt", "args": {"layers": STAGES}},
            "data": {"kind": "text", "length": 128},
            "plan": {
                **{"replicas": replicas, "scheduler": "uniform", "replan": False},
                **{"stages": STAGES, "pipelines": 1, "schedule": "1f1b"},
            },
            "sync": {"kind": "local", "every": STEPS},
            "train": {"steps": steps, "batch": each * SIZE, "microbatch": SIZE, "eval_every": 0},
        }
    )
    nothing = Shard("text", 1000, 1000, "0" * 64)  # nobody fetches it
    manifest = Manifest("text", (Column("text", "uint8"),), (nothing,), 1000, 0, length=128)
    spec = broker_pb2.RunSpec(
        version=1,
        name="ghost-rounds",
        job=job.to_json(),
        graph=blob(graph_to_bytes(graph)),
        data=blob(manifest.to_json().encode()),
        microbatches=each,
        microbatch_size=SIZE,
        steps=steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        began, wall = time.process_time(), time.perf_counter()
        world = World(
            [
                PeerSpec(name=f"p{i}-{k}", place=f"s{i:03}", flops_per_s=1e12)
                for i in range(replicas)
                for k in range(STAGES)
            ],
            blobs=blobs,
            folder=Path(folder),
            carry=steady(0.02, 12.5e6),
            broker_options=BrokerOptions(probe_s=0.0),
            device=Ghosts(),
            log=False,
        )
        name = world.submit(spec)
        run = world.broker.machine.runs[RunId(name)]
        assert run.record.rounds is not None, "the job has rounds"
        rounds = run.record.rounds
        ended = world.broker.ended
        world.until(lambda: all(r.record.term for r in run.replicas) or name in ended)
        planned = time.process_time()
        world.until(lambda: rounds.versions.round > 0 or name in ended)
        first, events = time.process_time(), world.calls
        happened = world.finish(name)
        cpu_s, wall_s = time.process_time() - began, time.perf_counter() - wall
    done = [e.round_done for e in happened if e.HasField("round_done")]
    assert len(done) == ROUNDS, happened[-1].state.reason.text
    assert all(len(d.members) == replicas for d in done)
    log = committed_rounds(happened, microbatches=each, microbatch_size=1)
    wanted = expected_rounds(graph.bind(SIZE), job.seed, log, each)
    assert [d.hash for d in done] == wanted.versions
    [files] = [e.weights.files for e in happened if e.HasField("weights")]
    assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights
    return {
        "peers": replicas * STAGES,
        "seconds": wall_s,
        "cpu_seconds": cpu_s,
        "planned_cpu_seconds": planned - began,
        "round_cpu_seconds": (began + cpu_s - first) / (ROUNDS - 1),
        "events": world.calls,
        "us_per_event": 1e6 * (began + cpu_s - first) / max(1, world.calls - events),
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "virtual_s": world.now,
    }


if __name__ == "__main__":
    print(json.dumps(many_replicas(int(sys.argv[1]))))
