"""Training from weights in files, over a real broker and real peers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shoal.broker.options import BrokerOptions
from shoal.broker.service.blobs import Upload
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client import Client, Refused, connect
from shoal.client.files import sending as sending_module
from shoal.client.files import shards as shards_module
from shoal.client.files.sending import send
from shoal.client.files.shards import Pretrained
from shoal.client.files.weight_files import WeightFilesError, find
from shoal.client.models.fitting import fit
from shoal.job import Job
from shoal.net.blobs.client import BlobClient
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell.daemon import Worker
from shoal.proto import broker_pb2

from ...net.web.web_files import serving
from .test_weight_files import folder, wanted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.cross_entropy(self.head(x), y)


def weights(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {n: t.to(dtype) for n, t in Net().state_dict().items()}


async def turn() -> None:
    """Of the loop, and no more."""
    await asyncio.to_thread(lambda: None)


def submitted_after(change: Callable[[], None]) -> Any:
    """What takes the place of `send`, so that the world changes between upload and submission."""

    async def sent(*args: Any, **settings: Any) -> Any:
        found = await send(*args, **settings)
        change()
        return found

    return sent


@dataclass
class Lab:
    """A broker and peers in this loop."""

    broker: Broker
    folder: Path
    workers: list[Worker] = field(default_factory=list)
    ends: dict[str, asyncio.Task[int]] = field(default_factory=dict)

    async def join(self, name: str, **settings: Any) -> None:
        table = {"broker": self.broker.address, "state": self.folder / name, "threads": 1}
        config = PeerConfig(name=name, insecure=True, **table | settings)
        self.ends[name] = asyncio.create_task(work(config, self.workers.append))
        members = self.broker.shell.machine.members.members
        while not any(m.profile.name == name for m in members.values()):
            await turn()

    def job(self, net: nn.Module, *, holdout: float = 0.0, **model: Any) -> Job:
        source = str(self.folder / "data.safetensors")
        data = {"kind": "arrays", "holdout": holdout, "source": source}
        return Job(
            model={"factory": "live:Net", **model},
            module=net,
            data=data,
            train={"steps": 3, "batch": 8, "microbatch": 2},
            output={"to": str(self.folder / "runs")},
        )

    async def train(self, job: Job, said: list[str] | None = None) -> list[float]:
        def follow() -> list[float]:
            with connect(self.broker.address) as client:
                run = client.submit(job, (said if said is not None else []).append)
                losses = []
                for event in run.watch():
                    if event.HasField("step"):
                        losses.append(event.step.outcome.loss)
                run.checked(run.state())
                return losses

        return await asyncio.to_thread(follow)


@pytest.fixture
async def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Lab]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    save_file({"x": x, "y": (x.sum(1) > 0).long()}, tmp_path / "data.safetensors")
    options = BrokerOptions(probe_s=0.0)
    async with Broker(BrokerConfig(port=0, insecure=True, options=options)) as broker:
        made = Lab(broker, tmp_path)
        yield made
        for worker in made.workers:
            worker.stop(now=True)
        assert await asyncio.gather(*made.ends.values()) == [0] * len(made.ends)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Bytes that came at the broker, by blob."""
    found = Counter[str]()
    whole = Upload.write

    def write(upload: Upload, data: bytes) -> None:
        found[upload.name] += len(data)
        whole(upload, data)

    monkeypatch.setattr(Upload, "write", write)
    return found


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
async def test_losses_are_those_of_a_module_that_has_the_weights(
    lab: Lab, dtype: torch.dtype, written: Counter[str]
) -> None:
    """bf16 files too: what is trained in fp32 is cast where it is read. The same model again is
    not uploaded again."""
    at = folder(lab.folder / "w", 2, weights(dtype))
    await lab.join("one", memory_bytes=4000)
    await lab.join("two", memory_bytes=4000)
    found = await lab.train(lab.job(Net(), weights=str(at)))
    before = written.total()
    assert await lab.train(lab.job(Net(), weights=str(at), freeze=["layers.0.*"])) != found
    # A graph, its core form and what the module brings itself; of the weights only their manifest.
    assert written.total() - before < before
    live = Net()
    live.load_state_dict({n: t.float() for n, t in weights(dtype).items()})
    assert await lab.train(lab.job(live)) == found


