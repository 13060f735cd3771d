"""A broker and two peers as real processes on one device: a GPT in two stages, or two replicas that
meet in rounds, and what it learns.

    python benchmarks/gpu/pair.py --folder DIR [--json FILE] [--device cuda] [--dtype bf16]
                                  [--rounds] [--cpu-too]

`--cpu-too` trains the same job again with peers on the CPU, and says how far the last losses are
apart: dropout draws the same numbers there, and the data come in the same order.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from shoal.benchmarks.table import Figure, arguments, report

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOB = """
version = 1
name = "pair"
[model]
factory = "{examples}/gpt.py:gpt"
dtype = "{dtype}"
args = {{ layers = {layers}, width = {width}, heads = 4, length = 64, dropout = 0.1 }}
[data]
kind = "text"
length = 64
source = "{examples}/*.py"
[train]
steps = {steps}
batch = 16
microbatch = 4
lr = 2e-3
{plan}
[output]
to = "{folder}/out"
"""


PLANS = {
    False: "[plan]\nstages = 2",
    True: '[plan]\nreplicas = 2\n[sync]\nkind = "local"\nmethod = "diloco"\nevery = 10',
}
"""Whether there are rounds: how the two peers share the work."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", action="store_true", help="two replicas in place of stages")
    parser.add_argument("--cpu-too", action="store_true", help="again, with peers on the CPU")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    small = options.device == "cpu"
    devices = ["cpu"] if small else ["cuda:0", *(["cpu"] if options.cpu_too else [])]
    figures, ends, learned = [], [], True
    for device in devices:
        seconds, losses = train(
            options.folder.resolve() / device.replace(":", ""),
            device,
            small=small,
            dtype=options.dtype,
            plan=PLANS[options.rounds],
        )
        if not losses:
            return 1
        learned &= losses[-1] < losses[0]
        ends.append(losses[-1])
        name = "pair" if device == devices[0] else "cpu"
        figures += [
            Figure(f"{name}_s", seconds, "s", "lower"),
            Figure(f"{name}_loss_first", losses[0], "nats", "lower"),
            Figure(f"{name}_loss_last", losses[-1], "nats", "lower"),
        ]
    if len(ends) == 2:
        figures.append(Figure("pair_loss_off_cpu", abs(ends[0] / ends[1] - 1), "ratio", "lower"))
    report(f"two peers on {devices[0]}, {options.dtype}", figures, options.json)
    return 0 if learned else 1


def train(
    folder: Path, device: str, *, small: bool, dtype: str, plan: str
) -> tuple[float, list[float]]:
    """Seconds, and the losses of the steps; none if it failed, which is printed."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = (
        {"layers": 2, "width": 64, "steps": 20}
        if small
        else {"layers": 8, "width": 512, "steps": 40}
    )
    job = folder / "pair.toml"
    job.write_text(JOB.format(examples=EXAMPLES, folder=folder, dtype=dtype, plan=plan, **sizes))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    port = address.partition(":")[2]
    running = [
        start(folder, "broker", "broker", "--insecure", "--host", "127.0.0.1", "--port", port)
    ]
    try:
        answers(address, running[0])
        running += [
            start(
                folder, name, "join", address, "--insecure", "--name", name, "--device", device,
                "--memory", "2GiB" if small else "8GiB", "--threads", "1" if small else "4",
            )
            for name in ("one", "two")
        ]  # fmt: skip
        started = time.perf_counter()
        trained = subprocess.run(
            [sys.executable, "-m", "shoal.cli", "train", str(job), "--broker", address, "--json"],
            stdout=subprocess.PIPE, text=True, cwd=folder, check=False,
        )  # fmt: skip
        seconds = time.perf_counter() - started
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(10)
    (folder / "events.jsonl").write_text(trained.stdout)
    losses = [loss for line in trained.stdout.splitlines() if (loss := loss_of(line)) is not None]
    if trained.returncode or len(losses) < 2:
        print(trained.stdout[-2000:], *(f.read_text()[-1500:] for f in folder.glob("*.log")))
        return seconds, []
    return seconds, losses


def start(folder: Path, name: str, *command: str) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "shoal.cli", *command, "--state", str(folder / f"{name}-state")],
            stdout=log, stderr=subprocess.STDOUT, cwd=folder,
        )  # fmt: skip


def answers(address: str, broker: subprocess.Popen[bytes]) -> None:
    """Waits until the broker listens, or has ended."""
    host, _, port = address.partition(":")
    while broker.poll() is None:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            return
        except OSError:  # not yet: the first import of torch may take a minute
            time.sleep(0.2)


def loss_of(line: str) -> float | None:
    """The loss of a step, if the line tells of one."""
    event = json.loads(line) if line.startswith("{") else {}
    return event.get("loss") if "step" in event else None


if __name__ == "__main__":
    raise SystemExit(main())
