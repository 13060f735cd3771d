"""Gossip: replicas exchange in pairs, and each goes on with weights of its own.

    attempt 1   pairs by the run's method (`pairs/selection.py`), of those whose contribution is
                there; who has no partner is alone, and goes on with its own
    later ones  a pair that lost a member is what is left of it; nobody else begins anew
    gathering   all with all, at the end

A group is a small exchange of its own, with its own attempts. Who has no version of its own takes
that of the first member of a group that is planned at that moment, or waits for the next round.
Nobody waits for more than its partner, and nobody loses its place for what that says alone. After
a restart of the broker every group is planned anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.plan.plan import PeerId
from ...job.rounds import method_of, options_of
from ...proto.broker_pb2 import RoundMember
from ..records.rounds import RoundRecord
from ..records.submitted import SubmittedRun
from .pairs.selection import PairSettings, pairs_of_round
from .policy import RoundPolicy
from .round_view import Blame, ExchangeGroup, PlannedAttempt, RoundView
from .segments import Replicated, meeting

__all__ = ["GossipPolicy", "regrouped"]


class GossipPolicy(RoundPolicy):
    """Pairs, and all with all in the last round."""

    saves_every = 0  # no version is all replicas'

    def __init__(self, run: SubmittedRun) -> None:
        super().__init__(run)
        method = method_of(self._sync.chosen)
        self._matching, self._alike = method.pairs, method.alike
        options = options_of(self._sync.chosen, self._sync.options)
        threshold = getattr(options, "threshold", "auto")
        self._settings = PairSettings(
            threshold=None if threshold == "auto" else float(threshold),
            recent=getattr(options, "recent", PairSettings.recent),
        )

    def too_late(self, missing: Sequence[int]) -> Sequence[int]:
        return ()

    # ------------------------------------------------------------ groups

    def attempt(
        self, view: RoundView, ready: Sequence[int], at_gate: Sequence[int], now: float
    ) -> PlannedAttempt:
        """Groups that were planned before stay as they are."""
        number = view.rounds.versions.attempt + 1
        members = self._grouped(view, self.members(view, ready), number, now)
        groups = _groups(m for m in members if m.attempt == number)
        stay = {m.replica for m in members if m.attempt < number}
        there = [n for n in self.joining(view, members, at_gate) if n not in view.troubled]
        kept = {j: s for j, s in view.sources.items() if s in stay and j in there}
        new = sorted(group[0] for group in groups)
        rest = [j for j in there if j not in kept] if new else []
        sources = kept | {j: new[i % len(new)] for i, j in enumerate(rest)}
        joiners = sorted(sources)
        taking = {n: [j for j in joiners if sources[j] == n] for n in new}
        begun = [ExchangeGroup(dict.fromkeys(g, 1), taking[g[0]], alike=False) for g in groups]
        return PlannedAttempt(members, joiners, begun, sources, stay | kept.keys())

    def _grouped(
        self, view: RoundView, ready: Sequence[RoundMember], attempt: int, now: float
    ) -> list[RoundMember]:
        versions = view.rounds.versions
        if self.gathers(view.rounds):
            return [_member(m, 0, attempt) for m in ready]
        if not versions.attempt:
            return self._paired(view, ready, now)
        everybody = {m.replica for m in versions.members}
        anew = view.troubled if view.attempt is not None else everybody
        return regrouped(versions.members, ready, anew, attempt)

    def late(self, view: RoundView, waiting: Sequence[int]) -> Blame:
        """Return the replicas that most wait for, else all that wait."""
        for lacks in view.lacks.values():
            blamed = Counter(n for about in lacks.values() for n in about)
            if blamed:
                most, inside = max(blamed.values()), view.rounds.versions.inside
                return Blame([n for n in inside if blamed[n] == most], convicts=False)
        return Blame(waiting, convicts=False)

    def agreed(
        self, view: RoundView, hashes: Mapping[int, int | None]
    ) -> tuple[int, Sequence[int]] | None:
        """Where pairs take a plain mean, each is to make what the first of them did, and joiners
        what theirs did. The hash is the sum of the members'."""
        found, members = super().agreed(view, hashes), view.rounds.versions.members
        if found is None or self.gathers(view.rounds):
            return found
        first: dict[int, int | None] = {}
        for m in members:
            if hashes.get(m.replica) is not None:
                first.setdefault(m.group, hashes[m.replica])
        wanted = {m.replica: first.get(m.group) for m in members} if self._alike else hashes
        wanted = {n: wanted.get(view.sources.get(n, n)) for n in hashes}
        total = sum(h for m in members if (h := hashes[m.replica]) is not None)
        return total % 2**64, [n for n, h in hashes.items() if h is not None and h == wanted[n]]

    def one_evaluation(self, rounds: RoundRecord) -> bool:
        """Only what stays at the end is one."""
        return rounds.work.over

    def gathers(self, rounds: RoundRecord) -> bool:
        return rounds.work.final

    def evaluators(self, rounds: RoundRecord) -> Collection[int]:
        """All replicas, for each has weights of its own."""
        return rounds.work.given if rounds.work.passed(self._wish.eval_every) else ()

    # ------------------------------------------------------------ pairs

    def _paired(
        self, view: RoundView, ready: Sequence[RoundMember], now: float
    ) -> list[RoundMember]:
        """The pairs of the first attempt."""
        versions, numbers = view.rounds.versions, [m.replica for m in ready]
        pairs = pairs_of_round(
            self._matching,
            self._wish.seed,
            versions.round,
            [_name(n) for n in numbers],
            self._rates(view, numbers, now),
            [tuple((_name(a), _name(b)) for a, b in met) for met in versions.met],
            self._settings,
        )
        group = {name: i for i, pair in enumerate(pairs, 1) for name in pair}
        alone = [n for n in numbers if _name(n) not in group]
        group |= {_name(n): i for i, n in enumerate(alone, len(pairs) + 1)}
        return [_member(m, group[_name(m.replica)], 1) for m in ready]

    def _rates(self, view: RoundView, numbers: Sequence[int], now: float) -> NDArray[np.float64]:
        """(n, n) bytes/s between replicas: of the slowest link that they would exchange over."""
        plans = [p for n in numbers if (p := view.run.replicas[n].plan) is not None]
        peers = list(dict.fromkeys(s.holders[0] for p in plans for s in p.stages))
        network = view.network(peers, now) if self._matching == "saps" else None
        reached = self._reached(view, peers)
        found = np.ones((len(numbers), len(numbers)))
        if network is None and reached.all():
            return found
        rate = np.ones((len(peers), len(peers)))
        if network is not None:
            ends = np.minimum(network.up[:, None], network.down[None, :])
            rate = np.minimum(network.bandwidth, ends)
        rate = np.where(reached, rate, 0.0)
        at = {peer: i for i, peer in enumerate(peers)}
        replicas = [Replicated(plan) for plan in plans]
        for i, a in enumerate(replicas):
            for j, b in enumerate(replicas):
                if i != j:
                    found[i, j] = min(rate[at[x], at[y]] for x, y in meeting(a, b))
        return found

    def _reached(self, view: RoundView, peers: Sequence[PeerId]) -> NDArray[np.bool_]:
        """(p, p): between whom there can be a link."""
        members, relays = view.members.members, self._submitted.options.relays
        known = np.array([p in members for p in peers])
        open_ = np.array([relays or (p in members and bool(members[p].address)) for p in peers])
        found: NDArray[np.bool_] = known & known[:, None] & (open_ | open_[:, None])
        return found


