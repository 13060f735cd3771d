"""The broker's shell in the simulated world: its machine's instructions on virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...broker import events as b
from ...broker.machine import BrokerMachine
from ...broker.options import BrokerOptions
from ...broker.planning import answer as plan_answer
from ...broker.planning import consider
from ...proto import broker_pb2
from .clock import Observed, Timers
from .control import BROKER, Control

if TYPE_CHECKING:
    from .world import World

__all__ = ["PLANNING_S", "BrokerShell"]

PLANNING_S = 0.05
"""How long a plan takes to make, in the world's time."""

_ENDED = (broker_pb2.DONE, broker_pb2.FAILED, broker_pb2.CANCELLED)


class BrokerShell:
    """See the module."""

    def __init__(self, world: World, options: BrokerOptions | None) -> None:
        self.world = world
        self.machine = BrokerMachine("broker", options)
        self.published: dict[str, list[broker_pb2.RunEvent]] = {}
        """Every event of each run."""
        self.ended: dict[str, broker_pb2.RunState] = {}
        """By run: the state that it ended in."""
        self._timers = Timers(world, lambda name: self.handle(b.TimerFired(name)))
        self._streams: dict[str, Control] = {}
        self._answers: dict[str, b.Answer | b.Reject] = {}
        self._requests = 0

    def handle(self, event: b.Event) -> None:
        world = self.world
        if world.observe is not None:
            world.observe(Observed(world.now, BROKER, event))
        for instruction in self.machine.handle(event, world.now):
            if world.observe is not None:
                world.observe(Observed(world.now, BROKER, instruction))
            self._carry_out(instruction)

    def ask(self, event: Callable[[b.RequestId], b.Event]) -> b.Answer | b.Reject:
        """A client's call; the machine answers in the same breath."""
        self._requests += 1
        request = b.RequestId(f"request-{self._requests}")
        self.handle(event(request))
        return self._answers.pop(request)

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
            case b.Tell(id, message):
                if id in self._streams:
                    stream = self._streams[id]
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
                self._publish(run, event)
            case b.MakePlan():
                answer = plan_answer(instruction, world.blobs[instruction.spec.graph.hash])
                world.after(PLANNING_S, lambda: self.handle(answer))
            case b.ConsiderPlan():
                found = consider(instruction, world.blobs[instruction.spec.graph.hash])
                world.after(PLANNING_S, lambda: self.handle(found))
            case b.SetTimer(name, at):
                self._timers.set(name, at)
            case b.Log(name, fields):
                world.note(BROKER, f"{name} {dict(fields)}")
            case b.Stop(why):
                world.note(BROKER, f"stops: {why}")

    def _publish(self, run: str, event: broker_pb2.RunEvent) -> None:
        world, kind = self.world, event.WhichOneof("kind")
        self.published.setdefault(run, []).append(event)
        world.note(BROKER, f"{run} event {event.number}: {kind}")
        if kind == "step":
            world.mark(run, "loss", repr(event.step.outcome.loss))
        elif kind == "plan":
            world.mark(run, "plan", "; ".join(event.plan.reasons))
        elif kind == "state":
            word = broker_pb2.Phase.Name(event.state.phase).lower()
            world.mark(run, word, event.state.reason.text)
            if event.state.phase in _ENDED:
                self.ended[run] = event.state
