"""Hosts as network namespaces of this machine, shaped by the kernel as real networks shape them.

    with Hosts(4, "tbf rate 50mbit burst 128kb latency 200ms", folder) as hosts:
        rows = hosts.train([JOB, …])

    hub (broker, client)  10.79.1.1 ──── 10.79.1.2  host 1 (one peer)
                          10.79.2.1 ──── 10.79.2.2  host 2 …

The hub forwards between the hosts. What leaves a host passes the queueing discipline on its device,
as it passes a home's router. Needs root, `ip` and `tc`; what was made is removed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

__all__ = ["Hosts", "usable"]

_NET = "10.79"
_PORT = 7100
_DELAY = """
import asyncio, sys
at, there, port, delay = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
async def pump(reader, writer):
    queue, loop = asyncio.Queue(), asyncio.get_running_loop()
    room = asyncio.Semaphore(2048)
    async def out():
        while (item := await queue.get()) is not None:
            if (left := item[0] - loop.time()) > 0:
                await asyncio.sleep(left)
            writer.write(item[1])
            await writer.drain()
            room.release()
        writer.close()
    task = asyncio.create_task(out())
    while data := await reader.read(65536):
        await room.acquire()
        queue.put_nowait((loop.time() + delay, data))
    queue.put_nowait(None)
    await task
async def serve(reader, writer):
    try:
        back, on = await asyncio.open_connection(there, port)
        await asyncio.gather(pump(reader, on), pump(back, writer))
    except OSError:
        writer.close()
async def main():
    await (await asyncio.start_server(serve, at, port)).serve_forever()
asyncio.run(main())
"""
_DRIVE = """
import json, statistics, sys, time
import shoal
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
client = shoal.connect("127.0.0.1:7077")
end = time.monotonic() + 90
while len(client.describe().peers) < int(sys.argv[1]):
    assert time.monotonic() < end, "not all peers joined within 90 s"
    time.sleep(0.2)
for path in sys.argv[2:]:
    row = {"job": path, "plan": [], "notes": [], "seconds": [], "predicted": [], "compute": []}
    links = client.describe().links
    row["links"] = [[l.source, l.destination, l.latency_s, l.bytes_per_s] for l in links]
    run = client.submit(Job.from_toml(path))
    for event in run.watch():
        if event.HasField("plan"):
            row["predicted"].append(event.plan.predicted.step_s)
            row["plan"].append([
                [[s.start, s.stop, list(s.holders)] for s in event.plan.stages],
                event.plan.microbatch_size, len(event.plan.routes)])
        if event.HasField("step"):
            row["seconds"].append(event.step.seconds)
            row["compute"].append(event.step.compute_s)
        if event.HasField("note"):
            row["notes"].append(event.note)
        if event.HasField("state"):
            row["phase"], row["reason"] = event.state.phase, event.state.reason.text
    row["done"] = row.pop("phase") == DONE
    print(json.dumps(row), flush=True)
"""


def usable() -> str:
    """Why namespaces cannot be made here; empty: they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    name = f"shoal-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "may not make network namespaces"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


