"""Which replicas of a run exchange with each other in a round of gossip.

    attempt 1   pairs by the run's method (`pairs/selection.py`), of those whose contribution is
                there; who has no partner is alone, and goes on with its own
    later ones  a pair that lost a member is what is left of it; nobody else begins anew
    gathering   all with all, at the end

A group is a small exchange of its own, with its own attempts. Who has no version of its own takes
that of the first member of a group that is planned at that moment, or waits for the next round.
Not durable: after a restart of the broker every group is planned anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...job.rounds import method_of, options_of
from ...proto.broker_pb2 import RoundMember
from ..membership.membership import Membership
from ..records.rounds import RoundRecord
from ..runs.run import Run
from .pairs.selection import PairSettings, pairs_of_round
from .policy import RoundPolicy
from .segments import Replicated, meeting

__all__ = ["Gossip", "NetworkOf", "regrouped"]

NetworkOf = Callable[[Sequence[PeerId], float], Network | None]
"""The links among peers, as they are known at a time."""


class Gossip(RoundPolicy):
    """The pairs of one run."""

    in_groups = True

    def __init__(
        self, run: Run, record: RoundRecord, members: Membership, network: NetworkOf
    ) -> None:
        super().__init__(record)
        self._run, self._members, self._network = run, members, network
        sync = run.submitted.requirements.sync
        method = method_of(sync.chosen)
        self._matching, self._alike = method.pairs, method.alike
        options = options_of(sync.chosen, sync.options)
        threshold = getattr(options, "threshold", "auto")
        self._settings = PairSettings(
            threshold=None if threshold == "auto" else float(threshold),
            recent=getattr(options, "recent", PairSettings.recent),
        )

    def grouped(
        self, ready: Sequence[RoundMember], *, anew: Collection[int] | None, now: float
    ) -> list[RoundMember]:
        record = self._record
        if record.gathers:
            found = [_member(m, 0, record.attempt + 1) for m in ready]
        elif record.attempt:
            everybody = [m.replica for m in record.members]
            again = everybody if anew is None else anew
            found = regrouped(record.members, ready, again, record.attempt + 1)
        else:
            found = self._paired(ready, now)
        return found

    def joining(
        self, members: Sequence[RoundMember], candidates: Sequence[int], without: Collection[int]
    ) -> list[int]:
        """`sources` says from whom. Groups that were planned before stay as they are."""
        candidates, before = [n for n in candidates if n not in without], self._record.attempt
        first = {m.group: m.replica for m in reversed(members)}
        stay = {m.replica for m in members if m.attempt <= before}
        sources = {j: s for j, s in self.sources.items() if s in stay and j in candidates}
        new = sorted(set(first.values()) - stay)
        rest = [j for j in candidates if j not in sources] if new else []
        self.sources = sources | {j: new[i % len(new)] for i, j in enumerate(rest)}
        self.kept = stay | sources.keys()
        return sorted(self.sources)

    def agreed(self, hashes: Mapping[int, int | None]) -> tuple[int, list[int]] | None:
        """Where pairs take a plain mean, each is to make what the first of them did, and joiners
        what theirs did. The hash is the sum of the members'."""
        found, members = super().agreed(hashes), self._record.members
        if found is None or self._record.gathers:
            return found
        first: dict[int, int | None] = {}
        for m in members:
            if hashes.get(m.replica) is not None:
                first.setdefault(m.group, hashes[m.replica])
        wanted = {m.replica: first.get(m.group) for m in members} if self._alike else hashes
        wanted = {n: wanted.get(self.sources.get(n, n)) for n in hashes}
        total = sum(h for m in members if (h := hashes[m.replica]) is not None)
        return total % 2**64, [n for n, h in hashes.items() if h is not None and h == wanted[n]]

    # ------------------------------------------------------------ pairs

    def _paired(self, ready: Sequence[RoundMember], now: float) -> list[RoundMember]:
        """Who meets whom in the first attempt of the round under way."""
        record, numbers = self._record, [m.replica for m in ready]
        pairs = pairs_of_round(
            self._matching,
            self._run.submitted.requirements.seed,
            record.round,
            [_name(n) for n in numbers],
            self._rates(numbers, now),
            [tuple((_name(a), _name(b)) for a, b in met) for met in record.met],
            self._settings,
        )
        group = {name: i for i, pair in enumerate(pairs, 1) for name in pair}
        alone = [n for n in numbers if _name(n) not in group]
        group |= {_name(n): i for i, n in enumerate(alone, len(pairs) + 1)}
        return [_member(m, group[_name(m.replica)], record.attempt + 1) for m in ready]

    def _rates(self, numbers: Sequence[int], now: float) -> NDArray[np.float64]:
        """(n, n) bytes/s between replicas: of the slowest link that they would exchange over."""
        plans = [p for n in numbers if (p := self._run.replicas[n].record.plan) is not None]
        peers = list(dict.fromkeys(s.holders[0] for p in plans for s in p.stages))
        network = self._network(peers, now) if self._matching == "saps" else None
        unreachable = self._unreachable(peers)
        found = np.ones((len(numbers), len(numbers)))
        if network is None and not unreachable.any():
            return found
        rate = np.ones((len(peers), len(peers)))
        if network is not None:
            ends = np.minimum(network.up[:, None], network.down[None, :])
            rate = np.minimum(network.bandwidth, ends)
        rate[unreachable] = 0.0
        at = {peer: i for i, peer in enumerate(peers)}
        replicas = [Replicated(plan) for plan in plans]
        for i, a in enumerate(replicas):
            for j, b in enumerate(replicas):
                if i != j:
                    found[i, j] = min(rate[at[x], at[y]] for x, y in meeting(a, b))
        return found

    def _unreachable(self, peers: Sequence[PeerId]) -> NDArray[np.bool_]:
        """(p, p): between whom there can be no link."""
        members = self._members.members
        known = np.array([p in members for p in peers])
        open_ = np.array([p in members and bool(members[p].address) for p in peers])
        if self._run.submitted.options.relays:
            open_[:] = True
        found: NDArray[np.bool_] = known & known[:, None] & (open_ | open_[:, None])
        return ~found


def regrouped(
    before: Sequence[RoundMember],
    ready: Sequence[RoundMember],
    anew: Collection[int],
    attempt: int,
) -> list[RoundMember]:
    """The groups of an attempt in place of `before`: one whose members are all ready, in the terms
    of then, stays as it was planned, unless one of them is in `anew`; of any other those go on
    who are left. Who comes late is alone. Pure."""
    now, groups = {m.replica: m for m in ready}, dict[int, list[RoundMember]]()
    for m in before:
        groups.setdefault(m.group, []).append(m)
    found: dict[int, RoundMember] = {}
    for number, members in groups.items():
        there = [m for m in members if m.replica in now]
        stays = len(there) == len(members) and all(now[m.replica].term == m.term for m in members)
        stays = stays and not any(m.replica in anew for m in members)
        for m in there:
            found[m.replica] = m if stays else _member(now[m.replica], number, attempt)
    last = max(groups, default=0)
    for i, m in enumerate((m for m in ready if m.replica not in found), last + 1):
        found[m.replica] = _member(m, i, attempt)
    return [found[n] for n in sorted(found)]


def _member(of: RoundMember, group: int, attempt: int) -> RoundMember:
    return RoundMember(
        replica=of.replica, weight=of.weight, term=of.term, group=group, attempt=attempt
    )


def _name(number: int) -> str:
    """As the selection of pairs has it: in the order of numbers."""
    return f"{number:06}"
