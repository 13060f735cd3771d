"""Weights of a large model from its files to a broker, and what that costs both.

A folder of safetensors files with an index, of linear layers of 4096 x 4096 in bf16, goes to a
broker in another process. First 6 GB as a job is submitted, by a process whose data may not be more
than 2 GiB (RLIMIT_DATA), which is killed in the middle and started again; then 8 GB, file by file,
each beside the same bytes written to the same disk by a plain loop (1 MiB at a time, then fsync).

    python benchmarks/large/shards.py [--folder DISK] [--gb 8] [--json FILE]

shards_submit_gib        peak resident set of the submitter of 6 GB, in both of its lives
shards_sent_over_size    bytes that came at the broker, over those of the files
shards_mb_per_s          6 GB, over the seconds of both lives, starts and captures included
broker_gib               peak resident set of the broker under 8 GB of blobs
broker_growth_mib        its anonymous memory after all of them, less that after the first one
broker_over_disk         bytes per second to disk through a broker, over the plain loop's: the
                         median of the pairs
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shoal.benchmarks.table import Figure, arguments, report

GIB = 1 << 30
SIDE = 4096
TENSORS = 30  # of a file: 1.007 GB
LIMIT_BYTES = 2 * GIB


def make(folder: Path, files: int) -> None:
    """Random bytes: no two shards are the same blob."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    listed: dict[str, str] = {}
    for i in range(files):
        size, header, at = SIDE * SIDE * 2, {}, 0
        for j in range(TENSORS):
            header[f"layers.{i * TENSORS + j}.weight"] = {
                "dtype": "BF16",
                "shape": [SIDE, SIDE],
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header).encode()
        path = folder / f"model-{i + 1:05}-of-{files:05}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _ in range(TENSORS):
                file.write(rng.bytes(size))
        listed |= dict.fromkeys(header, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))


# ---------------------------------------------------------------- the processes


def serve(folder: Path) -> None:
    """A broker; says its address, and at the end of its input how many bytes of blobs came."""
    from shoal.broker.service.blobs import Upload
    from shoal.broker.service.server import Broker, BrokerConfig

    came, whole = [0], Upload.write

    def write(upload: Upload, data: bytes | memoryview) -> None:
        came[0] += len(data)
        whole(upload, data)

    setattr(Upload, "write", write)  # noqa: B010  # a method in place of another one

    async def run() -> None:
        config = BrokerConfig(port=0, insecure=True, state=folder)
        async with Broker(config) as broker:
            print(broker.address, flush=True)
            await asyncio.to_thread(sys.stdin.read)
        print(came[0], flush=True)

    asyncio.run(run())


