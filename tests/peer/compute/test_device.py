"""Devices that follow a plan train as the plain loop does (I1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.transforms.lower import lower

STEPS = 6


def assert_same_losses(world, seen):
    for outcome, loss, norm in zip(world.outcomes, seen.losses, seen.norms, strict=True):
        assert outcome.loss == pytest.approx(loss, rel=1e-5)
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-3)


def assert_same_weights(world, module):
    found, plain = world.weights(), module.state_dict()
    assert set(found) == set(plain)
    apart = sum(float((found[n].double() - w.double()).square().sum()) for n, w in plain.items())
    whole = sum(float(w.double().square().sum()) for w in plain.values())
    assert (apart / whole) ** 0.5 <= 1e-5
    for name, weight in plain.items():
        assert found[name].dtype == weight.dtype
        assert float((found[name] - weight).double().norm()) <= 1e-3 * (
            float(weight.double().norm()) + 1e-6
        )


def check(case, plan, **options):
    seen, module = case.plain()
    world = case.world(plan, **options)
    world.run(case.train.steps)
    assert_same_losses(world, seen)
    assert_same_weights(world, module)
    return world


class Mlp(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(6, 16, bias=not norm),  # a bias before a norm has no gradient but rounding
            nn.BatchNorm1d(16) if norm else nn.Identity(),
            nn.Tanh(),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.Linear(16, 4),
        )

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a key's bias has no gradient
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h):
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Gpt(nn.Module):
    """Byte-level, tied embeddings."""

    def __init__(self, width=16, blocks=2, length=8, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(256, width)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.places = nn.Parameter(torch.randn(length, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x, y):
        h = self.drop(self.tokens(x) + self.places)
        for block in self.blocks:
            h = self.drop(block(h))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def digits(seed=0, samples=90):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(samples, 6)).astype("f4"),
        "y": rng.integers(0, 4, samples),
    }


PLANS = [
    (1, ["a"]),
    (2, ["a", "b"]),
    (1, ["a b c"]),
    (2, ["a b", "c"]),
    (3, ["a", "b c", "a"]),
    (4, ["a", "b", "a", "b"]),
    (3, ["a b", "b c", "c a"]),
]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_any_plan_trains_as_the_plain_loop(make_case, optimizer, stages, holders):
    case = make_case(Mlp(), **digits(), optimizer=optimizer, clip=0.5)
    check(case, case.plan(stages, holders))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_without_clipping_nobody_has_to_wait_for_the_norm(make_case, optimizer, stages, holders):
    """The losses, the norms that the hub reports, and the weights are the same bits."""
    case = make_case(Mlp(), **digits(), optimizer=optimizer, clip=0.0)
    plan = case.plan(stages, holders)
    waits, goes_on = check(case, plan), check(case, replace(plan, without_norm=True))
    assert goes_on.outcomes == waits.outcomes
    weights = goes_on.weights()
    assert all(torch.equal(weights[n], t) for n, t in waits.weights().items())
    flows = {peer: built.flow for peer, built in goes_on.built.items()}
    waiting = [p for p in plan.peers if any(str(a) == "<2@norm" for a in flows[p].actions(p))]
    flow = flows[plan.peers[0]]
    shared = [s for s, slot in zip(flow.stages, plan.stages, strict=True) if len(slot.holders) > 1]
    assert waiting == [flow.hub] if all(s.trainable for s in shared) else waiting == [*plan.peers]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_tied_weights_get_the_sum_of_their_gradients(make_case, schedule, stages, holders):
    case = make_case(Gpt(), length=8)
    check(case, case.plan(stages, holders, schedule=schedule))


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_batch_statistics_are_applied_in_microbatch_order(make_case, stages, holders):
    case = make_case(Mlp(norm=True), **digits(), microbatch=4, batch=16, optimizer="sgd")
    world = check(case, case.plan(stages, holders))
    assert int(world.weights()["net.1.num_batches_tracked"]) == STEPS * 4


class Frozen(nn.Module):
    """The first layers are frozen; one parameter is never read, one buffer only read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8).requires_grad_(False)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.last.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.full((8,), 1.5))
        self.register_buffer("hidden", torch.full((8,), 0.5), persistent=False)

    def forward(self, x, y):
        h = torch.tanh(self.first(x)) * self.scale + self.hidden
        return F.cross_entropy(self.last(torch.tanh(self.middle(h)) * self.scale), y)


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_frozen_and_unread_parameters_stay_and_are_exported(make_case, roles, stages, holders):
    case = make_case(Frozen(), **digits())
    world = check(case, case.plan(stages, holders))
    assert torch.equal(world.weights()["unused"], case.module.unused)
    if holders == ["a", "b"]:
        backwards = [k for k, _ in world.frames if k.role is roles.ACTIVATION_GRAD]
        assert len(backwards) in (0, STEPS * 4)


