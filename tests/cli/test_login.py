"""`shoal login`: what a token puts in the place of the credential that is there, and what it does
not."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import pytest

from shoal.broker.service.secured import Secured
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client import access
from shoal.client.access import AccessError, credential_folder, login, remember
from shoal.net.identity.credential import Credential
from shoal.net.identity.enroll import BrokerAwayError
from shoal.net.identity.names import OWNER, PartyRole


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def invited(secured: Secured, role: PartyRole) -> str:
    return str(secured.admission.invite(role, 1, timedelta(hours=1), "test", time.time()))


def kept(address: str) -> Credential:
    found = Credential.load(credential_folder(address))
    assert found is not None
    assert (
        not credential_folder(address).with_name(credential_folder(address).name + ".new").exists()
    )
    return found


async def test_a_peers_token_takes_nothing_away() -> None:
    async with Broker(BrokerConfig(port=0)) as broker:
        secured, at = broker.secured, broker.address
        assert secured is not None
        remember(at, secured.operator())
        before = kept(at)
        async with Broker(BrokerConfig(port=0)) as other:
            assert other.secured is not None
            strange = invited(other.secured, PartyRole.SUBMITTER)
        for token in (invited(secured, PartyRole.PEER), strange):
            with pytest.raises(AccessError, match=r"for `shoal join`|not the broker that gave out"):
                await asyncio.to_thread(login, at, token)
            assert kept(at) == before
        assert before.party == (PartyRole.OPERATOR, OWNER)
        # A person's token still works, with a key of its own.
        await asyncio.to_thread(login, at, invited(secured, PartyRole.SUBMITTER), "ann")
        assert kept(at).party.role is PartyRole.SUBMITTER
        assert kept(at).key != before.key
        # At its next start the broker gives whoever runs it their own rights back.
        remember(at, secured.operator())
        assert kept(at).party == (PartyRole.OPERATOR, OWNER)


async def test_a_person_who_logs_in_again_is_the_same_person() -> None:
    async with Broker(BrokerConfig(port=0)) as broker:
        assert broker.secured is not None
        subjects = set()
        for _ in range(2):
            token = invited(broker.secured, PartyRole.SUBMITTER)
            await asyncio.to_thread(login, broker.address, token, "ann")
            subjects.add(kept(broker.address).party.subject)
        [first] = subjects
        # The wrong kind of token neither takes that away nor is it used up by it.
        token = invited(broker.secured, PartyRole.PEER)
        with pytest.raises(AccessError, match="each role needs a key of its own"):
            await asyncio.to_thread(login, broker.address, token, "ann")
        assert kept(broker.address).party.subject == first


async def test_an_answer_that_was_lost_costs_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Broker(BrokerConfig(port=0)) as broker:
        assert broker.secured is not None
        token = invited(broker.secured, PartyRole.SUBMITTER)
        real = access.enroll

        def lost(*arguments: object, **named: object) -> Credential:
            real(*arguments, **named)  # type: ignore[arg-type]
            raise BrokerAwayError("the line went dead")

        monkeypatch.setattr(access, "enroll", lost)
        with pytest.raises(BrokerAwayError):
            await asyncio.to_thread(login, broker.address, token)
        assert Credential.load(credential_folder(broker.address)) is None
        monkeypatch.setattr(access, "enroll", real)
        await asyncio.to_thread(login, broker.address, token)
        assert kept(broker.address).party.role is PartyRole.SUBMITTER
