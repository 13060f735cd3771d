"""A submitter who wants somebody else's run: what happens in it, and the names of its weights, are
for whose it is and for operators, over real connections with TLS."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import grpc
import grpc.aio
import pytest

from shoal.broker.events import RunId
from shoal.broker.options import BrokerOptions
from shoal.broker.service.page.digest import Digest, MetricTotals
from shoal.broker.service.page.seen import Look
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.net.blobs.client import BlobClient
from shoal.net.identity.authority import utc
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole
from shoal.proto.broker_pb2 import (
    Checkpoint,
    CheckpointFile,
    Cohort,
    CohortChoice,
    DescribeRequest,
    Description,
    Outcome,
    RunEvent,
    RunRequest,
    RunSpec,
    RunState,
    StepDone,
    WatchRequest,
    WeightFile,
    Weights,
)
from shoal.proto.broker_pb2_grpc import RunsStub
from shoal.proto.common_pb2 import Reason

from ...broker.service.page.test_page import asked, connected, key_of

JOB = {
    "version": 1,
    "name": "ann's secret",
    "model": {"factory": "a:b"},
    "train": {"steps": 3, "batch": 4, "microbatch": 2},
}


@asynccontextmanager
async def calling(broker: Broker, role: PartyRole, subject: str) -> AsyncIterator[grpc.aio.Channel]:
    assert broker.secured is not None
    party = Party(role, subject)
    credential = broker.secured.authority.credential(party, utc(time.time()), timedelta(hours=1))
    async with grpc.aio.secure_channel(
        broker.address, credential.for_channel(), options=channel_options(broker.address)
    ) as channel:
        yield channel


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(BrokerConfig(port=0, options=BrokerOptions(probe_s=0.0))) as found:
        yield found


async def submitted(broker: Broker, channel: grpc.aio.Channel) -> tuple[str, str]:
    """A run, and the name of the weights that it has exported so far."""
    blobs = BlobClient(channel)
    ref = await blobs.store(b"no graph")
    spec = RunSpec(version=1, name="ann's secret", microbatches=2, microbatch_size=2, steps=3)
    spec.job = json.dumps(JOB)
    spec.graph.CopyFrom(ref)
    spec.data.CopyFrom(ref)
    spec.weights.append(WeightFile(blob=ref))
    run = (await RunsStub(channel).Submit(spec)).run
    weights = await blobs.store(b"what ann has trained")
    made = broker.shell.machine.runs[run].record
    made.history.add(RunEvent(weights=Weights(step=3, files=[WeightFile(blob=weights)])))
    made.history.add(RunEvent(checkpoint=Checkpoint(files=[CheckpointFile(blob=weights)])))
    made.replicas[0].reason.CopyFrom(Reason(code="export", text=f"blob {weights.hash} came late"))
    return run, weights.hash


async def everything(channel: grpc.aio.Channel, run: str) -> dict[str, tuple[str, bytes]]:
    """The status and the answer of every call that is about a run."""
    runs, named = RunsStub(channel), RunRequest(run=run)
    found: dict[str, tuple[str, bytes]] = {}
    for name in ("Recall", "Pause", "Resume", "Finish", "Cancel"):
        call = getattr(runs, name)(named)
        code = (await call.code()).name
        found[name] = code, (await call).SerializeToString() if code == "OK" else b""
    call = runs.Choose(CohortChoice(run=run, cohort=Cohort(clients=[0])))
    found["Choose"] = (await call.code()).name, b""
    watch = runs.Watch(WatchRequest(run=run, so_far=True))
    told = b""
    try:
        async for event in watch:
            told += event.SerializeToString()
    except grpc.aio.AioRpcError:
        pass
    found["Watch"] = (await watch.code()).name, told
    found["Describe"] = "OK", (await runs.Describe(DescribeRequest())).SerializeToString()
    return found


async def test_nobody_else_learns_of_a_runs_weights_or_changes_it(broker: Broker) -> None:
    async with (
        calling(broker, PartyRole.SUBMITTER, "ann") as ann,
        calling(broker, PartyRole.SUBMITTER, "bob") as bob,
        calling(broker, PartyRole.OPERATOR, "eve") as operator,
    ):
        run, weights = await submitted(broker, ann)
        found = await everything(bob, run)
        codes = {name: code for name, (code, _) in found.items()}
        assert codes.pop("Describe") == "OK"
        assert set(codes.values()) == {"PERMISSION_DENIED"}, codes
        assert not any(weights.encode() in told for _, told in found.values())
        (state,) = Description.FromString(found["Describe"][1]).runs
        assert (state.run, state.name) == (run, "ann's secret")
        assert weights[:12] in state.reason.text
        for who in (ann, operator):
            assert weights.encode() in (await everything(who, run))["Watch"][1]


async def test_who_is_refused_does_not_keep_news_from_who_waits(broker: Broker) -> None:
    """The two wait for the same run."""
    async with (
        calling(broker, PartyRole.SUBMITTER, "ann") as ann,
        calling(broker, PartyRole.SUBMITTER, "bob") as bob,
    ):
        run, _ = await submitted(broker, ann)
        watch = RunsStub(ann).Watch(WatchRequest(run=run, from_event=3))
        heard = asyncio.create_task(watch.read())
        while not any(e._waiters for e in broker.shell._news.values()):
            await asyncio.to_thread(lambda: None)  # a turn of the loop, and no more
        call = RunsStub(bob).Watch(WatchRequest(run=run))
        assert (await call.code()).name == "PERMISSION_DENIED"
        await RunsStub(ann).Cancel(RunRequest(run=run))
        event: Any = await asyncio.wait_for(heard, 10)
        assert event.HasField("state")


def first_state(broker: Broker, key: str) -> bytes:
    """What the page is told as soon as it is open."""
    with connected(broker) as page:
        page.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n")
        page.sendall(f"Authorization: Bearer {key}\r\n\r\n".encode())
        said = b""
        while b"\n\n" not in said.partition(b"data: ")[2]:
            more = page.recv(65_536)
            assert more, said
            said += more
        return said


async def test_a_key_of_the_page_opens_what_its_owner_may_see(broker: Broker) -> None:
    async with calling(broker, PartyRole.SUBMITTER, "ann") as ann:
        run, _ = await submitted(broker, ann)
    history = broker.shell.machine.runs[RunId(run)].record.history
    history.add(RunEvent(note="ann's alone"))
    history.add(RunEvent(step=StepDone(step=0, outcome=Outcome(loss=12.34375))))
    for role, subject, shown in (
        (PartyRole.SUBMITTER, "bob", False),
        (PartyRole.SUBMITTER, "ann", True),
        (PartyRole.OPERATOR, "eve", True),
        (PartyRole.SUBMITTER, "carl", False),  # also when others have looked
    ):
        key = key_of(broker, Party(role, subject))
        for path, secret in (("/state.json", b"ann's alone"), ("/metrics", b"12.34375")):
            answer, text = await asked(broker, path, key)
            assert (answer.status, run.encode() in text) == (200, True)
            assert (secret in text) == shown, (subject, path)
        live = await asyncio.to_thread(first_state, broker, key)
        assert (b"ann's alone" in live) == shown, subject


def test_the_page_shows_what_happens_in_a_run_to_whose_it_is() -> None:
    digest = Digest(1, MetricTotals(), 0.0)
    digest.add(RunEvent(number=0, step=StepDone(step=0)))
    digest.add(RunEvent(number=1, note="something about it"))
    states = [RunState(run=run, name=run, phase="RUNNING") for run in ("r-1", "r-2")]
    seen = Look(
        Description(runs=states),
        {"r-1": digest, "r-2": digest},
        {"r-1": "ann", "r-2": "bob"},
        0.0,
        lambda peer: (),
    )
    everything = Party(PartyRole.OPERATOR, "ola")
    ann, bob, eve = (Party(PartyRole.SUBMITTER, name) for name in ("ann", "bob", "eve"))
    for viewer, shown in ((ann, ["r-1"]), (bob, ["r-2"]), (everything, ["r-1", "r-2"]), (eve, [])):
        runs = json.loads(seen.text(viewer))["runs"]
        assert [r["run"] for r in runs] == ["r-1", "r-2"]
        assert [r["run"] for r in runs if r["moments"]] == shown
        assert [r["run"] for r in runs if r["losses"]] == shown
        assert [*seen.of(viewer)] == shown
