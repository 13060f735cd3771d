"""The policy of a run's rounds, by `kind` of its [sync]."""

from __future__ import annotations

from collections.abc import Mapping

from ..records.submitted import SubmittedRun
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
    if run.spec.client_data:
        return HostsPolicy(run)
    return POLICIES[run.requirements.sync.kind](run)
