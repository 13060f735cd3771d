"""Jobs, plans and peers know the same methods."""

from __future__ import annotations

from dataclasses import fields

import pytest

from shoal.dag.exchange.collectives import COLLECTIVES
from shoal.dag.plan.strategies import TRAITS, parse_strategy
from shoal.job.methods import METHODS, method_text
from shoal.peer.sync.strategies import STRATEGIES
from shoal.peer.sync.strategy import Strategy


def test_plans_and_peers_know_the_same_strategies():
    assert STRATEGIES.keys() == TRAITS.keys()
    for name, strategy in STRATEGIES.items():
        own = strategy.own_tensors is not Strategy.own_tensors
        assert own == TRAITS[name].own_state
        if TRAITS[name].collective:
            assert TRAITS[name].collective in COLLECTIVES


@pytest.mark.parametrize("method", METHODS)
def test_plans_read_what_jobs_write(method):
    found = parse_strategy(method_text(method, {}))
    assert [*found.options] == [f.name for f in fields(METHODS[method])]
    assert found.traits.collective == METHODS[method].COLLECTIVE
    assert (found.traits.elements is not None) == (method != "exact")
