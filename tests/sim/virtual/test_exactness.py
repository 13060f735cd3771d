"""I1: no plan changes the mathematics. Every example under random hand-written plans, in the
simulated world, against the plain loop over the same microbatches.

Peer p4 has the core operator set. Plans have unequal numbers of holders, peers with two stages and
microbatches on a route of their own.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.client.models import models
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.examples import resnet_digits, unet
from shoal.job import Job, Train
from shoal.sim.plain import oracle
from shoal.sim.virtual.world import PeerSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PEERS = [PeerSpec(name=f"p{i}", core=i == 4) for i in range(5)]
STEPS = 8
TEXT = {"kind": "text", "length": 12, "source": str(EXAMPLES / "*.py"), "holdout": 0.2}

SMALL: dict[str, dict[str, Any]] = {
    "gpt_bytes": {"args": {"layers": 2, "width": 16, "heads": 2, "length": 12, "dropout": 0.0}},
    "encoder_decoder": {"args": {"layers": 1, "width": 16, "heads": 2, "length": 12}},
    "moe": {"args": {"layers": 2, "width": 16, "heads": 2, "experts": 3, "length": 12}},
    "resnet_digits": {"args": {"width": 4, "blocks": 1}, "optimizer": "sgd", "lr": 0.05},
    "unet": {"args": {"width": 8, "depth": 2}},  # two channels a group: no gradient is truly zero
    "hf_gpt2": {
        "args": {
            **{"n_layer": 2, "n_embd": 16, "n_head": 2},
            **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
        }
    },
    "hf_llama": {"args": {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24}},
    "hf_mixtral": {"args": {"hidden_size": 16, "intermediate_size": 16}},
    "hf_qwen3_moe": {"args": {"hidden_size": 16, "moe_intermediate_size": 8, "head_dim": 4}},
    "hf_deepseek_v3": {
        "args": {
            **{"hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8},
            **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "v_head_dim": 4},
        }
    },
}
"""By example: factory arguments and train keys that make it small and deterministic."""
FEW = dict.fromkeys(("hf_mixtral", "hf_qwen3_moe", "hf_deepseek_v3"), 4)
"""Stages of the plan that is always tried, where they are not three."""
ALIKE = ("hf_mixtral", "hf_qwen3_moe", "hf_deepseek_v3")
"""Mixtures of experts beside that of moe, which are tried at night."""


def small_job(name: str, folder: Path) -> Job:
    """An example with few and small layers, no dropout, four microbatches and few steps."""
    job = Job.from_toml(EXAMPLES / f"{name}.toml")
    keys = dict(SMALL[name])
    data = TEXT
    if job.data.kind == "arrays":
        source = folder / f"{name}.npz"
        if not source.exists():
            if name == "unet":
                unet.write_discs(source, count=40, side=16)
            else:
                resnet_digits.write_digits(source)
        data = {"kind": "arrays", "source": str(source), "holdout": 0.1}
    data = {**data, "inputs": job.data.inputs, "targets": job.data.targets}
    small = Job.from_table(
        {
            "version": 1,
            "name": f"small-{name}",
            "model": {"factory": job.model.factory, "args": keys.pop("args")},
            "data": data,
            "train": {
                "steps": STEPS,
                "batch": 8,
                "microbatch": 2,
                "lr": 1e-3,
                "eval_every": STEPS // 2,
                "eval_batches": 2,
                **keys,
            },
        }
    )
    return replace(small, folder=EXAMPLES)


@pytest.fixture(scope="session")
def exact(laboratory: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("arrays")
    cache: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in cache:
            lab = laboratory(small_job(name, folder))
            cache[name] = (lab, lab.plain())
        return cache[name]

    return get


def random_plan(rng: random.Random, operators: int, stages: int, train: Train) -> Plan:
    """`stages` intervals cut anywhere, 1 to 3 holders each, not all alike; a peer with two stages;
    one microbatch on a route of its own, or all of them scattered."""
    cuts = sorted(rng.sample(range(1, operators), stages - 1))
    bounds = [0, *cuts, operators]
    names = [PeerId(p.name) for p in PEERS]
    holders = [rng.sample(names, rng.randint(1, 3)) for _ in range(stages)]
    if stages > 1:
        a, b = rng.sample(range(stages), 2)
        if holders[b][0] not in holders[a]:
            holders[a][0] = holders[b][0]
        if len(holders[a]) == len(holders[b]) == 1:
            holders[a].append(rng.choice([n for n in names if n not in holders[a]]))
    slots = tuple(StageSlot(bounds[i], bounds[i + 1], tuple(holders[i])) for i in range(stages))
    usual = [rng.choice(slot.holders) for slot in slots]
    odd, scattered = rng.randrange(train.microbatches), rng.random() < 0.5

    def route(own: bool) -> tuple[Visit, ...]:
        return tuple(
            Visit(i, rng.choice(slot.holders) if own else usual[i]) for i, slot in enumerate(slots)
        )

    return Plan(
        stages=slots,
        routes=tuple(route(scattered or m == odd) for m in range(train.microbatches)),
        microbatch_size=train.microbatch_size,
        schedule=rng.choice(["gpipe", "1f1b", "zero-bubble"]),
        evaluation_routes=tuple(route(True) for _ in range(2)),
    )


def check(exact: Any, equal_training: Any, name: str, stages: int, seed: int) -> None:
    lab, wanted = exact(name)
    rng = random.Random(f"{name} {stages} {seed}")
    plan = random_plan(rng, len(lab.graph.operators), stages, lab.job.train)
    print(plan)  # seen when it fails
    got = lab.train(lab.world(PEERS), plan)
    equal_training(got, wanted)
    assert len(got.evaluations) == 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "stages"),
    [
        pytest.param(
            name,
            n,
            marks=() if n == FEW.get(name, 3) and name not in ALIKE else pytest.mark.slow,
        )
        for name in sorted(SMALL)
        for n in (2, 3, 4, 7)
    ],
)
def test_a_plan_gives_the_plain_loops_losses_and_weights(exact, equal_training, name, stages):
    check(exact, equal_training, name, stages, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(SMALL))
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(stages=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_many_plans_give_the_plain_loops_losses_and_weights(
    exact, equal_training, name, stages, seed
):
    check(exact, equal_training, name, stages, seed)


@pytest.mark.parametrize("name", ["gpt_bytes", "hf_gpt2", "hf_llama", "unet"])
def test_a_step_is_that_of_one_full_batch(exact, name):
    """The second oracle, where nothing depends on the microbatches: one batch, one backward."""
    lab, _ = exact(name)
    train, reader = lab.job.train, lab.reader()

    def whole(step: int, _: int) -> dict[str, Tensor]:
        parts = [reader.batch(step, m, train.microbatch_size) for m in range(train.microbatches)]
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}

    module = copy.deepcopy(lab.module)
    with models.ready(module, lab.job) as ready:
        wanted = oracle.train(ready, whole, train, steps=2, microbatches=1)
    plan = random_plan(random.Random(name), len(lab.graph.operators), 3, train)
    got = lab.train(lab.world(PEERS), plan)
    assert got.losses[:2] == pytest.approx(wanted.losses, rel=1e-5)
    assert got.norms[:2] == pytest.approx(wanted.norms, rel=1e-4)


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_any_number_of_holders_gives_the_plain_loop(exact, equal_training, holders):
    lab, wanted = exact("gpt_bytes")
    n, train = len(lab.graph.operators), lab.job.train
    names = [PeerId(f"p{i}") for i in range(4)]
    slots = (StageSlot(0, n // 2, tuple(names[:holders])), StageSlot(n // 2, n, (names[3],)))
    plan = Plan(
        stages=slots,
        routes=tuple(
            (Visit(0, names[m % holders]), Visit(1, names[3])) for m in range(train.microbatches)
        ),
        microbatch_size=train.microbatch_size,
    )
    equal_training(lab.train(lab.world(PEERS), plan), wanted)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        ("gpt_bytes", "interleaved", ()),
        ("resnet_digits", "1f1b", (0, 1, 3)),
        ("resnet_digits", "zero-bubble", (0, 1, 3)),
    ],
)
def test_interleaving_and_recomputation_give_the_plain_loop(
    exact, equal_training, name, schedule, recompute
):
    """Two peers with two stages each; some compute their forward again."""
    lab, wanted = exact(name)
    n, train = len(lab.graph.operators), lab.job.train
    peers = [PeerId(f"p{i % 2}") for i in range(4)]
    bounds = [n * i // 4 for i in range(5)]
    route = tuple(Visit(i, peer) for i, peer in enumerate(peers))
    plan = Plan(
        stages=tuple(
            StageSlot(bounds[i], bounds[i + 1], (peer,), i in recompute)
            for i, peer in enumerate(peers)
        ),
        routes=(route,) * train.microbatches,
        microbatch_size=train.microbatch_size,
        schedule=schedule,
    )
    equal_training(lab.train(lab.world(PEERS), plan), wanted)


def test_dropout_is_the_same_under_every_plan(laboratory, equal_training, tmp_path):
    """Masks come from (seed, step, microbatch, operator, element): three peers, one with the
    core set, drop what one peer drops."""
    job = small_job("gpt_bytes", tmp_path)
    args = {**job.model.args, "dropout": 0.3}
    lab = laboratory(replace(job, name="dropout", model=replace(job.model, args=args)))
    alone = lab.train(lab.world(1))
    split = lab.train(lab.world([PeerSpec(name=f"p{i}", core=i == 1) for i in range(3)]))
    equal_training(split, alone)
    plan = random_plan(random.Random("again"), len(lab.graph.operators), 3, job.train)
    again = replace(plan, stages=tuple(replace(s, recompute=True) for s in plan.stages))
    equal_training(lab.train(lab.world(PEERS), again), alone)
    assert max(abs(a - b) for a, b in zip(alone.losses, lab.plain().losses, strict=True)) > 1e-4
