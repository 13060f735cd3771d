"""Error feedback that steps ahead equals a plain loop over copies of the whole model."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.compression.codec import parse
from shoal.dag.plan import CodecChoice
from shoal.peer.optimizer import learning_rate
from shoal.peer.records import take_records

STEPS = 12
AHEAD = "ahead+topk:ratio=7,values=fp32"


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
    def make(**train):
        rng = np.random.default_rng(0)
        data = {"x": rng.normal(size=(90, 6)).astype("f4"), "y": rng.integers(0, 4, 90)}
        settings = {"steps": STEPS, "weight_decay": 0.0, "eps": 0.01} | train
        return make_case(Net(), **data, **settings)

    return make


def coded(plan, text, *, whole):
    links = [(a, b) for a in plan.peers for b in plan.peers if a != b]
    return replace(
        plan,
        stages=tuple(replace(s, whole=whole and len(s.holders) > 1) for s in plan.stages),
        codecs=tuple(CodecChoice(a, b, "sync", text) for a, b in links),
    )


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def plain(case, holders, ratio, share=1.0):
    """The loop: each holder has a model and an optimizer, and keeps what is not among the largest
    1/ratio of all elements. The losses, and the weights that they have in common."""
    train, size = case.train, case.train.microbatch_size
    read, count = case.reader(), case.train.microbatches
    models = [copy.deepcopy(case.module).train() for _ in range(holders)]
    if train.optimizer == "adamw":
        made = [
            torch.optim.AdamW(m.parameters(), betas=train.betas, eps=train.eps, weight_decay=0)
            for m in models
        ]
    else:
        made = [torch.optim.SGD(m.parameters(), momentum=train.momentum) for m in models]
    common = flat(models[0].parameters())
    unsent, losses = [torch.zeros_like(common) for _ in models], []
    for step in range(train.steps):
        sent, found = [], []
        for r, (model, optimizer) in enumerate(zip(models, made, strict=True)):
            place = common - share * unsent[r] / count
            nn.utils.vector_to_parameters(place.clone(), model.parameters())  # which keeps views
            optimizer.zero_grad()
            own = range(r, count, holders)
            for m in own:
                batch = read.batch(step, m, size)
                loss = model(batch["x"], batch["y"])
                (loss / len(own)).backward()
                found.append((m, loss.item()))
            nn.utils.clip_grad_norm_(model.parameters(), train.clip)
            optimizer.param_groups[0]["lr"] = learning_rate(train, step)
            optimizer.step()
            update = len(own) * (place - flat(model.parameters())) + unsent[r]
            kept = torch.zeros_like(update)
            largest = update.abs().topk(round(update.numel() / ratio)).indices
            kept[largest] = update[largest]
            unsent[r] = update - kept
            sent.append(kept)
        common = common - sum(sent) / count
        losses.append(np.mean([loss for _, loss in sorted(found)]))
    return losses, common


@pytest.mark.parametrize(
    ("holders", "train"),
    [
        ("a b", {}),
        ("a b c", {"batch": 10}),  # one does two microbatches of five, one only one
        ("a b", {"optimizer": "sgd", "lr": 0.1}),
    ],
)
def test_holders_that_step_ahead_equal_a_loop_over_whole_models(case, holders, train):
    made = case(**train)
    world = made.world(coded(made.plan(1, [holders]), AHEAD, whole=True))
    losses = world.run(STEPS)
    expected, weights = plain(made, len(holders.split()), 7)
    assert losses == pytest.approx(expected, rel=1e-4)
    got = world.weights()
    names = [name for name, _ in made.module.named_parameters()]
    assert torch.allclose(flat(got[n] for n in names), weights, atol=1e-5)
    # The bar of the test: with what is not sent left out of the gradients it is another run.
    other, _ = plain(made, len(holders.split()), 7, share=0.0)
    assert losses != pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize("whole", [False, True])
def test_all_holders_have_the_same_weights_wherever_they_train(case, whole):
    made = case()
    world = made.world(coded(made.plan(2, ["a b", "c d"]), AHEAD, whole=whole))
    world.run(STEPS)
    for pair in (("c", "d"), ("a", "b")):
        one, other = (take_records(world.devices[p]._work, STEPS) for p in pair)
        names = [n for n in one if n.startswith("param:")]
        assert names
        assert all(torch.equal(one[n], other[n]) for n in names)
        own = [n for n in one if n.startswith("ahead/")]
        assert own
        assert not set(own) & set(other), "each has an optimizer of its own"
    work = world.devices["b"]._work
    work.held[0].ahead.leave(work.unsent(0))
    away = dict(work.held[0].executor.parameters)
    assert any(not torch.equal(away[n], t) for n, t in work.held[0].parameters().items())
    again = take_records(work, STEPS)
    assert all(torch.equal(again[n], other[n]) for n in names), "a snapshot has what all have"


def test_without_a_codec_between_holders_gradients_are_exchanged_as_ever(case):
    made = case()
    plan = made.plan(1, ["a b"])
    bare = made.world(replace(coded(plan, AHEAD, whole=False), codecs=()))
    assert bare.run(STEPS) == pytest.approx(made.plain()[0].losses, rel=1e-4)
    assert bare.devices["a"]._work.held[0].ahead is None


@pytest.mark.parametrize("text", ["topk:ratio=4", "ef+int8", "lossless", "bf16"])
def test_whole_gradients_add_up_to_the_same_as_parts(case, text):
    """To the bit where nothing is lost; else once, not twice."""
    made = case()
    plan = made.plan(1, ["a b"])
    whole = made.world(coded(plan, text, whole=True))
    parts = made.world(coded(plan, text, whole=False))
    losses, others = whole.run(STEPS), parts.run(STEPS)
    if text == "lossless":
        assert losses == others
    else:
        assert parse(text).error_bound(made.captured.graph.spec["param:last.weight"]) > 0
        assert losses == pytest.approx(others, rel=0.05)
    a, b = (take_records(whole.devices[p]._work, STEPS) for p in "ab")
    assert all(torch.equal(a[n], b[n]) for n in a if n[:6] == "param:")
