"""Data that stays with its peers: who has which, and the manifests that they make of it.

Rules.

- A peer announces data sets by name, each with those who may use it. What a job makes of one (its
  manifest) depends on how the job reads it, so the peer is asked (Resolve), once for each way; its
  answer counts for as long as its stream. A peer is asked while it is free, or holds the run that
  asks.
- A submitter's request is answered when everybody who was asked has answered or gone. Of different
  manifests that peers made, the one that most have counts; then who joined first.
- A run reads what it was submitted with: peers whose manifest has another hash lack its data. What
  must stay is what they say, whatever the run's spec claims. A peer's word counts for runs of who
  asked it, so that none makes the data of others' runs its own.
- A peer that does not answer within `data_s` has a problem, as one that says so.
- All of it is soft state; after a restart peers are asked again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ...dag.plan.plan import PeerId
from ...job.words import some_of
from ...planner.requests.run_spec import HASH, MOST_LOCAL
from ...proto.broker_pb2 import BrokerMessage, DataAnswer, Resolve, Resolved
from ...proto.common_pb2 import Reason
from ..events import Answer, DataAsked, Instruction, Log, Reject, RequestId, SetTimer, Tell, ignored
from ..membership.member import Member, clean
from ..membership.membership import Membership
from ..options import BrokerOptions
from ..runs.replica import Replica
from .waiting import WaitReason, suited

__all__ = ["DataSets", "lacks_data", "may_use"]

MOST_OPTIONS_BYTES = 16 * 1024
MOST_ANSWERS = 64
"""Answers that are remembered of a peer."""
MOST_MANIFESTS = 256
"""Manifests among them and among older ones: what runs go by."""
MOST_ASKED = 1024
"""Peers that one submitter's request asks."""

Way = tuple[str, str, str]
"""How data is read: its name, the job's options, the submitter."""


def may_use(member: Member, name: str, submitter: str) -> bool:
    """Whether a peer has data of that name, which its owner lets the submitter use."""
    found = (d for d in member.profile.data if d.name == name)
    return any(not d.users or submitter in d.users for d in found)


def lacks_data(replica: Replica, members: Membership, now: float) -> WaitReason | None:
    """Why a run waits whose data stays with peers; None: a free one has it, or it needs none."""
    wish = replica.run.requirements
    if not wish.local or wish.wanted:
        return None
    able, mine = suited(replica, members, now), [replica.record.data]
    if replica.context.forms:  # any client's will do
        mine += replica.run.spec.client_data
    has = [m for m in able if any((replica.run.owner, d.hash) in m.manifests for d in mine)]
    if any(m.state == "pool" for m in has):
        return None
    name, way = wish.data, _way(replica)
    here = [m for m in able if may_use(m, name, replica.run.owner)]
    working = [m for m in here if m.run is not None and (m in has or way not in m.answers)]
    if working:
        text = f"waits for its data {name!r}, which stays with {_labels(working)}"
        return WaitReason("data", f"{text}: busy with another run", blocks=True)
    if asked := [m for m in here if m.answers.get(way, ...) is None]:
        return WaitReason("data", f"{_labels(asked)} reads the data {name!r}", blocks=True)
    text = f"no peer that could take part has its data {name!r}"
    for m in here:
        if m.closed is not None:
            text += f"; {m.label} rests: {m.closed.text}"
        elif answer := m.answers.get(way):
            problem = answer.problem.text or "it has other data of that name"
            text += f"; {m.label}: {clean(problem)}"
    return WaitReason("data", f"{text}: it waits until one joins", blocks=False)


@dataclass(eq=False)
class _Request:
    """A submitter who waits. `peers`: whom it hangs on, each with the join that was asked."""

    way: Way
    peers: tuple[tuple[PeerId, int], ...]


