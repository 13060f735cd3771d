"""URLs that a stranger names: of http and https alone, at public addresses alone, wherever they
are followed from (a manifest of weights, a redirect), and looked at where they come in."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor, arange, nn, zeros

from shoal.broker.options import BrokerOptions
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.client.files.exported import bring
from shoal.client.files.web_folder import WebFolder
from shoal.client.files.weight_files import WeightFilesError, find
from shoal.client.runs.checkpoints import CheckpointError, read
from shoal.dag.capture.capture import capture
from shoal.dag.ir.convert import graph_to_bytes
from shoal.net.blobs.client import BlobClient
from shoal.net.identity.names import PartyRole
from shoal.net.web.places import origin_of, reachable
from shoal.net.web.web import Web, WebError
from shoal.peer.blobs.weight_shards import StoredTensor, WeightError, WeightManifest, WeightShard
from shoal.proto.broker_pb2 import RunSpec, WeightFile, Weights
from shoal.proto.broker_pb2_grpc import RunsStub

from ...net.web.web_files import serving
from ..broker.test_own_runs import JOB, calling

HOSTILE = [
    "file:///etc/passwd",
    "/etc/passwd",
    "simplecache::http://127.0.0.1/x",
    "reference::http://evil.example/refs.json",
    "https://user@evil.example/",
    "ftp://127.0.0.1/x",
    "data:,x",
    "memory://x",
    "http://",
    "http:/x",
    "HTTPS:x",
    "",
]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def shards(url: str, data: bytes) -> WeightManifest:
    """One tensor, all of a safetensors file's, that lies at a URL."""
    begin = 8 + int.from_bytes(data[:8], "little")
    part = data[begin:]
    shard = WeightShard(hashlib.sha256(part).hexdigest(), len(part), url, begin)
    return WeightManifest((shard,), {"w": StoredTensor("F32", (4,), ((0, 0, 16),))})


@pytest.mark.parametrize("url", HOSTILE)
def test_a_manifest_with_another_kind_of_url_is_refused(url: str) -> None:
    text = shards("http://a.example/w", save({"w": arange(4.0)})).to_json()
    with pytest.raises(WeightError, match="names the URL"):
        WeightManifest.from_json(text.replace("http://a.example/w", url))


@settings(max_examples=100)
@given(st.text(max_size=40) | st.sampled_from(HOSTILE).flatmap(lambda u: st.text().map(u.__add__)))
def test_whatever_a_manifest_names_is_http_or_refused(url: str) -> None:
    table = json.loads(shards("http://a.example/w", save({"w": arange(4.0)})).to_json())
    try:
        found = WeightManifest.from_json(json.dumps(table | {"urls": [url]}))
    except WeightError:
        return
    assert found.shards[0].url.lower().startswith(("http://", "https://"))
    assert origin_of(url) is not None


# ---------------------------------------------------------------- where it is followed


@contextmanager
def untouched() -> Iterator[str]:
    """A port of this machine at which nobody may knock: HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("to", ["ftp://{}/x", "file:///etc/passwd", "data:,x", "http://{}/x"])
def test_a_server_cannot_lead_a_reader_elsewhere(to: str) -> None:
    with untouched() as inside, serving() as served:
        here = served.address.replace("127.0.0.1", "localhost")  # its owner listed this name alone
        served.redirects["/w"] = to.format(inside)
        web = Web(reachable=reachable((here,)), attempts=1)
        with pytest.raises(WebError, match=r"no URL of http|no public address|not allowed"):
            web.small(f"{here}/w", 100)
        assert served.asked == [("/w", "")]


def test_an_index_names_files_beside_it_and_nothing_else(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for name in ("../w", "..", "zip://w::http://127.0.0.1/x", "a/b.safetensors", "C:\\w", "w?x"):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(WeightFilesError, match="name files beside it"):
            find([str(index)])


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with Broker(BrokerConfig(port=0, options=BrokerOptions(probe_s=0.0))) as found:
        yield found


async def test_an_export_reads_no_host_of_this_machines_network_that_its_user_did_not_name(
    broker: Broker, tmp_path: Path
) -> None:
    value = arange(4.0)
    data = save({"w": value})
    with serving() as served:
        served.files["/w"] = data
        url = f"{served.address}/w"
        async with calling(broker, PartyRole.SUBMITTER, "ann") as channel:
            blobs = BlobClient(channel)
            graph = await blobs.store(graph_to_bytes(capture(Scale(), {"x": zeros(2, 4)}).graph))
            manifest = await blobs.store(shards(url, data).to_json().encode())
            starting = [WeightFile(blob=manifest, sharded=True)]
            weights = Weights(step=1, starting=starting, graph=graph)
            with pytest.raises(WeightFilesError, match="no public address"):
                await bring(blobs, weights, tmp_path / "stranger")
            assert served.asked == []
            origin = origin_of(url)
            assert origin is not None
            found = await bring(blobs, weights, tmp_path / "own", origins={origin})
            assert found["w"].equal(value)


class Bomb:
    """Whoever unpickles it runs this."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize("protocol", [0, 2, 5, "torch"])