def regrouped(
    before: Sequence[RoundMember],
    ready: Sequence[RoundMember],
    anew: Collection[int],
    attempt: int,
) -> list[RoundMember]:
    """The groups of an attempt in place of `before`: one whose members are all ready, in the terms
    of then, stays as it was planned, unless one of them is in `anew`; of any other those go on
    who are left. Who comes late is alone. Pure."""
    now, known = {m.replica: m for m in ready}, {m.replica: m for m in before}
    terms = {n: m.term for n, m in now.items() if n not in anew}
    broken = {m.group for m in before if terms.get(m.replica) != m.term}
    last = max((m.group for m in before), default=0)
    late = [n for n in now if n not in known]
    group = {n: m.group for n, m in known.items()} | {n: last + 1 + i for i, n in enumerate(late)}
    stay = {n for n, m in known.items() if m.group not in broken}
    return [known[n] if n in stay else _member(now[n], group[n], attempt) for n in sorted(now)]


def _groups(members: Iterable[RoundMember]) -> list[list[int]]:
    """Numbers of replicas, by group."""
    found: dict[int, list[int]] = {}
    for m in members:
        found.setdefault(m.group, []).append(m.replica)
    return list(found.values())


def _member(of: RoundMember, group: int, attempt: int) -> RoundMember:
    return RoundMember(
        replica=of.replica, weight=of.weight, term=of.term, group=group, attempt=attempt
    )


def _name(number: int) -> str:
    """As the selection of pairs has it: in the order of numbers."""
    return f"{number:06}"
