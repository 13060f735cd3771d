"""I1 and recovery for each optimizer: whatever the plan and whoever is lost, training is what the
plain loop with torch's own optimizer makes of it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.client.models import models
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.plan.plan import PeerId
from shoal.planner.base.interface import PeerOffer
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.requests.request import plan_request
from shoal.planner.requests.requirements import read_spec
from shoal.proto import broker_pb2
from shoal.sim.virtual.world import PeerSpec
from shoal.tests.peer.optimizers.eight_bits import from_elements
from shoal.tests.peer.optimizers.exact_muon import in_float64
from shoal.tests.sim.played_rounds import Rounds, sites, sync_of
from shoal.tests.sim.recovery.test_recovery import JOB, Lab
from shoal.tests.sim.virtual.test_exactness import random_plan, small_job
from shoal.tests.sim.virtual.test_head_in_blocks import plan_of, untied

__all__ = ["untied"]

OPTIMIZERS = {"muon": 0.01, "adafactor": 0.02, "lion": 1e-3, "adamw8bit": 3e-3}
"""Learning rates."""
DOUBLE = """
from shoal.examples.gpt import gpt

def double():
    return gpt(layers=2, width=16, heads=2, length=12, dropout=0.0).double()
"""
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("adafactor", "lion")]


def both(
    optimizer: str, laboratory: Callable[..., Any], folder: Path, seed: object
) -> tuple[Any, Any]:
    """Return what a run under a random plan came to, and the plain loop."""
    job = small_job("gpt_bytes", folder)
    train = replace(job.train, optimizer=optimizer, lr=OPTIMIZERS[optimizer])
    lab = laboratory(replace(job, name=f"small-{optimizer}", train=train))
    if optimizer == "muon":
        # Embeddings of bytes, tied to the head, and of positions are AdamW's.
        assert lab.job.train.no_muon == ("bytes.weight", "positions.weight")
    rng = random.Random(f"{optimizer} {seed}")
    plan = random_plan(rng, len(lab.graph.operators), 3, lab.job.train)
    return lab.train(lab.world([PeerSpec(name=f"p{i}") for i in range(5)]), plan), lab.plain()


@pytest.mark.parametrize("optimizer", ["muon", *SLOW])
def test_no_plan_changes_what_it_comes_to(
    optimizer: str,
    laboratory: Callable[..., Any],
    tmp_path: Path,
    equal_training: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Muon's iteration in float64 on both sides. A sign of Lion's may turn with the order of a sum,
    and then a number is two whole steps apart."""
    in_float64(monkeypatch)
    got, wanted = both(optimizer, laboratory, tmp_path, 0)
    if optimizer != "lion":
        equal_training(got, wanted)
        return
    assert got.losses == pytest.approx(wanted.losses, rel=1e-4)
    for name, tensor in wanted.weights.items():
        assert float((got.weights[name] - tensor).norm()) <= 1e-2 * float(tensor.norm()), name


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_no_plan_changes_what_adamw_with_moments_in_8_bits_comes_to(
    seed: int,
    laboratory: Callable[..., Any],
    tmp_path: Path,
    equal_training: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float64, where the order of a sum decides of hardly any number what is next to it."""
    from_elements(monkeypatch, 200)
    (tmp_path / "model.py").write_text(DOUBLE)
    job = small_job("gpt_bytes", tmp_path)
    job = replace(
        job,
        name=f"double-{seed}",
        model=replace(job.model, factory=f"{tmp_path / 'model.py'}:double", args={}),
        train=replace(job.train, optimizer="adamw8bit", lr=OPTIMIZERS["adamw8bit"]),
    )
    lab = laboratory(job)
    plan = random_plan(random.Random(f"8 bits {seed}"), len(lab.graph.operators), 3, lab.job.train)
    wanted = lab.plain()
    got = lab.train(lab.world([PeerSpec(name=f"p{i}") for i in range(5)]), plan)
    equal_training(got, wanted)
    other = copy.copy(lab)  # with moments in 32 bits it would come to something else
    other.job = replace(lab.job, train=replace(lab.job.train, optimizer="adamw"))
    with pytest.raises(AssertionError, match=r"the plain loop has|weights differ"):
        equal_training(got, other.plain())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_torchs_own_muon_comes_to_the_same_losses(
    seed: int, laboratory: Callable[..., Any], tmp_path: Path
) -> None:
    """Its iteration rounds to bfloat16: which way, may hang on the order of a sum of gradients."""
    got, wanted = both("muon", laboratory, tmp_path, seed)
    assert got.losses == pytest.approx(wanted.losses, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_a_lost_peer_it_is_the_same_bit_for_bit(
    optimizer: str,
    laboratory: Callable[..., Any],
    plans_once: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from_elements(monkeypatch, 200)
    muon = {"no_muon": ["bytes.weight", "positions.weight"]} if optimizer == "muon" else {}
    lab = Lab(laboratory, train={**JOB["train"], "optimizer": optimizer, **muon})
    for at, name in ((lab.calm.records // 2, "p0"), (lab.calm.records * 3 // 4, "p1")):
        lab.assert_same(lab.play({at: name}), f"{name} at {at}")


@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw8bit"])
def test_a_plan_that_cuts_a_matrix_is_refused(
    optimizer: str, untied: Any, laboratory: Callable[..., Any]
) -> None:
    lab, _ = untied
    train = replace(lab.job.train, optimizer=optimizer, no_muon=())
    cut = laboratory(replace(lab.job, name=f"untied-{optimizer}", train=train))
    world = cut.world([PeerSpec(name=n) for n in "abc"])
    with pytest.raises(AssertionError, match="parameters whole: expected head_parts 0"):
        cut.train(world, plan_of(cut, ["a", "b", "c", "a", "b"]))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor", "lion", "adamw8bit"])
def test_the_planner_splits_a_head_only_where_parameters_may_be_cut(
    optimizer: str, untied: Any
) -> None:
    lab, _ = untied
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(lab.spec)
    train = replace(lab.job.train, optimizer=optimizer, no_muon=())
    spec.job = replace(lab.job, train=train).to_json()
    offers = [PeerOffer(PeerId(n), device_memory_bytes=20_000) for n in "abc"]
    request = plan_request(spec, read_spec(spec), lab.graph, offers, None)
    split = any(form.head_parts for form in request.others)
    assert split == (optimizer in ("adamw", "lion"))
    judge = CostModel(request)
    memory = MemoryModel(request.graph, judge.costs, in_8_bits=optimizer == "adamw8bit")
    whole = memory.stage(0, judge.operators).peak(train.state_bytes, 1)
    assert judge.stage_bytes(0, judge.operators, 1) == whole


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor", "adamw8bit"])
def test_it_is_the_inner_optimizer_of_rounds(
    optimizer: str, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replica against a plain loop of its own, over the rounds that were committed."""
    in_float64(monkeypatch)
    from_elements(monkeypatch, 200)
    train = {"optimizer": optimizer, "lr": OPTIMIZERS[optimizer]}
    if optimizer == "muon":
        train["no_muon"] = ["bytes.weight", "positions.weight"]
    world, run = rounds.play(sites(1e9, 1e9), sync=sync_of("diloco"), train=train)
    rounds.assert_expected(world, run)


@pytest.mark.slow
def test_in_rounds_lion_parts_only_where_gradients_are_rounding(rounds: Rounds) -> None:
    """A bias of keys moves all products of a query alike, which softmax does not see: its gradient
    is 0 but for rounding, of which a sign makes whole steps. The loss does not depend on it."""
    train = {"optimizer": "lion", "lr": 3e-3, "betas": [0.9, 0.99], "weight_decay": 0.0}
    world, run = rounds.play(sites(1e9, 1e9), sync=sync_of("average"), train=train)
    wanted, got = rounds.expected(world, run)
    rounds.assert_steps(world, run, wanted)
    apart = {n: (got[n] - t).abs() > 2e-5 for n, t in wanted.shared.items()}
    keys = [apart.pop(f"blocks.{i}.attention.qkv.bias").view(3, -1) for i in range(2)]
    assert all(not each[[0, 2]].any() for each in keys), "biases of queries and values are equal"
    assert any(each[1].any() for each in keys)
    others = [each for names in apart.values() for each in names.flatten().tolist()]
    assert sum(others) <= 0.002 * len(others)
    module = copy.deepcopy(rounds.lab.module)
    with models.ready(module, rounds.lab.job) as ready:
        ready(**rounds.lab.reader().batch(0, 0, 2)).backward()
    bias = module.get_parameter("blocks.0.attention.qkv.bias").grad.view(3, -1).abs()
    assert float(bias[1].max()) < 1e-6 * float(bias[2].max())
