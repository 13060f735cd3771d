"""A broker that has links measured, and peers that answer its probes."""

from __future__ import annotations

import pytest

from shoal.broker.events import Tell
from shoal.proto.broker_pb2 import LinkReport
from shoal.proto.common_pb2 import Reason

TRUE_LATENCY_S, TRUE_RATE = 0.02, 5e6


@pytest.fixture
def world(make_world):
    return make_world(probe_s=5.0)


def orders(out):
    """(stream, Probe) of every probe that someone was told of."""
    return [
        (i.stream, i.message.probe)
        for i in out
        if isinstance(i, Tell) and i.message.WhichOneof("kind") == "probe"
    ]


def probe(number, peer, latency_s=TRUE_LATENCY_S, rate=TRUE_RATE, size_bytes=80_000):
    return LinkReport(
        peer=peer, probe=number, latency_s=latency_s, bytes_per_s=rate, size_bytes=size_bytes
    )


def failed(number, peer, code="patience"):
    return LinkReport(peer=peer, probe=number, problem=Reason(code=code, text="no route"))


def serve(world, out, answer=probe):
    """Peers answer their probes, and those that come of it; everything that was done."""
    names = {stream: peer for peer, stream in world.streams.items()}
    done, queue = list(out), orders(out)
    while queue:
        stream, order = queue.pop(0)
        if stream not in names:
            continue
        more = world.say(names[stream], link=answer(order.number, order.peer))
        done += more
        queue += orders(more)
    return done


def live(world, seconds):
    """Time passes, and every peer speaks."""
    out = []
    for _ in range(int(seconds / 5)):
        for peer in world.streams:
            world.say(peer, heartbeat={})
        out += world.wait(5.0)
    return out


def pairs_of(out, world):
    names = {stream: peer for peer, stream in world.streams.items()}
    return [frozenset((names[stream], order.peer)) for stream, order in orders(out)]
