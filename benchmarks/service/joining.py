"""From `shoal join` to the first useful work, with identities and mutual TLS.

    python benchmarks/service/joining.py [--json FILE]

A broker runs and a job waits for two peers. Then two hosts join for the first time, with a token:
no key, no certificate, no measured speeds. The clock runs from the start of their processes to the
first committed step of the run: joining, measuring the devices and the links, planning, fetching,
building, and the step itself. Two things are measured beside it, each in two processes at once, as
the peers of this benchmark share the cores: what an interpreter takes to load torch, and what it
takes to the first step of a plain loop of torch's own, which loads as much of torch as a peer does
(its optimizer alone loads its compiler). Nobody trains without either.

CPU seconds are those of all of Shoal's processes from the start of the peers to the first step, the
broker's before that left out: they say the same on a machine that does something else besides.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from shoal.benchmarks.table import Figure, arguments, report

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 4, width = 128, heads = 4, length = 64, dropout = 0.0 }
[data]
length = 64
[train]
steps = 3
batch = 16
microbatch = 4
eval_every = 0
[plan]
stages = 2
"""

PLAIN = """
import torch
module = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(module.parameters())
module(torch.rand(4, 8)).sum().backward()
optimizer.step()
"""


def main() -> int:
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Settings, credentials and measured speeds of this user are not touched.
        os.environ |= {"HOME": name, "XDG_CONFIG_HOME": f"{name}/config", "OMP_NUM_THREADS": "1"}
        moments = _moments(folder)
    (torch_s, torch_cpu_s), (plain_s, plain_cpu_s) = _both("import torch"), _both(PLAIN)
    step_s, cpu_s = moments["step"], moments.pop("cpu")
    figures = [
        Figure("join_to_first_step_seconds", moments["step"], "s", "lower"),
        Figure("join_to_pool_seconds", moments["pool"], "s", "lower"),
        Figure("join_two_torch_imports_seconds", torch_s, "s", "lower"),
        Figure("join_two_plain_loops_seconds", plain_s, "s", "lower"),
        Figure("join_beyond_torch_seconds", step_s - torch_s, "s", "lower"),
        Figure("join_beyond_plain_loop_seconds", step_s - plain_s, "s", "lower"),
        Figure("join_cpu_seconds", cpu_s, "s", "lower"),
        Figure("join_cpu_of_two_torch_imports_seconds", torch_cpu_s, "s", "lower"),
        Figure("join_cpu_of_two_plain_loops_seconds", plain_cpu_s, "s", "lower"),
    ]
    report("joining", figures, options.json)
    for event, at_s in moments.items():
        print(f"    {at_s:6.2f} s  {event}")
    return 0


def start_shoal(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cli", *words],
            stdout=subprocess.PIPE,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )


def _moments(folder: Path) -> dict[str, float]:
    """Seconds from the start of the peers to: both in the pool, and each state of the run."""
    import shoal
    from shoal.job import Job

    where = ("--host", "127.0.0.1", "--port", "0", "--state", str(folder / "state"))
    running = [start_shoal(folder, "broker", "broker", *where)]
    try:
        assert running[0].stdout is not None
        line = running[0].stdout.readline().decode()
        found = re.fullmatch(r"shoal join (\S+) --token (\S+)\n", line)
        assert found, line
        address, token = found.groups()
        (folder / "job.toml").write_text(JOB)
        client = shoal.connect(address)
        run = client.submit(Job.from_toml(folder / "job.toml"))
        moments: dict[str, float] = {}
        began, before_s = time.monotonic(), cpu_s(running)
        for i in (1, 2):
            flags = ("--name", f"host-{i}", "--device", "cpu", "--threads", "1")
            state = ("--state", str(folder / f"host-{i}"))
            running.append(
                start_shoal(folder, f"host-{i}", "join", address, "--token", token, *flags, *state)
            )

        def pool() -> None:
            while len(client.describe().peers) < 2:
                time.sleep(0.05)
            moments["pool"] = time.monotonic() - began

        watcher = threading.Thread(target=pool)
        watcher.start()
        for event in run.watch():
            kind = event.WhichOneof("kind")
            name = event.state.reason.code or "running" if kind == "state" else str(kind)
            if name not in moments:
                moments[name] = time.monotonic() - began
            if name == "step" and "cpu" not in moments:
                moments["cpu"] = cpu_s(running) - before_s
        watcher.join()
        return dict(sorted(moments.items(), key=lambda m: m[1]))
    finally:
        for process in running[::-1]:
            process.terminate()
        for process in running:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def cpu_s(running: list[subprocess.Popen[bytes]]) -> float:
    """CPU seconds of processes and their descendants that live now."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has ended
            continue
        fields = text.rpartition(")")[2].split()
        number = int(path.parent.name)
        ticks[number] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(number)

    def total(number: int) -> int:
        return ticks.get(number, 0) + sum(total(n) for n in children.get(number, []))

    return sum(total(process.pid) for process in running) / os.sysconf("SC_CLK_TCK")


def _both(code: str) -> tuple[float, float]:
    """Seconds, and CPU seconds, of two interpreters at once that run the code to its end."""
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    for process in [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]:
        assert process.wait() == 0
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return time.monotonic() - began, cpu_s


if __name__ == "__main__":
    sys.exit(main())
