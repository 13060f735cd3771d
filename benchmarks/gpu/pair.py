"""A broker and two peers as real processes on one device: a GPT in two stages, and what it learns.

python benchmarks/gpu/pair.py --folder DIR [--json FILE] [--device cuda] [--dtype bf16]
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
[plan]
stages = 2
[output]
to = "{folder}/out"
"""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    folder, small = options.folder.resolve(), options.device == "cpu"
    folder.mkdir(parents=True, exist_ok=True)
    device = "cpu" if small else "cuda:0"
    sizes = (
        {"layers": 2, "width": 64, "steps": 10}
        if small
        else {"layers": 8, "width": 512, "steps": 60}
    )
    job = folder / "pair.toml"
    job.write_text(JOB.format(examples=EXAMPLES, folder=folder, dtype=options.dtype, **sizes))
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
        return trained.returncode or 1
    report(
        f"two peers on {device}, {options.dtype}",
        [
            Figure("pair_s", seconds, "s", "lower"),
            Figure("pair_loss_first", losses[0], "nats", "lower"),
            Figure("pair_loss_last", losses[-1], "nats", "lower"),
        ],
        options.json,
    )
    return 0 if losses[-1] < losses[0] else 1


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
