"""The output folder of a run: what happened, step by step, for people and programs.

RUN/run.json         the run, its job, and what the figures mean
RUN/metrics.jsonl    one line per step
RUN/events.out.*     the same for TensorBoard
RUN/sidecars/        files that go with an export (config, tokenizer)
RUN/checkpoint-*/    what `shoal resume` goes on from (client/runs/checkpoints.py)
RUN/model.safetensors or RUN/model/   the weights at the end
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...job import SettingsError
from ...proto.broker_pb2 import StepDone

__all__ = [
    "Recorder",
    "files_of",
    "local_folder",
    "read_run",
    "replacing",
    "step_numbers",
    "write_run",
]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block succeeds: a reader sees
    the whole old file or the whole new one, and a failure leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)


def local_folder(to: Path | str) -> Path:
    """Where what is kept of runs lies on this machine: `to`, or runs/ where that is a URL."""
    return Path("runs") if "://" in str(to) else Path(to)


def files_of(to: str) -> None:
    """Raises SettingsError for a URL that nothing here can write to."""
    if "://" not in to:
        return
    import fsspec

    protocol = to.partition("://")[0]
    try:
        fsspec.get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise SettingsError(
            "output.to", f"is {to!r}, and {protocol} is out of reach: {error}"
        ) from None


def write_run(folder: Path, record: Mapping[str, Any]) -> None:
    with replacing(folder / "run.json") as path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_run(folder: Path) -> dict[str, Any]:
    """What `write_run` left; empty when the run was submitted from elsewhere."""
    try:
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return record if isinstance(record, dict) else {}


def step_numbers(done: StepDone, tokens_per_step: int = 0) -> dict[str, float | int]:
    """One step as flat numbers, in the order people read them. tokens_per_step 0: not known."""
    outcome = done.outcome
    row: dict[str, float | int] = {"step": done.step, "loss": outcome.loss}
    row |= {m.name: m.value for m in outcome.metrics}
    row |= {"lr": outcome.lr, "grad_norm": outcome.grad_norm, "weight": outcome.weight}
    if tokens_per_step and done.seconds > 0:
        row["tokens_per_s"] = tokens_per_step / done.seconds
    row |= {"seconds": done.seconds, "compute_s": done.compute_s, "sent_bytes": done.sent_bytes}
    if done.again_bytes:
        row["again_bytes"] = done.again_bytes
    if done.HasField("evaluation"):
        row["eval_loss"] = done.evaluation.loss
        row |= {f"eval_{m.name}": m.value for m in done.evaluation.metrics}
    return row


class Recorder:
    """Writes the steps of one run into its folder. Steps that are there already are skipped, so a
    watcher that comes back adds only what is missing. `close` flushes TensorBoard's file."""

    def __init__(self, folder: Path, tokens_per_step: int = 0) -> None:
        self.folder = folder
        self.tokens_per_step = tokens_per_step
        self._path = folder / "metrics.jsonl"
        self._next = self._recover()
        self._board: Any = None

    def _recover(self) -> int:
        """The first step that is not there yet; a line that was cut off by a crash is removed."""
        if not self._path.exists():
            return 0
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            with replacing(self._path) as path:
                path.write_bytes(whole)
        lines = whole.splitlines()
        return int(json.loads(lines[-1])["step"]) + 1 if lines else 0

    def add(self, done: StepDone) -> None:
        if done.step < self._next:
            return
        self._next = done.step + 1
        row = step_numbers(done, self.tokens_per_step)
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab") as file:  # one write: a line is there or it is not
            file.write((json.dumps(_finite(row)) + "\n").encode())
        if self._board is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            self._board = SummaryWriter(str(self.folder))
        for name, value in row.items():
            if name != "step":
                self._board.add_scalar(name, value, done.step)

    def close(self) -> None:
        """Idempotent."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _finite(row: Mapping[str, float | int]) -> dict[str, float | int | None]:
    """JSON has no NaN and no infinity: a diverged loss is null."""
    return {k: v if math.isfinite(v) else None for k, v in row.items()}
