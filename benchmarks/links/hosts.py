"""A broker and peers on hosts with shaped uplinks (`namespaces.py`), and jobs that run there.

    with Pool(4, [[TBF_50MBIT]], folder) as pool:
        rows = pool.train([JOB, …])

The broker and the client are in the core, each peer on a host of its own, as it would be at home.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from shoal.benchmarks.links.namespaces import CORE, PYTHON, Hosts

__all__ = ["Pool"]

_PORT = 7100
_DRIVE = """
import json, statistics, sys, time
import shoal
from shoal.dag.schedule.convert_plan import microbatches_of
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE
client = shoal.connect("127.0.0.1:7077")
end = time.monotonic() + 90
while len(client.describe().peers) < int(sys.argv[1]):
    assert time.monotonic() < end, "not all peers joined within 90 s"
    time.sleep(0.2)
for path in sys.argv[2:]:
    row = {"job": path, "plan": [], "notes": [], "seconds": [], "predicted": [], "compute": []}
    row |= {"begun": [], "rounds": [], "evaluated": []}
    links = client.describe().links
    row["links"] = [[l.source, l.destination, l.latency_s, l.bytes_per_s] for l in links]
    run = client.submit(Job.from_toml(path))
    for event in run.watch():
        if event.HasField("plan"):
            row["predicted"].append(event.report.predicted.step_s)
            row["plan"].append([
                [[s.start, s.stop, list(s.holders)] for s in event.plan.stages],
                event.plan.microbatch_size, microbatches_of(event.plan)])
        if event.HasField("step"):
            row["seconds"].append(event.step.seconds)
            row["compute"].append(event.step.compute_s)
        if event.HasField("round_begun"):
            row["begun"].append(event.at_s)
        if event.HasField("round_done"):
            done = event.round_done
            row["rounds"].append([event.at_s, done.waited_s, done.sent_bytes, len(done.members)])
        if event.HasField("evaluated"):
            found = event.evaluated
            row["evaluated"].append([event.at_s, found.step, found.evaluation.loss])
        if event.HasField("note"):
            row["notes"].append(event.note)
        if event.HasField("state"):
            row["phase"], row["reason"] = event.state.phase, event.state.reason.text
    row["done"] = row.pop("phase") == DONE
    print(json.dumps(row), flush=True)
"""


class Pool:
    """See the module. `uplinks`: lines of tc for what hosts send, by turns; no line: not shaped.
    `folder`: for logs and states. `delay_s`: by how much a process in the core delays, each way,
    what peers send each other."""

    def __init__(
        self, count: int, uplinks: Sequence[Sequence[str]], folder: Path, *, delay_s: float = 0.0
    ) -> None:
        self.names = tuple(f"h{i}" for i in range(1, count + 1))
        self.hosts = Hosts(self.names)
        self._uplinks, self._folder, self._delay_s = uplinks, folder, delay_s
        self._environment = {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        self.hosts.__enter__()
        try:
            self.shape(self._uplinks)
            self._start()
        except BaseException:
            self.hosts.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.hosts.__exit__()

    def shape(self, uplinks: Sequence[Sequence[str]]) -> None:
        """From now on what leaves the hosts passes these, by turns."""
        for i, name in enumerate(self.names):
            self.hosts.shape(name, *uplinks[i % len(uplinks)])

    def _start(self) -> None:
        public = ("--port", "7077", "--public", f"{CORE}:7077")
        broker = self._shoal("core", "broker", "--state", str(self._folder / "broker"), *public)
        assert broker.stdout is not None
        token = broker.stdout.readline().split()[-1]
        for i, name in enumerate(self.names):
            there = f"{self.hosts.address(name)}:{_PORT}"
            public = ("--port", str(_PORT), "--public", there)
            if self._delay_s:
                at = _PORT + 1 + i
                self.hosts.helper("core", "delay", at, there, self._delay_s)
                public = ("--port", str(_PORT), "--public", f"{CORE}:{at}")
            flags = ("--name", name, "--state", str(self._folder / name), "--device", "cpu")
            threads = ("--threads", "1", *public)
            self._shoal(name, "join", f"{CORE}:7077", "--token", token, *flags, *threads)

    def _shoal(self, host: str, *arguments: str) -> subprocess.Popen[str]:
        log = self._folder / f"{host}.log"
        command = (PYTHON, "-m", "shoal.cli", *arguments)
        return self.hosts.start(host, *command, log=log, env=self._environment)

    def said(self, host: str, code: str) -> str:
        """What a line of Python prints there."""
        started = self.hosts.start(host, PYTHON, "-c", code, env=self._environment)
        return str(started.communicate()[0])

    def train(self, jobs: Sequence[str], timeout_s: float = 600.0) -> list[dict[str, Any]]:
        """Trains jobs one after the other; a row of each. Raises RuntimeError when one did not end
        well."""
        paths = [self._folder / f"job{i}.toml" for i in range(len(jobs))]
        for path, text in zip(paths, jobs, strict=True):
            path.write_text(text)
        command = (PYTHON, "-c", _DRIVE, str(len(self.names)), *map(str, paths))
        log = self._folder / "drive.log"
        process = self.hosts.start("core", *command, log=log, env=self._environment)
        try:
            text, _ = process.communicate(timeout=timeout_s)
        finally:
            self.hosts.end(process)
        rows = [json.loads(line) for line in text.splitlines()]
        bad = [r["reason"] for r in rows if not r["done"]]
        if bad or len(rows) < len(jobs) or process.returncode:
            logs = "".join(p.read_text()[-2000:] for p in sorted(self._folder.glob("*.log")))
            raise RuntimeError(f"{len(rows)} of {len(jobs)} jobs ended; {bad}\n{logs}")
        return rows