class DataSets:
    """Knows which peer has which data set, and asks peers for the manifests that runs need."""

    def __init__(self, members: Membership, options: BrokerOptions) -> None:
        self.members, self.options = members, options
        self._asks: dict[int, tuple[PeerId, int, Way]] = {}  # by number: whom, its join, and what
        self._requests: dict[RequestId, _Request] = {}
        self._number = 0

    def started(self, starts: int) -> None:
        """The broker was started for so manieth time: answers to older asks are none of ours."""
        self._number = (starts - 1) << 32

    # ------------------------------------------------------------ submitters

    def asked(self, event: DataAsked, now: float) -> list[Instruction]:
        request, name, by = event.request, event.name, event.by
        if not name or len(event.options) > MOST_OPTIONS_BYTES:
            text = (
                f"the request has the name {clean(name, 60)!r} and {len(event.options)} bytes of "
                f"options: expected a name and at most {MOST_OPTIONS_BYTES}"
            )
            return [Reject(request, "INVALID_ARGUMENT", text)]
        everyone = list(self.members.members.values())
        have = [m for m in everyone if any(d.name == name for d in m.profile.data)]
        if not have:
            return [Reject(request, "NOT_FOUND", self._unknown(name, by, everyone))]
        allowed = [m for m in have if may_use(m, name, by)]
        if not allowed:
            who = by or "somebody without an identity (the broker runs with --insecure)"
            text = (
                f"the owner of {_labels(have)} does not let {who} use its data "
                f"{clean(name, 64)!r}: ask to be named in `users` of its peer.toml"
            )
            return [Reject(request, "PERMISSION_DENIED", text)]
        here = [m for m in allowed if m.closed is None][:MOST_ASKED]
        if not here:
            why = allowed[0].closed.text if allowed[0].closed else ""
            text = f"{_labels(allowed)} has the data {clean(name, 64)!r} and rests now: {why}"
            return [Reject(request, "FAILED_PRECONDITION", text)]
        way = (name, event.options, by)
        self._requests[request] = _Request(way, tuple((m.id, m.joined) for m in here))
        out = [i for m in here for i in self._ask(m, way, now)]
        return out + self._answers()

    def _unknown(self, name: str, by: str, everyone: Iterable[Member]) -> str:
        known = {d.name: m for m in everyone for d in m.profile.data if may_use(m, d.name, by)}
        shown = ", ".join(f"{clean(n, 64)!r} ({m.label})" for n, m in list(known.items())[:8])
        there = f"there is {shown}" if known else "no peer here has any that you may use"
        return (
            f"no peer here has data called {clean(name, 64)!r}; {there}. A peer's owner names data "
            "in peer.toml"
        )

    def _answers(self) -> list[Instruction]:
        """To those submitters whose last answer has come."""
        out: list[Instruction] = []
        for request, waiting in list(self._requests.items()):
            members = [m for m in map(self._same, waiting.peers) if m is not None]
            answers = [(m, m.answers.get(waiting.way)) for m in members]
            if any(answer is None for _, answer in answers):
                continue
            del self._requests[request]
            out.append(_answer(request, [(m, a) for m, a in answers if a is not None]))
        return out

    def _same(self, asked: tuple[PeerId, int]) -> Member | None:
        member = self.members.members.get(asked[0])
        return member if member is not None and member.joined == asked[1] else None

    # ------------------------------------------------------------ peers

    def advance(self, replicas: Iterable[Replica], now: float) -> list[Instruction]:
        """Asks for what open runs need; answers who waited for a peer that is gone."""
        out: list[Instruction] = []
        for replica in replicas:
            if replica.record.ended or not replica.run.requirements.local:
                continue
            way = _way(replica)
            for member in list(self.members.members.values()):
                free = member.state == "pool" or member.run == replica.id
                if free and may_use(member, replica.run.requirements.data, replica.run.owner):
                    out += self._ask(member, way, now)
        return out + self._answers()

    def _ask(self, member: Member, way: Way, now: float) -> list[Instruction]:
        if way in member.answers:
            return []
        member.answers[way] = None
        if len(member.answers) > MOST_ANSWERS:
            known = (w for w, answer in member.answers.items() if answer is not None)
            oldest = next(known, None)
            if oldest is not None:
                del member.answers[oldest]
        self._number += 1
        self._asks[self._number] = (member.id, member.joined, way)
        name, options, by = way
        ask = Resolve(number=self._number, data=name, options=options, submitter=by)
        fields = (("peer", member.id), ("data", clean(name, 64)), ("submitter", by))
        return [
            Log("data_asked", fields),
            Tell(member.stream, BrokerMessage(resolve=ask)),
            SetTimer(f"data:{self._number}", now + self.options.data_s),
        ]

    def resolved(self, member: Member, message: Resolved) -> list[Instruction]:
        asked = self._asks.pop(message.number, None)
        if asked is None or asked[:2] != (member.id, member.joined):
            text = f"ask {message.number} is not open for this peer"
            return [ignored("resolved", member.id, text)]
        answer = Resolved()
        answer.CopyFrom(message)
        names = answer.local
        odd = len(names) > MOST_LOCAL or any(not n.isprintable() or len(n) > 200 for n in names)
        if not answer.HasField("problem") and (odd or not HASH.fullmatch(answer.manifest.hash)):
            answer.problem.CopyFrom(Reason(code="protocol", text="its answer names no manifest"))
        return self._took(member, asked[2], answer)

    def timer(self, name: str) -> list[Instruction]:
        """Give up what the timer `data:NUMBER` waited for."""
        asked = self._asks.pop(int(name), None) if name.isdecimal() else None
        member = self._same(asked[:2]) if asked is not None else None
        if asked is None or member is None:
            return []
        text = f"it did not read its data within {self.options.data_s:g} s"
        return self._took(member, asked[2], Resolved(problem=Reason(code="late", text=text)))

    def _took(self, member: Member, way: Way, answer: Resolved) -> list[Instruction]:
        member.answers[way] = answer
        if not answer.HasField("problem"):
            member.manifests[way[2], answer.manifest.hash] = tuple(answer.local)
            if len(member.manifests) > MOST_MANIFESTS:  # whose run needs it asks again
                del member.manifests[next(iter(member.manifests))]
            member.blended.discard(answer.manifest.hash)
            member.blended.update([answer.manifest.hash] if answer.blended else ())
            member.blended.intersection_update(hash_ for _, hash_ in member.manifests)
        self.members.version += 1  # plans depend on it
        why = clean(answer.problem.text)
        fields = (("peer", member.id), ("data", clean(way[0], 64)), ("problem", why))
        return [Log("data_resolved", fields)]  # `advance` runs behind every event


def _answer(request: RequestId, answers: list[tuple[Member, Resolved]]) -> Answer | Reject:
    good = [(m, a) for m, a in answers if not a.HasField("problem")]
    if not answers:
        return Reject(request, "FAILED_PRECONDITION", "the peers that had the data have left")
    if not good:
        text = "; ".join(f"{m.label}: {clean(a.problem.text)}" for m, a in answers[:4])
        return Reject(request, "INVALID_ARGUMENT", text)
    count = Counter(a.manifest.hash for _, a in good)
    chosen = max(good, key=lambda x: count[x[1].manifest.hash])[1]  # the first of equals
    peers = [m.id for m, a in good if a.manifest.hash == chosen.manifest.hash]
    each = {a.manifest.hash: a.manifest for _, a in reversed(good)}
    found = DataAnswer(manifest=chosen.manifest, local=chosen.local, peers=peers)
    found.all.extend(each[hash_] for hash_ in reversed(each))
    return Answer(request, found)


def _way(replica: Replica) -> Way:
    return replica.run.requirements.data, replica.run.requirements.data_options, replica.run.owner


def _labels(members: Iterable[Member]) -> str:
    return some_of([m.label for m in members])
