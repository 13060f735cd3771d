"""The broker's shell in the simulated world: its machine's instructions on virtual time.

Its process may die and be started again. What is left then is the journal, which the next machine
is made from, and what clients have seen of their runs, who ask for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...broker import events as b
from ...broker.journal.decided import DurableState
from ...broker.machine import BrokerMachine
from ...broker.options import BrokerOptions
from ...planner.answers.forming import answer as form_answer
from ...planner.answers.planning import answer as plan_answer
from ...planner.answers.planning import consider
from ...proto import broker_pb2, journal_pb2
from .clock import Observed, Timers
from .control import BROKER, Control
from .identities import check_named

if TYPE_CHECKING:
    from .world import World

__all__ = ["PLANNING_S", "BrokerShell"]

PLANNING_S = 0.05
"""How long a plan takes to make, in the world's time."""

_ENDED = (broker_pb2.DONE, broker_pb2.FAILED, broker_pb2.CANCELLED)


class BrokerShell:
    """The broker's shell in a simulated world: carries out its machine's instructions on virtual
    time."""

    machine: BrokerMachine
    """The machine of the newest process."""

    def __init__(self, world: World, options: BrokerOptions | None) -> None:
        self.world = world
        self.published: dict[str, list[broker_pb2.RunEvent]] = {}
        """Every event of each run, as a client that watches all of them has it."""
        self.ended: dict[str, broker_pb2.RunState] = {}
        """By run: the state that it ended in."""
        self.journal: list[bytes] = []
        """The records on its disk."""
        self.alive = False
        """Whether its process is there."""
        self.begun = False
        """Whether the machine has handled its first event: before, it knows no more than what the
        journal says, and for whom its runs wait is not worked out."""
        self._options = options or BrokerOptions()
        self._life = 0  # counts processes
        self._streams: dict[str, Control] = {}
        self._answers: dict[str, b.Answer | b.Reject] = {}
        self._requests = 0

    def start(self) -> None:
        """A process begins with what is in the journal."""
        assert not self.alive, "one process at a time"
        records = map(journal_pb2.Record.FromString, self.journal)
        self.machine = BrokerMachine(
            "broker",
            self._options,
            decided=DurableState(self._options, records),
            check=check_named if self.world.signs else None,
            secret=str(self.world.seed).encode(),
        )
        self.begun = False
        self._life += 1
        self._timers = Timers(self.world, self._of_this_life(b.TimerFired))
        self.alive = True
        self.handle(b.Started())
        if self.alive:
            for run in list(self.published):
                self._show(run)

    def die(self) -> None:
        """The process is gone without a word; the kernel closes its streams."""
        self.alive = False
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.end_there("the broker's process ended")

    def _of_this_life(self, event: Callable[[str], b.Event]) -> Callable[[str], None]:
        """Handles what comes of an argument, as long as this process is there."""
        life = self._life

        def call(argument: str) -> None:
            if life == self._life:
                self.handle(event(argument))

        return call

    def handle(self, event: b.Event) -> None:
        world, life = self.world, self._life
        if not (self.alive and self._observed(event)):
            return
        instructions = self.machine.handle(event, world.now)
        self.begun = True
        for instruction in instructions:
            if not self._observed(instruction) or life != self._life:
                return
            self._carry_out(instruction)

    def _observed(self, record: b.Event | b.Instruction) -> bool:
        """Whether the process is still there after the observer has seen this."""
        world = self.world
        if world.observe is not None:
            world.observe(Observed(world.now, BROKER, record))
        return self.alive

    def ask(self, event: Callable[[b.RequestId], b.Event]) -> b.Answer | b.Reject:
        """A client's call; the machine answers in the same breath, if it is there."""
        self._requests += 1
        request = b.RequestId(f"request-{self._requests}")
        self.handle(event(request))
        away = b.Reject(request, "UNAVAILABLE", "the broker's process is gone")
        return self._answers.pop(request, away)

    # ------------------------------------------------------------ streams of peers

    def opened(self, stream: Control) -> None:
        self._streams[stream.id] = stream
        self.handle(b.StreamOpened(stream.id))

    def said(self, stream: Control, data: bytes) -> None:
        if stream.id in self._streams:
            self.handle(b.PeerSaid(stream.id, broker_pb2.PeerMessage.FromString(data)))

    def closed(self, stream: Control, why: str) -> None:
        stream.open_there = False
        if self._streams.pop(stream.id, None) is not None:
            self.handle(b.StreamClosed(stream.id, why))

    # ------------------------------------------------------------ instructions

    def _carry_out(self, instruction: b.Instruction) -> None:
        world = self.world
        match instruction:
            case b.Persist(record):
                self.journal.append(record.SerializeToString(deterministic=True))
            case b.Tell(id, message):
                if id in self._streams:
                    stream = self._streams[id]
                    if message.HasField("assign"):
                        self._planned(message.assign)
                    world.note(BROKER, f"to {stream.name}: {message.WhichOneof('kind')}")
                    stream.tell(message.SerializeToString(deterministic=True))
            case b.CloseStream(id, why):
                if id in self._streams:
                    stream = self._streams[id]
                    stream.end_there(why)
                    world.after(0.0, lambda: self.closed(stream, why))
            case b.Answer(request) | b.Reject(request):
                self._answers[request] = instruction
            case b.Publish(run, event):
                world.note(BROKER, f"{run} event {event.number}: {event.WhichOneof('kind')}")
                self._show(run)
            case b.MakePlan() | b.FormReplicas() | b.ConsiderPlan():
                answer = _answered(instruction, world.blobs[instruction.spec.graph.hash])
                planned = self._of_this_life(lambda _: answer)
                world.after(PLANNING_S, lambda: planned(""))
            case b.SetTimer(name, at):
                self._timers.set(name, at)
            case b.Log(name, fields):
                world.note(BROKER, f"{name} {dict(fields)}")
            case b.StopServing(why):
                world.note(BROKER, f"stops: {why}")

    def _planned(self, assign: broker_pb2.Assign) -> None:
        replica = self.machine.replica(assign.run)
        known = replica.record if replica is not None else None
        if known is not None and known.plan is not None and known.term == assign.term:
            self.world.orders.planned(known.id, known.term, known.plan)

    def _show(self, run: str) -> None:
        """The client asks for the events after those that it has."""
        seen = self.published.setdefault(run, [])
        known = self.machine.runs.get(b.RunId(run))
        while known is not None:
            new = known.record.watched(seen[-1].number + 1 if seen else 0).events
            if not new:
                return
            for event in new:
                seen.append(event)
                self._mark(run, event)

    def _mark(self, run: str, event: broker_pb2.RunEvent) -> None:
        world, kind = self.world, event.WhichOneof("kind")
        if kind == "step":
            world.mark(run, "loss", repr(event.step.outcome.loss))
        elif kind == "plan":
            world.mark(run, "plan", "; ".join(event.report.reasons))
        elif kind == "state":
            word = broker_pb2.Phase.Name(event.state.phase).lower()
            world.mark(run, word, event.state.reason.text)
            if event.state.phase in _ENDED:
                self.ended[run] = event.state


def _answered(ask: b.MakePlan | b.FormReplicas | b.ConsiderPlan, graph: bytes) -> b.Event:
    if isinstance(ask, b.MakePlan):
        return plan_answer(ask, graph)
    return form_answer(ask, graph) if isinstance(ask, b.FormReplicas) else consider(ask, graph)
