"""Federated training: the clients of a round's cohort are divided among replicas, which train them
and exchange their means, all with all. Who is late is left out, and its clients with it. A replica
that is one peer trains its clients side by side, and makes no step; one that is a pipeline trains
them one after the other, by steps of its plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from ...dag.rounds.cohorts import (
    WEIGHT_UNIT,
    client_steps,
    cohort_of,
    effective_lengths,
    places_of,
    places_of_clients,
    ranges_of,
)
from ...job import Training
from ...job.rounds import method_of
from ...proto.broker_pb2 import ClientReports, ClientUploads, RoundBegun, RoundMember, RoundWork
from ..records.replica import ReplicaRecord
from ..records.rounds import RoundRecord
from ..records.run import RunRecord
from ..records.submitted import SubmittedRun
from .client_reports import client_reports
from .handing import at_most, divide, handed_on, with_places
from .policy import SPARE_S, RoundPolicy
from .round_view import LinksAmong, PlannedAttempt, RoundView
from .stateful import StatefulWork, place_clients
from .uploads import Links, Update, links_of, weights_of

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
        going: Sequence[RoundWork],
        network: LinksAmong,
    ) -> list[RoundWork]:
        """Return places of the cohort, as many for each replica as its speed is worth."""
        everybody = self._cohort(run, going)
        homes, number = run.of_rounds.homes, run.of_rounds.versions.round
        if homes is None:
            placed = StatefulWork(self._shared_out(run, numbers, len(everybody)), (), afresh=False)
        else:
            asked = self._clients(number, everybody)
            seconds = {n: run.replicas[n].round_step_s for n in numbers}
            running = [r.number for r in run.replicas if r.running]
            shared = self._sync.has_controls
            placed = place_clients(homes, asked, seconds, running, shared=shared)
        return self._works(run, everybody, placed, self._drawn(run, everybody))

    def _works(
        self, run: RunRecord, everybody: Sequence[int], placed: StatefulWork, links: Links | None
    ) -> list[RoundWork]:
        """Return the work of replicas that train the clients at these places of the cohort; `links`
        as of `_sent`."""
        ledger, found = run.of_rounds.work, list[RoundWork]()
        kept, weights = self._sent(run, everybody, links)
        for n, at in placed.places.items():
            places, replica = [everybody[i] for i in at], run.replicas[n]
            work = RoundWork(
                replica=n,
                term=replica.term,
                first_step=replica.committed,
                steps=self._steps(replica, run.of_rounds.versions.round, places),
                cohort=ranges_of(places),
                kept=[kept[i] for i in at if kept],
                weights=[weights[i] for i in at if weights],
                trained=[placed.trained[i] for i in at if placed.trained],
                afresh=placed.afresh,
                final=ledger.committed + 1 >= ledger.total,
            )
            found.append(work)
        return found

    def _shared_out(
        self, run: RunRecord, numbers: Sequence[int], clients: int
    ) -> dict[int, Sequence[int]]:
        """Return by replica which ones of so many it trains, which are the same everywhere."""
        seconds, first = [run.replicas[n].round_step_s for n in numbers], 0
        found, counts = dict[int, Sequence[int]](), divide(clients, seconds)
        if self._cohorts.secure and sum(map(bool, counts)) < self._cohorts.fewest:
            counts = divide(clients, [0.0] * len(seconds))
        for n, count in zip(numbers, counts, strict=True):
            if count:
                found[n] = range(first, first + count)
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
        found = with_places(work, [before[i] for i in there])
        for told in (found.kept, found.weights, found.trained):
            if told:
                told[:] = [told[i] for i in there]
        found.left_out.extend(gone)
        return found, self._clients(round_, gone)

    @property
    def _hands_on(self) -> bool:
        """Whether clients of a lost replica may be trained by another: all that they are follows
        from (seed, round, client), and what they come to is added up by weight."""
        cohorts = self._cohorts
        hidden = cohorts.secure or cohorts.privacy is not None
        keeps = self._sync.has_controls or cohorts.sends.sparse
        return not (hidden or keeps or cohorts.by_client or self.carries)

    def handed_on(
        self,
        view: RoundView,
        lost: Sequence[int],
        ready: Sequence[int],
        took_s: float,
        left_s: float,
    ) -> list[RoundWork]:
        given, replicas = view.rounds.work.given, view.run.replicas
        if not self._hands_on:
            return []
        seconds = {n: replicas[n].round_step_s for n in ready if not given[n].steps}
        return handed_on(given, lost, seconds, took_s=took_s, left_s=left_s)

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
        longest client that may be in the round, which peers bring moves to (`LocalCohort`)."""
        if not self._normalises:
            return 0.0
        number, cohorts = view.rounds.versions.round, self._cohorts
        train = Training.from_json(self._wish.training).train
        cohort = self._clients(number, range(cohorts.places))
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

    def begun(
        self, run: RunRecord, numbers: Sequence[int], work: Sequence[RoundWork]
    ) -> RoundBegun:
        """Return the event of the next round, which says whether its clients are those that the
        submitter's rule has chosen."""
        found, places = super().begun(run, numbers, work), {*self._chosen(run)}
        inside = (p for w in work for p in places_of(w.cohort))
        found.chosen = bool(places) and all(p in places for p in inside)
        return found

    def _chosen(self, run: RunRecord) -> list[int]:
        """Return the places of the next cohort that the submitter's rule has chosen; none: it has
        not."""
        found, number = run.of_rounds.work.chosen, run.of_rounds.versions.round
        if found is None:
            return []
        return places_of_clients(self._cohorts.clients, self._seed, number, found.clients)

    def _cohort(self, run: RunRecord, going: Sequence[RoundWork]) -> Sequence[int]:
        """Return the places of the next cohort: those that are chosen or the first ones, but for
        clients that `going` has already and in their place others, the next ones in the round's
        order."""
        number, cohorts = run.of_rounds.versions.round, self._cohorts
        if not going:
            return self._chosen(run) or range(cohorts.per_round)
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

    def _sent(
        self, run: RunRecord, places: Sequence[int], links: Links | None
    ) -> tuple[list[int], list[int]]:
        """Return, for each of these places of the next round, how many numbers of its update the
        client sends, and what it weighs; nothing where clients send all. `links`: of these clients;
        None: they are alike."""
        sends, number = self._cohorts.sends, run.of_rounds.versions.round
        if not self._cohorts.own_positions:
            return [], []
        update, options = self._update(run), sends.compression_options
        if sends.by_links and links is not None:
            kept = update.by_links(options.least_ratio, links)
        else:
            kept = update.least(options.least_ratio, len(places))
        alpha = options.alpha if sends.by_links else 0.0
        return kept.tolist(), weights_of(self._shares(number, places), kept, alpha)

    def _drawn(self, run: RunRecord, places: Sequence[int]) -> Links | None:
        """Return the links that the job says these clients of the round stand for; None: it says
        none."""
        if (links := self._cohorts.sends.client_links) is None:
            return None
        return links_of(links, self._clients(run.of_rounds.versions.round, places))

    def _update(self, run: RunRecord) -> Update:
        """Return what a client's update has. Replicas are of one model."""
        plans = (r.plan for r in run.replicas if r.plan is not None)
        whole = max((sum(s.elements for s in p.outline.stages) for p in plans), default=0)
        elements = self._submitted.spec.update_elements or whole
        return Update(elements, 4 * max(0, whole - elements))

    def uploads(self, view: RoundView, numbers: Sequence[int]) -> ClientUploads | None:
        """Return what the clients of these replicas sent in the round; None: all that there was."""
        works = [view.rounds.work.given[n] for n in numbers]
        kept = np.array([k for w in works for k in w.kept], np.int64)
        if not len(kept):
            return None
        update, seconds = self._update(view.run), 0.0
        places = [place for w in works for place in places_of(w.cohort)]
        if (links := self._drawn(view.run, places)) is not None:
            seconds = float(update.seconds(kept, links).max())
        return ClientUploads(
            clients=len(kept),
            bytes=int(update.bytes(kept).sum()),
            least_ratio=int(kept.min()) / update.elements,
            most_ratio=int(kept.max()) / update.elements,
            seconds=seconds,
        )

    def reports(self, view: RoundView, numbers: Sequence[int]) -> ClientReports | None:
        if not self._cohorts.selected:
            return None
        clients, update = partial(self._clients, view.rounds.versions.round), self._update(view.run)
        return client_reports(view, numbers, clients, update, told=self._cohorts.told)

    def evaluators(self, rounds: RoundRecord) -> Collection[int]:
        """Return the first replica that begins with the version, where an evaluation is due."""
        return self._beginners(rounds)[:1]

    def _beginners(self, rounds: RoundRecord) -> list[int]:
        """Return replicas that begin with the version, where an evaluation is due."""
        if not rounds.work.passed(self._wish.eval_every):
            return []
        return sorted(n for n, w in rounds.work.given.items() if not w.behind)
