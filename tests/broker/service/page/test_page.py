"""The page and the metrics on the broker's own port, for friendly and for hostile clients."""

from __future__ import annotations

import asyncio
import http.client
import importlib.util
import json
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from shoal.broker.options import BrokerOptions
from shoal.broker.service.door.front import MultiplexerLimits
from shoal.broker.service.page import serving
from shoal.broker.service.page.serving import own_certificate
from shoal.broker.service.server import Broker, BrokerConfig, BrokerConfigError
from shoal.cli import app
from shoal.client.access import remember
from shoal.net.identity.authority import utc
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole
from shoal.net.local import local_address
from shoal.proto.admission_pb2 import PageRequest
from shoal.proto.admission_pb2_grpc import AdmissionStub
from shoal.proto.broker_pb2 import DescribeRequest, Hello, PeerMessage, Profile
from shoal.proto.broker_pb2_grpc import AttachStub, RunsStub

from ...conftest import make_spec

ANN = Party(PartyRole.SUBMITTER, "ann")
GUARDED = ("/enter", "/live", "/state.json", "/metrics")


@asynccontextmanager
async def running(**config: Any) -> AsyncIterator[Broker]:
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(**{"port": 0, "options": options} | config)) as broker:
        broker.shell.warm_up = lambda: None  # nothing is planned here
        yield broker


def key_of(broker: Broker, party: Party = ANN) -> str:
    assert broker.page is not None
    return broker.page.key(party, 3600.0)[0]


def context(cafile: str | None = None) -> ssl.SSLContext:
    found = ssl.create_default_context(cafile=cafile)
    if cafile is None:
        found.check_hostname, found.verify_mode = False, ssl.CERT_NONE
    found.set_alpn_protocols(["h2", "http/1.1"])  # as browsers do
    return found


def connected(broker: Broker, *, tls: bool = True, host: str = "127.0.0.1") -> socket.socket:
    raw = socket.create_connection((host, broker.port), timeout=20)
    return context().wrap_socket(raw, server_hostname="localhost") if tls else raw


