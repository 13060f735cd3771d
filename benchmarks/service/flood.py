"""A training run while strangers knock: ten thousand joins and two thousand requests to the page.

    python benchmarks/service/flood.py [--attempts N] [--json FILE]

A broker and two peers train over mutual TLS, as in joining.py. Three kinds of times take turns:

quiet    nothing beside it
decoy    a process with the lowest priority opens connections that reach no broker: what the
         strangers' own computing costs here, who would have computers of their own
flood    the same process knocks at the broker: TLS hellos for the door, with a real handshake where
         it is let in, and requests to the page without a key

The step's seconds are the broker's own times between committed steps, their median in each kind;
CPU and memory are those of the broker's process.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from shoal.benchmarks.service.joining import JOB, cpu_s, start_shoal
from shoal.benchmarks.table import Figure, arguments, report

ROUNDS, QUIET_S, AT_ONCE = 3, 15.0, 16
JOINS_OF_PAGES = 5
"""So many joins for each request to the page."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--attempts", type=int, default=12_000)
    parser.add_argument("--knock", nargs=2, metavar=("PORT", "AUTHORITY"), help="be the strangers")
    options = parser.parse_args()
    if options.knock:
        port, authority = options.knock
        print(*asyncio.run(_knock(int(port), authority, options.attempts)))
        return 0
    with tempfile.TemporaryDirectory() as name:
        os.environ |= {"HOME": name, "XDG_CONFIG_HOME": f"{name}/config", "OMP_NUM_THREADS": "1"}
        report("flood", _figures(Path(name), options.attempts), options.json)
    return 0


def _past(end: float) -> bool:
    return time.monotonic() > end


def _ended(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None


def _figures(folder: Path, attempts: int) -> list[Figure]:
    import shoal
    from shoal.job import Job

    where = ("--host", "127.0.0.1", "--port", "0", "--state", str(folder / "state"))
    running = [start_shoal(folder, "broker", "broker", *where)]
    try:
        assert running[0].stdout is not None
        found = re.fullmatch(
            r"shoal join (\S+) --token (\S+)\n", running[0].stdout.readline().decode()
        )
        assert found
        address, token = found.groups()
        for i in (1, 2):
            flags = ("--name", f"host-{i}", "--device", "cpu", "--threads", "1")
            state = ("--state", str(folder / f"host-{i}"))
            words = ("join", address, "--token", token, *flags, *state)
            running.append(start_shoal(folder, f"host-{i}", *words))
        (folder / "job.toml").write_text(JOB.replace("steps = 3", "steps = 1000000"))
        client = shoal.connect(address)
        run = client.submit(Job.from_toml(folder / "job.toml"))
        spans: dict[str, list[tuple[float, float]]] = {"quiet": [], "decoy": [], "flood": []}
        steps: list[float] = []
        watch = run.watch()

        def until(over: Callable[[], bool], least: int = 10) -> None:
            """Watches steps until something is over, and so many at least."""
            for seen, event in enumerate(e for e in watch if e.WhichOneof("kind") == "step"):
                steps.append(event.at_s)
                if seen >= least and over():
                    return

        until(lambda: True, 20)
        broker = running[:1]
        used_s, let_in, memory = 0.0, 0, [_memory_bytes(broker[0].pid)]
        authority = folder / "authority.pem"
        authority.write_bytes(_authority(address))
        decoy = _Decoy(folder)
        try:
            for _ in range(ROUNDS):
                for kind in ("quiet", "decoy", "flood"):
                    began, before_s = steps[-1], cpu_s(broker)
                    if kind == "quiet":
                        until(partial(_past, time.monotonic() + QUIET_S))
                    else:
                        port = decoy.port if kind == "decoy" else address.rpartition(":")[2]
                        strangers = _strangers(port, authority, attempts // ROUNDS)
                        until(partial(_ended, strangers))
                        assert strangers.stdout is not None
                        passed = int(strangers.stdout.read().split()[0])
                        if kind == "flood":
                            used_s, let_in = used_s + cpu_s(broker) - before_s, let_in + passed
                            memory.append(_memory_bytes(broker[0].pid))
                    spans[kind].append((began, steps[-1]))
        finally:
            decoy.end()
        run.cancel()
        times = {kind: _step_s(steps, found) for kind, found in spans.items()}
        each = ROUNDS * (attempts // ROUNDS)
        return [
            Figure("flood_step_over_quiet", times["flood"] / times["quiet"], "ratio", "lower"),
            Figure("flood_step_over_decoy", times["flood"] / times["decoy"], "ratio", "lower"),
            Figure("flood_quiet_step_seconds", times["quiet"], "s", "lower"),
            Figure("flood_attempts", each, "", "higher"),
            Figure("flood_let_in", let_in, "", "lower"),
            Figure("flood_broker_cpu_per_attempt", used_s / each, "s", "lower"),
            Figure("flood_broker_grown_bytes", memory[-1] - memory[0], "B", "lower"),
        ]
    finally:
        for process in running[::-1]:
            process.terminate()
        for process in running:
            process.wait()


def _step_s(steps: list[float], spans: list[tuple[float, float]]) -> float:
    """The median time between steps in any of these spans."""
    pairs = pairwise(steps)
    return median(b - a for a, b in pairs if any(begin <= a and b <= end for begin, end in spans))


def _memory_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def _authority(address: str) -> bytes:
    from shoal.net.identity.enroll import shown_by

    return shown_by(address).authority


# ---------------------------------------------------------------- strangers


def _strangers(port: str | int, authority: Path, attempts: int) -> subprocess.Popen[bytes]:
    words = ("--knock", str(port), str(authority), "--attempts", str(attempts))
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE)


async def _knock(port: int, authority: str, attempts: int) -> tuple[int, int]:
    """How many joins got as far as a handshake, and how many requests were answered."""
    from shoal.net.identity.names import DOOR_NAME

    os.nice(19)
    door, page = ssl.create_default_context(cafile=authority), ssl.create_default_context()
    door.set_alpn_protocols(["h2"])
    page.set_alpn_protocols(["http/1.1"])
    page.check_hostname, page.verify_mode = False, ssl.CERT_NONE
    passed = answered = 0
    numbers = iter(range(attempts))

    async def one() -> None:
        nonlocal passed, answered
        for number in numbers:
            looks = number % (JOINS_OF_PAGES + 1) == 0
            context, name = (page, "localhost") if looks else (door, DOOR_NAME)
            try:
                async with asyncio.timeout(20):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=context, server_hostname=name
                    )
                    if looks:
                        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                        answered += bool(await reader.read(64))
                    else:
                        passed += 1
                    writer.close()
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                continue

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(one())
    return passed, answered


class _Decoy:
    """A port that closes every connection as it comes, in a process of its own."""

    def __init__(self, folder: Path) -> None:
        code = (
            "import socket\n"
            "with socket.create_server(('127.0.0.1', 0), backlog=512) as s:\n"
            "    print(s.getsockname()[1], flush=True)\n"
            "    while True: s.accept()[0].close()\n"
        )
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


if __name__ == "__main__":
    sys.exit(main())
