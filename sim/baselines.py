"""What federated training is held against, for the report of a simulation."""

from __future__ import annotations

from collections.abc import Callable

from ..client.front import CapturedFacts, SimulationFront
from ..job import Job
from .following import Following
from .plain.client_baselines import client_baselines

__all__ = ["add_baselines"]


def add_baselines(
    job: Job,
    followed: Following,
    facts: CapturedFacts,
    front: SimulationFront,
    most: int,
    say: Callable[[str], None],
) -> None:
    """Train the baselines of a federated run, and put them into its summary. `most`: as in
    `client_baselines`."""
    if facts.random:
        say("no baselines: the graph draws masks, and a plain loop draws others")
        return
    say("training the baselines: the run once more, one model of all samples, clients alone")
    with front.module(job) as module:
        try:
            rows = client_baselines(module, facts.job, followed.events, facts.reader(1), most)
        except ValueError as error:  # of a model with running statistics
            say(f"no baselines: {error}")
            return
    followed.summary.baselines = tuple(rows)
