"""The policy of a run's rounds, by `kind` of its [sync]."""

from __future__ import annotations

from collections.abc import Mapping

from ...job.rounds import method_of
from ..records.submitted import SubmittedRun
from .buffered import BufferedHostsPolicy, BufferedPolicy
from .federated import FederatedPolicy
from .gossip import GossipPolicy
from .hosts import HostsPolicy
from .policy import RoundPolicy

__all__ = ["POLICIES", "policy_of"]

POLICIES: Mapping[str, type[RoundPolicy]] = {
    "local": RoundPolicy,
    "gossip": GossipPolicy,
    "federated": FederatedPolicy,
}


def policy_of(run: SubmittedRun) -> RoundPolicy:
    """Return the policy of a run that has rounds."""
    sync = run.requirements.sync
    if method_of(sync.chosen).buffered:
        return BufferedHostsPolicy(run) if run.spec.client_data else BufferedPolicy(run)
    return HostsPolicy(run) if run.spec.client_data else POLICIES[sync.kind](run)