class Weighted(nn.Module):
    """Loss over unmasked tokens, their number as weight, a metric behind the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(256, 12)
        self.out = nn.Linear(12, 256)

    def forward(self, x, y):
        mask = (y % 5 != 0).float()
        mask = mask * (x[:, :1] % 2 == 0)  # whole samples go, so that a weight may be 0
        logits = self.out(torch.tanh(self.emb(x)))
        each = -F.log_softmax(logits, -1).gather(-1, y[..., None])[..., 0]
        loss = (each * mask).sum() / mask.sum().clamp(min=1)
        hits = (logits.argmax(-1) == y).float().mean()
        return {"loss": loss, "weight": mask.sum(), "accuracy": hits, "double": loss.detach() * 2}


def plain_weighted(case, microbatches):
    """Weighted held-out loss and accuracy after the plain loop."""
    module, read = case.plain()[1].eval(), case.reader()
    with torch.no_grad():
        outs = [module(**read.held_out(m, 1)) for m in range(microbatches)]
    total = sum(float(o["weight"]) for o in outs)
    return [
        sum(float(o["weight"]) * float(o[k]) for o in outs) / total for k in ("loss", "accuracy")
    ]


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_weights_make_the_mean_that_of_all_tokens(make_case, stages, holders):
    case = make_case(Weighted(), length=6, microbatch=1, batch=5)
    world = check(case, case.plan(stages, holders, held_out=5))
    found = world.evaluate(STEPS - 1)
    expected = plain_weighted(case, 5)
    assert found.loss == pytest.approx(expected[0], rel=1e-5)
    assert {m.name: m.value for m in found.metrics}["accuracy"] == pytest.approx(expected[1])
    for outcome in world.outcomes:
        metrics = {m.name: m.value for m in outcome.metrics}
        assert set(metrics) == {"accuracy", "double"}
        assert metrics["double"] == pytest.approx(2 * outcome.loss, rel=1e-5)


def test_one_microbatch_takes_another_route(make_case):
    case = make_case(Gpt(), length=8)
    plan = case.plan(3, ["a b", "c d e", "b a"], routes={1: "bea", 2: "adb"})
    check(case, plan)


def test_holders_that_run_nothing_stay_equal(make_case):
    case = make_case(Mlp(norm=True), **digits(), microbatch=4, batch=8, optimizer="sgd")
    plan = case.plan(2, ["a b c", "d e"], routes={m: "ad" for m in range(2)})
    world = check(case, plan)
    states = [
        {**h.executor.parameters, **h.executor.buffers}
        for p in ("a", "b", "c")
        for k, h in world.devices[p]._work.held.items()
    ]
    for other in states[1:]:
        assert all(torch.equal(other[n], t) for n, t in states[0].items())


def test_the_order_of_events_changes_no_bit(make_case):
    case = make_case(Gpt(), length=8)
    plan = case.plan(3, ["a b", "c", "b a"])
    losses = [case.world(plan, seed=seed).run(3) for seed in (1, 2)]
    assert losses[0] == losses[1]


def plain_evaluation(case, module, microbatches):
    module.eval()
    read, size = case.reader(), case.train.microbatch_size
    with torch.no_grad():
        losses = [float(module(**read.held_out(m, size))) for m in range(microbatches)]
    return sum(losses) / microbatches


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_an_evaluation_is_the_plain_one_and_changes_nothing(make_case, stages, holders):
    case = make_case(Mlp(norm=True), **digits(), microbatch=4, batch=8, optimizer="sgd", steps=3)
    world = case.world(case.plan(stages, holders, held_out=3))
    seen, module = case.plain()
    world.run(3)
    before = world.weights()
    found = world.evaluate(2)
    assert found.loss == pytest.approx(plain_evaluation(case, module, 3), rel=1e-5)
    assert found.weight == 3
    assert all(torch.equal(t, before[n]) for n, t in world.weights().items())
    assert seen.losses == pytest.approx([o.loss for o in world.outcomes], rel=1e-5)


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_masks_are_those_of_the_one_stage_run(make_case, stages, holders):
    case = make_case(Gpt(dropout=0.2), length=8, steps=4)
    one = case.world(case.plan(1, ["a"]))
    other = case.world(case.plan(stages, holders))
    assert other.run(4) == pytest.approx(one.run(4), rel=1e-5)
    assert one.outcomes[0].loss != pytest.approx(plain_first_loss(case), rel=1e-3)


def test_recomputation_gives_the_same_bits_for_less_memory(make_case):
    case = make_case(Gpt(dropout=0.2), length=8, steps=4, batch=16)
    plan = case.plan(2, ["a", "b"], schedule="gpipe")
    again = replace(plan, stages=tuple(replace(s, recompute=True) for s in plan.stages))
    one, other = case.world(plan), case.world(again)
    assert one.run(2) == other.run(2)
    weights = other.weights()
    assert all(torch.equal(weights[name], w) for name, w in one.weights().items())
    for peer in ("a", "b"):
        assert other.devices[peer].peak_bytes < one.devices[peer].peak_bytes


def plain_first_loss(case):
    """Without dropout."""
    module, read = case.module.eval(), case.reader()
    with torch.no_grad():
        return sum(float(module(**read.batch(0, m, 2))) for m in range(4)) / 4


@pytest.mark.parametrize(("stages", "holders"), PLANS[1:])
@pytest.mark.parametrize("model", ["gpt", "norm"])
def test_peers_with_the_core_set_mix_with_others(make_case, model, stages, holders):
    if model == "gpt":
        case = make_case(Gpt(), length=8, steps=4)
    else:
        case = make_case(Mlp(norm=True), **digits(), microbatch=4, batch=16, optimizer="sgd")
    core = lower(case.captured.graph.bind(case.train.microbatch_size))
    plan = case.plan(stages, holders, held_out=2)
    mixed = case.world(plan, of={"b": {"core": core}})
    full = case.world(plan)
    seen, _ = case.plain()
    assert mixed.run(case.train.steps) == pytest.approx(seen.losses, rel=1e-5)
    full.run(case.train.steps)
    assert mixed.evaluate(9).loss == pytest.approx(full.evaluate(9).loss, rel=1e-5)


@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_mixed_precision_flows_as_captured(make_case, stages, holders):
    case = make_case(Gpt(), length=8, steps=3, dtype="bf16")
    one, other = case.world(case.plan(1, ["a"])), case.world(case.plan(stages, holders))
    assert other.run(3) == pytest.approx(one.run(3), rel=1e-3)
    assert one.outcomes[0].loss == pytest.approx(case.plain()[0].losses[0], rel=1e-2)
    if stages == 3:
        assert any(a.spec.dtype == "bfloat16" for k, a in other.frames if k.microbatch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("stages", "holders"), PLANS)
def test_a_cuda_device_trains_as_the_plain_loop(make_case, stages, holders):
    case = make_case(Gpt(dropout=0.2), length=8, steps=4)
    plan = case.plan(stages, holders, held_out=2)
    cpu, cuda = case.world(plan), case.world(plan, device="cuda")
    assert cuda.run(4) == pytest.approx(cpu.run(4), rel=1e-4)
    assert cuda.evaluate(3).loss == pytest.approx(cpu.evaluate(3).loss, rel=1e-4)
    assert all(d.peak_bytes > 0 for d in cuda.devices.values())
