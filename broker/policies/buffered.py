"""FedBuff (Nguyen et al. 2022, 2106.06639): nobody waits for who is slow. A version is made as soon
as its buffer of clients has come; replicas that still train go on, and count for a later version
with what their clients moved away from the one that these began with.

    of n clients that train at a time, K make a version
    a move that s versions were made since counts 1 / sqrt(1 + s) times as much
    w <- w + lr · Σ p_i · D_i / sqrt(1 + s_i),  p_i: shares of clients by weight, Σ p_i = 1

Who makes the version has the newest one: of its members at least one began with that. It is of two
at least while two have work, for what one peer alone has is lost with it. Places of the next cohort
go to who has come, past clients that others still train.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import ClassVar

from ...dag.rounds.cohorts import WEIGHT_UNIT
from ...job.clients.client_options import FedBuffOptions
from ...job.rounds import options_of
from ...proto.broker_pb2 import RoundMember, RoundWork
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from ..records.submitted import SubmittedRun
from .federated import FederatedPolicy
from .hosts import HostsPolicy
from .round_view import LinksAmong, PlannedAttempt, RoundView

__all__ = ["BufferedHostsPolicy", "BufferedPolicy", "discounted"]


def discounted(weight: int, behind: int) -> int:
    """Return what a weight above 0 counts for when so many versions were made since its clients
    began, in units of 1 / WEIGHT_UNIT: at least 1."""
    return max(1, round(weight * WEIGHT_UNIT / math.sqrt(1 + behind)))


class BufferedPolicy(FederatedPolicy):
    """Clients of a partition, in turns on all replicas."""

    carries: ClassVar[bool] = True

    def __init__(self, run: SubmittedRun) -> None:
        super().__init__(run)
        options = options_of(self._sync.chosen, self._sync.options)
        assert isinstance(options, FedBuffOptions), f"{options!r} has no buffer"
        self._wanted, self._most = options.wanted(self._cohorts.per_round), options.max_staleness

    def work(
        self,
        run: RunRecord,
        numbers: Sequence[int],
        exchange_s: float,
        going: Sequence[RoundWork],
        network: LinksAmong,
    ) -> list[RoundWork]:
        """Return what goes on, by a version older, and of a new cohort as many clients as are left
        of those that may train at a time. Clients whose work is too old to count are nobody's."""
        older = [deepcopy(work) for work in going]
        for work in older:
            work.behind += 1
        counted = [w for w in older if self.counts(w)]
        return [*super().work(run, numbers, exchange_s, counted, network), *older]

    def counts(self, work: RoundWork) -> bool:
        """Whether no more versions than `max_staleness` were made since it was begun."""
        return work.behind <= self._most

    def is_enough(self, rounds: RoundRecord, ready: Sequence[int]) -> bool:
        """Whether these replicas have as many clients as make a version."""
        clients = sum(rounds.work.units(n) for n in ready)
        return clients >= self._wanted and len(ready) >= min(2, len(rounds.work.given))

    def too_late(self, missing: Sequence[int]) -> Sequence[int]:
        """Return nobody: all go on."""
        return ()

    def members(self, view: RoundView, numbers: Sequence[int]) -> list[RoundMember]:
        """Return replicas as members, by number; the weight of each is discounted where not all of
        them began with the newest version."""
        found = super().members(view, numbers)
        if any(m.behind for m in found):
            for m in found:
                m.weight, m.unit = discounted(m.weight, m.behind), WEIGHT_UNIT
        return found

    def scale(self, view: RoundView, members: Sequence[RoundMember]) -> float:
        """Return the sum of discounted weights by that of weights: a mean is by the former, and a
        version moves by the latter."""
        if not any(m.behind for m in members):
            return 0.0
        whole = super().members(view, [m.replica for m in members])
        return sum(m.weight for m in members) / (WEIGHT_UNIT * sum(m.weight for m in whole))

    def attempt(
        self, view: RoundView, ready: Sequence[int], at_gate: Sequence[int], now: float
    ) -> PlannedAttempt:
        """Return the next attempt, in which who began with an older version takes the new one from
        the others. Where disputes leave out all others, it is of these alone."""
        found, given = super().attempt(view, ready, at_gate, now), view.rounds.work.given
        newest = [n for n in ready if not given[n].behind]
        if newest and all(m.behind for m in found.members):
            found = super().attempt(view, newest, at_gate, now)
        [group] = found.groups
        behind = [m.replica for m in found.members if m.behind]
        return replace(found, groups=[replace(group, behind=behind)])


class BufferedHostsPolicy(BufferedPolicy, HostsPolicy):
    """Clients that are hosts, each with a replica of its own."""