def ask(
    broker: Broker, path: str, key: str = "", *, tls: bool = True, **headers: str
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("localhost", broker.port)
    connection.sock = connected(broker, tls=tls)
    with closing(connection):
        given = {"Authorization": f"Bearer {key}"} if key else {}
        connection.request(headers.pop("method", "GET"), path, headers=given | headers)
        answer = connection.getresponse()
        return answer, answer.read()


async def asked(*arguments: Any, **more: Any) -> tuple[http.client.HTTPResponse, bytes]:
    return await asyncio.to_thread(ask, *arguments, **more)


@asynccontextmanager
async def calling(broker: Broker, role: PartyRole, subject: str) -> AsyncIterator[grpc.aio.Channel]:
    assert broker.secured is not None
    credential = broker.secured._signed(role, subject)
    options = channel_options(broker.address)
    async with grpc.aio.secure_channel(
        broker.address, credential.for_channel(), options=options
    ) as found:
        yield found


async def join(stubs: grpc.aio.Channel, subject: str, name: str) -> Any:
    call = AttachStub(stubs).Attach()
    profile = Profile(name=name, operator_set=1, device_memory_bytes=1 << 30)
    hello = Hello(version=3, peer=subject, boot="x", counter=1, profile=profile)
    await call.write(PeerMessage(hello=hello))
    assert (await call.read()).HasField("welcome")
    return call


# ---------------------------------------------------------------- who may look


@pytest.mark.parametrize("tls", [True, False])
async def test_a_stranger_gets_the_page_without_a_figure_and_a_key_opens_it(tls: bool):
    async with running() as broker:
        answer, html = await asked(broker, "/", tls=tls)
        assert answer.status == 200
        assert b"<script>" in html
        assert broker.shell.machine.members.broker_id.encode() not in html
        stale = broker.page.key(ANN, 60.0)[0].replace(".submitter.", ".operator.")
        for path in GUARDED:
            for given in ("", stale, "x" * 4000):
                answer, text = await asked(broker, path, given, tls=tls)
                assert (answer.status, b"shoal page" in text) == (401, True), (path, given)
        key = key_of(broker)
        answer, _ = await asked(broker, f"/state.json?key={key}#{key}", tls=tls)
        assert answer.status == 401  # a key in an address would stand in logs
        answer, text = await asked(broker, "/state.json", key, tls=tls)
        assert answer.status == 200
        assert json.loads(text)["broker"] == broker.shell.machine.members.broker_id
        for method in ("POST", "PUT", "DELETE"):
            if tls:
                assert (await asked(broker, "/enter", key, method=method))[0].status == 405
        assert (await asked(broker, "/nothing", key, tls=tls))[0].status == 404


@pytest.mark.parametrize("tls", [True, False])
async def test_a_key_becomes_a_cookie_that_scripts_and_other_sites_do_not_have(tls: bool):
    async with running() as broker:
        answer, _ = await asked(broker, "/enter", key_of(broker), tls=tls)
        cookie = answer.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
        assert ("Secure" in cookie) == tls
        pair = cookie.split(";")[0]
        assert (await asked(broker, "/enter", tls=tls, Cookie=pair))[0].status == 204
        assert (await asked(broker, "/state.json", tls=tls, Cookie=pair))[0].status == 200
        other = re.sub("^shoal_........", "shoal_00000000", pair)
        assert (await asked(broker, "/state.json", tls=tls, Cookie=other))[0].status == 401


async def test_the_page_runs_its_own_script_alone_and_is_kept_and_framed_by_nobody():
    async with running() as broker:
        answer, html = await asked(broker, "/")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Connection"] == "close"
        # What peers are called becomes text, never markup; and nothing comes from elsewhere.
        for never in (b"innerHTML", b"insertAdjacent", b"document.write", b"eval(", b" style="):
            assert never not in html
        assert re.findall(rb"https?://(?!www\.w3\.org/2000/svg)", html) == []


async def test_without_tls_it_is_for_this_host_only():
    outer = local_address()
    if outer.startswith("127."):
        pytest.skip("this host has no other address")
    async with running(host="0.0.0.0") as broker:

        def plainly() -> bytes:
            with connected(broker, tls=False, host=outer) as stranger:
                stranger.sendall(b"GET /state.json HTTP/1.1\r\nHost: x\r\n")
                stranger.sendall(f"Authorization: Bearer {key_of(broker)}\r\n\r\n".encode())
                return b"".join(iter(lambda: stranger.recv(4096), b""))

        answer = await asyncio.to_thread(plainly)
        assert answer.startswith(b"HTTP/1.1 404")
        assert answer.endswith(b"Its page is served over https:// only.\n")


async def test_people_get_keys_by_their_certificates_and_a_link_by_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    async with running() as broker:
        async with calling(broker, PartyRole.SUBMITTER, "ann") as stubs:
            made = await AdmissionStub(stubs).Page(PageRequest(lasts_s=60.0))
        assert made.address == broker.address
        assert made.key.split(".")[2:4] == ["submitter", "ann"]
        assert (await asked(broker, "/metrics", made.key))[0].status == 200
        remember(broker.address, broker.secured.operator())
        arguments = ["page", "--broker", broker.address, "--for", "12h"]
        said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert said.exit_code == 0, said.output
        link = said.output.splitlines()[0]
        assert link.startswith(f"http://{broker.address}/#shp1.")
        assert made.fingerprint in said.output
        answer, _ = await asked(broker, "/enter", link.partition("#")[2])
        assert answer.status == 204


# ---------------------------------------------------------------- what they see


async def test_what_changes_is_seen_at_once_and_names_stay_text():
    evil = "<img src=x onerror=alert(1)>"
    async with running() as broker:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port, ssl=context())
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n")
        writer.write(f"Authorization: Bearer {key_of(broker)}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head

        async def seen(holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            while True:
                line = await reader.readuntil(b"\n\n")
                state = json.loads(line.partition(b"data: ")[2])
                if holds(state):
                    return state

        await seen(lambda state: state["peers"] == [] and state["runs"] == [])
        broker.shell.blobs.whole = lambda _: True  # what is in them does not matter here
        async with calling(broker, PartyRole.SUBMITTER, "ann") as stubs:
            run = (await RunsStub(stubs).Submit(make_spec())).run
        state = await seen(lambda state: bool(state["runs"]))
        assert (state["runs"][0]["run"], state["runs"][0]["phase"]) == (run, "waiting")
        assert "shoal join" in state["runs"][0]["reason"]
        async with calling(broker, PartyRole.PEER, "a") as stubs:
            call = await join(stubs, "a", evil)
            state = await seen(lambda state: bool(state["peers"]))
            assert state["peers"][0]["name"] == evil
            call.cancel()
        await seen(lambda state: state["peers"] == [])
        writer.close()


async def test_who_looks_is_cut_off_when_kicked(monkeypatch: pytest.MonkeyPatch):
    async with running() as broker:
        reader, writer = await asyncio.open_connection("127.0.0.1", broker.port, ssl=context())
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n")
        writer.write(f"Authorization: Bearer {key_of(broker)}\r\n\r\n".encode())
        await reader.readuntil(b"\n\n")
        broker.secured.admission._kicked.add("ann")
        await asyncio.wait_for(reader.read(), 20)  # its end
        writer.close()


async def test_prometheus_gets_what_the_broker_knows():
    async with running() as broker:
        broker.shell.blobs.whole = lambda _: True
        async with (
            calling(broker, PartyRole.SUBMITTER, "ann") as person,
            calling(broker, PartyRole.PEER, "a") as stubs,
        ):
            await RunsStub(person).Submit(make_spec())
            call = await join(stubs, "a", "home-1")
            with pytest.raises(grpc.aio.AioRpcError):
                await RunsStub(stubs).Submit(make_spec())  # not a peer's
            with closing(connected(broker, tls=False)) as noise:
                noise.sendall(b"noise" * 10)
                assert await asyncio.to_thread(noise.recv, 1) == b""
            described = await RunsStub(person).Describe(DescribeRequest())
            answer, text = await asked(broker, "/metrics", key_of(broker))
            call.cancel()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {
        (s.name, *sorted(s.labels.values())): s.value
        for family in text_string_to_metric_families(text.decode())
        for s in family.samples
    }
    states = [p.membership for p in described.peers]
    for state in ("pool", "assigned", "draining", "resting"):
        assert found["shoal_peers", state] == states.count(state)
    assert sum(v for k, v in found.items() if k[0] == "shoal_runs") == len(described.runs) == 1
    assert found["shoal_steps_total",] == 0
    assert found["shoal_refusals_total", "call", "permission_denied"] == 1
    assert found["shoal_refusals_total", "hello", "port"] == 1
    assert found["process_open_fds",] > 0


async def test_a_peers_key_shows_its_part_and_no_metrics():
    async with running() as broker:
        broker.shell.blobs.whole = lambda _: True
        async with (
            calling(broker, PartyRole.SUBMITTER, "ann") as person,
            calling(broker, PartyRole.PEER, "a") as stubs,
        ):
            run = (await RunsStub(person).Submit(make_spec())).run
            call = await join(stubs, "a", "home-1")
            made = await AdmissionStub(stubs).Page(PageRequest(lasts_s=60.0))
            told = await RunsStub(stubs).Describe(DescribeRequest())
            shown = json.loads((await asked(broker, "/state.json", made.key))[1])
            everything = json.loads((await asked(broker, "/state.json", key_of(broker)))[1])
            refused, _ = await asked(broker, "/metrics", made.key)
            call.cancel()
    assert [p.peer for p in told.peers] == [p["peer"] for p in shown["peers"]] == ["a"]
    assert [r["run"] for r in everything["runs"]] == [run]
    assert not told.runs
    assert not shown["runs"]
    assert refused.status == 403


# ---------------------------------------------------------------- what strangers may cost


async def test_slow_drips_end_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)
    async with running() as broker:
        for tls in (True, False):
            for said in (b"", b"GET / HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r\nHost: x\r\nX: "):
                if not tls and said[-4:] != b"\r\n\r\n":
                    broker.secured._front.limits = MultiplexerLimits(hello_s=0.2)
                with closing(await asyncio.to_thread(connected, broker, tls=tls)) as drip:
                    drip.sendall(said)
                    assert await asyncio.to_thread(drip.recv, 1) == b"", (tls, said)


async def test_a_handshake_that_stops_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving, "REQUEST_S", 0.2)
    async with running() as broker:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        half = context().wrap_bio(incoming, outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            half.do_handshake()
        with closing(connected(broker, tls=False)) as stranger:
            stranger.sendall(outgoing.read())  # and nothing more
            rest = await asyncio.to_thread(lambda: b"".join(iter(lambda: stranger.recv(4096), b"")))
        assert rest[:1] == b"\x16"  # the server's side of it, then the end


async def test_requests_that_are_none_are_refused():
    async with running() as broker:
        for said in (
            b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(5000)) + b"\r\n",
            b"GET /" + b"y" * 40_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x00" * 100,
        ):
            with closing(await asyncio.to_thread(connected, broker)) as stranger:
                try:
                    await asyncio.to_thread(stranger.sendall, said)
                    answer = await asyncio.to_thread(stranger.recv, 65536)
                except OSError:
                    answer = b""  # closed before all had been said
            assert answer[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 404"), (said[:40], answer)
        assert (await asked(broker, "/"))[0].status == 200


async def test_a_connection_is_one_request():
    async with running() as broker:

        def twice() -> bytes:
            with closing(connected(broker)) as greedy:
                greedy.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
                return b"".join(iter(lambda: greedy.recv(65536), b""))

        assert (await asyncio.to_thread(twice)).count(b"HTTP/1.1 200") == 1


async def test_an_address_has_so_many_connections_and_the_rest_of_the_port_goes_on():
    async with running() as broker:
        front = broker.secured._front
        front.limits = MultiplexerLimits(page_of_an_address=2)
        held = []
        for _ in range(2):
            looks = await asyncio.to_thread(connected, broker)
            looks.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n")
            looks.sendall(f"Authorization: Bearer {key_of(broker)}\r\n\r\n".encode())
            await asyncio.to_thread(looks.recv, 1)
            held.append(looks)
        with pytest.raises(OSError, match=r".*"):
            await asked(broker, "/")
        assert front.refused["page_connections"] == 1
        async with calling(broker, PartyRole.SUBMITTER, "ann") as stubs:
            assert await RunsStub(stubs).Describe(DescribeRequest())
        for looks in held:
            looks.close()


async def test_an_address_that_asks_too_often_waits():
    async with running() as broker:
        front = broker.secured._front
        front._page_knocks._in_a_row, front._page_knocks._per_s = 3.0, 0.0
        for _ in range(3):
            assert (await asked(broker, "/"))[0].status == 200
        with pytest.raises(OSError, match=r".*"):
            await asked(broker, "/")
        assert front.refused["page_knocks"] == 1


# ---------------------------------------------------------------- with and without


async def test_without_a_page_the_broker_says_so(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n, *a: None if n == "uvicorn" else found(n, *a)
    )
    for config, why in (
        ({"page": False}, "it was started with --no-page"),
        ({}, r"uvicorn is missing: pip install 'shoal\[page\]'"),
    ):
        async with running(**config) as broker, calling(broker, PartyRole.OPERATOR, "x") as stubs:
            with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
                await AdmissionStub(stubs).Page(PageRequest(lasts_s=60.0))
            assert caught.value.code().name == "FAILED_PRECONDITION"
            with pytest.raises(OSError, match=r".*"):
                await asked(broker, "/")
            assert (await asked(broker, "/", tls=False))[0].status == 404


async def test_the_owners_certificate_is_shown_and_a_wrong_one_is_said(tmp_path: Path):
    chain, key = own_certificate(tmp_path / "made", "localhost", utc(time.time()))
    certbot = tmp_path / "live"
    certbot.mkdir()
    (certbot / "fullchain.pem").write_bytes(chain.read_bytes())
    with pytest.raises(BrokerConfigError, match=r"privkey.pem: expected the page's certificate"):
        async with running(page_certificate=certbot):
            pass
    (certbot / "privkey.pem").write_bytes(chain.read_bytes())  # no key
    with pytest.raises(BrokerConfigError, match="certificate cannot be used"):
        async with running(page_certificate=certbot):
            pass
    (certbot / "privkey.pem").write_bytes(key.read_bytes())
    async with running(page_certificate=certbot) as broker:
        assert broker.page.fingerprint == ""

        def verified() -> bytes:
            raw = socket.create_connection(("127.0.0.1", broker.port), timeout=20)
            trusting = context(str(chain))  # as Prometheus' ca_file
            with trusting.wrap_socket(raw, server_hostname="localhost") as wrapped:
                return wrapped.getpeercert(True)

        assert await asyncio.to_thread(verified) == ssl.PEM_cert_to_DER_cert(chain.read_text())


def test_a_certificate_for_no_page_is_refused(tmp_path: Path):
    for config in ({"page": False}, {"insecure": True}):
        with pytest.raises(BrokerConfigError, match="--page-certificate without a page"):
            BrokerConfig(page_certificate=tmp_path, **config)


async def test_a_broker_without_identities_has_none_and_the_verb_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    async with running(insecure=True) as broker:
        arguments = ["page", "--broker", broker.address]
        said = await asyncio.to_thread(CliRunner().invoke, app, arguments)
        assert said.exit_code == 4, said.output
        assert "started with --insecure" in said.output
