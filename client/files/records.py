"""The output folder of a run: what happened, step by step, for people and programs.

RUN/run.json         the run, its job, and what the figures mean
RUN/metrics.jsonl    one line per step; of replicas that train apart, per step of each
RUN/rounds.jsonl     one line per round between replicas, and per evaluation of a version
RUN/events.out.*     the same for TensorBoard
RUN/sidecars/        files that go with an export (config, tokenizer)
RUN/checkpoint-*/    what `shoal resume` goes on from (client/runs/checkpoints.py)
RUN/model.safetensors or RUN/model/   the weights at the end
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ...broker.round_rows import RoundRow, client_numbers
from ...job import Job, Output, SettingsError
from ...job.settings import json_object, plain
from ...net.surroundings import naming, user_path
from ...proto.broker_pb2 import RunEvent, StepDone, VersionEvaluated
from ..errors import RecordError
from .columns import EVALUATED, own_numbers
from .row_file import RowFile

__all__ = [
    "Recorder",
    "RowsTo",
    "check_output",
    "evaluation_numbers",
    "local_folder",
    "output_of",
    "own_job",
    "read_run",
    "record_of",
    "replacing",
    "step_numbers",
    "write_run",
]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that takes its place when the block succeeds: a reader sees
    the whole old file or the whole new one, and a failure leaves nothing. Who may read it is as the
    umask has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(exist_ok=False)
    try:
        with naming(path):  # a full disk does not say which file it was
            yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def local_folder(to: Path | str) -> Path:
    """Where what is kept of runs lies on this machine: `to`, or runs/ where that is a URL."""
    return Path("runs") if "://" in str(to) else user_path(to)


def check_output(to: Path | str) -> None:
    """Raises SettingsError for where nothing here can write to: better now than with a run begun.
    Writes nothing."""
    folder = local_folder(to).absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not there.is_dir():
        raise SettingsError("output.to", f"is {str(to)!r}, and {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise SettingsError("output.to", f"is {str(to)!r}, and nothing can be written to {there}")
    if "://" not in (to := str(to)):
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
    """What `write_run` left; empty when the run was submitted from elsewhere. Raises RecordError
    for what it cannot have left."""
    file = folder / "run.json"
    try:
        return json_object(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RecordError(
            f"{file} is damaged ({error}): remove it, and the run is as one that was submitted "
            "elsewhere, without its job's folder, outputs and format; its weights are not lost"
        ) from None


def record_of(
    run: str, own: Job | None, to: str, data: str, tokens_per_step: int
) -> dict[str, Any]:
    """Make the record of a run that was started from here. own: its job, as it was said on this
    machine; None for one that goes on from somebody else's, of which nothing is kept that
    could be imported, read or written. to: where its outputs go; data: hash of its manifest."""
    record: dict[str, Any] = {"run": run, "tokens_per_step": tokens_per_step, "data": data}
    if own is None:
        return record | {"output": plain(Output(to=to))}
    return record | {"job": plain(own), "folder": str(own.folder.resolve())}


def own_job(record: Mapping[str, Any]) -> Job | None:
    """Return the job of a run as it was said on this machine, with its folder; None where it was
    not."""
    if not {"job", "folder"} <= record.keys():
        return None
    return Job(**record["job"], folder=record["folder"])


def output_of(record: Mapping[str, Any]) -> Output:
    """Return where the outputs of a recorded run go, and in which form."""
    return Output(**(record.get("job") or record).get("output", {}))


def step_numbers(done: StepDone, tokens_per_step: int = 0) -> dict[str, float | int]:
    """One step as flat numbers, in the order people read them. tokens_per_step 0: not known."""
    outcome = done.outcome
    row: dict[str, float | int] = {"step": done.step, "loss": outcome.loss}
    row |= own_numbers((m.name, m.value) for m in outcome.metrics)
    row |= {"lr": outcome.lr, "grad_norm": outcome.grad_norm, "weight": outcome.weight}
    if outcome.loss_scale:
        row |= {"loss_scale": outcome.loss_scale, "skipped": int(outcome.skipped)}
    if tokens_per_step and done.seconds > 0:
        row["tokens_per_s"] = tokens_per_step / done.seconds
    row |= {"seconds": done.seconds, "compute_s": done.compute_s, "sent_bytes": done.sent_bytes}
    if done.again_bytes:
        row["again_bytes"] = done.again_bytes
    if done.HasField("evaluation"):
        row["eval_loss"] = done.evaluation.loss
        row |= own_numbers(((m.name, m.value) for m in done.evaluation.metrics), EVALUATED)
    return row


def evaluation_numbers(found: VersionEvaluated) -> dict[str, float | int]:
    """Numbers of a version between two rounds; `round` begins from it, `step` is the run's.
    `replicas`: of gossip, over whose own losses `eval_loss` is the mean; there is no version.
    `replica`: of a version, the one that says so."""
    row: dict[str, float | int] = {"round": found.round, "step": found.step}
    row |= {"replicas": found.replicas} if found.replicas else {"replica": found.replica}
    row["eval_loss"] = found.evaluation.loss
    numbers = ((m.name, m.value) for m in found.evaluation.metrics)
    return {**row, **own_numbers(numbers, EVALUATED), **client_numbers(found.evaluation)}


class RowsTo(Protocol):
    """Gets the rows of a recorder that are new in its folder."""

    def row(self, row: Mapping[str, float | int], step: int, of: str) -> None:
        """Take in one. of: "/replica-N" of replicas that train apart, else empty."""

    def close(self) -> None:
        """No more will come."""


class Recorder:
    """Writes the steps and rounds of one run into its folder. Those that are there already are
    skipped, so a watcher that comes back adds only what is missing, and of several at once each
    adds what no other has; `to` gets what was added. `close` closes that."""

    def __init__(self, folder: Path, tokens_per_step: int = 0, to: RowsTo | None = None) -> None:
        self.folder = folder
        self.to = to
        self.tokens_per_step = tokens_per_step
        self._next = Counter[int]()
        self._newest = -1
        self._steps = RowFile(folder / "metrics.jsonl", self._step_is_there)
        self._rounds = RowFile(folder / "rounds.jsonl", self._round_is_there)
        self._replicas = 1

    def see(self, event: RunEvent, round: RoundRow | None = None) -> None:
        """Takes in one event. round: that it commits."""
        if event.HasField("state"):
            self._replicas = max(1, len(event.state.replicas))
        elif event.HasField("plan"):
            self._divided(event.plan.microbatch_size)
        elif event.HasField("step"):
            self.add(event.step, *[event.replica] * (self._replicas > 1))
        elif round is not None:
            self._between(event, round.table())
        elif event.HasField("evaluated"):
            row = evaluation_numbers(event.evaluated)
            if self._between(event, row):
                self._plot(row, event.evaluated.step)

    def _divided(self, size: int) -> None:
        """The plan takes microbatches of `size` samples, which hold for the whole run: run.json
        says so, where the job left it open."""
        record = read_run(self.folder)
        train = record.get("job", {}).get("train", {})
        if size and train and train.get("microbatch") != size:
            train["microbatch"] = size
            write_run(self.folder, record)

    def add(self, done: StepDone, replica: int | None = None) -> None:
        """replica: of several that train apart, which count their own steps."""
        of = replica or 0
        if done.step < self._next[of]:
            return
        # A step of the run is one of all replicas together: what one has in a second is its part.
        row = step_numbers(done, self.tokens_per_step // self._replicas)
        named = row if replica is None else {"replica": replica, **row}
        if self._steps.add(named, lambda: done.step >= self._next[of]):
            self._next[of] = done.step + 1
            self._plot(row, done.step, "" if replica is None else f"/replica-{replica}")

    def _step_is_there(self, row: Mapping[str, Any]) -> None:
        self._next[row.get("replica", 0)] = int(row["step"]) + 1

    def _between(self, event: RunEvent, row: Mapping[str, Any]) -> bool:
        """Whether it was not there yet."""
        if event.number <= self._newest:
            return False
        named = {"event": event.number, "kind": event.WhichOneof("kind"), **row}
        if not self._rounds.add(named, lambda: event.number > self._newest):
            return False
        self._newest = event.number
        return True

    def _round_is_there(self, row: Mapping[str, Any]) -> None:
        self._newest = max(self._newest, int(row["event"]))

    def _plot(self, row: Mapping[str, float | int], step: int, of: str = "") -> None:
        if self.to is not None:
            self.to.row(row, step, of)

    def close(self) -> None:
        """Close what gets the rows; a second time does nothing."""
        if self.to is not None:
            self.to.close()
            self.to = None
