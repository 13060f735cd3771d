"""A run as a program of people sees it: records, a table, callbacks, a comparison."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import shoal
from shoal.client import Client, Evaluated, Event, Reached, RunFailed, Step
from shoal.client.files import outside
from shoal.client.files.outside import check_logs
from shoal.client.files.records import write_run
from shoal.client.runs import callbacks
from shoal.client.runs.bar import TimeLeft, on_clock, progress_bar
from shoal.client.runs.readable import readable
from shoal.job import Job, SettingsError
from shoal.job.settings import plain
from shoal.proto import broker_pb2 as pb
from shoal.tests.client.runs.scripted_broker import Script, serving, state, step


@pytest.fixture
def script() -> Script:
    made = Script()
    third = step(3, 2)
    third.step.evaluation.loss = 1.9
    made.streams = [[state(0, pb.RUNNING), step(1, 0), step(2, 1), third, state(4, pb.DONE)]]
    return made


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with serving(script) as address, shoal.connect(address) as client:
        yield client


class Heard(shoal.Callback):
    """What was called, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_event(self, run: Any, event: Event) -> None:
        self.calls.append(("event", event.number))

    def on_step(self, run: Any, step: Step) -> None:
        self.calls.append(("step", step.step))

    def on_evaluation(self, run: Any, evaluation: Any) -> None:
        self.calls.append(("evaluation", evaluation.eval_loss))

    def on_row(self, run: Any, row: Any, step: int, of: str) -> None:
        self.calls.append(("row", step))

    def on_end(self, run: Any, end: Reached) -> None:
        self.calls.append(("end", end.phase))

    def close(self) -> None:
        self.calls.append(("close", None))


def test_a_callback_hears_everything_once_and_in_order(
    client: Client, script: Script, tmp_path: Path
) -> None:
    script.streams *= 2
    heard, again = Heard(), Heard()
    end = client.run("r-1", tmp_path).wait(heard)
    assert (end.phase, end.step, end.steps) == ("done", 3, 3)
    assert heard.calls == [
        *(("event", 0),),
        *(("row", 0), ("event", 1), ("step", 0)),
        *(("row", 1), ("event", 2), ("step", 1)),
        *(("row", 2), ("event", 3), ("step", 2), ("evaluation", 1.9)),
        *(("event", 4), ("end", "done"), ("close", None)),
    ]
    client.run("r-1", tmp_path).wait(again)  # rows are in the folder by now
    assert [call for call in heard.calls if call[0] != "row"] == again.calls


def test_what_a_callback_raises_ends_the_waiting_and_closes_everything(
    client: Client, tmp_path: Path
) -> None:
    class Enough(Heard):
        def on_step(self, run: Any, step: Step) -> None:
            if step.loss < 1.95:
                raise StopIteration(step.step)

    heard = Enough()
    with pytest.raises(StopIteration, match="1"):
        client.run("r-1", tmp_path).wait(heard)
    assert heard.calls[-1] == ("close", None)
    assert ("end", "done") not in heard.calls


@pytest.mark.parametrize("wrong", [shoal.Callback, lambda run, step: None], ids=["class", "call"])
def test_what_is_no_callback_is_said_before_the_waiting(client: Client, wrong: Any) -> None:
    heard = Heard()
    with pytest.raises(TypeError, match=r"is no callback: expected objects of shoal\.Callback"):
        client.run("r-1").wait(heard, wrong, bar=False)
    assert heard.calls == []


@pytest.mark.parametrize("to", ["file", "file/runs", "sealed/runs"])
def test_outputs_that_cannot_be_written_are_said_before_anything_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "sealed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: "sealed" not in str(path))
    job = Job(model="a:b", steps=1, output={"to": str(tmp_path / to)})
    with pytest.raises(SettingsError, match=r"`output.to` is .* (no folder|nothing can be)"):
        Client.submit(object(), job)  # type: ignore[arg-type]  # before anything of a client
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "sealed"]


