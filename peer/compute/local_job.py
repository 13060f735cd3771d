"""The local job of a replica between two rounds: steps of its plan on samples of the run, or on
those of clients; or clients that one peer trains side by side."""

from __future__ import annotations

from ...dag.execute.execute import StageExecutor
from ...dag.plan.plan import PlanError
from ...job import SettingsError
from ..core.rounds.round_exchange import run_of
from ..data.partition import partition_of
from ..data.reader import Reader
from ..federated.client_states import ClientStates
from ..federated.client_steps import ClientSampler, ClientSteps, OwnSamples
from ..federated.local_cohort import LocalCohort
from ..rounds.local import LocalSteps
from .order import BuildOrder

__all__ = ["local_steps", "trains_in_steps"]


def local_steps(
    order: BuildOrder,
    reader: Reader,
    executor: StageExecutor,
    of_run: int,
    states: ClientStates | None,
) -> LocalSteps:
    """Make what steps follow, or what trains clients. `executor`: of the first stage here.
    `states`: where clients' is kept from round to round; None: in memory. Raises
    PlanError for a plan that has a stage twice and is to train clients, SettingsError or DataError
    for a partition that cannot be."""
    plan, training, settings = order.plan, order.training, order.training.rounds
    if settings is None or settings.cohorts is None:
        return LocalSteps(len(plan.routes), of_run)
    if any(len(stage.holders) > 1 for stage in plan.stages):
        raise PlanError(f"{plan!r}: expected each stage on one peer, where clients are trained")
    cohorts = settings.cohorts
    if cohorts.privacy is not None and not cohorts.privacy.noise:
        raise SettingsError("sync.privacy.noise", "is 0: expected noise, which hides clients")
    states = states or ClientStates()
    if settings.keeps_state:
        states.begin(run_of(order.run))
    own = cohorts.partition.kind == "by-peer"
    partition = (
        OwnSamples(reader.manifest.train)
        if own
        else partition_of(cohorts.partition, cohorts.labels, reader)
    )
    each = len(plan.routes)
    local = (
        ClientSteps(training, order.graph, partition, each)
        if trains_in_steps(order)
        else LocalCohort(training, order.graph, executor, partition, reader, each, states)
    )
    sampler = reader.sampler
    reader.sampler = ClientSampler(sampler.manifest, sampler.seed, sampler.microbatches, local)
    return local


def trains_in_steps(order: BuildOrder) -> bool:
    """Return whether clients are trained by steps of the plan, of which each stage has a part."""
    rounds = order.training.rounds
    return rounds is not None and rounds.cohorts is not None and len(order.plan.stages) > 1
