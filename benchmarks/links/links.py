"""Links as real networks shape them: what a probe makes of a link, against what a long plain TCP
stream gets of the same link, in network namespaces with `tc` and real broker and peer processes.

- tbf      a token bucket, bursts of 32 KiB to 4 MiB, 8 to 500 Mbit/s
- delay    the same, and 5 to 150 ms added each way by a process in between
- htb      an uplink that a peer shares with itself only, and with a second flow that never ends
- policer  a token bucket without a queue: what does not conform is dropped
- free     nothing shapes it

`link_rate_error_worst`: max |estimate / truth - 1| over the cases that are shaped, of the sustained
rate (what is not shaped goes as fast as the cores copy it, which unequal programs do not do
alike); `link_latency_error_worst`: max of the latency's error, in times of what is
allowed, 3 ms or a tenth of the truth, so 1 is the bar. Both from the median of `--repeat` probes.
Needs root and Linux.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from shoal.benchmarks.links.namespaces import CORE, PYTHON, Hosts
from shoal.benchmarks.table import Figure, arguments, report

TBF = "qdisc add dev eth root tbf rate {}mbit burst {} latency 200ms"
HTB = (
    "qdisc add dev eth root handle 1: htb default 1",
    "class add dev eth parent 1: classid 1:1 htb rate {}mbit ceil {}mbit burst {}",
)
POLICER = "qdisc add dev eth root tbf rate {}mbit burst {} limit {}"
PORT, ORACLE = 7100, 7200


@dataclass(frozen=True)
class Case:
    """`lines`: of tc, for what a sends; b's way back is as fast as it can be. `stream_s`: of the
    oracle, whose later half counts. `beside`: another flow shares the uplink all the time."""

    name: str
    lines: tuple[str, ...]
    delay_s: float = 0.0
    beside: bool = False
    stream_s: float = 6.0


def _tbf(mbit: int, burst: str, delay_ms: int = 0, stream_s: float = 6.0) -> Case:
    name = f"tbf_{mbit}mbit_{burst}" + (f"_{delay_ms}ms" if delay_ms else "")
    line = TBF.format(mbit, burst.replace("KiB", "k").replace("MiB", "m"))
    return Case(name, (line,), delay_ms / 1e3, stream_s=stream_s)


def _htb(mbit: int, burst: str, beside: bool) -> Case:
    lines = HTB[0], HTB[1].format(mbit, mbit, burst)
    # A stream that begins beside another one finds its half late: BBR in some tens of seconds.
    name, stream_s = f"htb_{mbit}mbit" + ("_shared" if beside else ""), 30.0 if beside else 6.0
    return Case(name, lines, beside=beside, stream_s=stream_s)


CASES = (
    Case("free", ()),
    _tbf(8, "32KiB"),
    _tbf(8, "4MiB", stream_s=14.0),
    _tbf(50, "32KiB"),
    _tbf(50, "128KiB"),
    _tbf(50, "4MiB"),
    _tbf(200, "256KiB"),
    _tbf(500, "512KiB"),
    _tbf(500, "4MiB"),
    _tbf(8, "32KiB", 150),
    _tbf(50, "128KiB", 5),
    _tbf(50, "128KiB", 40),
    _tbf(50, "1MiB", 150),
    _tbf(200, "1MiB", 20),
    _tbf(500, "4MiB", 10),
    _htb(50, "64k", beside=False),
    _htb(50, "64k", beside=True),
    _htb(200, "64k", beside=True),
    Case("policer_50mbit", (POLICER.format(50, "128k", "160k"),), stream_s=10.0),
    Case("policer_50mbit_20ms", (POLICER.format(50, "128k", "160k"),), 0.02, stream_s=10.0),
)


class Bench:
    """A broker in core and peers on hosts, of one case after another."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder = hosts, folder
        self._own = {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self._delays: list[subprocess.Popen[str]] = []
        at = ("--port", "7077", "--public", f"{CORE}:7077")
        broker = self._shoal("core", "broker", "--state", str(folder / "state"), *at)
        assert broker.stdout is not None
        self._token = broker.stdout.readline().split()[-1]

    def _shoal(self, host: str, *arguments: str) -> subprocess.Popen[str]:
        command = (PYTHON, "-m", "shoal.cli", *arguments)
        log = self.folder / f"{host}.log"
        return self.hosts.start(host, *command, log=log, env=self._own)

    def delayed(self, host: str, port: int, delay_s: float) -> str:
        """The address under which others reach a port of a host."""
        there = f"{self.hosts.address(host)}:{port}"
        if not delay_s:
            return there
        at = port + 1000 + self.hosts.names.index(host)
        self._delays.append(self.hosts.helper("core", "delay", at, there, delay_s))
        return f"{CORE}:{at}"

    def truth(self, case: Case) -> tuple[float, float]:
        """(latency one way, rate) of a plain TCP stream from a to b."""
        receiver = self.hosts.helper("b", "receive", ORACLE)
        sender = self.hosts.helper(
            "a", "send", self.delayed("b", ORACLE, case.delay_s), case.stream_s
        )
        latency, _ = sender.communicate()
        rate, _ = receiver.communicate()
        return float(latency), float(rate)

    def probe(self, case: Case) -> dict[str, float]:
        """The link from a to b, as the broker has it after both joined."""
        peers = []
        for name in ("a", "b"):
            public = self.delayed(name, PORT, case.delay_s)
            flags: tuple[str, ...] = ("--name", name, "--state", str(self.folder / name))
            flags += ("--device", "cpu")
            flags += ("--threads", "1", "--port", str(PORT), "--public", public)
            peers.append(self._shoal(name, "join", f"{CORE}:7077", "--token", self._token, *flags))
        until = time.monotonic() + 90.0
        found: dict[str, float] = {}
        while time.monotonic() < until and not found:
            time.sleep(0.5)
            found = self._link()
        for peer in peers:
            peer.send_signal(signal.SIGINT)
            peer.wait(30.0)
            self.hosts.end(peer)
        if not found:
            raise SystemExit(f"{case.name}: nothing was measured; see {self.folder}")
        return found

    def _link(self) -> dict[str, float]:
        command = ("-m", "shoal.cli", "peers", "--links", "--json", "--broker", "127.0.0.1:7077")
        out, _ = self.hosts.start("core", PYTHON, *command, env=self._own).communicate()
        links = json.loads(out)["links"] if out.strip() else []
        ways = {link["source"][:2]: link for link in links}
        return ways["a-"] if len(ways) == 2 else {}

    def measure(self, case: Case, repeat: int) -> list[dict[str, float]]:
        """Each with the truth beside it."""
        self.hosts.shape("a", *case.lines)
        beside = []
        if case.beside:
            beside.append(self.hosts.helper("c", "receive", ORACLE))
            there = f"{self.hosts.address('c')}:{ORACLE}"
            beside.append(self.hosts.helper("a", "send", there, 3600))
        rows = []
        try:
            for _ in range(repeat):
                latency, rate = self.truth(case)
                rows.append({"latency": latency, "rate": rate} | self.probe(case))
        finally:
            for process in (*beside, *self._delays):
                self.hosts.end(process)
            self._delays.clear()
        return rows


def errors(rows: list[dict[str, float]]) -> tuple[float, float]:
    """Of the median probe: the rate's, as a signed share; the latency's, in times of what is
    allowed."""
    rate = median(r["bytes_per_s"] / r["rate"] - 1 for r in rows)
    off = median(r["latency_s"] - r["latency"] for r in rows)
    return rate, abs(off) / max(3e-3, 0.1 * median(r["latency"] for r in rows))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="the case of this name, or those with it"
    )
    parser.add_argument("--repeat", type=int, default=3, help="probes of each case")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="logs go there")
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("network namespaces need root")
    figures, rates, latencies = [], [], []
    with tempfile.TemporaryDirectory() as made, Hosts(("a", "b", "c")) as hosts:
        folder = options.keep or Path(made)
        folder.mkdir(exist_ok=True, parents=True)
        bench = Bench(hosts, folder)
        chosen = [c for c in CASES if options.only == c.name]
        chosen = chosen or [c for c in CASES if options.only in c.name]
        if not chosen:
            names = ", ".join(c.name for c in CASES)
            parser.error(f"no case {options.only!r}: expected one of {names}")
        for case in chosen:
            rows = bench.measure(case, options.repeat)
            rate, off = errors(rows)
            rates.append(abs(rate) if case.lines else 0.0)
            latencies.append(off)
            figures += [
                Figure(
                    f"{case.name}_truth", median(r["rate"] for r in rows) / 1e6, "MB/s", "higher"
                ),
                Figure(f"{case.name}_rate_error", rate, "ratio", "lower"),
                Figure(
                    f"{case.name}_latency_error",
                    median(r["latency_s"] - r["latency"] for r in rows) * 1e3,
                    "ms",
                    "lower",
                ),
                Figure(
                    f"{case.name}_burst",
                    median(r["burst_bytes"] for r in rows) / 1024,
                    "KiB",
                    "lower",
                ),
            ]
            for row in rows:
                print(f"{case.name}: {json.dumps(row)}", flush=True)
    worst = [
        Figure("link_rate_error_worst", max(rates), "ratio", "lower"),
        Figure("link_latency_error_worst", max(latencies), "ratio", "lower"),
    ]
    report("links", [*worst, *figures], options.json)


if __name__ == "__main__":
    main()
