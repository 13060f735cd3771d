"""A broker that answers as a test tells it to, and events that it may tell."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from shoal.proto import broker_pb2 as pb
from shoal.proto.broker_pb2_grpc import RunsServicer, add_RunsServicer_to_server


class Script(RunsServicer):
    """Answers as told: `streams` are the events of each Watch; an exception ends the stream."""

    def __init__(self) -> None:
        self.streams: list[list[pb.RunEvent | grpc.StatusCode]] = []
        self.asked: list[int] = []
        self.state = pb.RunState(run="r-1", phase=pb.RUNNING, steps=3)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.RunEvent]:  # noqa: N802 (gRPC's name)
        self.asked.append(request.from_event)
        for event in self.streams.pop(0):
            if isinstance(event, grpc.StatusCode):
                context.abort(event, "as told")
            if event.HasField("state"):
                self.state = event.state
            yield event

    def Describe(self, request: Any, context: Any) -> pb.Description:  # noqa: N802 (gRPC's name)
        return pb.Description(broker="b", runs=[self.state])

    def Cancel(self, request: Any, context: Any) -> pb.RunState:  # noqa: N802 (gRPC's name)
        context.abort(grpc.StatusCode.NOT_FOUND, "no such run")
        raise AssertionError("unreachable")


@contextmanager
def serving(script: Script) -> Iterator[str]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_RunsServicer_to_server(script, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def step(number: int, at: int) -> pb.RunEvent:
    outcome = pb.Outcome(loss=2.0 - at / 10, lr=1e-3, grad_norm=1.0, weight=4.0)
    return pb.RunEvent(number=number, step=pb.StepDone(step=at, outcome=outcome, seconds=0.5))


def state(number: int, phase: pb.Phase, reason: str = "") -> pb.RunEvent:
    found = pb.RunState(run="r-1", phase=phase, step=3, steps=3)
    found.reason.text = reason
    return pb.RunEvent(number=number, state=found)
