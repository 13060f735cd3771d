"""Runs that would fill the broker's memory, its journal or its disk, over real connections: what
does not fit is refused with its numbers, who else is there goes on, and the broker never stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shoal.broker.journal import barrier as barriers
from shoal.broker.journal import journal as journals
from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.blobs.client import BlobClient
from shoal.net.identity.names import PartyRole
from shoal.planner.requests.run_spec import MOST_SPEC_BYTES
from shoal.proto.broker_pb2 import (
    Availability,
    DescribeRequest,
    PeerMessage,
    RunRequest,
    RunSpec,
    WeightFile,
)
from shoal.proto.broker_pb2_grpc import AttachStub, RunsStub
from shoal.proto.common_pb2 import BlobRef, Reason

from ...broker.conftest import make_spec
from ...broker.service.test_secured import channel, made, status
from .test_limits import hello

MIB = 1 << 20


@asynccontextmanager
async def broker(state: Path, **options: int) -> AsyncIterator[Broker]:
    config = BrokerConfig(port=0, state=state, options=BrokerOptions(probe_s=0.0, **options))
    async with Broker(config) as found:
        yield found


@asynccontextmanager
async def submitter(broker: Broker, name: str = "eve") -> AsyncIterator[tuple[RunsStub, BlobRef]]:
    """A submitter's calls, and a blob that is there."""
    async with channel(broker, made(broker, PartyRole.SUBMITTER, name)) as stubs:
        yield RunsStub(stubs), await BlobClient(stubs).store(b"a graph, or so it says")


