"""Federated training: the clients of a round's cohort are divided among replicas, which train them
and exchange their means, all with all. Who is late is left out, and its clients with it. A replica
that is one peer trains its clients side by side, and makes no step; one that is a pipeline trains
them one after the other, by steps of its plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ...dag.rounds.cohorts import (
    WEIGHT_UNIT,
    client_steps,
    cohort_of,
    effective_lengths,
    places_of,
    ranges_of,
)
from ...job import Training
from ...job.rounds import method_of
from ...proto.broker_pb2 import ClientUploads, RoundMember, RoundWork
from ..records.replica import ReplicaRecord
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from ..records.submitted import SubmittedRun
from .handing import at_most, divide
from .policy import SPARE_S, RoundPolicy
from .round_view import PlannedAttempt, RoundView
from .stateful import StatefulWork, place_clients
from .uploads import Update, links_of, weights_of

__all__ = ["FederatedPolicy"]


class FederatedPolicy(RoundPolicy):
    """Clients in place of the run's samples."""

    def __init__(self, run: SubmittedRun) -> None:
        super().__init__(run)
        cohorts = run.requirements.cohorts
        assert cohorts is not None, f"run {run.id} has no clients"
        self._cohorts, self._sizes = cohorts, run.spec.client_sizes
        self._seed = run.requirements.seed
        self._normalises = method_of(self._sync.chosen).normalises

    def work(
        self,
        run: RunRecord,
        numbers: Sequence[int],
        exchange_s: float,
        going: Sequence[RoundWork] = (),
    ) -> list[RoundWork]:
        """Return places of the cohort, as many for each replica as its speed is worth."""
        assert run.rounds is not None, f"run {run.id} has no rounds"
        ledger, found = run.rounds.work, list[RoundWork]()
        kept, weights = self._sent(run)
        homes, number = run.rounds.homes, run.rounds.versions.round
        if homes is None:
            placed = StatefulWork(self._shared_out(run, numbers, going), (), afresh=False)
        else:
            asked = self._clients(number, range(self._cohorts.per_round))
            seconds = {n: run.replicas[n].round_step_s for n in numbers}
            running = [r.number for r in run.replicas if r.running]
            shared = self._sync.has_controls
            placed = place_clients(homes, asked, seconds, running, shared=shared)
        for n, places in placed.places.items():
            found.append(
                RoundWork(
                    replica=n,
                    term=run.replicas[n].term,
                    first_step=run.replicas[n].committed,
                    steps=self._steps(run.replicas[n], number, places),
                    cohort=ranges_of(places),
                    kept=[kept[p] for p in places if kept],
                    weights=[weights[p] for p in places if weights],
                    trained=[placed.trained[p] for p in places if placed.trained],
                    afresh=placed.afresh,
                    final=ledger.committed + 1 >= ledger.total,
                )
            )
        return found

    def _shared_out(
        self, run: RunRecord, numbers: Sequence[int], going: Sequence[RoundWork]
    ) -> dict[int, Sequence[int]]:
        """Return by replica the places that it trains, of clients that are the same everywhere."""
        seconds, first = [run.replicas[n].round_step_s for n in numbers], 0
        places, found = self._free(run, going), dict[int, Sequence[int]]()
        counts = divide(len(places), seconds)
        if self._cohorts.secure and sum(map(bool, counts)) < self._cohorts.fewest:
            counts = divide(len(places), [0.0] * len(seconds))
        for n, count in zip(numbers, counts, strict=True):
            if count:
                found[n] = places[first : first + count]
            first += count
        return found

    def _steps(self, replica: ReplicaRecord, round_: int, places: Sequence[int]) -> int:
        """Return how many own steps clients at these places are to a replica; 0: it makes none."""
        if replica.plan is None or len(replica.plan.stages) == 1:
            return 0
        spec, local = self._submitted.spec, self._cohorts.local
        sizes, batch = self._sizes_of(round_, places), spec.microbatches * spec.microbatch_size
        return int(client_steps(sizes, batch, passes=local.passes, steps=local.steps).sum())

    def replanned(self, replica: ReplicaRecord, round_: int, work: RoundWork) -> None:
        """Have a replica make steps where it was one peer and is a pipeline now. One that was a
        pipeline goes on with its steps, whatever it is."""
        work.steps = work.steps or self._steps(replica, round_, places_of(work.cohort))

    def lasts_s(self, run: RunRecord, rounds: RoundRecord) -> float:
        """Return how long local work may take: by the steps of pipelines, if there are some."""
        least, given = super().lasts_s(run, rounds), rounds.work.given.items()
        each = (w.steps * run.replicas[n].round_step_s for n, w in given)
        times = [seconds for seconds in each if seconds]
        if self._sync.deadline != "auto" or not times:
            return least
        return max(least, 2 * at_most(times) + SPARE_S)

    def without(
        self, round_: int, work: RoundWork, places: Sequence[int]
    ) -> tuple[RoundWork, list[int]] | None:
        before = places_of(work.cohort)
        gone = sorted({*before} & {*places})
        there = [i for i, place in enumerate(before) if place not in gone]
        if not gone or not there:
            return None
        found = RoundWork()
        found.CopyFrom(work)
        found.ClearField("cohort")
        found.cohort.extend(ranges_of([before[i] for i in there]))
        for name in ("kept", "weights", "trained"):
            if told := getattr(work, name):
                found.ClearField(name)
                getattr(found, name).extend(told[i] for i in there)
        found.left_out.extend(gone)
        return found, self._clients(round_, gone)

    def members(self, view: RoundView, numbers: Sequence[int]) -> list[RoundMember]:
        """Return replicas as members, by number; the weight of each is its clients' samples, or
        their number."""
        found, rounds = [], view.rounds
        for n in sorted(numbers):
            work = rounds.work.given[n]
            member = RoundMember(replica=n, term=view.run.replicas[n].term)
            if work.weights:
                member.weight, member.unit = sum(work.weights), WEIGHT_UNIT
            else:
                number = rounds.versions.round - work.behind
                member.weight = sum(self._shares(number, places_of(work.cohort)))
                member.behind = work.behind
            found.append(member)
        return found

    def scale(self, view: RoundView, members: Sequence[RoundMember]) -> float:
        """Return, of FedNova, the mean effective length of the members' clients, by that of the
        longest client of the cohort, which peers bring moves to (`LocalCohort`)."""
        if not self._normalises:
            return 0.0
        number, cohorts = view.rounds.versions.round, self._cohorts
        train = Training.from_json(self._wish.training).train
        cohort = cohort_of(cohorts.clients, self._seed, number, range(cohorts.per_round))
        sizes = np.array([self._sizes[c] for c in cohort])
        lengths = effective_lengths(
            sizes,
            train.batch,
            passes=cohorts.local.passes,
            steps=cohorts.local.steps,
            momentum=train.momentum,
        )
        given = view.rounds.work.given
        inside = [p for m in members for p in places_of(given[m.replica].cohort)]
        weights = sizes[inside] if cohorts.weight == "samples" else None
        return float(np.average(lengths[inside], weights=weights) / lengths.max())

    def share(self, view: RoundView, members: Sequence[RoundMember]) -> float:
        """Return which share of all clients is in the members' work."""
        trained = sum(view.rounds.work.units(m.replica) for m in members)
        return trained / self._cohorts.clients

    def attempt(
        self, view: RoundView, ready: Sequence[int], at_gate: Sequence[int], now: float
    ) -> PlannedAttempt:
        """Return the next attempt, in which each client's contribution comes by itself if the
        aggregate wants that: to one member, if clients are chosen by all that they came to."""
        found, cohorts = super().attempt(view, ready, at_gate, now), self._cohorts
        [group] = found.groups
        if self._sync.has_controls:
            group = replace(group, share=self.share(view, found.members))
            return replace(found, groups=[group])
        if not cohorts.by_client:
            return found
        return replace(found, groups=[replace(group, by_client=True, whole=cohorts.chooses)])

    @property
    def saves_every(self) -> int | Literal["auto"]:
        """Return 0 for a run with a budget: whoever went on from a checkpoint would begin with a
        new one."""
        return 0 if self._cohorts.privacy is not None else super().saves_every

    def _free(self, run: RunRecord, going: Sequence[RoundWork]) -> Sequence[int]:
        """Return the places of the next cohort: of all its clients, but for those that `going` has
        already and in their place others, the next ones in the round's order."""
        assert run.rounds is not None, f"run {run.id} has no rounds"
        number, cohorts = run.rounds.versions.round, self._cohorts
        if not going:
            return range(cohorts.per_round)
        busy = {c for w in going for c in self._clients(number - w.behind, places_of(w.cohort))}
        order = self._clients(number, range(cohorts.clients))
        free = [place for place, client in enumerate(order) if client not in busy]
        return free[: max(0, cohorts.per_round - len(busy))]

    def _clients(self, round_: int, places: Sequence[int]) -> list[int]:
        return cohort_of(self._cohorts.clients, self._seed, round_, places)

    def _shares(self, round_: int, places: Sequence[int]) -> list[int]:
        """Return what clients at these places weigh by themselves: their samples, or 1."""
        if self._cohorts.weight == "equal":
            return [1] * len(places)
        return self._sizes_of(round_, places)

    def _sizes_of(self, round_: int, places: Sequence[int]) -> list[int]:
        return [self._sizes[c] for c in self._clients(round_, places)]

    # ------------------------------------------------------------ what clients send

    def _sent(self, run: RunRecord) -> tuple[list[int], list[int]]:
        """Return, by place of the cohort of the next round, how many numbers of its update a client
        sends, and what it weighs; nothing where clients send all."""
        assert run.rounds is not None
        sends, number = self._cohorts.sends, run.rounds.versions.round
        if not self._cohorts.own_positions:
            return [], []
        places, options = range(self._cohorts.per_round), sends.compression_options
        update, links = self._update(run), sends.client_links
        if sends.by_links and links is not None:
            drawn = links_of(links, self._clients(number, places))
            kept = update.by_links(options.least_ratio, drawn)
        else:
            kept = update.least(options.least_ratio, len(places))
        alpha = options.alpha if sends.by_links else 0.0
        return kept.tolist(), weights_of(self._shares(number, places), kept, alpha)

    def _update(self, run: RunRecord) -> Update:
        """Return what a client's update has. Replicas are of one model."""
        plans = (r.plan for r in run.replicas if r.plan is not None)
        whole = max((sum(s.elements for s in p.outline.stages) for p in plans), default=0)
        elements = self._submitted.spec.update_elements or whole
        return Update(elements, 4 * max(0, whole - elements))

    def uploads(self, view: RoundView, numbers: Sequence[int]) -> ClientUploads | None:
        """Return what the clients of these replicas sent in the round; None: all that there was."""
        given, number = view.rounds.work.given, view.rounds.versions.round
        works = [given[n] for n in numbers]
        kept = np.array([k for w in works for k in w.kept], np.int64)
        if not len(kept):
            return None
        update, links, seconds = self._update(view.run), self._cohorts.sends.client_links, 0.0
        if links is not None:
            places = [place for w in works for place in places_of(w.cohort)]
            drawn = links_of(links, self._clients(number, places))
            seconds = float(update.seconds(kept, drawn).max())
        return ClientUploads(
            clients=len(kept),
            bytes=int(update.bytes(kept).sum()),
            least_ratio=int(kept.min()) / update.elements,
            most_ratio=int(kept.max()) / update.elements,
            seconds=seconds,
        )

    def evaluators(self, rounds: RoundRecord) -> Collection[int]:
        """Return the first replica that begins with the version, where an evaluation is due."""
        return self._beginners(rounds)[:1]

    def _beginners(self, rounds: RoundRecord) -> list[int]:
        """Return replicas that begin with the version, where an evaluation is due."""
        if not rounds.work.passed(self._wish.eval_every):
            return []
        return sorted(n for n, w in rounds.work.given.items() if not w.behind)
