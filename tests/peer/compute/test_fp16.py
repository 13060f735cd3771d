"""fp16 with scaled losses over stages and holders, against torch's autocast and scaler in one loop:
the same losses, the same scales, the same steps skipped by all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.plan.plan import CodecChoice, PlanError, StageExchange
from shoal.job import Train
from shoal.peer.compute.records import load_records, write_records
from shoal.peer.core.snapshots import SnapshotError

STEPS = 12
EAGER = {"init_scale": 2.0**20, "growth_interval": 2}
"""It overflows at once, and again and again."""
NIGHTLY = pytest.mark.slow
PLANS = [
    pytest.param(1, ["a"], marks=NIGHTLY),
    pytest.param(3, ["a", "b", "c"], marks=NIGHTLY),
    (2, ["a b", "c d"]),
    pytest.param(3, ["a b", "c", "b d"], marks=NIGHTLY),
]


class Net(nn.Module):
    """Numbers of `size` come in, and the first weights are as much smaller: of a large size, their
    gradients alone overflow, and no other does."""

    def __init__(self, size=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.size = size
        self.first, self.norm = nn.Linear(6, 16), nn.LayerNorm(16)
        self.second, self.last = nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.first.weight /= size

    def extra_repr(self):  # by which captures are known
        return f"{self.size}"

    def forward(self, x, y):
        h = torch.tanh(self.norm(self.first(x * self.size)))
        return F.cross_entropy(self.last(torch.tanh(self.second(h))), y)


def data():
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}


@pytest.fixture
def made(make_case):
    def make(size=1.0, **train):
        train = {"steps": STEPS, "loss_scale": EAGER, **train}
        return make_case(Net(size), **data(), dtype="fp16", **train)

    return make


def check(case, world):
    """Losses, scales, skips, norms and weights are the plain loop's."""
    seen, module = case.plain()
    world.run(case.train.steps)
    skipped = [not np.isfinite(norm) for norm in seen.norms]
    assert [o.loss_scale for o in world.outcomes] == seen.scales
    assert [o.skipped for o in world.outcomes] == skipped
    assert 1 < sum(skipped) < len(skipped) - 3, "the test shows too little"
    for o, loss, norm, skips in zip(world.outcomes, seen.losses, seen.norms, skipped, strict=True):
        assert o.loss == pytest.approx(loss, rel=2e-3)
        assert skips or o.grad_norm == pytest.approx(norm, rel=1e-2)
    for name, wanted in module.state_dict().items():
        apart = (world.weights()[name] - wanted).double().norm() / wanted.double().norm()
        assert float(apart) < 5e-3, f"{name} is {float(apart)} off"
    return world


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_it_trains_as_torch_does_under_any_plan(made, stages, holders):
    case = made()
    check(case, case.world(case.plan(stages, holders)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [
        {"clip": 0.0},
        {"clip": 0.05},
        {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0},
        {"optimizer": "muon", "no_muon": ("first.*", "last.*")},
        {"optimizer": "adafactor"},
        {"microbatch": 8},
    ],
    ids=str,
)
def test_with_any_clip_optimizer_and_microbatch(made, train):
    case = made(**train)
    check(case, case.world(case.plan(2, ["a b", "c"])))


@pytest.mark.slow
def test_with_halves_of_backwards_and_recomputation(made):
    case = made()
    plan = case.plan(3, ["a", "b", "c"], schedule="zero-bubble")
    stages = tuple(replace(s, recompute=s.start == 0) for s in plan.stages)
    check(case, case.world(replace(plan, stages=stages)))


class Normed(nn.Module):
    """A batch norm, whose running statistics know of steps that are skipped, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.last(torch.tanh(self.norm(self.first(x)))), y)


@pytest.mark.slow
def test_running_statistics_take_in_what_is_skipped(make_case):
    case = make_case(Normed(), **data(), dtype="fp16", steps=STEPS, loss_scale=EAGER)
    check(case, case.world(case.plan(2, ["a b", "c"])))


def test_where_one_peer_overflows_all_skip(made):
    """The gradients of the first stage overflow alone."""
    case = made(3e3, loss_scale={"init_scale": 2.0**12, "growth_interval": 3})
    world = case.world(case.plan(3, ["a", "b", "c"]))
    held = world.devices["c"]._now.held[2]
    finite, step = [], held.executor.zero_grad

    def seen():
        grads = [p.grad for p in held.executor.parameters.values() if p.grad is not None]
        finite.append(all(bool(g.isfinite().all()) for g in grads))
        step()

    held.executor.zero_grad = seen
    check(case, world)
    assert all(finite), "the last stage overflows as well: the test shows too little"


def test_what_changes_with_an_update_stays_in_a_step_that_is_skipped(made):
    case = made(ema=0.9, loss_scale={"init_scale": 2.0**30, "growth_interval": 2})
    world = case.world(case.plan(2, ["a", "b"]))
    before = {p: load_records([d.snapshot(0)()]).tensors for p, d in world.devices.items()}
    world.run(1)
    assert [o.skipped for o in world.outcomes] == [True]
    for peer, device in world.devices.items():
        after = load_records([device.snapshot(1)()]).tensors
        assert after.keys() == before[peer].keys()
        changed = [n for n, t in after.items() if not torch.equal(t, before[peer][n])]
        assert changed == ["scaler:scale"]


@pytest.mark.parametrize(
    ("stop", "holders"),
    [
        pytest.param(1, ["a", "b"], marks=NIGHTLY),
        pytest.param(6, ["a", "b"], marks=NIGHTLY),
        (6, ["c a", "b", "d"]),
    ],
)
def test_a_run_goes_on_from_snapshots_with_its_scale(made, stop, holders):
    case = made()
    calm = case.world(case.plan(2, ["a", "b"]))
    steps(calm, 0, stop)
    states = tuple(d.snapshot(stop)() for d in calm.devices.values())
    plan = case.plan(len(holders), holders)
    again = case.world(plan, first_step=stop, resumed=states)
    steps(calm, stop, STEPS)
    steps(again, stop, STEPS)
    wanted = [(o.loss_scale, o.skipped) for o in calm.outcomes[stop:]]
    assert [(o.loss_scale, o.skipped) for o in again.outcomes] == wanted
    assert any(skipped for _, skipped in wanted)
    losses = [o.loss for o in calm.outcomes[stop:]]
    assert [o.loss for o in again.outcomes] == pytest.approx(losses, rel=1e-3)


def steps(world, first, stop):
    for step in range(first, stop):
        for device in world.devices.values():
            device.prefetch(step)
        world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})


def test_a_snapshot_without_a_scale_or_with_a_wrong_one_is_refused(made):
    case = made()
    plan = case.plan(1, ["a"])
    calm = case.world(plan)
    steps(calm, 0, 2)
    tensors = load_records([calm.devices["a"].snapshot(2)()]).tensors
    without = {n: t for n, t in tensors.items() if n != "scaler:scale"}
    wrong = tensors | {"scaler:scale": torch.tensor(0.0, dtype=torch.float64)}
    for found in (without, wrong):
        with pytest.raises(SnapshotError, match="scale of losses"):
            case.world(plan, first_step=2, resumed=((write_records(found),),))


def test_frames_between_stages_are_as_wide_as_autocast_has_them(made):
    case = made()
    world = case.world(case.plan([case.operators - 3], ["a", "b"]))
    world.run(1)
    assert {a.spec.dtype for _, a in world.frames} == {"float16", "float64"}


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8:block=64"])
def test_codecs_of_activations_and_gradients_let_no_overflow_pass_as_a_number(made, codec):
    """Scales and skips are those without codecs, losses near them."""
    case = made(batch=32, microbatch=16)
    plan = case.plan(3, ["a b", "c", "b d"])
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    roles = ("activation", "activation_grad", "sync")
    choices = tuple(CodecChoice(a, b, role, codec) for a, b in links for role in roles)
    plain, world = case.world(plan), case.world(replace(plan, codecs=choices))
    plain.run(STEPS)
    world.run(STEPS)
    assert {a.codec.partition("/")[0] for _, a in world.frames} > {codec.partition(":")[0]}
    scales = [(o.loss_scale, o.skipped) for o in plain.outcomes]
    assert [(o.loss_scale, o.skipped) for o in world.outcomes] == scales
    losses = [o.loss for o in plain.outcomes]
    assert [o.loss for o in world.outcomes] == pytest.approx(losses, rel=0.05)


def test_a_plan_by_which_nobody_would_know_of_an_overflow_is_refused(made):
    case = made(clip=0.0)
    plan = case.plan(2, ["a", "b"])
    with pytest.raises(PlanError, match="updates that wait for no norm"):
        case.world(replace(plan, without_norm=True))
    exchange = StageExchange(0, strategy="powersgd:rank=1,saving=2")
    with pytest.raises(PlanError, match="has powersgd: expected"):
        case.world(replace(case.plan(1, ["a b"]), exchanges=(exchange,)))


@pytest.mark.slow
def test_a_run_whose_losses_are_not_scaled_has_no_scale(make_case):
    case = make_case(Net(), **data(), steps=2)
    world = case.world(case.plan(1, ["a"]))
    world.run(2)
    assert [(o.loss_scale, o.skipped) for o in world.outcomes] == [(0.0, False)] * 2
    assert not any("scaler" in n for n in load_records([world.devices["a"].snapshot(2)()]).tensors)
    assert Train(steps=1).loss_scale.init_scale == 65536.0
