"""From `shoal join` to the first useful work, with identities and mutual TLS.

    python benchmarks/joining.py [--json FILE]

A broker runs and a job waits for two peers. Then two hosts join for the first time, with a token:
no key, no certificate, no measured speeds. The clock runs from the start of their processes to the
first committed step of the run: joining, measuring the devices and the links, planning, fetching,
building, and the step itself. What an interpreter takes to load torch is measured beside it, as
nobody joins without that; the two peers of this benchmark share the cores while they do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from table import Figure, arguments, report

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


def main() -> int:
    options = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Settings, credentials and measured speeds of this user are not touched.
        os.environ |= {"HOME": name, "XDG_CONFIG_HOME": f"{name}/config", "OMP_NUM_THREADS": "1"}
        moments = _moments(folder)
    torch_s = min(_torch_s() for _ in range(3))
    both_s = _both_torch_s()
    figures = [
        Figure("join_to_first_step_seconds", moments["step"], "s", "lower"),
        Figure("join_to_pool_seconds", moments["pool"], "s", "lower"),
        Figure("join_torch_import_seconds", torch_s, "s", "lower"),
        Figure("join_two_torch_imports_seconds", both_s, "s", "lower"),
        Figure("join_beyond_torch_seconds", moments["step"] - both_s, "s", "lower"),
    ]
    report("joining", figures, options.json)
    for event, at_s in moments.items():
        print(f"    {at_s:6.2f} s  {event}")
    return 0


def _shoal(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
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
    running = [_shoal(folder, "broker", "broker", *where)]
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
        began = time.monotonic()
        for i in (1, 2):
            flags = ("--name", f"host-{i}", "--device", "cpu", "--threads", "1")
            state = ("--state", str(folder / f"host-{i}"))
            running.append(
                _shoal(folder, f"host-{i}", "join", address, "--token", token, *flags, *state)
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
            moments.setdefault(name, time.monotonic() - began)
        watcher.join()
        return dict(sorted(moments.items(), key=lambda m: m[1]))
    finally:
        for process in running[::-1]:
            process.terminate()
        for process in running:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _importing() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import torch"])


def _torch_s() -> float:
    began = time.monotonic()
    assert _importing().wait() == 0
    return time.monotonic() - began


def _both_torch_s() -> float:
    began = time.monotonic()
    for process in [_importing(), _importing()]:
        assert process.wait() == 0
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
