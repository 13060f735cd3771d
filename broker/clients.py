"""What clients ask for: each request is answered once, in the same call."""

from __future__ import annotations

from ..net.identity.names import OWNER
from ..planner.requests.requirements import read_spec
from ..planner.requests.run_spec import HASH, RunSpecError
from ..proto.broker_pb2 import (
    Cohort,
    Description,
    PeerState,
    Recalled,
    RunEvent,
    RunState,
    Submitted,
)
from .events import (
    Answer,
    CohortAsked,
    DescribeAsked,
    Instruction,
    Log,
    PreviewAsked,
    PreviewWanted,
    Reject,
    RequestId,
    RunAsked,
    RunId,
    RunSubmitted,
    WatchAsked,
)
from .lender_view import for_lender
from .links.probing import Probing
from .membership.member import Member, clean
from .membership.membership import Membership
from .placement.placing import PoolScheduler
from .records.space import make_room
from .registry import RunRegistry
from .runs.run import Run

__all__ = ["ClientRequests", "choose"]

_WITHOUT_SHARE = ("", OWNER)
"""Submitters who may have all runs: where nobody has an identity, and the broker's own user."""
_SHOWN = 5
"""Unknown clients that a refusal names."""


class ClientRequests:
    """Requests about runs, and of how everything stands."""

    def __init__(
        self, registry: RunRegistry, members: Membership, placing: PoolScheduler, probing: Probing
    ) -> None:
        self._registry, self._members = registry, members
        self._placing, self._probing = placing, probing
        self._options = members.options

    def submit(self, event: RunSubmitted, now: float) -> list[Instruction]:
        if self._placing.draining:
            text = "the broker is leaving and starts nothing new: submit to it when it is back"
            return [Reject(event.request, "UNAVAILABLE", text)]
        owners = [run.owner for run in self._registry.runs.values() if not run.ended]
        own, most = owners.count(event.by), self._options.most_waiting_of_one
        if len(owners) >= self._options.most_waiting:
            text = f"{len(owners)} runs have not ended, the limit: try again when some have"
            return [Reject(event.request, "RESOURCE_EXHAUSTED", text)]
        if own >= most and event.by not in _WITHOUT_SHARE:
            text = f"{own} runs of {event.by} have not ended, the limit for one submitter: try "
            text += "again when some have, or cancel some"
            return [Reject(event.request, "RESOURCE_EXHAUSTED", text)]
        try:
            wanted = read_spec(event.spec)
        except RunSpecError as error:
            return [Reject(event.request, "INVALID_ARGUMENT", str(error))]
        if wanted.cohorts is not None and wanted.cohorts.secure and not self._options.identities:
            text = (
                "sync.secure of the run is true, and the peers of a broker with --insecure have no "
                "certificates to sign keys of masks with: expected a network without --insecure"
            )
            return [Reject(event.request, "INVALID_ARGUMENT", text)]
        lease = wanted.recovery.lease
        if lease is not None and lease < (least := 2 * self._options.heartbeat_s):
            text = (
                f"recovery.lease of the run is {lease:g} s: expected at least {least:g} s, for the "
                f"peers of this broker speak every {self._options.heartbeat_s:g} s"
            )
            return [Reject(event.request, "INVALID_ARGUMENT", text)]
        size = event.spec.ByteSize()
        full, why = make_room(
            self._registry.decided.runs.values(), event.by, size, event.free, self._options
        )
        if why:
            return [Reject(event.request, "RESOURCE_EXHAUSTED", why)]
        self._registry.forget(full)
        run = self._registry.add(event.spec, event.by)
        self._placing.changed()
        fields = (("run", run.id), ("name", event.spec.name), ("steps", event.spec.steps))
        return [Log("run_submitted", fields), Answer(event.request, Submitted(run=run.id))]

    def asked(self, event: RunAsked, now: float) -> list[Instruction]:
        request, wanted = event.request, event.wanted
        if refused := self._refused(request, event.run, event.by, wanted):
            return [refused]
        run = self._registry.runs[event.run]
        if wanted == "recall":
            found = Recalled(spec=run.submitted.spec, checkpoint=run.record.checkpoint)
            return [Answer(request, found)]
        out: list[Instruction] = []
        self._registry.all_changing(run.replicas)
        try:
            if wanted != "cancel":
                wishes = {"pause": run.pause, "resume": run.unpause, "finish": run.finish}
                out += wishes[wanted](now)
            elif not run.ended:
                out += run.cancel(now)
        except ValueError as error:
            return [Reject(request, "FAILED_PRECONDITION", str(error))]
        if not run.record.active:
            self._placing.closed(run.replicas)
        return [*out, Answer(request, run.state)]

    def choose(self, event: CohortAsked, now: float) -> list[Instruction]:
        """Take the clients of a round to come."""
        if refused := self._refused(event.request, event.run, event.by, "choose clients of"):
            return [refused]
        run = self._registry.runs[event.run]
        try:
            return [*choose(run, event.cohort, now), Answer(event.request, run.state)]
        except ValueError as error:
            return [Reject(event.request, "FAILED_PRECONDITION", str(error))]

    def watch(self, event: WatchAsked) -> list[Instruction]:
        if refused := self._refused(event.request, event.run, event.by, "watch"):
            return [refused]
        watched = self._registry.runs[event.run].record.watched(event.from_event)
        return [Answer(event.request, watched)]

    def _refused(self, request: RequestId, run_id: RunId, by: str, wanted: str) -> Reject | None:
        """Why somebody may not have this of a run: what is in it is its submitter's."""
        run = self._registry.runs.get(run_id)
        if run is None:
            return self._unknown(request, run_id)
        if not by or run.owner == by:
            return None
        text = f"run {run.id} is {run.owner}'s: only they or an operator may {wanted} it"
        return Reject(request, "PERMISSION_DENIED", text)

    def _unknown(self, request: RequestId, run: str) -> Reject:
        known = ", ".join(list(self._registry.runs)[-5:]) or "none"
        text = f"no run {clean(run, 60)!r} here; the newest runs: {known}"
        return Reject(request, "NOT_FOUND", text)

    def preview(self, event: PreviewAsked, now: float) -> list[Instruction]:
        try:
            read_spec(event.spec)
        except RunSpecError as error:
            return [Reject(event.request, "INVALID_ARGUMENT", str(error))]
        # A draft brings no core graph: whether one exists is found when it is submitted.
        # Peers that only keep copies for a run are given back to one that begins.
        lent = (p for r in self._registry.runs.values() for x in r.replicas for p in x.only_keep)
        pool = (*self._members.pool, *(self._members.members[p] for p in dict.fromkeys(lent)))
        offers = tuple(m.offer_to(event.by) for m in pool)
        network = self._probing.network([m.id for m in pool], now)
        states = tuple(_state(m, now) for m in pool)
        notes = tuple(clean(text) for m in pool for text in m.odd)
        wanted = PreviewWanted(event.spec, states, offers, network, notes)
        return [Answer(event.request, wanted)]

    def describe(self, event: DescribeAsked, now: float) -> list[Instruction]:
        members = self._members.members
        found = Description(
            broker=self._members.broker_id,
            peers=[_state(m, now) for m in members.values()],
            runs=[_told(run, now) for run in self._registry.runs.values()],
            links=self._probing.links.states(members, now),
        )
        if event.peer:
            found = for_lender(found, event.peer, self._registry.decided.shares.of(event.peer))
        return [Answer(event.request, found)]


