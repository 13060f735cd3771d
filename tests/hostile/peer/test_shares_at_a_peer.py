"""What one peer, and all together, may hold open at another: streams, and fetches of blobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import grpc.aio
import pytest

from shoal.net.identity.authority import Authority
from shoal.net.identity.credential import Credential
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import PartyRole, dns_name
from shoal.peer.blobs import sharing
from shoal.tests.broker.service.door.test_relay import network
from shoal.tests.peer.blobs.test_sharing import DATA, NAME, fellows, holding, party, serving

Codes = list["asyncio.Task[grpc.StatusCode]"]


@asynccontextmanager
async def silent_calls(
    method: str, address: str, to: str, callers: list[Credential]
) -> AsyncIterator[Codes]:
    """A call of each, over a connection of its own, on which nothing is ever said: how they end."""
    async with AsyncExitStack() as stack:
        codes: Codes = []
        for credential in callers:
            options = channel_options(address, dns_name(PartyRole.PEER, to))
            made = grpc.aio.secure_channel(address, credential.for_channel(), options=options)
            call = (await stack.enter_async_context(made)).stream_stream(method)()
            codes.append(asyncio.create_task(call.code()))
        yield codes
    await asyncio.gather(*codes)  # those that were let in end with their channels


async def first(codes: Codes, count: int) -> list[str]:
    """How those calls end that end first."""
    ends = asyncio.as_completed(codes)
    return [(await next(ends)).name for _ in range(count)]


async def test_all_peers_together_have_only_so_many_streams(monkeypatch: pytest.MonkeyPatch):
    """None of them has more than its own share."""
    monkeypatch.setattr("shoal.net.transports.grpc_transport._STREAMS", 4)
    async with network("b", "c", "d", "e") as (broker, members):
        callers = [m.credential for m in members[1:] for _ in range(2)]
        async with silent_calls("/shoal.v1.Peer/Frames", broker.address, "b", callers) as codes:
            assert await first(codes, 2) == ["RESOURCE_EXHAUSTED"] * 2


@pytest.fixture
def authority() -> Authority:
    return Authority.new(datetime.now(UTC))


async def test_one_peers_silent_fetches_are_few_and_others_get_blobs(
    tmp_path: Path, authority: Authority
):
    mine, eve, ann = (party(authority, name) for name in ("a", "eve", "ann"))
    async with (
        serving(holding(tmp_path / "a"), credential=mine) as address,
        silent_calls("/shoal.v1.Blobs/Fetch", address, "a", [eve] * 7) as codes,
    ):
        assert await first(codes, 3) == ["RESOURCE_EXHAUSTED"] * 3
        async with fellows({"a": address}, ann) as found:
            assert await found.clients[0].fetch(NAME, 0, 9) == DATA[:9]


async def test_all_peers_together_fetch_only_so_much_at_once(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sharing, "_MOST_STREAMS", 4)
    mine, callers = party(authority, "a"), [party(authority, f"b{i}") for i in range(6)]
    async with (
        serving(holding(tmp_path / "a"), credential=mine) as address,
        silent_calls("/shoal.v1.Blobs/Fetch", address, "a", callers) as codes,
    ):
        assert await first(codes, 2) == ["RESOURCE_EXHAUSTED"] * 2
