"""The public address, as peers find that join."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from datetime import timedelta
from pathlib import Path

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.service.door.public import PublicAddress
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.cli.status import public_line
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import Credential
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole
from shoal.net.local import split
from shoal.net.web.pump import close, join
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell import attempt as confirming
from shoal.peer.shell.attempt import confirm
from shoal.peer.shell.daemon import Worker
from shoal.proto.broker_pb2 import Confirmed, DescribeRequest
from shoal.proto.broker_pb2_grpc import RunsStub

AT = "shoal.example.org:7077"

answers = st.builds(
    Confirmed,
    address=st.sampled_from([AT, "elsewhere:1"]),
    reached=st.booleans(),
    inside=st.booleans(),
    problem=st.text(max_size=300),
)


@given(st.lists(st.tuples(st.sampled_from("abc"), answers), max_size=8))
def test_the_first_who_reached_it_from_another_host_confirms_it(
    said: list[tuple[str, Confirmed]],
) -> None:
    public = PublicAddress(AT)
    outside = [(peer, c) for peer, c in said if c.address == AT and not c.inside]
    for peer, confirmed in said:
        public.answered(peer, confirmed)
    found = public.describe()
    first = next((peer for peer, c in outside if c.reached), "")
    assert found.confirmed_by == first
    assert (public.question() is None) == bool(first)
    assert bool(found.problem) == (bool(outside) and not first)
    assert found.problem.isprintable()
    assert len(found.problem) <= 200
    assert first in public_line(found)
    assert public_line(found).startswith("WARNING") == bool(found.problem)


def a_peer(authority: Authority) -> Credential:
    return authority.credential(Party(PartyRole.PEER, "home"), utc(time.time()), timedelta(hours=1))


async def test_who_answers_must_be_the_broker_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Broker(BrokerConfig(port=0)) as broker, Broker(BrokerConfig(port=0)) as other:
        assert broker.secured is not None
        mine = a_peer(broker.secured.authority)
        found = await confirm(broker.address, broker.address, mine)
        assert (found.inside, found.reached, found.problem) == (True, False, "")
        monkeypatch.setattr(confirming, "_is_ours", lambda host: False)
        found = await confirm(broker.address, broker.address, mine)
        assert (found.inside, found.reached, found.problem) == (False, True, "")
        found = await confirm(other.address, other.address, mine)
        assert not found.reached
        assert found.problem == f"another broker answers at {other.address}"
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            gone = f"127.0.0.1:{nobody.getsockname()[1]}"
        found = await confirm(gone, gone, mine)
        assert not found.reached
        assert "nobody listens" in found.problem
        assert "expected HOST:PORT" in (await confirm("nonsense", "nonsense", mine)).problem
        # Who shows the certificate, which is public, without the key is found out.
        served = False

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal served
            to = broker.address if not served else other.address
            served = True
            inner = await asyncio.open_connection(*split(to))
            await join((reader, writer), inner)
            close(inner)
            close((reader, writer))

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        there = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        found = await confirm(there, there, mine)
        server.close()
        assert not found.reached
        assert "TLS to it breaks" in found.problem


async def test_the_first_joiner_confirms_it_and_status_shows_by_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(confirming, "_is_ours", lambda host: False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = BrokerConfig(port=port, public=f"localhost:{port}")
    async with Broker(config) as broker:
        assert broker.secured is not None
        at = f"127.0.0.1:{port}"
        people = broker.secured.operator()
        async with grpc.aio.secure_channel(
            at, people.for_channel(), options=channel_options(at)
        ) as channel:
            stub = RunsStub(channel)
            before = (await stub.Describe(DescribeRequest())).public
            assert "not confirmed yet" in public_line(before)
            workers: list[Worker] = []
            settings = PeerConfig(
                broker=at,
                state=tmp_path / "home",
                name="home",
                threads=1,
                token=str(broker.secured.printed_token()),
            )
            end = asyncio.create_task(work(settings, workers.append))
            with caplog.at_level(logging.INFO):
                while not (found := (await stub.Describe(DescribeRequest())).public).confirmed_by:
                    pass  # the broker has no call that waits for it; each round is one of its own
            assert f"public_confirmed address=localhost:{port}" in caplog.text
            assert found.confirmed_by == workers[0].me.peer
            assert "confirmed by home-" in public_line(found)
            workers[0].stop(now=True)
            assert await end == 0
