"""Federated training on data that stays with its hosts: each is a client, and has a replica of its
own, by itself or with peers that lend it memory. In a round are the first of them in the round's
order that are there; where more are asked than are wanted, those who come first make the round, and
the others go on from its version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from ...dag.plan.plan import PeerId
from ...dag.rounds.cohorts import cohort_of
from ...proto.broker_pb2 import HostLine, RoundBegun, RoundWork
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from .federated import FederatedPolicy
from .round_view import LinksAmong, PlannedAttempt, RoundView
from .stateful import StatefulWork
from .uploads import Links, as_uploaded, lines_of, sending_to_all, shown_line

__all__ = ["HostsPolicy"]


class HostsPolicy(FederatedPolicy):
    """Every replica trains one client, always the same."""

    def work(
        self,
        run: RunRecord,
        numbers: Sequence[int],
        exchange_s: float,
        going: Sequence[RoundWork],
        network: LinksAmong,
    ) -> list[RoundWork]:
        """Return the place of its client for each replica that is in the round."""
        clients = self._cohorts.clients
        order = cohort_of(clients, self._seed, run.of_rounds.versions.round, range(clients))
        there = {run.replicas[n].client: n for n in numbers}
        found = [(there[c], place) for place, c in enumerate(order) if c in there]
        places = {*self._chosen(run)}  # nobody of whom may be there
        found = [(n, place) for n, place in found if place in places] or found
        homes = run.of_rounds.homes
        afresh = homes is not None and (homes.lost or not homes.known)
        asked = sorted(found[: self._asked - len(going)])
        everybody, trained = [place for _, place in asked], list[int]()
        if homes is not None:
            trained = [0 if afresh else homes.trained(order[place]) for place in everybody]
        placed = StatefulWork({n: [i] for i, (n, _) in enumerate(asked)}, trained, afresh)
        links = self._measured(run, [n for n, _ in asked], network)
        return self._works(run, everybody, placed, links)

    def _measured(
        self, run: RunRecord, numbers: Sequence[int], network: LinksAmong
    ) -> Links | None:
        """Return the links by which these hosts send their updates; None: their numbers do not go
        by links, or nothing is known of these."""
        peers = _first_peers(run, numbers)
        if not self._cohorts.sends.by_links or len(peers) < max(2, len(numbers)):
            return None
        found = network([*peers.values()])
        return None if found is None else sending_to_all(found, _shown(run, peers))

    def begun(
        self, run: RunRecord, numbers: Sequence[int], work: Sequence[RoundWork]
    ) -> RoundBegun:
        """Return the event of the next round, which says to a rule whose hosts were there."""
        found = super().begun(run, numbers, work)
        if self._cohorts.selected:
            found.reachable.extend(sorted(run.replicas[n].client for n in numbers))
        return found

    def attempt(
        self, view: RoundView, ready: Sequence[int], at_gate: Sequence[int], now: float
    ) -> PlannedAttempt:
        """Return the next attempt, in which hosts add up as much as their links carry to all
        others, who wait for it."""
        found = super().attempt(view, ready, at_gate, now)
        peers = _first_peers(view.run, [m.replica for m in found.members])
        network = view.network([*peers.values()], now) if len(peers) > 1 else None
        if network is None:
            return found
        network = as_uploaded(network, _shown(view.run, peers))
        lines = dict(zip(peers, lines_of(network).tolist(), strict=True))
        [group] = found.groups
        group = replace(group, lines=lines, together=self._cohorts.sends.by_links)
        return replace(found, groups=[group])

    def lines(
        self, view: RoundView, numbers: Sequence[int], took_s: float, now: float
    ) -> list[HostLine]:
        """Return what the uploads of these replicas have shown, by what their peers say; no upload
        took longer than the exchange."""
        peers, found = _first_peers(view.run, numbers), list[HostLine]()
        if not self._cohorts.sends.by_links or len(peers) < 2:
            return found
        network, update = view.network([*peers.values()], now), self._update(view.run)
        if network is None:
            return found
        for i, n in enumerate(peers):
            said, work = view.made.get(n, {}).values(), view.rounds.work.given[n]
            whole = int(update.bytes(np.array(work.kept, np.int64)).sum())
            sent = sum(r.upload_bytes for r in said)
            seconds = min(took_s, max((r.upload_s for r in said), default=0.0))
            line = shown_line(network, i, sent, whole, seconds)
            if line is not None:
                line.replica, line.term = n, view.run.replicas[n].term
                found.append(line)
        return found

    @property
    def _hands_on(self) -> bool:
        """Nobody else has a host's data."""
        return False

    @property
    def _asked(self) -> int:
        """How many clients are asked in a round."""
        return self._sync.asked(self._cohorts.per_round)

    def is_enough(self, rounds: RoundRecord, ready: Sequence[int]) -> bool:
        """Whether the contributions of so many replicas make a round: of as many as are wanted of
        those that were asked."""
        wanted = min(len(rounds.work.given), self._cohorts.per_round)
        return len(ready) >= self._sync.needed(wanted)

    def one_evaluation(self, rounds: RoundRecord) -> bool:
        """Each evaluates its own samples; the last version is evaluated by the host that brings the
        weights, and said to be so."""
        return rounds.work.over

    def evaluators(self, rounds: RoundRecord) -> Collection[int]:
        """Return all that begin with the version, where an evaluation is due."""
        return self._beginners(rounds)


def _first_peers(run: RunRecord, numbers: Sequence[int]) -> dict[int, PeerId]:
    """Return by replica the peer that has its first stage, of those that have a plan; one that is
    being planned anew has none."""
    plans = ((n, run.replicas[n].plan) for n in numbers)
    return {n: plan.stages[0].holders[0] for n, plan in plans if plan is not None}


def _shown(run: RunRecord, numbers: Iterable[int]) -> list[HostLine | None]:
    """Return what uploads of rounds gone by have shown of these replicas' lines."""
    lines = run.of_rounds.lines
    return [lines.line(n, run.replicas[n].term) for n in numbers]
