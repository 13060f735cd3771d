"""What lies on the broker's disk tells no secret but the one that it prints, and a kick takes
nothing from others."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

from shoal.client.doctor import examine
from shoal.net.identity.enroll import enroll
from shoal.net.identity.names import PartyRole
from shoal.net.identity.token import Token
from shoal.proto.admission_pb2 import InviteRequest, KickRequest
from shoal.proto.admission_pb2_grpc import AdmissionStub
from shoal.proto.broker_pb2 import CANCELLED, RunRequest
from shoal.proto.broker_pb2_grpc import RunsStub

from ...broker.conftest import make_spec
from ...broker.service.test_secured import channel, running


def lying(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


async def test_no_secret_lies_on_the_brokers_disk_but_that_of_the_line_it_prints(tmp_path: Path):
    folder = tmp_path / "broker"
    async with running(state=folder) as broker:
        printed = broker.secured.printed_token()
        async with channel(broker, broker.secured.operator()) as operator:
            asked = InviteRequest(role="peer", uses=3, lasts_s=3600.0)
            given = await AdmissionStub(operator).Invite(asked)
        token = Token.parse(given.token)
        await asyncio.to_thread(enroll, broker.address, token, tmp_path / "home", "home")
        files = lying(folder)
        for secret in (token.secret, token.secret.hex().encode(), str(token).encode()):
            assert not [name for name, data in files.items() if secret in data]
        assert not [name for name, data in files.items() if printed.secret in data]
        assert [n for n, data in files.items() if str(printed).encode() in data] == ["join-token"]
        assert stat.S_IMODE((folder / "join-token").stat().st_mode) == 0o600
        keys = [p for p in folder.rglob("*.pem") if b"PRIVATE" in p.read_bytes()]
        assert keys
        assert {stat.S_IMODE(p.stat().st_mode) for p in keys} == {0o600}
    for secret in (token.secret, str(token).encode()):  # what is written at the end, too
        assert not [name for name, data in lying(folder).items() if secret in data]


async def test_the_doctor_takes_no_use_of_a_token(tmp_path: Path):
    async with running() as broker:
        async with channel(broker, broker.secured.operator()) as operator:
            asked = InviteRequest(role="peer", uses=1, lasts_s=3600.0)
            given = await AdmissionStub(operator).Invite(asked)
        for _ in range(3):
            await asyncio.to_thread(
                lambda: [*examine(broker.address, given.token, [tmp_path / "nobody"])]
            )
        token = Token.parse(given.token)
        found = await asyncio.to_thread(enroll, broker.address, token, tmp_path / "home", "home")
        assert found.party.role is PartyRole.PEER


async def test_who_joined_by_a_kicked_ones_token_stays_and_its_runs_go_on(tmp_path: Path):
    async with running() as broker:
        broker.shell.blobs.whole = lambda _: True  # what is in them does not matter here
        async with channel(broker, broker.secured.operator()) as operator:
            asked = InviteRequest(role="operator", uses=1, lasts_s=3600.0)
            given = await AdmissionStub(operator).Invite(asked)
        token = Token.parse(given.token)
        eve = await asyncio.to_thread(enroll, broker.address, token, tmp_path / "eve", "eve")
        async with channel(broker, eve) as stubs:
            asked = InviteRequest(role="submitter", uses=3, lasts_s=3600.0)
            given = await AdmissionStub(stubs).Invite(asked)
            run = (await RunsStub(stubs).Submit(make_spec())).run
        token = Token.parse(given.token)
        ann = await asyncio.to_thread(enroll, broker.address, token, tmp_path / "ann", "ann")
        async with channel(broker, broker.secured.operator()) as operator:
            await AdmissionStub(operator).Kick(KickRequest(subject=eve.party.subject))
            async with channel(broker, ann) as stubs:
                await RunsStub(stubs).Submit(make_spec())
            state = await RunsStub(operator).Cancel(RunRequest(run=run))
            assert state.phase == CANCELLED, "it was open until now"
