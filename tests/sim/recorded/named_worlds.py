"""Small worlds by name: one for each thing that a plan or a round may be made of.

Five peers of two sites, each with a speed of its own; links inside a site are fast, those between
them have 8 ms and 2 MB/s. What a world is about it really contains: `contains` says so of a run,
and tests ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.dag.ir.graph import Graph
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.transforms.vocabulary import head_operators
from shoal.dag.transforms.vocabulary import split_head as split_head_of
from shoal.job.methods import METHODS
from shoal.job.rounds import GOSSIP
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.sim.played_rounds import LOCAL, OPTIONS

from .contained import (
    Seen,
    changes_places,
    interleaved,
    lossy,
    meets,
    pipeline,
    recomputes,
    recovers,
    several,
    split_head,
    tied,
)

SPEEDS = (2e7, 1e7, 1.5e7, 1.8e7, 1.2e7)
"""FLOP/s of p0 to p4: a forward of the model takes as long as a hop between the sites."""
NEAR, FAR = (0.001, 2e7), (0.008, 2e6)
"""Seconds one way and bytes/s inside a site, and between the two."""


def carry(source: str, destination: str, size_bytes: int) -> tuple[float, float]:
    """Peers with even numbers are one site, those with odd ones the other."""
    same = (ord(source[-1]) - ord(destination[-1])) % 2 == 0
    latency_s, bandwidth = NEAR if same else FAR
    busy_s = size_bytes / bandwidth
    return busy_s, busy_s + latency_s


@dataclass(frozen=True, kw_only=True)
class NamedWorld:
    """A job's tables and who runs it. `dies`: by stage whose first holder does, after how many
    steps. `memory`: bytes of peers that have little. `exact`: it is the plain loop (I1). `by_hand`:
    of the graph and the number of microbatches, a plan that no search would take here."""

    contains: Callable[[Seen], bool]
    tables: Mapping[str, Mapping[str, Any]]
    peers: int = 3
    model: str = "tied"
    memory: Mapping[str, int] = field(default_factory=dict)
    dies: Mapping[int, int] = field(default_factory=dict)
    exact: bool = True
    by_hand: Callable[[Graph, int], Plan] | None = None

    @property
    def rounds(self) -> bool:
        return self.tables.get("sync", {}).get("kind") in ("local", "gossip")


def peers_of(world: NamedWorld) -> list[PeerSpec]:
    """The first of the five peers."""
    return [
        PeerSpec(
            name=f"p{i}",
            place=f"s{i % 2}",
            flops_per_s=SPEEDS[i],
            memory_bytes=world.memory.get(f"p{i}", 4 << 30),
        )
        for i in range(world.peers)
    ]


def planned(schedule: str, stages: int | str = 3, pipelines: int = 1, **more: Any) -> Any:
    """A [plan] table."""
    found = {"schedule": schedule, "stages": stages, "pipelines": pipelines}
    return {"scheduler": "auto", "replan": False, "recompute": False} | found | more


def head_in_blocks(graph: Graph, microbatches: int) -> Plan:
    """The body on p0, and three blocks of the head and what joins them on three peers."""
    parts = head_operators(graph, 3)
    edges = [0, *(start for start, _ in parts), parts[-1][1]]
    edges.append(len(split_head_of(graph, 3).operators))
    peers = [PeerId(f"p{i}") for i in (0, 1, 2, 0, 1)]
    slots = tuple(StageSlot(edges[i], edges[i + 1], (peer,)) for i, peer in enumerate(peers))
    route = tuple(Visit(i, peer) for i, peer in enumerate(peers))
    return Plan(slots, (route,) * microbatches, 2, evaluation_routes=(route,) * 2, head_parts=3)


TRAIN = {
    **{"steps": 4, "batch": 16, "microbatch": 2, "lr": 1e-2, "eval_every": 2, "eval_batches": 2},
}
JOB: dict[str, Any] = {
    "version": 1,
    "data": {"kind": "text", "length": 8},
    "train": TRAIN,
}
SMALL = {"width": 8, "heads": 1, "length": 8, "dropout": 0.0}
MODELS = {
    "tied": ("tied", {"layers": 2, **SMALL}),
    "deep": ("tied", {"layers": 6, **SMALL}),
    "untied": ("untied", {"layers": 1, "width": 16}),
}


WEAK = 140_000
"""Bytes of memory that the model for rounds does not fit into."""


def in_step(method: str) -> NamedWorld:
    """Two pipelines whose holders exchange gradients by a method."""
    options: dict[str, Any] = {
        "gtopk": {"ratio": 10},
        "demo": {"top": 2, "block": 8},
        "lags": {"ratio": 20},
        "powersgd": {"rank": 1, "saving": 0.0},
        "acp-sgd": {"rank": 1, "saving": 0.0},
    }
    train = {"optimizer": "sgd", "momentum": 0.0} if method == "demo" else {}
    return NamedWorld(
        peers=4,
        tables={
            "plan": planned("1f1b", 2, 2),
            "sync": {"method": method, "options": options[method]},
            "train": train,
        },
        contains=several(2, strategy=method),
        exact=False,
    )


def apart(method: str, **more: Any) -> NamedWorld:
    """Three replicas that meet in rounds by a method, of which one has two stages."""
    gossip = method in GOSSIP
    options = {**OPTIONS.get(method, {}), **more}
    sync = {"kind": "gossip" if gossip else "local", "method": method.split()[0], "every": 3}
    return NamedWorld(
        peers=5 if gossip else 4,
        memory={"p0": WEAK, "p2": WEAK},
        tables={
            "plan": {"replicas": 4 if gossip else 3, "scheduler": "auto", "replan": False},
            "sync": {**sync, "options": options},
            "train": {"steps": 9, "batch": 24, "optimizer": "sgd", "lr": 0.05, "eval_every": 6},
        },
        contains=meets(pairs=gossip),
    )


WORLDS: dict[str, NamedWorld] = {
    "gpipe": NamedWorld(
        model="deep", tables={"plan": planned("gpipe")}, contains=pipeline("gpipe")
    ),
    "1f1b": NamedWorld(model="deep", tables={"plan": planned("1f1b")}, contains=pipeline("1f1b")),
    "interleaved": NamedWorld(
        model="deep", tables={"plan": planned("interleaved", 4)}, peers=2, contains=interleaved
    ),
    "recomputation": NamedWorld(
        model="deep", tables={"plan": planned("1f1b", recompute=True)}, contains=recomputes
    ),
    "split-head": NamedWorld(
        model="untied",
        tables={"plan": planned("1f1b", "auto")},
        by_hand=head_in_blocks,
        contains=split_head,
    ),
    "tied-weights": NamedWorld(
        tables={"plan": planned("1f1b", 2, scheduler="uniform")}, peers=2, contains=tied
    ),
    "codecs": NamedWorld(
        tables={
            "plan": planned("1f1b", 2, 2),
            "codec": {"activation": "int8", "activation_grad": "topk:ratio=4", "grad": "int8"},
        },
        peers=4,
        contains=lossy("activation", "activation_grad", "sync"),
        exact=False,
    ),
    "pipelines": NamedWorld(tables={"plan": planned("1f1b", 2, 2)}, peers=4, contains=several(2)),
    "all-reduce ring": NamedWorld(
        tables={"plan": planned("1f1b", 1, 4), "sync": {"collective": "ring"}},
        peers=4,
        contains=several(4, "ring"),
    ),
    "swarm": NamedWorld(
        tables={"plan": {"scheduler": "swarm", "replan": False}},
        peers=5,
        contains=several(5),
    ),
    "snapshot": NamedWorld(
        tables={"plan": planned("1f1b", 2), "recovery": {"snapshot_every": 1}},
        dies={1: 2},
        contains=recovers("(warm)"),
    ),
    "sibling": NamedWorld(
        tables={"plan": planned("1f1b", 2, 2)},
        peers=4,
        dies={1: 2},
        contains=recovers("sibling"),
    ),
    "neighbour": NamedWorld(
        model="deep",
        tables={
            "plan": planned("1f1b", 3, scheduler="uniform"),
            "recovery": {"ladder": ["neighbour"]},
        },
        peers=4,
        dies={1: 2},
        contains=recovers("made anew"),
        exact=False,
    ),
    "neighbour+": NamedWorld(
        model="deep",
        tables={
            "plan": {"scheduler": "uniform", "stages": 4, "replan": False},
            "recovery": {"ladder": ["neighbour+"]},
        },
        peers=5,
        dies={1: 2},
        contains=changes_places,
        exact=False,
    ),
    **{method: in_step(method) for method in METHODS if method != "exact"},
    **{method: apart(method) for method in LOCAL},
    **{f"gossip {method}": apart(method) for method in GOSSIP},
    "diloco overlap": replace(apart("diloco", overlap=2), memory={"p0": 200_000, "p2": 200_000}),
}
