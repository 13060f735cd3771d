"""Copies of a snapshot that a keeper made up: whoever is to go on from one says that it is the
snapshot, and neither its build nor a step of it, which would look like a fault of its own."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.peer.compute.records import load_records, write_records
from shoal.peer.core.snapshots import SnapshotError, in_parts
from shoal.peer.shell.workbench import code_of, code_of_action
from shoal.tests.peer.compute.test_records import STEPS, STOP, case, coded, resumed, steps, taken  # noqa: F401
from shoal.tests.peer.conftest import make_case  # noqa: F401  # a fixture
from shoal.tests.peer.optimizers.eight_bits import from_elements

Records = dict[str, Tensor]
ODD_NAMES = (
    *("own/x", "own/", "codec/", "codec/a/b", "codec/a/sync/x", "round:", "slot:", ""),
    *("param:", "/"),
)


def other_shape(t: Tensor, rng: random.Random) -> Tensor:
    return rng.choice((t.flatten()[:-1], t[None], torch.zeros(3, 5), torch.zeros(0), t.flatten()))


def other_dtype(t: Tensor, rng: random.Random) -> Tensor:
    return t.to(rng.choice((torch.int64, torch.bool, torch.float64, torch.uint8, torch.float16)))


def lies(honest: Records, rng: random.Random) -> Records:
    """Some tensors of an honest snapshot of another shape, dtype, name, or gone. How far a codec's
    stream is only its other end can tell, by the next frame."""
    made = dict(honest)
    told = [n for n in sorted(made) if not (n.startswith("codec/") and "/count/" in n)]
    for name in rng.sample(told, rng.randint(1, 2)):
        match rng.randrange(5):
            case 0:
                made[name] = other_shape(honest[name], rng)
            case 1:
                made[name] = other_dtype(honest[name], rng)
            case 2 if not name.startswith("codec/"):
                del made[name]
            case 3:
                made[rng.choice(ODD_NAMES)] = honest[name]
            case _:
                made[rng.choice(told)] = honest[name]
    return made


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 120), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("codec", "train"),
    [
        ("", {}),
        ("", {"optimizer": "sgd", "momentum": 0.9}),
        ("delta+topk:ratio=4", {}),
        ("", {"optimizer": "adamw8bit"}),
    ],
)
def test_a_snapshot_that_a_keeper_made_up_is_the_snapshots_fault(
    case: Callable[..., Any],  # noqa: F811
    codec: str,
    train: dict[str, Any],
    seeds: range,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from_elements(monkeypatch, 20)
    made = case(steps=STEPS, **train)
    plan = made.plan(2, ["a", "b c"])
    plan = coded(plan, codec) if codec else plan
    calm = made.world(plan)
    steps(calm, 0, STOP)
    states = taken(calm, STOP)
    honest = [dict(load_records([state]).tensors) for state in states]
    outcomes = set[str]()
    for seed in seeds:
        rng = random.Random(seed)
        which = rng.randrange(len(states))
        bad = in_parts(write_records(lies(honest[which], rng)))
        given = tuple(bad if i == which else state for i, state in enumerate(states))
        try:
            again = resumed(made, plan, given)
            outcomes.add("built")
            steps(again, STOP, STOP + 1)
            outcomes.add("went on")
        except SnapshotError as error:
            outcomes |= {"refused", code_of_action(error), code_of(error, "build")}
    assert outcomes == {"built", "went on", "refused", "snapshot"}


@pytest.mark.parametrize(
    "metadata",
    [
        {"xxh3_128": "[" * 100_000},
        {"xxh3_128": "[]"},
        {"xxh3_128": "5"},
        {"xxh3_128": json.dumps({"x": 1e999})},
        {},
    ],
)
def test_notes_of_a_snapshot_that_are_none_are_refused(metadata: dict[str, str]) -> None:
    from safetensors.torch import save

    with pytest.raises(SnapshotError):
        load_records([in_parts(memoryview(save({"x": torch.ones(2)}, metadata)))])
