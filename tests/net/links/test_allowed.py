"""No buffer is allocated for more bytes than a frame of its key can have."""

from __future__ import annotations

import pytest

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameError, FrameHeader, FrameKey
from shoal.net.links.inbox import Inbox

SPEC = TensorSpec((1 << 20,), "float32")
LIMITS = {"small": 100, "none": 0, "unknown": None}


def inbox():
    taken = []

    def allocate(size):
        taken.append(size)
        return memoryview(bytearray(size))

    made = Inbox("b", "a", allocate, 1 << 30, lambda key: LIMITS[key.port])
    made.allow(Role.ACTIVATION, 10)
    return made, taken


def header(port, size_bytes, number=1):
    key = FrameKey("r", 1, 0, Role.ACTIVATION, number, 1, port, "a", "b")
    return FrameHeader(number, key, "topk/1", b"", SPEC, size_bytes)


@pytest.mark.parametrize(("port", "size_bytes"), [("small", 101), ("none", 1), ("small", 1 << 22)])
def test_more_than_the_codec_gives_is_refused_before_it_comes(port, size_bytes):
    made, taken = inbox()
    with pytest.raises(FrameError, match=f"the plan and its codec allow {LIMITS[port]}"):
        made.announce(header(port, size_bytes))
    assert taken == []
    assert made.announced == 0
    assert made.partial == ()


@pytest.mark.parametrize(("port", "size_bytes"), [("small", 100), ("unknown", 1 << 22)])
def test_as_much_as_it_gives_is_taken(port, size_bytes):
    made, taken = inbox()
    made.announce(header(port, size_bytes))
    assert taken == [size_bytes]
