"""Whether clients of federated training may be trained by several peers each, looked at before a
job is submitted: a stage sees microbatches, where one peer trains on whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..dag.ir.graph import Graph
from ..job import Job, SettingsError
from ..job.refusals.of_clients import not_in_pipelines
from ..peer.federated.client_steps import why_not_in_steps

__all__ = ["with_stages"]


def with_stages(
    job: Job,
    graph: Graph,
    sizes: Sequence[int],
    why_it_depends: Callable[[], str],
    say: Callable[[str], None],
) -> Job:
    """Return the job; with one stage where it leaves their number open, and its model cannot be
    trained by stages of a client. `sizes`: samples of each client. `why_it_depends`: as there
    (`client/models/division.py`), asked where it matters. Raises SettingsError where the job wants
    several."""
    stages, microbatch = job.plan.stages, job.train.microbatch_size
    if job.sync.kind != "federated" or stages == 1:
        return job
    if stages == "auto" and (any(not_in_pipelines(job)) or any(n % microbatch for n in sizes)):
        return job  # the planner says so, where it matters
    why = why_not_in_steps(graph, job.sync.chosen) or why_it_depends()
    if not why:
        return job
    if stages != "auto":
        raise SettingsError(
            "plan.stages",
            f"is {stages}, and a client of this model cannot be trained by several peers: {why}; "
            "expected 1",
        )
    say(f"each client is trained on one peer: {why}")
    return replace(job, plan=replace(job.plan, stages=1))
