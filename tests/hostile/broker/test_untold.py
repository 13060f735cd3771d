"""What a peer says for the broker alone is told to nobody, whatever happens to its run."""

from __future__ import annotations

from typing import Any

from shoal.broker.events import DescribeAsked
from shoal.broker.machine import BrokerMachine
from shoal.broker.options import BrokerOptions
from shoal.proto.broker_pb2 import Fault, Heartbeat
from shoal.proto.common_pb2 import Reason
from shoal.tests.broker.conftest import World

WEB, HOST = "intranet-7.example", "0123456789abcdef"


def test_neither_its_list_of_the_web_nor_its_machine() -> None:
    world = World(BrokerMachine("broker-1", BrokerOptions(probe_s=0.0, relays=True)))
    said: list[str] = []
    handle = world.machine.handle

    def noted(event: Any, now: float) -> Any:
        out = handle(event, now)
        said.extend(str(getattr(i, "message", "")) + str(getattr(i, "event", "")) for i in out)
        return out

    world.machine.handle = noted  # type: ignore[method-assign]
    world.join("evil", web=[WEB], host=HOST, cores=2)
    run = world.start("evil", "b", steps=9)
    world.join("c")
    for step in range(3):
        for peer in ("evil", "b"):
            world.report(peer, run, step)
    world.say("evil", fault=Fault(run=run, term=1, reason=Reason(code="data", text="none")))
    world.say("b", heartbeat=Heartbeat())
    world.close("evil")
    world.handle(DescribeAsked(world.request()))
    assert any("evil" in text for text in said), "others do hear of it"
    assert not [text for text in said if WEB in text or HOST in text]
