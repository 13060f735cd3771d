"""Methods with equal weights in the simulated world: as a job asks for them, through the deaths of
holders, and with ghosts, whose sums say whether every gradient was counted once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.dag.ir.random import rounding_key
from shoal.dag.plan.messages import low_rank
from shoal.dag.plan.plan import PeerId, Plan, StageExchange, StageSlot, Visit
from shoal.dag.plan.strategies import parse_strategy
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.job.methods import method_text
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.hashes import expected
from shoal.sim.monitor.monitor import Monitor
from shoal.tests.peer.sync.loops import loop
from shoal.tests.peer.sync.test_demo import BLOCK, DECAY, TOP, DeMo
from shoal.tests.peer.sync.test_gtopk import GTopK
from shoal.tests.peer.sync.test_lags import LAGS
from shoal.tests.peer.sync.test_low_rank import ACPSGD, PowerSGD, basis
from shoal.tests.sim.played import read_export

from ..recovery.test_recovery import JOB, STEPS, Lab
from .test_ahead_world import CODEC, two_pipelines

OPTIONS: dict[str, dict[str, Any]] = {
    "gtopk": {"ratio": 10},
    "demo": {"top": 2, "block": 8},
    "lags": {"ratio": 20},
    "powersgd": {"rank": 1, "saving": 0.0},
    "acp-sgd": {"rank": 1, "saving": 0.0},
}
TRAIN = {
    "demo": {"optimizer": "sgd", "momentum": 0.0},
    "dgc": {"optimizer": "sgd", "momentum": 0.9},
}


def exchanging(plan: Plan, text: str) -> Plan:
    exchanges = tuple(StageExchange(k, strategy=text) for k in range(len(plan.stages)))
    return replace(plan, exchanges=exchanges)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(m, marks=pytest.mark.slow if m in ("gtopk", "lags") else ())
        for m in (*OPTIONS, "dgc")
    ],
)
def test_a_run_goes_on_after_the_death_of_a_holder_as_if_nothing_had_been(
    laboratory: Any, method: str
) -> None:
    """What it has not sent is in the copy of its snapshot on another peer."""
    coded = method == "dgc"
    text = method if coded else method_text(method, OPTIONS[method])
    table = {"train": JOB["train"] | TRAIN.get(method, {})}

    class Exchanging(Lab):
        peers = 5

        def plan_of(self, operators: int) -> Plan:
            return exchanging(two_pipelines(operators, CODEC if coded else ""), text)

    lab = Exchanging(laboratory, **table)
    first = lab.calm.begun
    moments = range(first, lab.calm.records, max(1, (lab.calm.records - first) // 4))
    for number, moment in enumerate(moments):
        name = f"p{number % 4}"
        lab.assert_same(lab.play({moment: name}), f"{name} at record {moment}")


@pytest.mark.parametrize("method", OPTIONS)
def test_ghosts_prove_that_every_gradient_counts_once(laboratory: Any, method: str) -> None:
    found = laboratory(Job.from_table(JOB))
    graph = found.graph
    world = found.world(4, device=Ghosts())
    text = method_text(method, OPTIONS[method])
    plan = exchanging(two_pipelines(len(graph.operators), ""), text)
    spec = RunSpec()
    spec.CopyFrom(found.spec)
    spec.plan.CopyFrom(plan_to_proto(plan))
    events = Monitor(world).finish(world.submit(spec))
    wanted = expected(graph.bind(2), found.job.seed, STEPS, 2)
    steps = [e.step for e in events if e.HasField("step")]
    assert [s.outcome.loss for s in steps] == wanted.losses
    files = [e.weights.files for e in events if e.HasField("weights")][-1]
    assert read_export(world.blobs[f.blob.hash] for f in files) == wanted.weights


@pytest.mark.parametrize(
    "method",
    [
        "lags",
        "demo",
        *(pytest.param(m, marks=pytest.mark.slow) for m in ("gtopk", "powersgd", "acp-sgd")),
    ],
)
def test_the_planner_gives_stages_the_method_that_a_job_names(laboratory: Any, method: str) -> None:
    """Four peers, two pipelines of two stages; fewer bytes between holders than exact gradients."""
    options = OPTIONS[method]
    table = JOB | {
        "train": JOB["train"] | TRAIN.get(method, {}),
        "plan": {"stages": 2, "pipelines": 2},
        "model": JOB["model"] | {"args": JOB["model"]["args"] | {"width": 32}},
    }
    sent = {}
    for sync in ({"method": "exact"}, {"method": method, "options": options}):
        job = Job.from_table(table | {"name": f"{method} {sync['method']}", "sync": sync})
        found = laboratory(job)
        world = found.world(4)
        events = world.finish(world.submit(found.spec))
        plan = next(e.plan for e in events if e.HasField("plan"))
        steps = [e.step for e in events if e.HasField("step")]
        links = [link for s in steps for link in s.links if link.role == "sync"]
        sent[sync["method"]] = sum(link.bytes for link in links)
        assert len(steps) == STEPS
    found = [parse_strategy(e.strategy) for e in plan.exchanges]
    assert [choice.word for choice in found] == [method] * 2
    if method == "lags":  # the first stage's gradients come last: nothing hides them
        assert found[0].options["ratio"] >= found[1].options["ratio"]
    else:
        assert {e.strategy for e in plan.exchanges} == {method_text(method, options)}
        assert sent[method] < 0.5 * sent["exact"]


def whole(operators: int, text: str) -> Plan:
    """Three holders of the whole model; one of them has two of the four microbatches."""
    names = tuple(PeerId(f"p{i}") for i in range(3))
    routes = tuple((Visit(0, names[m % 3]),) for m in range(4))
    exchange = (StageExchange(0, strategy=text),)
    return Plan((StageSlot(0, operators, names),), routes, 2, exchanges=exchange)


@pytest.mark.parametrize("method", OPTIONS)
def test_a_run_is_a_plain_loop_in_torch(laboratory: Any, method: str) -> None:
    """Through broker, peers and links; each method's loop is in its test of `tests/peer/sync/`."""
    train = {"optimizer": "sgd", "momentum": 0.0, "lr": 0.05, "weight_decay": 0.0, "clip": 0.0}
    args = JOB["model"]["args"] | {"dropout": 0.0}
    table = JOB | {
        "name": f"loop {method}",
        "model": JOB["model"] | {"args": args},
        "train": {"steps": STEPS, "batch": 8, "microbatch": 2, **train},
    }
    found = laboratory(Job.from_table(table))
    module, names = found.module, [n for n, _ in found.module.named_parameters()]
    options = OPTIONS[method] | ({"block": BLOCK, "top": TOP} if method == "demo" else {})
    if method == "demo":
        options["decay"] = DECAY
    text = method_text(method, options)
    trained = found.train(found.world(3), whole(len(found.graph.operators), text))
    oracles = {
        "gtopk": lambda: GTopK(names, 3, options["ratio"]),
        "lags": lambda: LAGS(3, options["ratio"]),
        "demo": lambda: DeMo(SimpleNamespace(train=found.job.train), 3),
        "powersgd": lambda: PowerSGD(SimpleNamespace(module=module), 3, factors(found, text)),
        "acp-sgd": lambda: ACPSGD(SimpleNamespace(module=module), 3, factors(found, text)),
    }
    method_loop = oracles[method]()
    method_loop.square = 0
    losses, weights = loop(module, found.job.train, found.reader(), 3, method_loop)
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    assert all(torch.allclose(trained.weights[n], weights[n], atol=1e-4) for n in names)


def factors(found: Any, text: str) -> dict[str, torch.Tensor]:
    """What all holders begin with, of the run's seed."""
    graph, choice = found.graph.bind(2), parse_strategy(text)
    trained = [p.name for p in graph.parameters]
    made = {}
    shapes = low_rank([graph.spec[f"param:{n}"] for n in trained], choice.options)
    for name, m in zip(trained, shapes, strict=True):
        if m is not None:
            left = choice.word == "acp-sgd" and not m.first
            key = rounding_key(found.job.seed, 0, f"{name}:sync.factor")
            rows = m.rows if left else m.columns
            start = torch.randn(rows, m.rank, generator=torch.Generator().manual_seed(key))
            made[name] = basis(start)
    return made