async def test_peers_read_the_web_where_their_owners_let_them(lab: Lab) -> None:
    at = folder(lab.folder / "w", 2, weights(torch.float32))
    with serving() as served:
        served.files = {f"/w/{p.name}": p.read_bytes() for p in at.iterdir()}
        listed = [f"{served.address}/w/{p.name}" for p in sorted(at.glob("*.safetensors"))]
        job = lab.job(Net(), weights=listed, where="url")
        await lab.join("closed")  # whose owner lists nothing
        await lab.join("open", web=(served.address,))
        said: list[str] = []
        from_web = await lab.train(job, said)
        assert any("which peers read from the web" in line for line in said)
        kept = {p.name for p in (lab.broker.blobs.folder / "whole").iterdir()}
        found = fit(find(listed), wanted(weights(torch.float32)))
        assert not {hashlib.sha256(found.read(c)).hexdigest() for c in found.cuts} & kept
    assert await lab.train(lab.job(Net(), weights=str(at))) == from_web


async def test_a_run_waits_for_peers_that_may_read_its_weights_and_says_so(lab: Lab) -> None:
    at = folder(lab.folder / "w", 1, weights(torch.float32))
    await lab.join("closed")
    with serving() as served:
        served.files["/w.safetensors"] = next(at.glob("*.safetensors")).read_bytes()
        job = lab.job(Net(), weights=f"{served.address}/w.safetensors", where="url")

        def reason() -> str:
            with connect(lab.broker.address) as client:
                run = client.submit(job)
                text: str = run.state().reason.text
                run.cancel()
                return text

        text = await asyncio.to_thread(reason)
    assert f"1 may not read {served.address}: its owner has to list the host" in text


