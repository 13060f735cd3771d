"""Clients of a round whose work changes while it is under way: those of lost replicas, which others
train, those whose state is gone, and those that have moved by what is no finite number."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from ...dag.rounds.cohorts import places_of
from ...proto.broker_pb2 import BrokerMessage, RoundBegun, RoundReport, RunEvent
from ..events import Instruction, Tell
from ..policies.policy import RoundPolicy
from ..policies.round_view import RoundView
from ..runs.run import Run
from .contributions import Contributions

__all__ = ["ClientWork"]


class ClientWork:
    """Clients of the round under way."""

    def __init__(
        self, run: Run, view: RoundView, policy: RoundPolicy, contributions: Contributions
    ) -> None:
        self._run, self._view, self._policy = run, view, policy
        self._contributions = contributions

    def hand_on(self, ready: Sequence[int], now: float) -> list[Instruction]:
        """Have those that are ready do the work of others that are lost; nothing, where they shall
        not."""
        contributions, rounds = self._contributions, self._view.rounds
        lost = [n for n in rounds.work.given if n not in ready and n not in contributions.bad]
        since = contributions.since if contributions.since is not None else now
        took_s, left_s = now - since, contributions.closes_at - now
        work = self._policy.handed_on(self._view, lost, ready, took_s, left_s)
        if not work:
            return []
        begun = RoundBegun(round=rounds.versions.round, work=work)
        takers = [w for w in work if w.cohort]
        who = ", ".join(str(w.replica) for w in takers)
        text = f"round {begun.round}: clients of replicas that are lost are trained by {who}"
        out = self._changed(begun, text, 0, now)
        for w in takers:
            replica = self._run.replicas[w.replica]
            contributions.goes_on(w.replica)
            start = self._policy.start_of(rounds, replica.id, w)
            start.evaluate = False  # that is done
            message = BrokerMessage(round_start=start)
            out += [Tell(m.stream, message) for m in replica.context.holders()]
        return out

    def contributed(self, number: int, said: RoundReport, now: float) -> list[Instruction]:
        """A contribution of a replica says what became of its clients."""
        return [*self._lose(number, said, now), *self._leave_out(number, said, now)]

    def _lose(self, number: int, said: RoundReport, now: float) -> list[Instruction]:
        """A replica does not have the state of some of its clients, which began without."""
        rounds = self._view.rounds
        given, known = rounds.work.given.get(number), rounds.homes
        if given is None or known is None or not said.lost or given.lost:
            return []
        work = deepcopy(given)
        work.lost.extend(sorted({*said.lost} & {*places_of(given.cohort)}))
        count = f"{len(work.lost)} client{'s' * (len(work.lost) > 1)}"
        text = f"round {said.round}: the state of {count} is gone"
        if self._run.submitted.requirements.sync.has_controls:
            text += ": all begin the next one without"
        return self._changed(RoundBegun(round=said.round, work=[work]), text, number, now)

    def _leave_out(self, number: int, said: RoundReport, now: float) -> list[Instruction]:
        """Clients of a replica have moved by what is no finite number: its work is that of the
        others."""
        rounds = self._view.rounds
        given = rounds.work.given.get(number) if said.left_out else None
        found = self._policy.without(said.round, given, said.left_out) if given else None
        if found is None:
            return []
        work, clients = found
        names = f"client{'s' * (len(clients) > 1)} {', '.join(map(str, clients))}"
        text = f"round {said.round}: {names} moved by what is no finite number: left out"
        return self._changed(
            RoundBegun(round=rounds.versions.round, work=[work]), text, number, now
        )

    def _changed(self, begun: RoundBegun, why: str, number: int, now: float) -> list[Instruction]:
        """The event of work that is another one, and a note of a replica."""
        publish = self._run.record.publish
        event = publish(RunEvent(round_begun=begun), 0, now)
        return [event, publish(RunEvent(note=why), number, now)]