def spec(blob: BlobRef, size: int = 0) -> RunSpec:
    """One of at least so many bytes, none of which is wrong by itself."""
    made = make_spec()
    made.graph.CopyFrom(blob)
    made.data.CopyFrom(blob)
    file = WeightFile(blob=blob)
    made.weights.extend([file] * (size // (file.ByteSize() + 2) + bool(size)))
    return made


async def test_a_spec_that_is_larger_than_any_honest_one_is_refused_and_leaves_nothing(
    tmp_path: Path,
):
    async with broker(tmp_path) as found, submitter(found) as (runs, blob):
        huge = spec(blob, 7 * MIB // 2)
        for _ in range(4):
            code, why = await status(runs.Submit(huge))
            assert code == "INVALID_ARGUMENT"
            assert f"has {huge.ByteSize()} bytes: expected at most {MOST_SPEC_BYTES}" in why
        code, why = await status(runs.Preview(huge))
        assert (code, str(MOST_SPEC_BYTES) in why) == ("INVALID_ARGUMENT", True)
        long = spec(blob)
        long.job = long.job.replace("{", "{" + " " * 300_000, 1)
        code, why = await status(runs.Submit(long))
        assert (code, "the job of the run has" in why) == ("INVALID_ARGUMENT", True)
        resumed = spec(blob)
        resumed.resumed.job = long.job
        code, why = await status(runs.Submit(resumed))
        assert (code, "the job of the checkpoint of" in why) == ("INVALID_ARGUMENT", True)
        assert found.shell._journal.size_bytes < 10_000
        assert (await runs.Submit(spec(blob))).run


async def test_one_subject_fills_its_own_share_and_nobody_elses(tmp_path: Path):
    async with (
        broker(tmp_path, subject_bytes=4 * MIB) as found,
        submitter(found, "eve") as (runs, blob),
        submitter(found, "ann") as (others, _),
    ):
        large = spec(blob, MIB)
        mine = [(await runs.Submit(large)).run for _ in range(3)]
        code, why = await status(runs.Submit(large))
        assert code == "RESOURCE_EXHAUSTED"
        assert f"has {large.ByteSize()} bytes" in why
        assert "the 3 open runs of eve take " in why
        assert f"of at most {4 * MIB}" in why
        assert (await others.Submit(large)).run
        await runs.Cancel(RunRequest(run=mine[0]))
        assert (await runs.Submit(large)).run  # its own ended run makes room
        left = {state.run for state in (await runs.Describe(DescribeRequest())).runs}
        assert mine[0] not in left
        assert len(left) == 4


async def test_runs_that_come_and_go_push_out_the_ended_ones_of_their_own_owner(tmp_path: Path):
    async with broker(tmp_path, kept_runs=4) as found:
        async with submitter(found, "ann") as (runs, blob):
            old = (await runs.Submit(spec(blob))).run
            await runs.Cancel(RunRequest(run=old))
        async with submitter(found, "eve") as (runs, blob):
            for _ in range(8):
                run = (await runs.Submit(spec(blob))).run
                await runs.Cancel(RunRequest(run=run))
            states = (await runs.Describe(DescribeRequest())).runs
        assert old in {state.run for state in states}
        assert len(states) == 5  # the newest had not ended when it came


async def test_a_disk_that_is_nearly_full_takes_no_new_runs_and_goes_on_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async with broker(tmp_path) as found, submitter(found) as (runs, blob):
        open_run = (await runs.Submit(spec(blob))).run
        monkeypatch.setattr(journals, "RESERVE_BYTES", 1 << 60)
        wanted = spec(blob)
        code, why = await status(runs.Submit(wanted))
        assert code == "RESOURCE_EXHAUSTED"
        assert f"has {wanted.ByteSize()} bytes" in why
        assert f"0 bytes left for new runs, of which it needs {3 * wanted.ByteSize()}" in why
        state = await runs.Cancel(RunRequest(run=open_run))  # a decision of a run that is there
        assert state.run == open_run
        monkeypatch.undo()
        assert (await runs.Submit(wanted)).run


async def test_a_full_disk_is_waited_for_and_what_was_decided_is_told_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """SQLite refuses pages beyond a number, as it does when the disk has none."""
    async with broker(tmp_path) as found, submitter(found) as (runs, blob):
        db = found.shell._journal._db
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 1}")
        barrier = found.shell._barrier
        with caplog.at_level(logging.ERROR):
            submitted = asyncio.ensure_future(runs.Submit(spec(blob, MIB)))
            while barrier.full is None:
                await asyncio.wait({submitted}, timeout=0.01)
                assert not submitted.done()
        assert "journal_waits" in caplog.text
        code, why = await status(runs.Describe(DescribeRequest()))
        assert (code, "the disk is full" in why) == ("UNAVAILABLE", True)
        assert not found.shell.stopped.is_set()
        db.execute("PRAGMA max_page_count = 1000000")
        run = (await submitted).run
        assert [s.run for s in (await runs.Describe(DescribeRequest())).runs] == [run]
    async with broker(tmp_path) as again:
        assert list(again.shell.machine.runs) == [run]


async def test_a_broker_that_waits_too_long_for_a_full_disk_ends_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A peer that says much meanwhile can bring that about."""
    monkeypatch.setattr(barriers, "MOST_HELD", 20)
    monkeypatch.setattr(barriers, "AGAIN_S", 0.01)
    async with broker(tmp_path) as found, submitter(found) as (runs, blob):
        run = (await runs.Submit(spec(blob, MIB))).run
        db = found.shell._journal._db
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA max_page_count = 1")
        lost = asyncio.ensure_future(status(runs.Submit(spec(blob, MIB))))
        while found.shell._barrier.full is None:  # else what the peer says may be kept before
            await asyncio.wait({lost}, timeout=0.01)
            assert not lost.done()
        async with channel(found, made(found, PartyRole.PEER, "eve")) as stubs:
            call = AttachStub(stubs).Attach()
            await call.write(hello("eve"))
            for i in range(40):
                closed = Reason(code="hours", text="closed") if i % 2 else None
                await call.write(PeerMessage(availability=Availability(closed=closed)))
            await asyncio.wait_for(found.shell.stopped.wait(), 20)
            assert "is full" in str(found.shell.error)
            call.cancel()
        await lost
    async with broker(tmp_path) as again:
        assert list(again.shell.machine.runs) == [run]
