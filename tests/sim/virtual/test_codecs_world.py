"""Codecs through the whole pipeline: broker, peers and links, under a plan that names them."""

from __future__ import annotations

import pytest
import torch

from shoal.dag.plan.plan import CodecChoice, PeerId, Plan, StageSlot, Visit
from shoal.job import Job

JOB = Job.from_table(
    {
        "version": 1,
        "name": "gpt with codecs",
        "model": {
            "factory": "shoal.examples.gpt:gpt",
            "args": {"layers": 2, "width": 32, "heads": 2, "length": 32, "dropout": 0.0},
        },
        "data": {"kind": "text", "length": 32},
        "train": {"steps": 3, "batch": 8, "microbatch": 2, "lr": 1e-2},
    }
)
ROLES = ("activation", "activation_grad", "sync")
HOLDERS = [["p0"], ["p1", "p2"], ["p3"]]


def plan_with(operators, codec=None):
    """Three stages, the middle one with two holders; a codec for every link, one for all roles or
    by role."""
    by_role = dict(codec) if isinstance(codec, tuple) else dict.fromkeys(ROLES, codec)
    cuts = [0, operators // 3, 2 * operators // 3, operators]
    slots = tuple(
        StageSlot(a, b, tuple(map(PeerId, names)))
        for a, b, names in zip(cuts[:-1], cuts[1:], HOLDERS, strict=True)
    )
    routes = tuple(
        tuple(Visit(k, s.holders[m % len(s.holders)]) for k, s in enumerate(slots))
        for m in range(4)
    )
    peers = [PeerId(f"p{i}") for i in range(4)]
    codecs = tuple(
        CodecChoice(a, b, role, text)
        for a in peers
        for b in peers
        for role, text in by_role.items()
        if a != b and text
    )
    return Plan(slots, routes, 2, "1f1b", codecs)


@pytest.fixture(scope="module")
def trained(laboratory):
    """trained(codec): what a run with this codec on all links came to, and the bytes that it sent;
    one run per codec."""
    lab, made = laboratory(JOB), {}

    def train(codec):
        if codec not in made:
            world = lab.world(4)
            got = lab.train(world, plan_with(len(lab.graph.operators), codec))
            (events,) = world.broker.published.values()
            made[codec] = got, sum(e.step.sent_bytes for e in events if e.HasField("step"))
        return made[codec]

    return train


def test_lossless_links_train_bit_for_bit_as_raw_ones(trained):
    """I1 for codecs that lose nothing, step by step and in the weights."""
    raw, raw_bytes = trained(None)
    lossless, fewer = trained("lossless")
    assert lossless.losses == raw.losses
    assert lossless.norms == raw.norms
    assert lossless.weights.keys() == raw.weights.keys()
    assert all(torch.equal(lossless.weights[n], raw.weights[n]) for n in raw.weights)
    assert fewer < 0.95 * raw_bytes


@pytest.mark.parametrize(
    ("codec", "bytes_share", "rel"),
    [
        ("bf16", 0.55, 2e-3),
        ("int8", 0.32, 1e-2),
        ("ef+int8", 0.32, 1e-2),
        ("delta+int8", 0.32, 1e-2),
    ],
)
def test_codecs_that_lose_little_train_nearly_as_raw(trained, codec, bytes_share, rel):
    raw, raw_bytes = trained(None)
    lossy, fewer = trained(codec)
    assert lossy.losses == pytest.approx(raw.losses, rel=rel)
    assert lossy.losses != raw.losses
    assert fewer < bytes_share * raw_bytes


def test_a_world_with_codecs_gives_the_same_events_byte_for_byte(laboratory, trained):
    """I6: reports of codecs hold nothing of this machine's clock."""
    lab = laboratory(JOB)
    plan = plan_with(len(lab.graph.operators), "int8")
    again = lab.train(lab.world(4), plan)
    first, _ = trained("int8")
    assert again.log == first.log
    assert again.losses == first.losses


def test_gradients_come_back_where_their_values_were_sent(trained):
    """Under `support` neither positions nor the other gradients travel, and both ends agree on them
    through several steps, microbatches and holders; the norm is that of a sparse network, smaller
    than with the whole gradient."""
    value = ("activation", "topk:ratio=4.0,values=fp32")
    whole, more = trained((value,))
    sparse, fewer = trained((value, ("activation_grad", "support:ratio=4.0,values=fp32")))
    assert sparse.losses[0] == whole.losses[0]  # the same forward
    assert sparse.losses[1:] != whole.losses[1:]
    assert sparse.norms[0] < whole.norms[0]
    assert fewer < 0.8 * more
    # Not of a sparse value: the gradients travel whole.
    raw, _ = trained(None)
    alone, _ = trained((("activation_grad", "support:ratio=4.0,values=fp32"),))
    assert alone.losses == raw.losses