async def test_a_shard_that_the_web_gives_otherwise_fails_the_run_by_name(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = folder(lab.folder / "w", 1, weights(torch.float32))
    data = next(at.glob("*.safetensors")).read_bytes()
    with serving() as served:
        await lab.join("web", web=(served.address,))
        served.files["/w.safetensors"] = data

        def spoil() -> None:
            served.files["/w.safetensors"] = data[:-4] + b"else"

        def submit() -> str:
            with connect(lab.broker.address) as client:
                job = lab.job(Net(), weights=f"{served.address}/w.safetensors", where="url")
                run = client.submit(job)
                return [e.state.reason.text for e in run.watch() if e.HasField("state")][-1]

        monkeypatch.setattr("shoal.client.uploading.send", submitted_after(spoil))
        text = await asyncio.to_thread(submit)
    assert f"weights from {served.address}/w.safetensors" in text
    assert "came with the content of" in text


async def test_the_peers_evaluate_as_the_plain_module_does(lab: Lab) -> None:
    """With the weights of a run that has ended; its own last evaluation is the oracle."""
    await lab.join("one", memory_bytes=4000)
    await lab.join("two", memory_bytes=4000)

    def evaluate() -> tuple[list[dict[str, float]], list[str]]:
        with connect(lab.broker.address) as client:
            run = client.submit(lab.job(Net(), holdout=0.25))
            steps = [e.step for e in run.watch() if e.HasField("step")]
            own = {"loss": steps[-1].evaluation.loss, "weight": steps[-1].evaluation.weight}
            found = [own, run.evaluate_there(), run.evaluate(Net()), run.evaluate_there(1)]
            return found, [broker_pb2.Phase.Name(r.phase) for r in client.describe().runs]

    (own, *found), phases = await asyncio.to_thread(evaluate)
    for numbers in found:
        assert numbers == pytest.approx(own, rel=1e-6)
    assert set(phases) <= {"CANCELLED", "DONE"}, "nothing of it goes on"


async def test_an_export_goes_on_where_it_was_cut_off(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lab.join("one", memory_bytes=4000)
    await lab.join("two", memory_bytes=4000)
    fetched: list[str] = []
    whole = BlobClient.fetch_to

    async def fetch_to(self: BlobClient, hash: str, path: Path, **settings: Any) -> None:
        if len(fetched) == 1 and not path.parent.joinpath("again").exists():
            raise KeyboardInterrupt
        fetched.append(hash)
        await whole(self, hash, path, **settings)

    def export() -> tuple[dict[str, Tensor], dict[str, Tensor], Path]:
        with connect(lab.broker.address) as client:
            run = client.submit(lab.job(Net(), freeze=["layers.0.*"]))
            run.wait()
            plain = run.weights()
            monkeypatch.setattr(sending_module, "_AT_ONCE", 1)
            monkeypatch.setattr(BlobClient, "fetch_to", fetch_to)
            with pytest.raises(KeyboardInterrupt):
                run.export()
            (run.folder / ".parts" / "again").touch()
            path = run.export()
            return load_file(path), plain, run.folder

    found, plain, at = await asyncio.to_thread(export)
    assert found.keys() == plain.keys() == Net().state_dict().keys()
    assert all(torch.equal(found[name], plain[name]) for name in found)
    assert len(fetched) == len(set(fetched)) > 1
    assert not (at / ".parts").exists()


# ---------------------------------------------------------------- sending


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 64 << 10)
    monkeypatch.setattr(shards_module, "LARGE_BYTES", 8 << 10)


@pytest.fixture
def large(tmp_path: Path, small_shards: None) -> Pretrained:
    tensors = {f"t{i}": torch.randn(300 + 7 * i, 100) for i in range(12)}
    return fit(find([str(folder(tmp_path / "large", 3, tensors))]), wanted(tensors))


async def test_bytes_are_sent_once_whatever_breaks(
    lab: Lab, large: Pretrained, written: Counter[str], tmp_path: Path
) -> None:
    """Cut off again and again, by the death of the sender; what is there is gone on from."""
    async with Client(lab.broker.address).access.aio_channel() as channel:
        for limit in (200_000, 600_000, 1_000_000):
            cut_off = asyncio.create_task(send(BlobClient(channel), large, cache=tmp_path / "c"))
            while written.total() < limit and not cut_off.done():
                await turn()
            assert not cut_off.done()
            cut_off.cancel()
            await asyncio.gather(cut_off, return_exceptions=True)
            while lab.broker.blobs._open:  # the broker notices
                await turn()
        file = await send(BlobClient(channel), large, cache=tmp_path / "c")
        manifest = file.blob.size_bytes
        assert written.total() == large.size_bytes + manifest
        again = await send(BlobClient(channel), large, cache=tmp_path / "elsewhere")
        assert (again, written.total()) == (file, large.size_bytes + manifest)


async def test_what_was_sent_is_not_read_again(
    lab: Lab, large: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Client(lab.broker.address).access.aio_channel() as channel:
        first = await send(BlobClient(channel), large, cache=tmp_path / "c")
        monkeypatch.setattr(Pretrained, "read", None)
        assert await send(BlobClient(channel), large, cache=tmp_path / "c") == first


async def test_a_file_that_changes_under_way_is_named(
    lab: Lab, large: Pretrained, tmp_path: Path
) -> None:
    # ruff: noqa: ASYNC240
    first = Path(large.cuts[0].file)
    data = first.read_bytes()
    async with Client(lab.broker.address).access.aio_channel() as channel:
        first.write_bytes(data[:-1] + b"x")
        with pytest.raises(WeightFilesError, match="was changed while it was read"):
            await send(BlobClient(channel), large, cache=tmp_path / "c")
        first.write_bytes(data[:-100])
        with pytest.raises(WeightFilesError, match="it was cut off since it was looked at"):
            await send(BlobClient(channel), large, cache=tmp_path / "c")


async def test_a_run_whose_shards_are_not_there_is_refused(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = folder(lab.folder / "w", 1, weights(torch.float32))
    store = lab.broker.blobs
    before = set(store._sizes)

    def lose() -> None:
        for name in set(store._sizes) - before:
            if store._sizes[name] == found.cuts[0].length:
                del store._sizes[name]

    found = fit(find([str(at)]), wanted(weights(torch.float32)))
    monkeypatch.setattr("shoal.client.uploading.send", submitted_after(lose))

    def submit() -> None:
        with connect(lab.broker.address) as client:
            client.submit(lab.job(Net(), weights=str(at)))

    with pytest.raises(Refused, match="1 blobs of the run are not here"):
        await asyncio.to_thread(submit)
    assert not lab.broker.shell.machine.runs.values()


async def test_the_broker_keeps_the_shards_of_open_runs(lab: Lab, tmp_path: Path) -> None:
    at = folder(tmp_path / "w", 1, weights(torch.float32))
    found = fit(find([str(at)]), wanted(weights(torch.float32)))

    def submit() -> broker_pb2.RunState:
        with connect(lab.broker.address) as client:
            return client.submit(lab.job(Net(), weights=str(at))).state()

    await asyncio.to_thread(submit)  # nobody has joined: it waits
    store = lab.broker.blobs
    store._used = dict.fromkeys(store._used, 0.0)
    await lab.broker.shell.sweeper.sweep()
    for cut in found.cuts:
        assert store.whole(hashlib.sha256(found.read(cut)).hexdigest())
