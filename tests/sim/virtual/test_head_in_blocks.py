"""I1 with the vocabulary head in blocks: a GPT whose head is its own matrix, under plans that lay
the blocks on several peers, against the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from shoal.client.models import models
from shoal.dag.plan.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.transforms.vocabulary import head_operators, split_head
from shoal.job import Job
from shoal.sim.virtual.world import PeerSpec

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PARTS = 3
MODEL = """
from torch import nn
from shoal.examples.gpt import VOCABULARY, gpt

def untied(width):
    model = gpt(layers=1, width=width, heads=2, length=12, dropout=0.0)
    model.head = nn.Linear(width, VOCABULARY)
    return model
"""


@pytest.fixture(scope="session")
def untied(laboratory: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The laboratory and the plain loop, ten steps, of which some are clipped; a glob names the
    whole head, of which no peer has a parameter."""
    folder = tmp_path_factory.mktemp("untied")
    (folder / "model.py").write_text(MODEL)
    job = Job.from_table(
        {
            "version": 1,
            "name": "untied",
            "model": {"factory": f"{folder / 'model.py'}:untied", "args": {"width": 16}},
            "data": {
                **{"kind": "text", "length": 12},
                **{"source": str(EXAMPLES / "*.py"), "holdout": 0.2},
            },
            "train": {
                **{"steps": 10, "batch": 8, "microbatch": 2, "lr": 3e-3, "clip": 0.7},
                **{"no_decay": ["*.bias", "*norm*", "head.weight"], "weight_decay": 0.5},
                **{"eval_every": 5, "eval_batches": 2},
            },
        }
    )
    lab = laboratory(job)
    return lab, lab.plain()


def plan_of(lab: Any, holders: list[str]) -> Plan:
    """Five stages: the body, three blocks, the combination; `holders` separated by "+"."""
    graph = lab.graph
    bounds = head_operators(graph, PARTS)
    end = len(split_head(graph, PARTS).operators)
    edges = [0, *(start for start, _ in bounds), bounds[-1][1], end]
    slots = tuple(
        StageSlot(edges[i], edges[i + 1], tuple(PeerId(p) for p in who.split("+")))
        for i, who in enumerate(holders)
    )

    def route(m: int) -> tuple[Visit, ...]:
        return tuple(Visit(i, s.holders[m % len(s.holders)]) for i, s in enumerate(slots))

    train = lab.job.train
    return Plan(
        slots,
        tuple(route(m) for m in range(train.microbatches)),
        train.microbatch_size,
        evaluation_routes=(route(0), route(1)),
        head_parts=PARTS,
    )


@pytest.mark.parametrize(
    "holders",
    [["a", "a", "b", "c", "c"], ["a", "b", "c", "a", "b"], ["a+b", "b+c", "c", "a+c", "b"]],
    ids=lambda h: " ".join(h),
)
def test_blocks_on_several_peers_train_as_the_plain_loop(untied, equal_training, holders):
    lab, wanted = untied
    world = lab.world([PeerSpec(name=n) for n in "abc"])
    before = set(world.blobs)
    got = lab.train(world, plan_of(lab, holders))
    equal_training(got, wanted)
    assert got.norms == pytest.approx(wanted.norms, rel=1e-5)
    assert max(wanted.norms) > lab.job.train.clip, "no step was clipped: the test shows too little"
    assert len(got.evaluations) == 2
    models.build(lab.job).load_state_dict(got.weights, strict=True)
    parts = [load(world.blobs[name]) for name in set(world.blobs) - before]
    rows = {n: len(t) for part in parts for n, t in part.items() if n.startswith("head.weight")}
    assert rows == {"head.weight..0/3": 85, "head.weight..1/3": 85, "head.weight..2/3": 86}


def test_a_peer_with_the_core_set_cannot_hold_part_of_such_a_plan(untied):
    lab, _ = untied
    world = lab.world([PeerSpec(name=n, core=n == "b") for n in "abc"])
    with pytest.raises(AssertionError, match="b has the core operator set only"):
        lab.train(world, plan_of(lab, ["a", "a", "b", "c", "c"]))
