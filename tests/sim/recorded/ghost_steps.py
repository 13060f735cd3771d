"""How long a step of a plan takes when ghosts execute it: broker, peers and links as they are, over
the modelled network of a planner's request, a hash in place of each tensor."""

from __future__ import annotations

import hashlib
import statistics
from pathlib import Path

import numpy as np

from shoal.broker.options import BrokerOptions
from shoal.dag.cost.network import Network
from shoal.dag.ir.convert import graph_to_bytes
from shoal.dag.plan.plan import PeerId, Plan
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.peer.data.manifest import Column, Manifest, Shard
from shoal.planner.base.interface import PlanRequest
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.ghost.device import Ghosts
from shoal.sim.virtual.control import BROKER
from shoal.sim.virtual.wan import Wan
from shoal.sim.virtual.world import PeerSpec, World

STEPS = 4
BROKER_S, BROKER_RATE = 0.01, 1e9
"""Seconds one way and bytes/s between each peer and the broker."""


def executed_s(request: PlanRequest, plan: Plan, folder: Path) -> float:
    """Median seconds of the steps behind the first one. `request`: what the plan is an answer to;
    its graph must be bound, and needs no weights."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes) -> common_pb2.BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    size, count = plan.microbatch_size, len(plan.routes)
    train = {"steps": STEPS, "batch": size * count, "microbatch": size, "eval_every": 0}
    model = {"factory": "shoal.examples.gpt:gpt"}  # nobody builds it
    nothing = Shard("text", 10**6, 10**6, "0" * 64)  # nobody fetches it
    manifest = Manifest("text", (Column("text", "uint8"),), (nothing,), 10**6, 0, length=8)
    job = Job.from_table(
        {
            "version": 1,
            "model": model,
            "data": {"kind": "text", "length": 8},
            "train": train,
            "plan": {"replan": False},
            "recovery": {"ladder": ["checkpoint"]},
        }
    )
    spec = broker_pb2.RunSpec(
        version=1,
        name="executed",
        job=job.to_json(),
        graph=blob(graph_to_bytes(request.graph)),
        data=blob(manifest.to_json().encode()),
        microbatches=count,
        microbatch_size=size,
        steps=STEPS,
        plan=plan_to_proto(plan),
    )
    used = set(plan.peers)
    peers = [
        PeerSpec(name=o.peer, hardware=o.pace, memory_bytes=o.device_memory_bytes, place=o.place)
        for o in request.offers
        if o.peer in used
    ]
    world = World(
        peers,
        blobs=blobs,
        folder=folder,
        wan=Wan(_with_broker(_among(request.network, used)), seed=0),
        broker_options=BrokerOptions(step_floor_s=1e6, first_step_s=1e6, probe_s=0.0),
        device=Ghosts(),
        log=False,
    )
    run = world.submit(spec)
    events = world.finish(run)
    end = world.broker.ended[run]
    assert end.phase == broker_pb2.DONE, end.reason.text
    return statistics.median([e.step.seconds for e in events if e.HasField("step")][1:])


def _among(network: Network, used: set[PeerId]) -> Network:
    """The network between some of its peers."""
    at = [i for i, peer in enumerate(network.peers) if peer in used]
    grid = np.ix_(at, at)
    return Network(
        tuple(network.peers[i] for i in at),
        network.latency_s[grid],
        network.bandwidth[grid],
        network.up[at],
        network.down[at],
    )


def _with_broker(network: Network) -> Network:
    """The network with the broker as its last end."""
    n = len(network.peers)

    def padded(values: np.ndarray, fill: float) -> np.ndarray:
        found = np.full((n + 1, n + 1), fill)
        found[:n, :n] = values
        return found

    return Network(
        (*network.peers, PeerId(BROKER)),
        padded(network.latency_s, BROKER_S),
        padded(network.bandwidth, BROKER_RATE),
        np.append(network.up, np.inf),
        np.append(network.down, np.inf),
    )