async def test_exported_weights_are_never_unpickled(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int | str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = io.BytesIO()
    if protocol == "torch":
        torch.save({"w": Bomb()}, file)
    else:
        pickle.dump({"w": Bomb()}, file, int(protocol))
    async with calling(broker, PartyRole.SUBMITTER, "ann") as channel:
        blobs = BlobClient(channel)
        weights = Weights(step=1, files=[WeightFile(blob=await blobs.store(file.getvalue()))])
        with pytest.raises(WeightFilesError):
            await bring(blobs, weights, tmp_path / "export")
    assert "unpickled" not in os.listdir()


async def test_a_broker_takes_no_weights_at_urls_that_the_job_does_not_name(broker: Broker) -> None:
    data = save({"w": arange(4.0)})
    async with calling(broker, PartyRole.SUBMITTER, "ann") as channel:
        for url, says in (
            *((u, "expected http(s)://HOST") for u in HOSTILE if u),
            ("https://other.example/w", "its job names https://a.example: expected"),
            ("https://a.example/w", ""),
        ):
            found = await submitted(channel, url, data)
            assert says in found, (url, found)
            assert says or not found


async def submitted(channel: grpc.aio.Channel, url: str, data: bytes) -> str:
    """Why a run is not taken whose job names https://a.example, and its weights that URL."""
    blobs = BlobClient(channel)
    ref = await blobs.store(b"no graph")
    text = shards("@", data).to_json().replace('"@"', json.dumps(url))
    spec = RunSpec(version=1, name="x", microbatches=2, microbatch_size=2, steps=3)
    model = {"factory": "a:b", "weights": "https://a.example/w", "where": "url"}
    spec.job = json.dumps(JOB | {"model": model})
    spec.graph.CopyFrom(ref)
    spec.data.CopyFrom(ref)
    spec.weights.append(WeightFile(blob=await blobs.store(text.encode()), sharded=True))
    try:
        await RunsStub(channel).Submit(spec)  # type: ignore[no-untyped-call]
    except grpc.aio.AioRpcError as error:
        return error.details() or "refused"
    return ""


# ---------------------------------------------------------------- a checkpoint on the web


def test_a_checkpoint_on_the_web_is_found_and_its_server_leads_nowhere_else() -> None:
    files = {"graph": {"sha256": "0" * 64, "bytes": 5}}
    listed: dict[str, Any] = {"version": 1, "spec": {}, "files": files}
    with untouched() as inside, serving() as served:
        here = served.address.replace("127.0.0.1", "localhost")
        for step in (4, 12):
            listed["checkpoint"] = {"run": "r-1", "step": str(step)}
            place = f"/runs/r-1/checkpoint-{step:06}/checkpoint.json"
            served.files[place] = json.dumps(listed).encode()
        page = b'<a href="checkpoint-000004/">x</a> <a href="checkpoint-000012/">y</a> '
        served.files["/runs/r-1/"] = page + b'<a href="checkpoint-000020/">cut off</a>'
        for url in (f"{here}/runs/r-1", f"{here}/runs/r-1/checkpoint-000012/"):
            kept = read(url)
            assert (kept.checkpoint.step, set(kept.files)) == (12, {"graph"})
        served.redirects["/runs/r-1/checkpoint-000012/checkpoint.json"] = f"http://{inside}/x"
        with pytest.raises((CheckpointError, WebError), match="no public address"):
            read(f"{here}/runs/r-1/checkpoint-000012")


@pytest.mark.parametrize("size", [0, 1, 10, 11, 5000])
def test_no_more_of_a_file_on_the_web_comes_than_was_listed(size: int) -> None:
    with serving() as served:
        served.files["/f"] = bytes(size)
        folder = WebFolder(served.address)
        data = b"".join(folder.pieces(f"{served.address}/f", 10))
        assert len(data) == min(size, 11)


HASH = "0" * 64
LISTINGS = [
    "[" * 100_000,
    '{"a":' * 100_000,
    "null",
    "[]",
    '{"version": [1]}',
    '{"version": 1, "files": []}',
    '{"version": 1, "files": {"graph": null}, "checkpoint": {}, "spec": {}}',
    f'{{"version": 1, "files": {{"graph": {{"sha256": "{HASH}", "bytes": -1}}}}}}',
    f'{{"version": 1, "files": {{"graph": {{"sha256": "{HASH}", "bytes": 1e400}}}}}}',
    f'{{"version": 1, "files": {{"../x": {{"sha256": "{HASH}", "bytes": 1}}}}}}',
    '{"version": 1, "files": {}, "spec": {}, "checkpoint": {"step": "1e99"}}',
    '{"version": 1, "files": {}, "checkpoint": {}, "spec": ' + '{"job": ' * 3000,
    "9" * 5000,
]


@pytest.mark.parametrize("text", LISTINGS, ids=lambda text: text[:24])
def test_a_checkpoint_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"checkpoint\.json"):
        read(str(tmp_path))
