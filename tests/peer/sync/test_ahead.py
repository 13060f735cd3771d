"""Error feedback that steps ahead equals a plain loop over copies of the whole model."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.dag.plan.plan import CodecChoice, PlanError, StageExchange
from shoal.peer.compute.records import take_records
from shoal.peer.sync.optimizer import learning_rate

STEPS = 12
RATIO = 7
CODEC = f"ef+topk:ratio={RATIO},values=fp32"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.last = nn.Linear(16, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.last(self.layers(x)), y)


@pytest.fixture
def case(make_case):
    def make(module=None, **train):
        rng = np.random.default_rng(0)
        data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
        settings = {"steps": STEPS, "weight_decay": 0.0, "eps": 0.01} | train
        return make_case(module or Net(), **data, **settings)

    return make


class Tied(nn.Module):
    """Its last layer is its first one, transposed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16, bias=False)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x, y):
        return F.cross_entropy(self.layers(torch.tanh(self.first(x))) @ self.first.weight, y)


def ahead(plan, text=CODEC):
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    return replace(
        plan,
        exchanges=tuple(StageExchange(k, strategy="ahead") for k in range(len(plan.stages))),
        codecs=tuple(CodecChoice(a, b, "sync", text) for a, b in links),
    )


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


class Apart(Tied):
    """The same with a copy of that layer's own."""

    def __init__(self):
        super().__init__()
        self.copy = nn.Parameter(self.first.weight.detach().clone())

    def forward(self, x, y):
        return F.cross_entropy(self.layers(torch.tanh(self.first(x))) @ self.copy, y)


def plain(case, holders, vectors, share=1.0, module=None, copies=()):
    """The loop: each holder has a model and an optimizer. Of each vector of parameters, named in
    `vectors`, it clips the gradient and keeps what is not among the largest RATIO-th of its update.
    `copies` of one parameter get the sum of their gradients, and the mean of what is sent of them.
    The losses, and the weights that they have in common."""
    train, size = case.train, case.train.microbatch_size
    read, count = case.reader(), case.train.microbatches
    models = [copy.deepcopy(module or case.module).train() for _ in range(holders)]
    if train.optimizer == "adamw":
        made = [
            torch.optim.AdamW(m.parameters(), betas=train.betas, eps=train.eps, weight_decay=0)
            for m in models
        ]
    else:
        made = [torch.optim.SGD(m.parameters(), momentum=train.momentum) for m in models]
    common = {n: p.detach().clone() for n, p in models[0].named_parameters()}
    unsent = [{n: torch.zeros_like(p) for n, p in common.items()} for _ in models]
    losses = []
    for step in range(train.steps):
        total, found = {n: torch.zeros_like(p) for n, p in common.items()}, []
        for r, (model, optimizer) in enumerate(zip(models, made, strict=True)):
            parameters = dict(model.named_parameters())
            place = {n: common[n] - share * unsent[r][n] / count for n in common}
            for n, p in parameters.items():
                p.data.copy_(place[n])
            optimizer.zero_grad()
            own = range(r, count, holders)
            for m in own:
                batch = read.batch(step, m, size)
                loss = model(batch["x"], batch["y"])
                (loss / len(own)).backward()
                found.append((m, loss.item()))
            if copies:
                whole = sum(parameters[n].grad for n in copies)
                for n in copies:
                    parameters[n].grad = whole.clone()
            for names in vectors:
                nn.utils.clip_grad_norm_([parameters[n] for n in names], train.clip)
            optimizer.param_groups[0]["lr"] = learning_rate(train, step)
            optimizer.step()
            for names in vectors:
                updates = [len(own) * (place[n] - parameters[n]) + unsent[r][n] for n in names]
                update = flat(updates)
                sent = torch.zeros_like(update)
                largest = update.abs().topk(round(update.numel() / RATIO)).indices
                sent[largest] = update[largest]
                at = 0
                for n, whole in zip(names, updates, strict=True):
                    part = sent[at : at + whole.numel()].view_as(whole)
                    unsent[r][n] = (whole - part).detach()
                    total[n] += part
                    at += whole.numel()
        if copies:
            mean = sum(total[n] for n in copies) / len(copies)
            total |= dict.fromkeys(copies, mean)
        common = {n: common[n] - total[n] / count for n in common}
        losses.append(np.mean([loss for _, loss in sorted(found)]))
    return losses, common


