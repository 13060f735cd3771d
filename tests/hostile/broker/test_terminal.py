"""What strangers call things, on its way to a terminal or into the broker's log: over a real
connection, and through what `shoal` prints."""

from __future__ import annotations

import asyncio
import io
import logging
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.client.show.progress import note_of, print_table
from shoal.net.identity.names import PartyRole
from shoal.net.printable import SafeFormatter
from shoal.proto.broker_pb2 import (
    DataSet,
    Goodbye,
    Hello,
    PeerMessage,
    Plan,
    PlanReport,
    Profile,
    RunEvent,
    RunState,
    StageSlot,
)
from shoal.proto.broker_pb2_grpc import AttachStub
from shoal.proto.common_pb2 import Reason
from shoal.proto.graph_pb2 import FULL

from ...broker.service.test_secured import channel, made, running

EVIL = "x\x1b]0;owned\x07\n2026-01-01 00:00:00 INFO root peer_joined peer=honest \u202e[bold]"
ANY = st.text(max_size=40) | st.text("\x1b\n\r\u202e\u2028[]/bold=link", max_size=40)


def hello(**profile: object) -> PeerMessage:
    known = {"name": "a", "device_memory_bytes": 1, "operator_set": FULL, **profile}
    found = Hello(version=3, peer="a", boot="b", counter=1, profile=Profile(**known))
    return PeerMessage(hello=found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, EVIL) for name in ("name", "place", "owner", "device", "software", "hours")),
        ("host", EVIL),
        ("data", [DataSet(name=EVIL[:40])]),
    ],
)
async def test_a_peer_with_a_name_that_acts_is_refused_in_one_plain_line(field: str, value: object):
    async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "a")) as stubs:
        call = AttachStub(stubs).Attach()
        await call.write(hello(**{field: value}))
        said = await asyncio.wait_for(call.read(), 10)
        assert f"profile.{field}" in said.refused.reason.text
        assert said.refused.reason.text.isprintable()
        assert not broker.shell.machine.members.members


async def test_what_a_peer_says_makes_one_line_of_the_brokers_log():
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(SafeFormatter("%(levelname)s %(message)s"))
    log = logging.getLogger("shoal")
    log.addHandler(handler)
    level, log.level = log.level, logging.INFO
    try:
        async with running() as broker, channel(broker, made(broker, PartyRole.PEER, "a")) as stubs:
            call = AttachStub(stubs).Attach()
            await call.write(hello())
            while (await call.read()).WhichOneof("kind") != "welcome":
                pass
            await call.write(PeerMessage(goodbye=Goodbye(reason=Reason(text=EVIL))))
            await call.done_writing()
            while await call.read():
                pass
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    lines = out.getvalue().removesuffix("\n").split("\n")
    assert any("owned" in line for line in lines), "it is there, and harmless"
    assert all(line.isprintable() for line in lines)
    assert all(line.split(" ")[0] in ("INFO", "WARNING") for line in lines)
    assert not any(line.startswith("2026-01-01") for line in lines)


@given(ANY, st.lists(ANY, max_size=3), st.lists(ANY, min_size=1, max_size=3))
def test_what_people_read_of_an_event_has_the_lines_that_we_gave_it(
    text: str, reasons: list[str], holders: list[str]
):
    plan = Plan(stages=[StageSlot(start=0, stop=1, holders=holders)])
    for event, count in (
        (RunEvent(note=text), 1),
        (RunEvent(state=RunState(phase="FAILED", reason=Reason(text=text))), 1),
        (RunEvent(plan=plan, report=PlanReport(reasons=reasons)), 2 + len(reasons)),
    ):
        lines = note_of(event).split("\n")
        assert len(lines) == count
        assert all(line.isprintable() for line in lines)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=ANY)
def test_a_table_shows_names_as_they_are_written(name: str, monkeypatch: pytest.MonkeyPatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    print_table(f"peers at {name}", ("name", "hours"), [{"name": name, "hours": name}])
    shown = out.getvalue()
    assert all(line.isprintable() for line in shown.split("\n"))
    if name.isprintable() and " " not in name:
        assert shown.count(name) >= 3 or not name  # markup, too
