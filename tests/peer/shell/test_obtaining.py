"""A peer waits for a broker that cannot admit anybody, and gives up where nothing can change."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.identity import enroll
from shoal.net.identity.enroll import NotAdmittedError, NotNowError
from shoal.net.identity.names import PartyRole
from shoal.net.identity.token import Token
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell import credentials


def settings(broker: Broker, folder: Path, token: str, **more: float) -> PeerConfig:
    return PeerConfig(broker=broker.address, state=folder, name="p", token=token, **more)


async def test_a_disk_of_the_broker_that_takes_nothing_is_waited_for_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than for a broker that is away, as this one is reached; not longer than it is told."""
    said, often = list[str](), asyncio.Event()

    def note(_: logging.Logger, __: int, what: str, **fields: object) -> None:
        said.append(f"{what}: {fields['why']}")
        if len(said) == 3:
            often.set()

    monkeypatch.setattr(credentials, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(credentials, "note", note)
    async with Broker(BrokerConfig(port=0, state=tmp_path / "broker")) as broker:
        assert broker.secured is not None
        token = broker.join_line().split()[-1]
        disk = broker.secured.admission._file.db
        disk.execute("PRAGMA query_only = ON")
        impatient = settings(broker, tmp_path / "q", token, give_up_s=0.01)
        with pytest.raises(NotNowError, match=r"admits nobody now: .*make room there"):
            await credentials.obtain(impatient)
        patient = settings(broker, tmp_path / "p", token, first_s=0.01)
        joining = asyncio.ensure_future(credentials.obtain(patient))
        await often.wait()
        assert not joining.done()
        assert all("not joined yet" in line and "make room there" in line for line in said)
        disk.execute("PRAGMA query_only = OFF")
        found = await joining
        assert found.party.role is PartyRole.PEER


async def test_what_a_token_is_refused_for_is_final(tmp_path: Path) -> None:
    async with Broker(BrokerConfig(port=0, state=tmp_path / "broker")) as broker:
        right = Token.parse(broker.join_line().split()[-1])
        wrong = Token(right.fingerprint, b"x" * 8, right.secret)
        with pytest.raises(NotAdmittedError, match="knows no such token"):
            await credentials.obtain(settings(broker, tmp_path / "p", str(wrong)))


def test_answers_that_are_final_are_about_the_request() -> None:
    passing = {c.name for c in grpc.StatusCode} - {c.name for c in enroll.FINAL}
    assert passing >= {"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "UNKNOWN", "INTERNAL"}
    assert not passing & {"UNAUTHENTICATED", "PERMISSION_DENIED", "FAILED_PRECONDITION"}
