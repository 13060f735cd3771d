"""Links over the path that frames will take: of two that nobody can dial, by the relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shoal.broker.events import Tell
from shoal.broker.membership.member import RELAY


@pytest.mark.parametrize("relays", [True, False])
def test_two_that_nobody_can_dial_are_measured_by_the_relay(
    make_world: Callable[..., Any], relays: bool
) -> None:
    world = make_world(probe_s=5.0, relays=relays)
    world.join("a", address="")
    out = world.join("b", address="")
    told = [i.message for i in out if isinstance(i, Tell)]
    probes = [m.probe.address for m in told if m.WhichOneof("kind") == "probe"]
    assert sorted(probes) == (["", RELAY] if relays else []), "one of them dials"
