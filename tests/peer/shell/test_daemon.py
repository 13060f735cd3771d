"""The worker's shell over real gRPC on loopback, in this process, with the real broker's daemon."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from torch import nn

from shoal.broker.events import RunId
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client import submission
from shoal.client.prepared import Prepared
from shoal.dag.ir.convert import graph_to_bytes
from shoal.job import Job
from shoal.net.blobs.client import BlobClient
from shoal.peer.blobs.cache import BlobCache, Fetch
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.host.host import Host
from shoal.peer.host.identity import Identity
from shoal.peer.shell import daemon, owner
from shoal.peer.shell.daemon import Worker
from shoal.proto import broker_pb2, broker_pb2_grpc
from shoal.sim.shaped.forwarder import Forwarder
from shoal.sim.shaped.shaping import Shaping


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(256, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = self.head(torch.relu(self.hidden(self.emb(x))))
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())


@dataclass
class Cluster:
    """A broker and workers in this loop."""

    folder: Path
    broker: Broker
    channel: grpc.aio.Channel
    ready: Prepared
    workers: list[Worker] = field(default_factory=list)
    ends: dict[str, asyncio.Task[int]] = field(default_factory=dict)

    def join(self, *names: str, **settings: Any) -> None:
        for name in names:
            table = {"broker": self.broker.address, "state": self.folder / name, "threads": 1}
            config = PeerConfig(name=name, insecure=True, **table | settings)
            self.ends[name] = asyncio.create_task(work(config, self.workers.append))

    async def submit(self, steps: int) -> str:
        """The tiny job, as the client would submit it; the run's id."""
        blobs, ready = BlobClient(self.channel), self.ready
        job = json.loads(ready.job.to_json())
        job["train"]["steps"] = steps
        spec = broker_pb2.RunSpec(
            version=1,
            name="tiny",
            job=json.dumps(job),
            graph=await blobs.store(graph_to_bytes(ready.graph)),
            weights=[broker_pb2.WeightFile(blob=await blobs.store(ready.weights))],
            recipe=await blobs.store(ready.recipe.to_bytes()) if ready.recipe else None,
            data=await blobs.store(ready.manifest.to_json().encode()),
            microbatches=ready.job.train.microbatches,
            microbatch_size=ready.job.train.microbatch_size,
            steps=steps,
        )
        for path in ready.shards.values():
            await blobs.store(path)
        stub: Any = broker_pb2_grpc.RunsStub(self.channel)
        return (await stub.Submit(spec)).run

    async def watch(self, run: str) -> AsyncIterator[broker_pb2.RunEvent]:
        stub: Any = broker_pb2_grpc.RunsStub(self.channel)
        async for event in stub.Watch(broker_pb2.WatchRequest(run=run)):
            yield event

    async def members(self, count: int) -> None:
        """Waits until so many peers are in the pool."""
        stub: Any = broker_pb2_grpc.RunsStub(self.channel)
        asked = broker_pb2.DescribeRequest()
        while len((await stub.Describe(asked)).peers) < count:
            pass  # the broker has no call that waits for peers; each round is one of its own

    async def alone(self) -> None:
        """Waits until all others have left."""
        stub: Any = broker_pb2_grpc.RunsStub(self.channel)
        while len((await stub.Describe(broker_pb2.DescribeRequest())).peers) > 1:
            pass

    async def until(self, name: str, membership: str) -> broker_pb2.PeerState:
        """Waits until a peer is that."""
        stub: Any = broker_pb2_grpc.RunsStub(self.channel)
        while True:
            for peer in (await stub.Describe(broker_pb2.DescribeRequest())).peers:
                if (peer.profile.name, peer.membership) == (name, membership):
                    return peer


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prepared]:
    """A tiny model on a page of text, captured once."""
    text = tmp_path_factory.mktemp("data") / "page.txt"
    text.write_bytes(bytes((i * i // 7 + i) % 250 for i in range(2000)))
    job = Job(
        plan={"stages": 2},
        model=Tiny(),
        data={"source": str(text), "length": 8, "holdout": 0.1},
        train={"steps": 4, "batch": 4, "microbatch": 2, "eval_every": 2, "eval_batches": 1},
    )
    with submission.prepare(job) as prepared:
        yield prepared


@pytest.fixture
async def cluster(tmp_path: Path, ready: Prepared) -> AsyncIterator[Cluster]:
    """Stops every worker at the end and checks that nothing of them is left."""
    threads = set(threading.enumerate())
    async with (
        Broker(BrokerConfig(port=0, insecure=True)) as broker,
        grpc.aio.insecure_channel(broker.address) as channel,
    ):
        made = Cluster(tmp_path, broker, channel, ready)
        yield made
        for worker in made.workers:
            worker.stop(now=True)
        assert await asyncio.gather(*made.ends.values()) == [0] * len(made.ends)
    lanes = {"compute", "data", "sending", "arriving", "keeping"}
    left = {t.name for t in set(threading.enumerate()) - threads}
    assert not left & lanes
    folders = [f for w in made.workers for f in (w.me.scratch, w.me.blobs)]
    assert not [f for f in folders if os.path.exists(f)]  # noqa: ASYNC240


@pytest.mark.slow
async def test_who_was_killed_fetches_nothing_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    came: Counter[tuple[str, str]] = Counter()

    class Counted(BlobCache):
        """Counts the bytes that come of whole blobs, by peer and blob: a range cannot be checked,
        and is not kept."""

        def __init__(self, folder: Path, fetch: Fetch, **more: Any) -> None:
            def counted(name: str, offset: int, length: int) -> Iterator[bytes]:
                for piece in fetch(name, offset, length):
                    if not length:
                        came[folder.parent.name, name] += len(piece)
                    yield piece

            super().__init__(folder, counted, **more)

    async def trained() -> Counter[tuple[str, str]]:
        came.clear()
        cluster.join("p0", "p1")
        await cluster.members(2)
        async for event in cluster.watch(await cluster.submit(steps=1)):
            if event.HasField("weights"):
                break
        for worker in cluster.workers:
            worker.stop(now=True)
        assert await asyncio.gather(*cluster.ends.values()) == [0, 0]
        return came.copy()

    monkeypatch.setattr(daemon, "BlobCache", Counted)
    tidy = Identity.__exit__
    # A process that is killed tidies up nothing; its lock is the kernel's.
    monkeypatch.setattr(Identity, "__exit__", lambda self, *_: self._lock.close())
    first = await trained()
    assert {peer for peer, _ in first} == {"p0", "p1"}
    monkeypatch.setattr(Identity, "__exit__", tidy)
    assert not await trained()


async def test_a_run_goes_from_submission_to_stored_weights(cluster: Cluster) -> None:
    cluster.join("p0", "p1")
    await cluster.members(2)
    run = await cluster.submit(steps=4)
    steps, phases, weights = [], [], []
    async for event in cluster.watch(run):
        match event.WhichOneof("kind"):
            case "step":
                steps.append(event.step)
            case "state":
                phases.append(broker_pb2.Phase.Name(event.state.phase))
            case "weights":
                weights += event.weights.files
            case "plan":
                assert len(event.plan.stages) == 2, "both peers take part"
    assert phases[-1] == "DONE", phases
    assert [s.step for s in steps] == [0, 1, 2, 3]
    assert [s.HasField("evaluation") for s in steps] == [False, True, False, True]
    assert steps[3].outcome.loss < steps[0].outcome.loss
    assert all(s.sent_bytes > 0 and s.compute_s > 0 for s in steps)
    assert len(weights) == 2
    for file in weights:
        assert len(await BlobClient(cluster.channel).fetch(file.blob.hash)) == file.blob.size_bytes


async def test_a_run_goes_on_when_a_holder_is_stopped_once_another_has_joined(
    cluster: Cluster,
) -> None:
    cluster.join("p0", "p1")
    await cluster.members(2)
    run = await cluster.submit(steps=100)
    stopped, other = cluster.workers
    states, steps = [], []
    async for event in cluster.watch(run):
        if event.WhichOneof("kind") == "step":
            steps.append(event.step.step)
            if event.step.step == 2:
                stopped.stop()
        if event.WhichOneof("kind") == "state":
            states.append(event.state)
            if event.state.reason.code == "goodbye" and len(cluster.ends) == 2:
                cluster.join("p2")
    assert states[-1].phase == broker_pb2.DONE, states[-1].reason.text
    assert steps == list(range(100)), "each is committed once"
    assert any(stopped.me.peer in s.reason.text for s in states)
    assert {s.term for s in states} == {0, 1, 2}
    assert await cluster.ends[stopped.config.name] == 0
    assert other.machine.exit is None, "the other peer goes on"


async def test_a_holder_that_is_stopped_hands_its_part_to_a_warm_peer(cluster: Cluster) -> None:
    cluster.join("p0", "p1", "p2")
    await cluster.members(3)
    run = await cluster.submit(steps=100)
    waits: list[str] = []
    states, steps = [], []
    stopped = None
    async for event in cluster.watch(run):
        if event.WhichOneof("kind") == "step":
            steps.append(event.step.step)
            if event.step.step == 2:
                holders = cluster.broker.shell.machine.replica(RunId(run)).record.peers
                stopped = next(w for w in cluster.workers if w.me.peer == holders[0])
                stopped.waits = lambda what, within_s: waits.append(what)
                stopped.stop()
        if event.WhichOneof("kind") == "state":
            states.append(event.state)
    assert stopped is not None
    assert states[-1].phase == broker_pb2.DONE, states[-1].reason.text
    assert steps == list(range(100))
    (text,) = (s.reason.text for s in states if s.reason.code == "left")
    found = re.fullmatch(
        r"peer .* hands over at step (\d+): its owner stops it; .*step (\d+)", text
    )
    assert found is not None, text
    assert found[1] == found[2], "nothing is done again"
    assert "to take its part at step" in waits[-1]
    assert await cluster.ends[stopped.config.name] == 0


async def test_a_paused_peer_leaves_its_run_and_rests_until_it_is_unpaused(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "LOOKED_S", 0.05)
    host = Host(cluster.folder / "host")
    cluster.join("p0", host_state=host.folder, monthly_bytes=10**12, stay_s=3600.0)
    cluster.join("p1")
    await cluster.members(2)
    run = await cluster.submit(steps=100_000)
    async for event in cluster.watch(run):
        if event.WhichOneof("kind") == "step" and event.step.step == 2:
            break
    host.pause()
    mine = await cluster.until("p0", "resting")
    assert mine.closed.code == "paused"
    assert 0 < mine.profile.stay_s < 3600
    (standing,) = host.standings()
    assert standing.moved_bytes > 1000, "frames, weights and what it says"
    assert standing.closed == "its owner has paused it"
    host.unpause()
    assert not (await cluster.until("p0", "pool")).HasField("closed")


def held() -> Counter[str]:
    """What this process has of peers, links, tasks, threads and descriptors, by kind; without facts
    that wait in timers, and the pools of threads that fill up to their limits as work overlaps."""
    gc.collect()
    kinds = (type(one) for one in gc.get_objects())
    names = (f"{k.__module__}.{k.__qualname__}" for k in kinds)
    found = Counter(n for n in names if n.startswith(("shoal.peer.", "shoal.net.")))
    found.update(f"task {t.get_coro().__qualname__}" for t in asyncio.all_tasks())
    found.update(f"thread {t.name}" for t in threading.enumerate())
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    waits = ("shoal.peer.core.events.", "thread asyncio_", "thread shoal-broker-disk_")
    return Counter({n: count for n, count in found.items() if not n.startswith(waits)})


@pytest.mark.slow
async def test_peers_that_came_and_went_leave_nothing_behind(cluster: Cluster) -> None:
    """In those that stay, and in the broker: no task, no thread, no descriptor, no object."""
    cluster.join("stays")
    await cluster.members(1)
    seen = []
    for i in range(3):
        cluster.join(f"guest-{i}")
        await cluster.members(2)
        run = await cluster.submit(steps=3)
        async for _ in cluster.watch(run):
            pass
        await cluster.until("stays", "pool")
        guest = cluster.workers.pop()
        guest.stop(now=True)
        assert await cluster.ends.pop(f"guest-{i}") == 0
        del guest
        await cluster.alone()
        seen.append(held())
    for _ in range(200):  # a call that has just been answered may not have ended yet
        if not (more := held() - seen[0]):
            break
        await cluster.alone()
    assert not more, more
    # One that dialled the others of the run asks them no more: only the broker is left.
    assert held()["shoal.net.blobs.client.BlobClient"] == 1


@asynccontextmanager
async def nowhere() -> AsyncIterator[str]:
    """An address where nothing listens."""
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    yield f"127.0.0.1:{port}"


async def test_a_broker_that_is_not_there_gives_code_3_and_one_clear_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with nowhere() as address:
        config = PeerConfig(insecure=True, broker=address, state=tmp_path, name="p", give_up_s=0.1)
        assert await work(config) == 3
    last = caplog.records[-1]
    assert last.getMessage() == "ended"
    assert address in str(last.__dict__["fields"]["why"])


async def test_two_processes_on_one_identity_give_code_4(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Identity(tmp_path, "p"):
        assert (
            await work(PeerConfig(insecure=True, broker="127.0.0.1:9", state=tmp_path, name="p"))
            == 4
        )
    assert "--state" in str(caplog.records[-1].__dict__["fields"]["why"])


async def test_a_device_that_is_not_here_gives_code_2(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = PeerConfig(
        insecure=True, broker="127.0.0.1:9", state=tmp_path, name="p", device="cuda:77"
    )
    assert await work(config) == 2
    assert "cuda:77" in str(caplog.records[-1].__dict__["fields"]["why"])


async def test_peers_dial_what_their_map_says_and_may_be_slower_than_they_are(
    cluster: Cluster,
) -> None:
    """Two peers who know addresses of each other and of the broker that lead nowhere by
    themselves: everything between them goes through the shaped path."""
    network = Shaping(
        names=("p0", "p1", "broker"),
        latency_s=((0.001,) * 3,) * 3,
        bandwidth=((1e8,) * 3,) * 3,
        up=(1e8,) * 3,
        down=(1e8,) * 3,
    )
    with Forwarder(network, {"broker": cluster.broker.address}) as paths:
        for name in ("p0", "p1"):
            via = paths.via(name)
            away = via.pop(cluster.broker.address)
            cluster.join(
                name,
                broker="10.255.255.1:7077",
                via=via | {"10.255.255.1:7077": away},
                port=paths.port(name),
                stretch=3.0,
            )
        await cluster.members(2)
        run = await cluster.submit(steps=4)
        steps = [e.step async for e in cluster.watch(run) if e.HasField("step")]
        assert [s.step for s in steps] == [0, 1, 2, 3]
        carried = (await asyncio.to_thread(paths.carried)).bytes
        for worker in cluster.workers:
            worker.stop(now=True)
        await asyncio.gather(*cluster.ends.values())
    assert all(carried[pair] > 0 for pair in (("p0", "p1"), ("p1", "p0")))
    assert all(carried["broker", name] > carried[name, "broker"] > 0 for name in ("p0", "p1"))


async def test_a_port_that_is_taken_gives_code_2_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with taken_port() as port:
        config = PeerConfig(
            insecure=True, broker="127.0.0.1:9", state=tmp_path, name="p", port=port
        )
        assert await work(config) == 2
    assert f"port {port} of 127.0.0.1" in str(caplog.records[-1].__dict__["fields"]["why"])


@asynccontextmanager
async def taken_port() -> AsyncIterator[int]:
    """A port on which something listens."""
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()
