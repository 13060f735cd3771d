"""Shards of weights over a long line, one after another and with some fetched ahead.

A host in a network namespace has a broker and a web server (one connection for each range, as
`http.server` does) with the same shards, an uplink of 1 Gbit/s (`tbf`), and in front of both a
process that delays each way by 50 ms (`namespaces.py`). A reader on another host reads all shards
in order, as a peer that builds a stage does, into an empty cache: without reading ahead, and with
it, by turns. Needs Linux and root.

    python benchmarks/large/read_ahead.py [--mb 256] [--json FILE]

SOURCE_SIZE_alone_mb_per_s    one shard after another
SOURCE_SIZE_gain              seconds of that over seconds with reading ahead
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from shoal.benchmarks.links.namespaces import PYTHON, Hosts, usable
from shoal.benchmarks.table import Figure, arguments, report

DELAY_S = 0.05
UPLINK = "qdisc add dev eth root tbf rate 1gbit burst 1mb latency 100ms"
SIZES = (8, 32)  # MiB of a shard
TURNS = 3
PORTS = {"broker": 7101, "web": 7102}
"""Behind the delay; what it leads to says its own."""


# ---------------------------------------------------------------- the processes


def content(size: int, i: int) -> bytes:
    """Of a shard; no two are alike."""
    import numpy as np

    return np.random.default_rng([size, i]).bytes(size << 20)


class _Ranges(BaseHTTPRequestHandler):
    folder: Path

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        path = self.folder / Path(self.path).name
        with path.open("rb") as file:
            file.seek(first)
            data = file.read(last + 1 - first)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{path.stat().st_size}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: Path, mb: int) -> None:
    """Both servers; says their ports and the shards."""
    from shoal.broker.service.server import Broker, BrokerConfig
    from shoal.client.access import Access
    from shoal.net.blobs.client import BlobClient

    found: dict[int, list[tuple[str, int]]] = {size: [] for size in SIZES}
    handler = type("Ranges", (_Ranges,), {"folder": folder})
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()

    async def run() -> None:
        async with Broker(BrokerConfig(port=0, insecure=True, state=folder / "state")) as broker:
            async with Access(broker.address, None).aio_channel() as channel:
                for size in SIZES:
                    with (folder / f"{size}").open("wb") as file:
                        for i in range(mb // size):
                            data = content(size, i)
                            await BlobClient(channel).store(data)
                            file.write(data)
                            found[size].append((hashlib.sha256(data).hexdigest(), i * size << 20))
            port = int(broker.address.rpartition(":")[2])
            said = {"broker": port, "web": web.server_port, "shards": found}
            print(json.dumps(said), flush=True)
            await asyncio.Event().wait()

    asyncio.run(run())


def read(host: str, text: str, folder: Path) -> None:
    """Reads all by turns; says the seconds, [alone, ahead], by source and size."""
    from shoal.client.access import Access
    from shoal.net.blobs.client import BlobClient
    from shoal.net.cap import Cap
    from shoal.peer.blobs.cache import BlobCache
    from shoal.peer.blobs.fetching import Fetching
    from shoal.peer.blobs.read_ahead import ReadAhead, alone
    from shoal.peer.blobs.sharing import Fellows
    from shoal.peer.blobs.weight_shards import WeightShard

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def client() -> BlobClient:
        return BlobClient(Access(f"{host}:{PORTS['broker']}", None).aio_channel())

    blobs = asyncio.run_coroutine_threadsafe(client(), loop).result()
    web = f"http://{host}:{PORTS['web']}"
    fetching = Fetching(loop, lambda: blobs, Fellows(lambda: None, Cap(None)), (web,))
    for size, shards in json.loads(text).items():
        for source in PORTS:
            url = f"{web}/{size}" if source == "web" else ""
            wanted = [WeightShard(h, int(size) << 20, url, at if url else 0) for h, at in shards]
            for turn in range(TURNS):
                seconds = []
                for ahead in (False, True):
                    at = folder / f"{source}-{size}-{turn}-{ahead}"
                    at.mkdir()
                    cache = BlobCache(at, fetching.from_broker)
                    reader = ReadAhead(
                        partial(cache.shard, from_web=fetching.from_web),
                        partial(cache.bring, from_web=fetching.from_web),
                    )
                    began = time.perf_counter()
                    with (reader.reading if ahead else alone)(wanted):
                        for shard in wanted:
                            reader.whole(shard)
                    seconds.append(time.perf_counter() - began)
                print(json.dumps([source, size, *seconds]), flush=True)


# ---------------------------------------------------------------- the figures


def figures(mb: int) -> list[Figure]:
    if why := usable():
        raise SystemExit(f"this benchmark {why}")
    names = ("far", "near")
    with tempfile.TemporaryDirectory(prefix="shoal-ahead-") as name, Hosts(names) as hosts:
        folder = Path(name)
        hosts.shape("far", UPLINK)
        serving = hosts.start("far", PYTHON, __file__, "--serve", name, str(mb))
        assert serving.stdout is not None
        said = json.loads(serving.stdout.readline())
        for source, port in PORTS.items():
            hosts.helper("far", "delay", port, f"127.0.0.1:{said[source]}", DELAY_S)
        given = (hosts.address("far"), json.dumps(said["shards"]), str(folder))
        reading = hosts.start("near", PYTHON, __file__, "--read", *given)
        assert reading.stdout is not None
        rows = []
        for line in reading.stdout:
            print(line.strip(), flush=True)
            rows.append(json.loads(line))
        reading.wait()
    found = []
    for source in PORTS:
        for size in map(str, SIZES):
            pairs = [(alone, ahead) for s, z, alone, ahead in rows if (s, z) == (source, size)]
            rate = statistics.median(mb * 1.048576 / alone for alone, _ in pairs)
            gain = statistics.median(alone / ahead for alone, ahead in pairs)
            found += [
                Figure(f"{source}_{size}_alone_mb_per_s", rate, "MB/s", "higher"),
                Figure(f"{source}_{size}_gain", gain, "ratio", "higher"),
            ]
    return found


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]), int(sys.argv[3]))
    if sys.argv[1:2] == ["--read"]:
        return read(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
    parser = arguments(__doc__)
    parser.add_argument("--mb", type=int, default=256, help="MiB of all shards of one size")
    given = parser.parse_args()
    report("read_ahead", figures(given.mb), given.json)


if __name__ == "__main__":
    main()
