"""What a round is: who works on what, when it closes, who exchanges with whom, who is to blame if
nothing comes of that, and which weights are a version.

Here all replicas exchange with all and come to one version; what members say of each other makes
disputes and convictions (`disputes.py`). Another policy is a subclass that differs in some of
these, as `gossip.py` does. A policy has settings and no state: all that it answers is a function of
its arguments, and it changes none of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Literal

from ...dag.plan.plan import PeerId
from ...dag.schedule.filled import filled
from ...planner.network.places import may_have_places, places_of
from ...proto.broker_pb2 import (
    ClientReports,
    ClientUploads,
    HostLine,
    RoundBegun,
    RoundMember,
    RoundStart,
    RoundWork,
)
from ..records.replica import ReplicaRecord
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from ..records.submitted import SubmittedRun
from ..snapshots.checkpoints import AUTO_S
from .disputes import doubted
from .handing import at_most, local_work
from .round_view import Blame, ExchangeGroup, LinksAmong, PlannedAttempt, RoundView

__all__ = ["SPARE_S", "RoundPolicy"]

SPARE_S = 30.0
"""Added to twice the expected time of local work."""


class RoundPolicy:
    """All with all."""

    carries: ClassVar[bool] = False
    """Whether who is not ready when a round closes goes on, and its work is of the next round."""

    def __init__(self, run: SubmittedRun) -> None:
        self._submitted, self._wish = run, run.requirements
        self._sync = run.requirements.sync

    # ------------------------------------------------------------ who works on what

    def work(
        self,
        run: RunRecord,
        numbers: Sequence[int],
        exchange_s: float,
        going: Sequence[RoundWork],
        network: LinksAmong,
    ) -> list[RoundWork]:
        """Return the work of the next round, for these replicas; those that would get none are not
        in it. `exchange_s`: how long the last exchange took, 0: not known. `going`: where work is
        carried on, that of others in the round before. `network`: as it is known now."""
        return local_work(run, numbers, exchange_s, saves=self.saves)

    def begun(
        self, run: RunRecord, numbers: Sequence[int], work: Sequence[RoundWork]
    ) -> RoundBegun:
        """Return the event of the next round, in which these replicas could have been, and which
        is of this work."""
        return RoundBegun(round=run.of_rounds.versions.round, work=work)

    def start_of(self, rounds: RoundRecord, replica: str, work: RoundWork) -> RoundStart:
        """Return what holders of a replica, by its id, are told of its work."""
        start, length = rounds.work.schedule
        return filled(
            RoundStart,
            work,
            run=replica,
            round=rounds.versions.round - work.behind,
            start=start - work.behind,
            length=length * work.steps / work.planned if work.planned else length,
            evaluate=work.replica in self.evaluators(rounds),
            gathers=self.gathers(rounds),
            apart=self._sync.apart and rounds.versions.round > 0,
        )

    def replanned(self, replica: ReplicaRecord, round_: int, work: RoundWork) -> None:
        """Have the work of a replica be what its new plan, in the middle of the round, makes of
        it."""

    def without(
        self, round_: int, work: RoundWork, places: Sequence[int]
    ) -> tuple[RoundWork, list[int]] | None:
        """Return a replica's work of a round without the clients at these places, and their
        numbers; None: it has none of them, or no others."""
        return None

    def handed_on(
        self,
        view: RoundView,
        lost: Sequence[int],
        ready: Sequence[int],
        took_s: float,
        left_s: float,
    ) -> list[RoundWork]:
        """Return the work of the round anew, in which replicas that are ready have that of those
        that are lost; empty: they have not. took_s: how long the slowest took for its own; left_s:
        until the deadline."""
        return []

    # ------------------------------------------------------------ when it closes

    def lasts_s(self, run: RunRecord, rounds: RoundRecord) -> float:
        """Return how long local work may take: who is not ready then is left out."""
        if self._sync.deadline != "auto":
            return float(self._sync.deadline)
        given = rounds.work.given.items()
        times = [w.steps * run.replicas[n].round_step_s for n, w in given]
        if not all(times):  # nothing is known of some
            return self._submitted.options.first_step_s
        return 2 * at_most(times) + SPARE_S

    def counts(self, work: RoundWork) -> bool:
        """Whether a contribution counts, however many versions were made since it was begun."""
        return True

    def is_enough(self, rounds: RoundRecord, ready: Sequence[int]) -> bool:
        """Whether the contributions of these replicas make a round, before others are there."""
        return len(ready) >= self._sync.needed(len(rounds.work.given))

    def too_late(self, missing: Sequence[int]) -> Sequence[int]:
        """Return replicas that may lose their place since the round closes without them."""
        return missing

    # ------------------------------------------------------------ who exchanges with whom

    def attempt(
        self, view: RoundView, ready: Sequence[int], at_gate: Sequence[int], now: float
    ) -> PlannedAttempt:
        """Return the next attempt of replicas whose contribution is there; of those `at_gate`, who
        does not contribute may take the version."""
        out = view.disputes.leaves_out(ready)  # else nobody can add up what all of these give
        members = self.members(view, [n for n in ready if n not in out])
        joiners = self.joining(view, members, at_gate)
        weights = {m.replica: m.weight for m in members}
        apart = view.disputes.between([*weights, *joiners])
        scale, places = self.scale(view, members), self._places(view, members, now)
        group = ExchangeGroup(weights, joiners, apart=apart, scale=scale, places=places)
        return PlannedAttempt(members, joiners, [group])

    def _places(
        self, view: RoundView, members: Sequence[RoundMember], now: float
    ) -> Mapping[PeerId, int]:
        """Return by peer the place of those whose contributions may be added up there first."""
        if not self._submitted.requirements.goes_whole:
            return {}
        plans = [p for m in members if (p := view.run.replicas[m.replica].plan) is not None]
        peers = dict.fromkeys(peer for plan in plans for peer in plan.peers)
        elements = sum(s.elements for s in plans[0].outline.stages)
        if not may_have_places(len(peers), elements):
            return {}
        network = view.network([*peers], now)
        return places_of(network, elements) if network is not None else {}

    def members(self, view: RoundView, numbers: Sequence[int]) -> list[RoundMember]:
        """Return replicas as members, by number; the weight of each is its samples."""
        found = []
        for n in sorted(numbers):
            replica = view.run.replicas[n]
            assert replica.plan is not None, f"replica {n} has no plan"
            weight = view.rounds.work.units(n) * replica.plan.microbatch_size
            found.append(RoundMember(replica=n, weight=weight, term=replica.term))
        return found

    def scale(self, view: RoundView, members: Sequence[RoundMember]) -> float:
        """Return what the mean of parameters is multiplied by; 0: nothing."""
        return 0.0

    def joining(
        self, view: RoundView, members: Sequence[RoundMember], at_gate: Sequence[int]
    ) -> list[int]:
        """Return who is no member, and not in dispute with all whose version it may take."""
        inside, between = [m.replica for m in members], view.disputes.between
        others = [n for n in at_gate if n not in inside]
        return [n for n in others if not all(between((n, m)) for m in inside)]

    # ------------------------------------------------------------ who is to blame

    def late(self, view: RoundView, waiting: Sequence[int]) -> Blame:
        """Return who is left out of the next attempt, as the time of this one is over and some wait
        for their version: who has said nothing of others, and who speaks against one of whom
        nothing was to come any more. What others say makes disputes: who lacks one thing lacks it
        because of whoever lacks what it is made of, if somebody does."""
        each, nobody = [dict(lacks) for lacks in view.lacks.values()], set[int]()
        others = [{n: lacks.get(n, nobody) - {n} for n in waiting} for lacks in each]
        said = next((lacks for lacks in others if any(lacks.values())), {})
        both = {n: nobody.union(*(lacks.get(n, nobody) for lacks in each)) for n in waiting}
        out, pairs = [n for n in waiting if not both[n] - {n}], list[tuple[int, int]]()
        known = view.disputes.between(view.rounds.versions.inside)
        for by in [n for n in waiting if n not in out]:
            for about in sorted(said.get(by, nobody) - {by, *out}):
                if {by, about} in known:
                    out.append(by)
                    break
                pairs.append((by, about))
        return Blame(out, pairs)

    def differ(self, view: RoundView, others: Sequence[int], like: int) -> Blame:
        """Return who is to blame that these have made another version than `like` did: who did so
        out of what others gave it is in dispute with these."""
        inside, replicas = view.rounds.versions.inside, view.run.replicas
        out, pairs = list[int](), list[tuple[int, int]]()
        for number in others:
            peers = doubted(number, like, view.made, view.plans)
            about = [n for n in inside if n != number and peers & set(replicas[n].peers)]
            pairs += [(number, n) for n in about]
            out += [] if about else [number]
        return Blame(out, pairs)

    # ------------------------------------------------------------ what a round came to

    def agreed(
        self, view: RoundView, hashes: Mapping[int, int | None]
    ) -> tuple[int, Sequence[int]] | None:
        """Return a hash of what a round came to, and who has made what it was to make, by the
        hashes of members and joiners; None: of each the own holders differ."""
        known = Counter(h for h in hashes.values() if h is not None)
        if not known:
            return None
        version = known.most_common(1)[0][0]
        return version, [n for n, h in hashes.items() if h == version]

    def uploads(self, view: RoundView, numbers: Sequence[int]) -> ClientUploads | None:
        """Return what clients of these replicas sent of their updates in the round; None: there are
        no clients, or they send all."""
        return None

    def lines(
        self, view: RoundView, numbers: Sequence[int], took_s: float, now: float
    ) -> Sequence[HostLine]:
        """Return what the uploads of these replicas in the round, whose exchange took so long, have
        shown of their lines."""
        return ()

    def reports(self, view: RoundView, numbers: Sequence[int]) -> ClientReports | None:
        """Return what is known of the clients of these replicas, for the submitter's rule; None:
        there is none."""
        return None

    def one_evaluation(self, rounds: RoundRecord) -> bool:
        """Whether what one replica's evaluation comes to holds for all: they have the same weights,
        and evaluate the same samples."""
        return True

    def gathers(self, rounds: RoundRecord) -> bool:
        """Whether replicas with weights of their own come to one version in the round under way."""
        return False

    def evaluators(self, rounds: RoundRecord) -> Collection[int]:
        """Return replicas that evaluate what they begin the round with, if that is due: one, the
        first in which the version does not land where the next one does, for frames of two
        evaluations at one step are one another's doubles."""
        if not rounds.work.passed(self._wish.eval_every):
            return ()
        given = rounds.work.given.items()
        return sorted(n for n, w in given if w.late < w.steps + w.ahead)[:1]

    # ------------------------------------------------------------ which versions are kept

    @property
    def saves_every(self) -> int | Literal["auto"]:
        """Steps of the run between versions that are kept as checkpoints; 0: none."""
        return 0 if self._sync.apart else self._wish.output.every

    def saves(self, run: RunRecord, step: int) -> bool:
        """Whether the version with so many steps of the run is one of those that are kept."""
        every, saved = self.saves_every, run.saved_step
        if every == "auto":
            step_s = max(r.round_step_s for r in run.replicas)
            return (step - saved) * step_s >= AUTO_S
        return bool(every) and step // every > saved // every
