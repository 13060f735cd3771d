"""What a run cannot begin with, of what a planner made or formed for it."""

from __future__ import annotations

from ..events import ReplicasFormed
from ..runs.replica import Replica

__all__ = ["bad_formation"]


def bad_formation(first: Replica, event: ReplicasFormed) -> str:
    """Why a run cannot begin with what a planner formed; empty: it can."""
    needs, plans = first.run.requirements, event.plans
    if not plans:
        return "" if needs.undecided and event.formation.kind == "allreduce" else "it has no plan"
    apart = bool(first.run.spec.client_data)  # clients whose host is away are planned later
    told = len(event.formation.replicas)
    if event.formation.kind != "local" or (len(plans) > told if apart else len(plans) != told):
        count, kind = len(event.formation.replicas), event.formation.kind
        return f'it has {len(plans)} plans for {count} replicas of kind "{kind}"'
    if not apart and not needs.undecided and len(plans) != needs.replicas:
        return f"it has {len(plans)} replicas, the run {needs.replicas}"
    spec = first.run.spec
    clients = [r.client for r in event.formation.replicas]
    if apart and sorted(clients) != [*range(len(spec.client_data))]:
        return f"its replicas are of the clients {clients}, and there are {len(spec.client_data)}"
    shares = 1 if needs.cohorts is not None else len(plans)  # a client's batch is its own
    if any(
        len(made.plan.routes) * shares != spec.microbatches
        or made.plan.microbatch_size != spec.microbatch_size
        for made in plans
    ):
        return f"its plans do not share the {spec.microbatches} microbatches of a step"
    if len({p for made in plans for p in made.plan.peers}) < sum(len(m.plan.peers) for m in plans):
        return "a peer is in two replicas"
    return ""