class Hosts:
    """See the module. `qdisc`: what follows `tc qdisc add dev DEVICE root`, of the hosts by turns;
    more lines of tc behind a semicolon, with {dev} for the device; empty: not shaped. `folder`: for
    logs and states. `delay_s`: by how much a process at the hub delays, each way, what peers send
    each other."""

    def __init__(
        self, count: int, qdisc: Sequence[str], folder: Path, *, delay_s: float = 0.0
    ) -> None:
        self.count, self.qdisc, self.folder, self.delay_s = count, tuple(qdisc), folder, delay_s
        self._prefix = f"shoal-pace-{os.getpid()}"
        self._running: list[tuple[subprocess.Popen[str], IO[str]]] = []

    def name(self, host: int) -> str:
        """0: the hub."""
        return f"{self._prefix}-{host}"

    def __enter__(self) -> Hosts:
        try:
            self._make()
            self._start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)

    def _in(self, host: int, *arguments: str) -> None:
        self._ip("-n", self.name(host), *arguments)

    def _make(self) -> None:
        for host in range(self.count + 1):
            self._ip("netns", "add", self.name(host))
            self._in(host, "link", "set", "lo", "up")
        forward = ["sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
        subprocess.run(["ip", "netns", "exec", self.name(0), *forward], check=True)
        for host in range(1, self.count + 1):
            inside, outside = f"in{host}", f"up{host}"
            self._in(0, "link", "add", outside, "type", "veth", "peer", "name", inside)
            self._in(0, "link", "set", inside, "netns", self.name(host))
            for where, device, end in ((0, outside, 1), (host, inside, 2)):
                self._in(where, "addr", "add", f"{_NET}.{host}.{end}/24", "dev", device)
                self._in(where, "link", "set", device, "up")
            self._in(host, "route", "add", "default", "via", f"{_NET}.{host}.1")
        self.shape(self.qdisc)

    def shape(self, qdisc: Sequence[str]) -> None:
        """From now on what leaves the hosts passes these, by turns; an empty one is none."""
        for host in range(1, self.count + 1):
            device, text = f"in{host}", qdisc[(host - 1) % len(qdisc)]
            tc = ["tc", "-n", self.name(host)]
            subprocess.run([*tc, "qdisc", "del", "dev", device, "root"], capture_output=True)
            first, *more = text.split(";")
            lines = [f"qdisc add dev {{dev}} root {first}", *more] if text else []
            for line in lines:
                words = line.format(dev=device).split()
                subprocess.run([*tc, *words], check=True, capture_output=True, text=True)

    def _start(self) -> None:
        public = ("--port", "7077", "--public", f"{_NET}.1.1:7077")
        broker = self.start(0, "broker", "--state", "broker", *public)
        assert broker.stdout is not None
        token = broker.stdout.readline().split()[-1]
        for host in range(1, self.count + 1):
            flags: tuple[str, ...] = (
                "--name",
                f"h{host}",
                "--state",
                f"h{host}",
                "--device",
                "cpu",
                "--threads",
                "1",
            )
            if self.delay_s:
                at, there = f"{_NET}.{host}.1", f"{_NET}.{host}.2"
                self._run(0, "-c", _DELAY, at, there, str(_PORT), str(self.delay_s))
                flags += ("--port", str(_PORT), "--public", f"{at}:{_PORT}")
            self.start(host, "join", f"{_NET}.{host}.1:7077", "--token", token, *flags)

    def command(self, host: int, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(host), sys.executable, *arguments]

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "HOME": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        """A verb of shoal's there, until the end."""
        return self._run(host, "-m", "shoal.cli", *arguments)

    def _run(self, host: int, *arguments: str) -> subprocess.Popen[str]:
        log = open(self.folder / f"{host}-{len(self._running)}.log", "w")  # noqa: SIM115  # closed by `end`
        process = subprocess.Popen(
            self.command(host, *arguments),
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=self.folder,
            env=self.environment(),
            start_new_session=True,
        )
        self._running.append((process, log))
        return process

    def drive(self, jobs: Sequence[str]) -> subprocess.Popen[str]:
        """Trains jobs one after the other; a line of JSON for each at its end."""
        paths = []
        for i, text in enumerate(jobs):
            (self.folder / f"job{i}.toml").write_text(text)
            paths.append(f"job{i}.toml")
        return subprocess.Popen(
            self.command(0, "-c", _DRIVE, str(self.count), *paths),
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment(),
        )

    def train(self, jobs: Sequence[str], timeout_s: float = 600.0) -> list[dict[str, Any]]:
        """The rows of `drive`. Raises RuntimeError for jobs that did not end well."""
        process = self.drive(jobs)
        try:
            text, _ = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
            process.wait()
        rows = [json.loads(line) for line in text.splitlines()]
        bad = [r["reason"] for r in rows if not r["done"]]
        if bad or len(rows) < len(jobs) or process.returncode:
            logs = "".join(p.read_text()[-2000:] for p in self.folder.glob("*.log"))
            raise RuntimeError(f"{len(rows)} of {len(jobs)} jobs ended; {bad}\n{logs}")
        return rows

    def end(self) -> None:
        for process, log in reversed(self._running):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
            log.close()
        self._running = []
        for host in range(self.count + 1):
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True)
