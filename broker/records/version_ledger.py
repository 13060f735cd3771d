"""The ledger of versions: which one the run has come to, who has it, and which exchange makes the
next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...dag.rounds.sums import EXPONENT
from ...proto.broker_pb2 import LieProved, RoundDone, RoundMember, RoundPlanned, RoundUnmasked
from ...proto.journal_pb2 import MetPairs, RoundsKept

__all__ = ["VersionLedger", "pairs_of"]


def pairs_of(members: Iterable[RoundMember]) -> tuple[tuple[int, int], ...]:
    """Pairs of replicas that met; none where all met, or everybody was alone."""
    groups: dict[int, list[int]] = {}
    for member in members:
        groups.setdefault(member.group, []).append(member.replica)
    found = (sorted(g) for number, g in sorted(groups.items()) if number and len(g) == 2)
    return tuple((a, b) for a, b in found)


class VersionLedger:
    """Changes by events only.

    round: the one under way, or the next one: so many versions were made. attempt, members,
    joiners: of its exchange, as it was planned last; 0: not yet. exponent: as in RoundPlan.
    holders: in which term a replica made the newest version, by number; of the first version, which
    all begin from, nobody. unmasked: members of the exchange by their peers' ids, once its masks
    are lifted: there is no other attempt at the round then. met: the pairs of the newest rounds,
    since all met last. liars: ids of peers that are in no round any more, as a lie of theirs was
    proved.
    """

    def __init__(self, remembers: int = 0) -> None:
        """`remembers`: so many rounds' pairs."""
        self.first = self.round = self.attempt = 0
        """`first`: the round whose version all begin from."""
        self.members: tuple[RoundMember, ...] = ()
        self.joiners: tuple[int, ...] = ()
        self.unmasked: tuple[str, ...] = ()
        self.exponent = EXPONENT
        self.holders: dict[int, int] = {}
        self.met: deque[tuple[tuple[int, int], ...]] = deque(maxlen=remembers)
        self.liars = set[str]()
        self.done_at_s = 0.0
        """When the last one was committed, or the first round began."""

    @property
    def inside(self) -> list[int]:
        """Numbers of the replicas in the present attempt: members, then joiners."""
        return [*(m.replica for m in self.members), *self.joiners]

    def attempt_of(self, number: int) -> int:
        """In which attempt what a member now does was planned."""
        found = (m.attempt for m in self.members if m.replica == number)
        return next(found, 0) or self.attempt

    # ------------------------------------------------------------ what happened

    def begin(self, at_s: float) -> None:
        """Replicas have got work of the round."""
        if not self.round and not self.done_at_s:
            self.done_at_s = at_s

    def planned(self, planned: RoundPlanned) -> None:
        """Another attempt. Raises ValueError where it is none."""
        if self.unmasked:
            raise ValueError(f"attempt {planned.attempt}, and attempt {self.attempt} is unmasked")
        if planned.attempt <= self.attempt:
            raise ValueError(f"attempt {planned.attempt}, behind attempt {self.attempt}")
        self.attempt, self.exponent = planned.attempt, planned.exponent
        self.members, self.joiners = tuple(planned.members), tuple(planned.joiners)

    def unmask(self, told: RoundUnmasked) -> None:
        """The masks of the attempt are to be lifted. Raises ValueError where there is none."""
        if not self.attempt or self.unmasked:
            raise ValueError(f"masks of round {self.round} are lifted in attempt {self.attempt}")
        self.unmasked = tuple(told.members)

    def proved(self, lie: LieProved) -> None:
        """A peer has lied."""
        self.liars.add(lie.peer)

    def done(self, done: RoundDone, at_s: float) -> None:
        """The version is made."""
        if any(m.group for m in done.members):
            self.met.append(pairs_of(done.members))
        else:
            self.met.clear()
        self.round, self.attempt, self.members, self.joiners = self.round + 1, 0, (), ()
        self.unmasked = ()
        self.holders = {m.replica: m.term for m in (*done.members, *done.joined)}
        self.done_at_s = at_s

    # ------------------------------------------------------------ the journal's snapshots

    def kept(self) -> RoundsKept:
        return RoundsKept(
            round=self.round,
            attempt=self.attempt,
            members=self.members,
            joiners=self.joiners,
            unmasked=self.unmasked,
            liars=sorted(self.liars),
            exponent=self.exponent,
            done_at_s=self.done_at_s,
            holders=[RoundMember(replica=n, term=term) for n, term in self.holders.items()],
            met=[MetPairs(replicas=[n for pair in pairs for n in pair]) for pairs in self.met],
        )

    def restore(self, kept: RoundsKept) -> None:
        self.round, self.attempt, self.exponent = kept.round, kept.attempt, kept.exponent
        self.members, self.joiners = tuple(kept.members), tuple(kept.joiners)
        self.unmasked = tuple(kept.unmasked)
        self.liars |= {*kept.liars}
        self.holders = {m.replica: m.term for m in kept.holders}
        self.done_at_s = kept.done_at_s
        for m in kept.met:
            self.met.append(tuple(zip(m.replicas[::2], m.replicas[1::2], strict=True)))
