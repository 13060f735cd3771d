"""What must hold of rounds between replicas: I2 of samples and clients, I11 of versions."""

from __future__ import annotations

from ...broker import events as b
from ...broker.records.submitted import run_of
from ...dag.rounds.cohorts import cohort_of, places_of
from ...peer.core import events as p
from ...proto.broker_pb2 import DONE, Cohort, RoundBegun, RoundWork, RunEvent
from ..virtual.clock import Observed
from ..virtual.world import World
from .violation import Broken, Check

__all__ = ["RoundCheck"]


class RoundCheck(Check):
    """Every microbatch of a run is committed once; nobody works on what others work on or what is
    committed; a round that a rule has chosen has the clients of that choice, no others; whoever
    begins a round has the same version in its stages."""

    wants = (b.Publish, b.Started, p.BeginRound, p.RoundReady)

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._work: dict[str, dict[int, RoundWork]] = {}
        """By run, of the round under way."""
        self._committed: dict[str, set[int]] = {}
        self._chosen: dict[str, Cohort] = {}
        """By run, the newest choice of its submitter's rule."""
        self._seen: dict[str, int] = {}
        """Events of a run that were looked at."""
        self._versions: dict[tuple[str, int, tuple[int, int]], dict[str, tuple[int, str]]] = {}
        """By run, round and group: of each value, its hash, and whose."""
        self._apart: dict[tuple[str, int], bool] = {}
        """By run and round, of gossip, whether replicas begin it with versions of their own."""

    def observe(self, seen: Observed) -> None:
        match seen.record:
            case b.Publish(run, event):
                self._happened(run, event)
            case b.Started():  # what an earlier process wrote down and did not come to publish
                for run, known in self.world.broker.machine.runs.items():
                    for event in known.record.history.events:
                        self._happened(run, event)
            case p.RoundReady(run=run, term=term, round=number):
                self._begins(seen.who, run, term, number)

    def _happened(self, run: str, event: RunEvent) -> None:
        if event.number < self._seen.get(run, 0):
            return
        self._seen[run] = event.number + 1
        match event.WhichOneof("kind"):
            case "chosen":
                self._chosen[run] = event.chosen
            case "round_begun":
                self._handed_out(run, list(event.round_begun.work))
                if event.round_begun.chosen:
                    self._as_chosen(run, event.round_begun)
            case "round_done":
                members = [m.replica for m in event.round_done.members]
                work = self._work.pop(run, {})
                done_in_groups = any(m.group for m in event.round_done.members)
                self._apart[run, event.round_done.round + 1] = done_in_groups
                if len(set(members)) < len(members) or not set(members) <= work.keys():
                    raise Broken("I2", f"{run} commits work of replicas {members}: not all have it")
                done = self._done(run)
                for number in members:
                    done |= _numbers(work[number], ahead=False)
                if places := [
                    (w.behind, place)
                    for w in map(work.get, members)
                    if w and w.cohort
                    for place in places_of(w.cohort)
                ]:
                    if len(set(places)) < len(places):
                        raise Broken("I2", f"{run} has a client twice in one round: {places}")
                    done.add(event.round_done.round)  # a round is committed as a whole
                if len(done) != event.round_done.microbatches:
                    raise Broken(
                        "I2",
                        f"{run} has {event.round_done.microbatches} microbatches committed, "
                        f"expected {len(done)}",
                    )

    def _as_chosen(self, run: str, begun: RoundBegun) -> None:
        """Check that a round is of the clients that were chosen. Some may be missing where data
        stays with its hosts, or state of clients with a replica that is not there."""
        needs = self.world.broker.machine.runs[b.RunId(run)].submitted.requirements
        chosen = self._chosen.get(run)
        assert needs.cohorts is not None, f"{run} has no clients"
        places = [p for w in begun.work for p in places_of(w.cohort)]
        inside = cohort_of(needs.cohorts.clients, needs.seed, begun.round, places)
        wanted = set(chosen.clients) if chosen and chosen.round == begun.round else set()
        partly = needs.sync.keeps_state or needs.cohorts.partition.kind == "by-peer"
        if not set(inside) <= wanted or (set(inside) != wanted and not partly):
            raise Broken("I2", f"{run} has {inside} in round {begun.round}: chosen were {wanted}")

    def _done(self, run: str) -> set[int]:
        """Committed microbatches, those of a checkpoint that it goes on from included."""
        if run not in self._committed:
            spec = self.world.broker.machine.runs[b.RunId(run)].submitted.spec
            at, done = spec.resumed.rounds, spec.resumed.step * spec.microbatches
            found = set(range(at.next or done))
            for r in at.returned:
                found.difference_update(range(r.first, r.first + r.count))
            self._committed[run] = found
        return self._committed[run]

    def _handed_out(self, run: str, new: list[RoundWork]) -> None:
        work = self._work.setdefault(run, {})
        for mine in new:
            taken = set(self._done(run))
            for number, other in work.items():
                if number != mine.replica:
                    taken |= _numbers(other)
            numbers = _numbers(mine)
            handed = sum(s.count for s in (*mine.samples, *mine.ahead_samples))
            if numbers & taken or len(numbers) != handed:
                raise Broken("I2", f"replica {mine.replica} of {run} gets samples that others have")
            work[mine.replica] = mine

    def _begins(self, who: str, replica: str, term: int, number: int) -> None:
        device = self.world.peers[who].device
        run, own = run_of(replica)
        # What one did by itself before it was lost, nobody need have.
        group = (own, term) if self._apart.get((run, number)) else (-1, 0)
        known = self._versions.setdefault((run, number, group), {})
        for value, hash_ in device.rounds.entries.versions().items():
            before, whose = known.setdefault(value, (hash_, who))
            if before != hash_:
                raise Broken(
                    "I11", f"{who} begins round {number} with another {value} than {whose}"
                )

    def ended(self, run: str) -> None:
        known = self.world.broker.machine.runs[b.RunId(run)]
        if not known.has_rounds or self.world.broker.ended[run].phase != DONE:
            return
        if self._committed.get(run, set()) != set(range(known.rounds.work.total)):
            raise Broken("I2", f"{run} is done, and not every sample of it was committed")


def _numbers(work: RoundWork, *, ahead: bool = True) -> set[int]:
    """`ahead`: those of the next round, too."""
    samples = (*work.samples, *(work.ahead_samples if ahead else ()))
    return {g for s in samples for g in range(s.first, s.first + s.count)}
