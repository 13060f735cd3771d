"""How long a round waits for a replica whose peer is away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from shoal.broker.rounds.contributions import Contributions


def contributions(*steps: int, away: str = "") -> Contributions:
    """Of replicas that have so many steps to make in a round that began at 100 s and closes at 160,
    2 s a step, all of whose streams broke. `away`: who may come back to a broker that was started
    again."""
    record = SimpleNamespace(running=False, round_step_s=2.0, term=1)
    replicas = [SimpleNamespace(record=record, context=SimpleNamespace(away=away)) for _ in steps]
    given = {n: SimpleNamespace(steps=s, term=1) for n, s in enumerate(steps)}
    sync = SimpleNamespace(deadline="auto")
    submitted = SimpleNamespace(requirements=SimpleNamespace(sync=sync))
    rounds = SimpleNamespace(work=SimpleNamespace(given=given))
    run = SimpleNamespace(replicas=replicas, rounds=rounds, submitted=submitted, record=None)
    policy = SimpleNamespace(lasts_s=lambda record, rounds: 60.0)
    return Contributions(cast(Any, run), cast(Any, policy), 100.0)


def test_of_clients_that_have_no_steps_it_goes_by_how_long_others_took() -> None:
    """A stream that broke, or a broker that was started again, is no reason to do without who
    comes back in a moment."""
    found = contributions(0, 0, 0)
    assert found.waits_until([0, 1], [2], 104.0) == 104.0 + 4.0 / 2
    assert found.waits_until([0, 1], [2], 105.0) == 104.0 + 4.0 / 2, "it is no longer then"
    assert contributions(0, 0, 0, away="p").waits_until([0, 1], [2], 104.0) == 160.0
    assert contributions(3, 3, 3).waits_until([0, 1], [2], 104.0) == 104.0 + 3 * 2.0 / 2