def submit(address: str, folder: Path, files: int, names: list[str]) -> None:
    """A job that begins with the weights at some places; nobody has joined to train it."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    import shoal

    np.savez(folder / "data.npz", x=np.zeros((64, SIDE), np.float32))
    job = shoal.Job(
        model={
            "factory": "shards_net.py:Net",
            "args": {"layers": files * TENSORS},
            "weights": names,
        },
        data={"kind": "arrays", "source": str(folder / "data.npz"), "targets": "", "holdout": 0.0},
        train={"steps": 1, "batch": 8, "microbatch": 2},
        output={"to": str(folder / "runs")},
        folder=Path(__file__).parent,
    )
    with shoal.connect(address) as client:
        client.submit(job, lambda line: print(line, flush=True))


def send(address: str, cache: Path, names: list[str]) -> None:
    """The weights at some places, as a submission sends them."""
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    from shoal.client.access import Access
    from shoal.client.files.sending import send as send_all
    from shoal.client.files.weight_files import find
    from shoal.client.models.fitting import Wanted, fit
    from shoal.client.uploading import transfer

    stored = find(names)
    wanted = [Wanted((n,), e.shape, e.dtype, True) for n, e in stored.entries.items()]
    found = fit(stored, wanted)
    began = time.perf_counter()
    transfer(Access(address, None), lambda blobs: send_all(blobs, found, print, cache=cache))
    print(time.perf_counter() - began, flush=True)


@contextmanager
def broker(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker's process and address; its folder is gone afterwards."""
    command = [sys.executable, __file__, "--serve", str(folder)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child, child.stdout.readline().strip()
    finally:
        if child.returncode is None:
            child.kill()
            child.wait()
        shutil.rmtree(folder)


def sender(address: str, cache: Path, names: list[Path]) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--send", address, str(cache), *map(str, names)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def submitter(address: str, work: Path, names: list[Path]) -> subprocess.Popen[str]:
    given = [address, str(work), str(len(names)), *map(str, names)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(work / "cache")}
    command = [sys.executable, __file__, "--submit", *given]
    return subprocess.Popen(command, env=environment, text=True)


def ended(child: subprocess.Popen[str], *, killed: bool = False) -> int:
    """Bytes of the peak resident set of a child that ends. Raises RuntimeError for one that did not
    end as it should."""
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != (-signal.SIGKILL if killed else 0):
        raise RuntimeError(f"{child.args!r} ended with {child.returncode}")
    return usage.ru_maxrss * 1024


def status_bytes(pid: int, key: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def size_of(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


# ---------------------------------------------------------------- the figures


def killed_and_resumed(work: Path, files: list[Path]) -> list[Figure]:
    size = sum(path.stat().st_size for path in files)
    with broker(work / "broker") as (serving, address):
        began = time.perf_counter()
        first = submitter(address, work, files)
        while size_of(work / "broker") < size / 2:
            if first.poll() is not None:
                raise RuntimeError(f"the submitter ended with {first.returncode}")
            time.sleep(0.05)
        first.kill()
        peak = ended(first, killed=True)
        half = size_of(work / "broker")
        second = submitter(address, work, files)
        peak = max(peak, ended(second))
        seconds = time.perf_counter() - began
        assert serving.stdin is not None
        assert serving.stdout is not None
        serving.stdin.close()
        came = int(serving.stdout.readline())
        serving.wait()
    print(f"killed at {half / size:.0%} of {size / 1e9:.2f} GB")
    return [
        Figure("shards_submit_gib", peak / GIB, "GiB", "lower"),
        Figure("shards_sent_over_size", came / size, "ratio", "lower"),
        Figure("shards_mb_per_s", size / seconds / 1e6, "MB/s", "higher"),
    ]


def written(path: Path, source: Path) -> float:
    """Seconds of a plain loop that copies a file's bytes to the disk; they are in memory before."""
    data = source.read_bytes()
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 1 << 20):
            file.write(memoryview(data)[at : at + (1 << 20)])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


def beside_the_disk(work: Path, files: list[Path]) -> list[Figure]:
    pairs, anonymous = [], []
    with broker(work / "broker") as (serving, address):
        for path in files:
            plain_s = written(work / "plain", path)
            child = sender(address, work / "cache-2", [path])
            assert child.stdout is not None
            sent_s = float(child.stdout.read().splitlines()[-1])
            ended(child)
            pairs.append(plain_s / sent_s)
            anonymous.append(status_bytes(serving.pid, "RssAnon"))
            rate = path.stat().st_size / 1e6
            print(
                f"{rate / plain_s:.0f} MB/s to disk, {rate / sent_s:.0f} through a broker, whose "
                f"anonymous memory is {anonymous[-1] / 2**20:.0f} MiB"
            )
        peak = status_bytes(serving.pid, "VmHWM")
    return [
        Figure("broker_gib", peak / GIB, "GiB", "lower"),
        Figure("broker_growth_mib", (anonymous[-1] - anonymous[0]) / 2**20, "MiB", "lower"),
        Figure("broker_over_disk", statistics.median(pairs), "ratio", "higher"),
    ]


def figures(folder: Path | None = None, gb: int = 8) -> list[Figure]:
    """See the module: `gb` GB of files, in a folder of their own inside of `folder`."""
    with tempfile.TemporaryDirectory(prefix="shoal-shards-", dir=folder) as name:
        work = Path(name)
        make(work / "model", gb)
        files = sorted((work / "model").glob("*.safetensors"))
        return killed_and_resumed(work, files[: gb * 3 // 4]) + beside_the_disk(work, files)


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve(Path(sys.argv[2]))
    if sys.argv[1:2] == ["--submit"]:
        return submit(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    if sys.argv[1:2] == ["--send"]:
        return send(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="where the files go; default: a temporary one")
    parser.add_argument("--gb", type=int, default=8, help="how many GB in all")
    given = parser.parse_args()
    report("large_shards", figures(given.folder, given.gb), given.json)


if __name__ == "__main__":
    main()
