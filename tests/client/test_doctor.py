"""`shoal doctor`: each thing that stands in the way is named, and what works is not."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client import doctor
from shoal.client.access import credential_folder
from shoal.client.doctor import Finding, examine
from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.enroll import enroll
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.token import Token
from shoal.peer.host.host import Host, Standing
from shoal.tests.net.web.proxies import ConnectProxy


async def found(address: str, token: str = "", *folders: Path) -> dict[str, Finding]:
    """By what was looked at."""
    findings = await asyncio.to_thread(lambda: list(examine(address, token, list(folders))))
    return {f.what: f for f in findings}


def wrong(findings: dict[str, Finding]) -> list[str]:
    return [what for what, finding in findings.items() if finding.how == "wrong"]


async def test_where_all_is_well_nothing_is_wrong(tmp_path: Path) -> None:
    async with Broker(BrokerConfig(port=0)) as broker:
        token = broker.join_line().split()[-1]
        peer = await asyncio.to_thread(
            enroll, broker.address, Token.parse(token), tmp_path / "peer", "home"
        )
        findings = await found(broker.address, token, tmp_path / "peer", tmp_path / "nothing")
        assert wrong(findings) == []
        assert peer.party.subject in findings["credential"].text
        assert findings["token"].how == "ok"
        assert "whole" in findings["token"].text
        assert findings["tls"].how == findings["packets"].how == findings["size"].how == "ok"
        assert int(findings["size"].text.split()[0]) > 250_000
        # No use was taken, and nobody joined.
        assert (await found(broker.address))["credential"].how == "note"


async def test_what_does_not_work_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = str(Authority.new(utc(0.0)).token())
    async with Broker(BrokerConfig(port=0)) as broker:
        assert wrong(await found(broker.address, other)) == ["token"]
        assert wrong(await found(broker.address, other[:-3])) == ["token"]
        token = Token.parse(broker.join_line().split()[-1])
        await asyncio.to_thread(enroll, broker.address, token, tmp_path, "home")
        (tmp_path / "key.pem").write_bytes(b"nonsense")
        assert wrong(await found(broker.address, "", tmp_path)) == ["credential"]
        shown = await asyncio.to_thread(doctor.shown_by, broker.address)
        late = shown._replace(ahead_s=7200.0)
        monkeypatch.setattr(doctor, "shown_by", lambda _: late)
        findings = await found(broker.address)
        assert wrong(findings) == ["clock"]
        assert "7200 s ahead of the broker's" in findings["clock"].text


async def test_another_authority_and_a_handshake_that_fails_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = Authority.new(utc(time.time())).credential(
        Party(PartyRole.SUBMITTER, "ann"), utc(time.time()), timedelta(days=1)
    )
    old.save(tmp_path)
    async with Broker(BrokerConfig(port=0)) as broker:
        findings = await found(broker.address, "", tmp_path)
        assert wrong(findings) == ["credential"]
        assert "of another authority" in findings["credential"].text
        assert wrong(await found(broker.address, "", tmp_path / "none", tmp_path)) == []
        assert broker.secured is not None
        ended = broker.secured.authority.credential(
            Party(PartyRole.BROKER, "broker"), utc(time.time() - 9e6), timedelta(days=30)
        )
        monkeypatch.setattr(broker.secured, "_own", ended)
        monkeypatch.setattr(broker.secured, "_signed", lambda *_: ended)
        findings = await found(broker.address)
        assert wrong(findings) == ["tls"]
        assert "is not valid any more" in findings["tls"].text


async def test_what_the_owner_has_set_is_said(tmp_path: Path) -> None:
    host, address = Host(tmp_path), "nowhere.invalid:7077"

    def about() -> list[str]:
        return [f.text for f in examine(address, "", [], tmp_path) if f.what == "owner"]

    standing = Standing(
        peer="home-1", name="home", broker=address, month="2026-11", moved_bytes=0,
        monthly_bytes=None, closed="",
    )  # fmt: skip
    host.keep(standing)
    assert about() == []
    host.keep(replace(standing, closed="it takes part from 22:00-08:00, by its own clock"))
    assert about() == ["home is closed: it takes part from 22:00-08:00, by its own clock"]
    host.pause()
    (text,) = about()
    assert text.startswith("this host is paused since 20")
    assert "`shoal unpause`" in text


async def test_a_proxy_of_the_environment_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    far = "broker.invalid:7077"
    async with Broker(BrokerConfig(port=0)) as broker, ConnectProxy({far: broker.address}) as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        token = broker.join_line().split()[-1]
        findings = await found(far, token)
        assert wrong(findings) == []
        assert [findings[what].how for what in ("proxy", "port", "token")] == ["note", "ok", "ok"]
        assert "name" not in findings  # only the proxy knows it
        assert set(proxy.asked) == {far}
        findings = await found("broker.invalid:443")
        assert wrong(findings) == ["proxy"]
        assert "403 Forbidden" in findings["proxy"].text
        assert "--port 443" in findings["proxy"].text
        # This machine itself is reached without it.
        assert "proxy" not in await found(broker.address)
        monkeypatch.setenv("https_proxy", "socks5://127.0.0.1:1")
        assert wrong(await found(far)) == ["proxy"]


async def test_it_ends_where_nothing_further_can_be_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    findings = await found(f"127.0.0.1:{port}")
    assert wrong(findings) == ["port"]
    assert [*findings][-1] == "port"
    assert wrong(await found("nowhere.invalid:7077")) == ["name"]
    async with Broker(BrokerConfig(port=0, insecure=True)) as broker:
        findings = await found(broker.address)
        assert wrong(findings) == ["broker"]
        assert "--insecure" in findings["broker"].text
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        await found("no sense")


async def test_the_exit_code_says_what_is_wrong_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))

    async def code(*words: str) -> int:
        result = await asyncio.to_thread(CliRunner().invoke, cli.app, ["doctor", *words])
        assert "Traceback" not in result.output
        return result.exit_code

    assert await code("no sense") == await code('a"b:7') == 2
    assert await code("nowhere.invalid:7077") == 3
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    assert await code(f"127.0.0.1:{port}") == await code("--broker", f"127.0.0.1:{port}") == 3
    assert await code("127.0.0.1:1", "--broker", "127.0.0.1:2") == 2
    async with Broker(BrokerConfig(port=0)) as broker:
        at, token = broker.address, broker.join_line().split()[-1]
        assert await code(at) == 0
        assert await code("--broker", at, "--token", token) == 0
        monkeypatch.setenv("SHOAL_BROKER", at)
        assert await code() == 0
        assert await code(at, "--token", str(Authority.new(utc(0.0)).token())) == 2
        folder = credential_folder(at)
        await asyncio.to_thread(enroll, at, Token.parse(token), folder, "home")
        assert await code(at) == 0
        (folder / "key.pem").write_bytes(b"nonsense")
        assert await code(at, "--json") == 4
