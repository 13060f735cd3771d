"""The simulated world: a whole run by the broker's and the peers' own machines."""

from __future__ import annotations

import pytest

from shoal.examples.gpt import GPT
from shoal.sim.world import PeerSpec


def small(dropout: float = 0.0) -> GPT:
    return GPT(layers=2, width=16, heads=2, length=16, dropout=dropout)


KEYS = {"data": {"kind": "text", "length": 16}, "steps": 4, "batch": 8, "microbatch": 2, "lr": 1e-2}


@pytest.fixture
def gpt(laboratory):
    return laboratory("gpt-world", small, train_eval_every=0, **KEYS) if False else laboratory(
        "gpt-world", small, **KEYS
    )


def test_a_run_in_the_world_equals_the_plain_loop(gpt):
    from conftest import assert_equal_training

    assert_equal_training(gpt.train(gpt.world(3)), gpt.plain())