def _told(run: Run, now: float) -> RunState:
    """How a run stands, for everybody: whoever knows a blob's whole name may fetch it."""
    state = run.state
    state.left_s = run.record.left_s(now)
    for reason in (state.reason, *(r.reason for r in state.replicas)):
        if reason.text:
            reason.text = HASH.sub(lambda name: f"{name[0][:12]}…", reason.text)
    return state


def _state(member: Member, now: float) -> PeerState:
    state = PeerState(
        peer=member.id,
        profile=member.profile,
        address=member.address,
        run=member.run or "",
        silent_s=max(0.0, now - member.heard_at),
        membership=member.state,
        closed=member.closed,
    )
    for data in state.profile.data:
        data.ClearField("users")  # whom an owner trusts is not everybody's business
    state.profile.ClearField("host")  # who knows it could say that it is there
    state.profile.ClearField("web")  # names of its owner's network may be there
    return state


def choose(run: Run, cohort: Cohort, now: float) -> list[Instruction]:
    """Have the next round that begins be of these clients, as the submitter's rule has chosen them
    (docs/federated.md); nothing where that is known already. Raises ValueError for a cohort that no
    round can have, and where it comes too late."""
    wanted = run.submitted.requirements
    cohorts = wanted.cohorts
    if cohorts is None or not cohorts.selected:
        raise ValueError(
            f"run {run.id} has its clients by (seed, round): expected one that was submitted with "
            "sync.select"
        )
    work, number = run.rounds.work, run.rounds.next
    if run.ended or work.committed + work.begun >= work.total:
        raise ValueError(f"run {run.id} begins no round any more")
    if cohort.round != number:
        when = "has begun" if cohort.round < number else "is not the next one"
        raise ValueError(f"round {cohort.round} {when}: expected the clients of round {number}")
    most, count = wanted.sync.asked(cohorts.per_round), len(cohort.clients)
    if not cohorts.fewest <= count <= most:
        raise ValueError(f"round {number} has {count} clients: expected {cohorts.fewest} to {most}")
    if unknown := [c for c in cohort.clients if c >= cohorts.clients]:
        some = ", ".join(map(str, unknown[:_SHOWN]))
        raise ValueError(
            f"round {number} has clients {some}, and there are {cohorts.clients}: expected numbers "
            f"from 0 to {cohorts.clients - 1}"
        )
    if len(set(cohort.clients)) < count:
        raise ValueError(f"round {number} has a client twice: expected each once")
    if work.chosen is not None:
        if set(work.chosen.clients) == set(cohort.clients):
            return []
        raise ValueError(f"round {number} has its clients already: others were chosen before")
    return [run.record.publish(RunEvent(chosen=cohort), 0, now)]
