"""What the owner of a lent host sees with nothing but a peer's certificate."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal.broker.options import BrokerOptions
from shoal.broker.records.peer_shares import PeerShares
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.cli import app, owner
from shoal.net.identity.names import Party, PartyRole
from shoal.net.surroundings import user_path
from shoal.peer.host.config import DEFAULT_STATE
from shoal.peer.host.host import Host, Standing
from shoal.proto.broker_pb2 import PeerShare


def gave(shares: PeerShares, peer: str) -> None:
    kept = PeerShare(peer=peer, run="r-7", name="chat", samples=640, sent_bytes=1, seconds=7200.0)
    shares.restore(kept)


async def test_a_lender_sees_its_share_and_may_do_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    folder = user_path(DEFAULT_STATE)

    async def call(*arguments: str) -> tuple[int, str]:
        found = await asyncio.to_thread(CliRunner().invoke, app, list(arguments))
        return found.exit_code, found.output

    config = BrokerConfig(port=0, options=BrokerOptions(probe_s=0.0))
    async with Broker(config) as broker:
        code, text = await call("status", "--mine", "--broker", broker.address)
        assert code == 2
        assert "expected `shoal join` before --mine" in text
        assert broker.secured is not None
        own = Party(PartyRole.PEER, "home-1")
        broker.secured._signed(own.role, own.subject, timedelta(hours=1)).save(
            folder / "home" / "cpu"
        )
        standing = Standing(
            peer="home-1",
            name="home",
            broker=broker.address,
            month="2026-11",
            moved_bytes=0,
            monthly_bytes=None,
            closed="",
        )
        Host(folder).keep(standing)
        for peer in ("home-1", "other-1"):
            gave(broker.shell.machine.decided.shares, peer)
        for arguments in (["status", "--mine"], ["status"]):  # there is no other certificate
            code, text = await call(*arguments, "--json", "--broker", broker.address)
            assert code == 0, text
            found = json.loads(text[text.index("{") :].splitlines()[0])
            assert found["shares"] == [
                {
                    "peer": "home-1",
                    "run": "r-7",
                    "name": "chat",
                    "samples": 640,
                    "sent_bytes": 1,
                    "hours": 2.0,
                }
            ]
        code, text = await call("status", "--broker", broker.address)
        assert "what home-1 has given" in text
        code, text = await call("page", "--broker", broker.address)
        assert code == 0
        assert ".peer.home-1." in text
        code, text = await call("cancel", "r-7", "--broker", broker.address)
        assert code == 4
        assert "no credential" in text


def test_that_a_host_rests_is_said_before_its_peers_have_looked(tmp_path: Path) -> None:
    host = Host(tmp_path)
    kept = Standing(
        peer="home-1",
        name="home",
        broker="b:1",
        month="2026-11",
        moved_bytes=0,
        monthly_bytes=None,
        closed="",
    )
    host.keep(kept)
    assert [p["state"] for p in owner.standing(tmp_path)["peers"]] == ["takes part"]
    host.pause()
    (found,) = owner.standing(tmp_path)["peers"]
    assert found["state"] == "is about to rest: its owner has paused it"
    host.unpause()
    assert owner.standing(tmp_path)["peers"][0]["state"] == "takes part"
