"""Every example with blocks that can be left out, over random routes, in the world: losses, norms,
weights and buffers are those of a plain loop whose blocks pass on what comes where a microbatch
leaves them out, and evaluations go through all.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.client.models import models
from shoal.dag.plan.full_steps import FullSteps
from shoal.dag.plan.plan import PeerId, Plan, Route, StageSlot, Visit
from shoal.job import Job
from shoal.planner.skipping.layouts import row_of_blocks
from shoal.sim.plain import oracle
from shoal.tests.sim.conftest import Trained
from shoal.tests.sim.virtual.test_exactness import EXAMPLES, PEERS, small_job

DEEPER: dict[str, dict[str, Any]] = {
    "gpt_bytes": {"layers": 4},
    "hf_gpt2": {"n_layer": 4},
    "hf_llama": {"num_hidden_layers": 4},
    "resnet_digits": {"blocks": 4},
}
LAYERED = Job.from_table(
    {
        "version": 1,
        "model": {"factory": "shoal.tests.sim.layered_model:layered"},
        "data": {"kind": "text", "length": 8},
        "train": {"steps": 4, "batch": 4, "microbatch": 1, "lr": 1e-2, "eval_every": 2},
        "plan": {"scheduler": "uniform", "skip": 0.5},
    }
)
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


@pytest.fixture(scope="module")
def deeper(
    laboratory: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Any]:
    folder, known = tmp_path_factory.mktemp("arrays"), dict[str, Any]()

    def get(name: str) -> Any:
        if name == "layered":
            known[name] = known.get(name) or laboratory(LAYERED)
        if name not in known:
            job = small_job(name, folder)
            args = {**job.model.args, **DEEPER[name]}
            train = replace(job.train, steps=4, eval_every=2)
            known[name] = laboratory(
                replace(job, model=replace(job.model, args=args), train=train, folder=EXAMPLES)
            )
        return known[name]

    return get


def drawn(lab: Any, rng: random.Random) -> tuple[Plan, list[set[str]]]:
    """A plan of one or two blocks to a stage, and by microbatch the blocks that it leaves out."""
    row, n = row_of_blocks(lab.graph), len(lab.graph.operators)
    count, names = lab.job.train.microbatches, [PeerId(p.name) for p in PEERS]
    cuts = [0, row[0].start]
    for block in row:
        if rng.random() < 0.7 or block is row[-1]:
            cuts.append(block.stop)
    cuts.append(n)
    held = [tuple(rng.sample(names, rng.randint(1, 2))) for _ in cuts[1:]]
    slots = tuple(StageSlot(a, b, h) for a, b, h in zip(cuts, cuts[1:], held, strict=False))
    last = len(slots) - 1
    visited = [{m for m in range(count) if rng.random() < 0.5} for _ in slots]
    for k in range(1, last):
        visited[k] = visited[k] or {rng.randrange(count)}
    routes, gone = [], []
    for m in range(count):
        inner = [k for k in range(1, last) if m in visited[k]]
        routes.append(tuple(Visit(k, rng.choice(held[k])) for k in (0, *inner, last)))
        out = [slots[k] for k in range(1, last) if m not in visited[k]]
        gone.append({b.name for b in row for s in out if s.start <= b.start < s.stop})
    plan = Plan(
        slots,
        tuple(routes),
        lab.job.train.microbatch_size,
        schedule=rng.choice(SCHEDULES),
        evaluation_routes=(tuple(Visit(k, held[k][0]) for k in range(last + 1)),) * 2,
        full=_full(rng, routes, last + 1) if rng.random() < 0.7 else None,
    )
    return plan, gone


def _full(rng: random.Random, routes: list[Route], stages: int) -> FullSteps:
    """Two of four steps or fewer, in which microbatches go through all stages."""
    at = [[v for route in routes for v in route if v.stage == k] for k in range(stages)]
    own = [{v.stage: v for v in route} for route in routes]
    full = tuple(tuple(o.get(k) or rng.choice(at[k]) for k in range(stages)) for o in own)
    return FullSteps(rng.randrange(2), rng.randrange(3, 5), full)


def plain(lab: Any, gone: list[set[str]], full: FullSteps | None = None) -> Trained:
    """A block's gradients count as if all microbatches had gone through it; in full steps they
    have."""
    module, train, reader = copy.deepcopy(lab.module), lab.job.train, lab.reader()
    now: set[str] = set()
    whole = [False]

    def bypass(name: str, block: nn.Module) -> None:
        forward = block.forward
        visits = sum(name not in left for left in gone)

        def counted(value: Any) -> Any:
            """A parameter that several blocks read counts by each one's visits."""
            if not isinstance(value, nn.Parameter):
                return value
            value = value.view_as(value)
            value.register_hook(scale)
            return value

        def scale(g: Tensor) -> Tensor:
            return g if whole[0] else g * len(gone) / visits

        block.forward = lambda *a, **k: (
            a[0] if name in now else forward(*(counted(v) for v in a), **k)
        )
        for parameter in block.parameters():
            parameter.register_hook(scale)

    def batch(step: int, m: int) -> Mapping[str, Tensor]:
        now.clear()
        whole[0] = full is not None and full.has(step)
        now.update(() if whole[0] else gone[m])
        found: Mapping[str, Tensor] = reader.batch(step, m, train.microbatch_size)
        return found

    with models.ready(module, lab.job):
        for block in row_of_blocks(lab.graph):
            bypass(block.name, module.get_submodule(block.name))
        seen = oracle.train(module, batch, train, steps=train.steps, microbatches=len(gone))
    return Trained(seen.losses, seen.norms, dict(module.state_dict()), [], [])


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=() if seed == 0 and fast else pytest.mark.slow)
        for name, fast in (
            ("gpt_bytes", False),
            ("layered", True),
            ("resnet_digits", False),
            ("hf_gpt2", False),
            ("hf_llama", False),
        )
        for seed in range(12)
    ],
)
def test_any_routes_give_the_plain_loop_over_them(
    deeper: Callable[[str], Any], equal_training: Any, name: str, seed: int
) -> None:
    lab = deeper(name)
    plan, gone = drawn(lab, random.Random(f"{name} {seed}"))
    print(plan, plan.routes, gone)  # seen when it fails
    got = lab.train(lab.world(PEERS), plan)
    equal_training(got, plain(lab, gone, plan.full))
    module, reader, size = copy.deepcopy(lab.module), lab.reader(), lab.job.train.microbatch_size
    # A run has buffers too that are none of the state_dict.
    assert not module.load_state_dict(got.weights, strict=False).missing_keys
    with models.ready(module, lab.job), torch.no_grad():
        found = [module.eval()(**reader.held_out(m, size)) for m in range(2)]
    losses = [out if isinstance(out, Tensor) else out["loss"] for out in found]
    assert got.evaluations[-1] == pytest.approx(float(sum(losses)) / 2, rel=1e-4)
