"""A rule for who is in a round, run by whoever plays a world: it takes no time there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...broker import events as b
from ...broker.candidates import Candidates, Clients, Rule, chosen_by
from ...proto.broker_pb2 import RunSpec
from .clock import Observed, beside
from .world import World

__all__ = ["begin_choosing"]


def begin_choosing(
    world: World, run: b.RunId, spec: RunSpec, rule: Rule, say: Callable[[str], None]
) -> None:
    """Have a rule choose the clients of each round of a run that begins from here on. `say` hears
    of what it raises and of what the broker refuses. Raises ValueError for a run whose clients no
    rule chooses."""
    clients = Clients(spec)

    def choose(found: Candidates) -> None:
        try:
            cohort = chosen_by(rule, found)
        except Exception as error:  # whatever the user's code raises is the user's to see
            say(f"round {found.round}: the rule raised {type(error).__name__}: {error}")
            return
        answer = world.broker.ask(lambda request: b.CohortAsked(request, run, cohort))
        if isinstance(answer, b.Reject):
            say(f"round {found.round}: {answer.reason}")

    def observe(seen: Observed) -> None:
        told = seen.record
        if not isinstance(told, b.Publish) or told.run != run:
            return
        if (found := clients.see(told.event)) is not None:
            world.after(0.0, partial(choose, found))

    world.observe = beside(world.observe, observe)