@pytest.mark.parametrize(
    ("holders", "train"),
    [
        ("a b", {}),
        ("a b c", {"batch": 10}),  # one does two microbatches of five, one only one
        ("a b c", {"batch": 4}),  # one does none
        ("a b", {"optimizer": "sgd", "lr": 0.1}),
    ],
)
def test_holders_that_step_ahead_equal_a_loop_over_whole_models(case, holders, train):
    made = case(**train)
    world = made.world(ahead(made.plan(1, [holders])))
    losses = world.run(STEPS)
    names = [name for name, _ in made.module.named_parameters()]
    expected, weights = plain(made, len(holders.split()), [names])
    assert losses == pytest.approx(expected, rel=1e-4)
    got = world.weights()
    assert all(torch.allclose(got[n], weights[n], atol=1e-5) for n in names)
    # The bar of the test: with what is not sent left out of the gradients it is another run.
    other, _ = plain(made, len(holders.split()), [names], share=0.0)
    assert losses != pytest.approx(other, rel=1e-3)


def test_a_tied_parameter_is_stepped_ahead_with_the_gradients_of_all_its_stages(case):
    made = case(Tied())
    world = made.world(ahead(made.plan(2, ["a b", "c d"])))
    losses = world.run(STEPS)
    stages = [h.stage.trainable for d in "ac" for h in world.devices[d]._work.held.values()]
    assert {*stages[0]} & {*stages[1]} == {"first.weight"}
    vectors = [stages[0], ["copy" if n == "first.weight" else n for n in stages[1]]]
    copies = ("first.weight", "copy")
    expected, weights = plain(made, 2, vectors, module=Apart(), copies=copies)
    assert losses == pytest.approx(expected, rel=1e-4)
    copies = [take_records(world.devices[p]._work, STEPS)["param:first.weight"] for p in "abcd"]
    assert all(torch.equal(copies[0], c) for c in copies)
    assert torch.allclose(copies[0], weights["first.weight"], atol=1e-5)


def test_all_holders_have_the_same_weights_wherever_they_train(case):
    made = case()
    world = made.world(ahead(made.plan(2, ["a b", "c d"])))
    world.run(STEPS)
    for pair in (("c", "d"), ("a", "b")):
        one, other = (take_records(world.devices[p]._work, STEPS) for p in pair)
        names = [n for n in one if n.startswith("param:")]
        assert names
        assert all(torch.equal(one[n], other[n]) for n in names)
        own = [n for n in one if n.startswith("own/")]
        assert own
        assert not set(own) & set(other), "each has an optimizer of its own"
    work = world.devices["b"]._work
    work.held[0].strategy.before_forward()
    away = dict(work.held[0].executor.parameters)
    assert any(not torch.equal(away[n], t) for n, t in work.held[0].parameters().items())
    again = take_records(work, STEPS)
    assert all(torch.equal(again[n], other[n]) for n in names), "a snapshot has what all have"


@pytest.mark.parametrize("holders", [["a", "b"], ["a b", "c"], ["a b", "b a"]])
def test_a_plan_without_whole_pipelines_cannot_step_ahead(case, holders):
    made = case()
    with pytest.raises(PlanError, match="expected as many in each"):
        ahead(made.plan(2, holders)).validate(len(made.captured.graph.operators))


def test_going_on_from_snapshots_equals_never_having_stopped(case):
    """Each holder finds its own state among those of all."""
    made = case()
    plan, stop = ahead(made.plan(2, ["a b", "c d"])), STEPS // 2
    calm = made.world(plan)

    def some(world, first, last):
        for step in range(first, last):
            for device in world.devices.values():
                device.prefetch(step)
            world._pass(step, {p: b.flow.actions(p) for p, b in world.built.items()})

    some(calm, 0, stop)
    states = tuple(device.snapshot(stop)() for device in calm.devices.values())
    again = made.world(plan, first_step=stop, resumed=states)
    some(calm, stop, STEPS)
    some(again, stop, STEPS)
    assert [o.loss for o in again.outcomes] == [o.loss for o in calm.outcomes[stop:]]
    got, wanted = again.weights(), calm.weights()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)
    # Under another plan, with or without steps ahead, everybody begins with some holder's state.
    for other in (ahead(made.plan(1, ["x y"])), made.plan(2, ["x", "y"])):
        moved = made.world(other, first_step=stop, resumed=states)
        some(moved, stop, STEPS)
        assert moved.outcomes[0].loss == pytest.approx(calm.outcomes[stop].loss, rel=0.05)
        assert moved.devices["x"]._work.held[0].strategy.holder.optimizer.state_tensors()