def test_a_run_of_which_nothing_can_be_kept_here_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(folder: Path, run: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    cancelled: list[str] = []
    client = object.__new__(Client)
    monkeypatch.setattr("shoal.client.uploading.upload", lambda access, prepared, say: None)
    monkeypatch.setattr(Client, "submit_spec", lambda self, spec: "r-1")
    monkeypatch.setattr(Client, "cancel", lambda self, run: cancelled.append(run))
    prepared: Any = SimpleNamespace(keep=keep)
    client.access = None  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        client.submit_prepared(prepared, tmp_path)
    assert cancelled == ["r-1"]


def test_what_is_no_job_is_said(client: Client) -> None:
    with pytest.raises(TypeError, match=r"submit got a dict: expected shoal\.Job"):
        client.submit({"model": "a:b"})  # type: ignore[arg-type]


def test_a_failed_run_ends_for_callbacks_too(
    client: Client, script: Script, tmp_path: Path
) -> None:
    script.streams = [[state(0, pb.FAILED, "home-1 was lost")]]
    heard = Heard()
    with pytest.raises(RunFailed, match="home-1 was lost"):
        client.run("r-1", tmp_path).wait(heard)
    assert heard.calls[1:] == [("end", "failed"), ("close", None)]


def test_a_bar_shows_loss_and_what_is_done(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.run("r-1", tmp_path).wait(bar=True)
    shown = capsys.readouterr().err
    assert "done" in shown
    assert "3/3" in shown
    assert "loss 1.8000 · held-out 1.9000" in shown
    assert not callbacks.on_screen()


@pytest.mark.parametrize(
    ("stop_at_s", "left"), [(0.0, "0:10:00"), (2000.0, "0:10:00"), (1030.0, "0:00:30")]
)
def test_a_bar_has_the_time_by_pace_or_by_the_rule_that_ends_the_run(
    stop_at_s: float, left: str
) -> None:
    now_s = 0.0
    shown = progress_bar(Console(), get_time=lambda: now_s)
    task = shown.add_task("running", total=700, figures="", stop_at_s=0.0)
    shown.start_task(task)
    column = next(c for c in shown.columns if isinstance(c, TimeLeft))
    assert str(column.render(shown.tasks[0])) == "-:--:--"
    for done in range(101):
        now_s = float(done)
        at_s = 900.0 + now_s  # of the broker's clock
        stop = on_clock(shown, stop_at_s, at_s)
        shown.update(task, completed=done, stop_at_s=stop)
    assert str(column.render(shown.tasks[0])) == left


def test_events_have_plain_fields_and_say_what_they_are(client: Client) -> None:
    found = [*client.run("r-1").events()]
    assert [repr(e) for e in found[1::2]] == [
        "<Step 0: loss 2.0000, 0.50 s>",
        "<Step 2: loss 1.8000, held-out 1.9000, 0.50 s>",
    ]
    assert repr(found[-1]) == "<Reached done after 3 of 3 steps>"
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].number = 3  # type: ignore[misc]


def inside(value: Any) -> Iterator[Any]:
    """A value, and all that is in it."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from inside(getattr(value, field.name))
    elif isinstance(value, dict):
        for one in value.values():
            yield from inside(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from inside(one)


KINDS = [*pb.RunEvent.DESCRIPTOR.oneofs_by_name["kind"].fields]


@given(kind=st.sampled_from(KINDS), number=st.integers(0, 99), loss=st.floats(allow_nan=False))
def test_no_record_has_a_message_of_the_protocol_in_it(kind: Any, number: int, loss: float) -> None:
    event = pb.RunEvent(number=number)
    if kind.message_type is None:
        event.note = "home-1 left"
    else:
        getattr(event, kind.name).SetInParent()
    if kind.name == "evaluated":
        event.evaluated.evaluation.loss = loss
        event.evaluated.evaluation.clients.add(name="loss", least=0.5, median=1, most=2)
    if kind.name == "plan":
        event.plan.stages.add(start=0, stop=3, holders=["p"])
    found = readable(event)
    assert found.number == number
    assert repr(found).startswith(f"<{type(found).__name__} ")
    assert not [v for v in inside(found) if isinstance(v, Message)]
    assert not [v for v in inside(found) if type(v).__module__.startswith("google.")]
    if isinstance(found, Evaluated):
        assert found.loss == loss
        assert found.clients == {"loss": {"least": 0.5, "median": 1, "most": 2}}


def test_the_history_is_a_table_of_what_the_folder_and_the_broker_have(
    client: Client, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "r-1").mkdir()
    row = {"step": 0, "loss": 2.5, "seconds": 1.0}
    (tmp_path / "r-1" / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 1, "lo')
    table = client.run("r-1", tmp_path).history()
    assert [row["step"] for row in table] == table.columns["step"] == [0, 1, 2]
    assert table.columns["loss"] == [2.5, 1.9, 1.8]
    assert table.columns["eval_loss"] == [None, None, 1.9]
    assert len(table) == 3
    assert repr(table).startswith("<History of 3 rows, loss 2.5 -> 1.8; columns step, loss,")


def test_replicas_that_train_apart_have_rows_of_their_own(
    client: Client, script: Script, tmp_path: Path
) -> None:
    apart = state(0, pb.RUNNING)
    apart.state.replicas.extend([pb.ReplicaState(), pb.ReplicaState()])
    other = step(2, 0)
    other.replica = 1
    script.streams = [[apart, step(1, 0), other]]
    rows = client.run("r-1", tmp_path).history().rows
    assert [(row["replica"], row["step"]) for row in rows] == [(0, 0), (1, 0)]


# ---------------------------------------------------------------- [log]


def logged(folder: Path, log: dict[str, Any]) -> None:
    write_run(folder, {"run": "r-1", "job": {"name": "first", "log": log}})


def test_a_job_without_tensorboard_leaves_no_file_for_it(client: Client, tmp_path: Path) -> None:
    logged(tmp_path / "r-1", {"tensorboard": False})
    client.run("r-1", tmp_path).wait()
    assert not list((tmp_path / "r-1").glob("events.out.*"))
    assert (tmp_path / "r-1" / "metrics.jsonl").exists()


def test_no_mean_of_nothing_is_drawn() -> None:
    nothing = {"step": 3, "loss": math.nan, "lr": 0.1, "weight": 0.0}
    assert callbacks._numbers(nothing, "/replica-1") == {
        "lr/replica-1": 0.1,
        "weight/replica-1": 0.0,
    }
    assert math.isnan(callbacks._numbers(nothing | {"weight": 2.0}, "")["loss"])


def job(**log: Any) -> Job:
    return Job(model="a:b", steps=1, log=log)


def test_wandb_without_its_package_is_refused_before_training(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outside, "find_spec", lambda name: None)
    check_logs(job())
    with pytest.raises(SettingsError, match=r"log\.wandb.*pip install wandb"):
        client.submit(job(wandb={"project": "fish"}))


@pytest.mark.parametrize("table", [{"wandb": {}}, {"wandb": {"project": ""}}, {"tensorbord": True}])
def test_wrong_keys_of_log_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="log"):
        job(**table)


def test_nobody_else_is_told_where_numbers_go() -> None:
    assert "fish" not in job(wandb={"project": "fish"}).to_json()


@pytest.mark.slow
def test_wandb_gets_every_number_once(
    client: Client, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged(tmp_path / "r-1", {"wandb": {"project": "fish", "mode": "offline"}})
    kept: list[dict[str, Any]] = []
    log = wandb.sdk.wandb_run.Run.log
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run,
        "log",
        lambda self, data, *a, **k: (kept.append(data), log(self, data, *a, **k))[1],
    )
    script.streams *= 2
    for _ in range(2):
        client.run("r-1", tmp_path).wait()
    assert [row["step"] for row in kept] == [0, 1, 2]
    assert kept[2]["eval_loss"] == 1.9
    assert [path.stat().st_size > 0 for path in tmp_path.rglob("*.wandb")] == [True]


@pytest.mark.slow
def test_wandb_without_a_key_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(SettingsError, match="has no key to write with"):
        check_logs(job(wandb={"project": "fish", "mode": "online"}))
    check_logs(job(wandb={"project": "fish", "mode": "offline"}))


# ---------------------------------------------------------------- comparing


def recorded(folder: Path, lr: float, losses: list[float]) -> None:
    own = Job(model="a:b", steps=3, lr=lr)
    write_run(folder, {"run": folder.name, "job": plain(own)})
    rows = [
        {"step": n, "loss": loss, "seconds": 1.0, "sent_bytes": 5} for n, loss in enumerate(losses)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_compared_from_python(tmp_path: Path) -> None:
    recorded(tmp_path / "r-1", 1e-3, [3.0, 2.0])
    recorded(tmp_path / "r-2", 2e-3, [3.0, 1.0])
    found = shoal.compare(tmp_path / "r-1", str(tmp_path / "r-2"))
    assert "train.lr" in repr(found)
    assert found.different["train.lr"] == [0.001, 0.002]
    found.draw(tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 1000


def test_a_run_at_a_broker_is_compared_with_a_folder(client: Client, tmp_path: Path) -> None:
    recorded(tmp_path / "r-1", 1e-3, [3.0, 2.0])
    recorded(tmp_path / "r-2", 2e-3, [3.0, 1.0])
    found = shoal.compare(client.run("r-1", tmp_path), tmp_path / "r-2")
    assert list(found.rows) == ["r-1", "r-2"]
    assert [len(told[0].course) for told in found.rows.values()] == [3, 2]
