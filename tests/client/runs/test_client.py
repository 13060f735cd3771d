"""The client against a broker: its errors, its watch that survives breaks, its output folder."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import shoal
from shoal.client import BrokerUnreachable, Client, Refused, RunFailed
from shoal.client.access import Access, find_address
from shoal.client.files.records import (
    Recorder,
    evaluation_numbers,
    read_run,
    record_of,
    write_run,
)
from shoal.client.files.weight_files import WeightFilesError
from shoal.client.models import models
from shoal.client.models.state_dicts import load_named
from shoal.client.runs import broker_calls, weights
from shoal.client.runs import session as client_module
from shoal.client.runs.run import Run
from shoal.client.show.progress import follow
from shoal.client.submission import draft, prepare
from shoal.client.uploading import transfer
from shoal.dag.capture.capture import capture
from shoal.dag.transforms.lower import lower
from shoal.job import Job, Model, SettingsError
from shoal.net.address import AddressError
from shoal.proto import broker_pb2 as pb
from shoal.proto.broker_pb2_grpc import RunsServicer, add_RunsServicer_to_server

# ---------------------------------------------------------------- a scripted broker


class Script(RunsServicer):
    """Answers as told: `streams` are the events of each Watch; an exception ends the stream."""

    def __init__(self) -> None:
        self.streams: list[list[pb.RunEvent | grpc.StatusCode]] = []
        self.asked: list[int] = []
        self.state = pb.RunState(run="r-1", phase=pb.RUNNING, steps=3)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.RunEvent]:  # noqa: N802 (gRPC's name)
        self.asked.append(request.from_event)
        for event in self.streams.pop(0):
            if isinstance(event, grpc.StatusCode):
                context.abort(event, "as told")
            if event.HasField("state"):
                self.state = event.state
            yield event

    def Describe(self, request: Any, context: Any) -> pb.Description:  # noqa: N802 (gRPC's name)
        return pb.Description(broker="b", runs=[self.state])

    def Cancel(self, request: Any, context: Any) -> pb.RunState:  # noqa: N802 (gRPC's name)
        context.abort(grpc.StatusCode.NOT_FOUND, "no such run")
        raise AssertionError("unreachable")


@contextmanager
def serving(script: Script) -> Iterator[str]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        add_RunsServicer_to_server(script, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with serving(script) as address, shoal.connect(address) as client:
        yield client


def step(number: int, at: int) -> pb.RunEvent:
    outcome = pb.Outcome(loss=2.0 - at / 10, lr=1e-3, grad_norm=1.0, weight=4.0)
    return pb.RunEvent(number=number, step=pb.StepDone(step=at, outcome=outcome, seconds=0.5))


def state(number: int, phase: pb.Phase, reason: str = "") -> pb.RunEvent:
    found = pb.RunState(run="r-1", phase=phase, step=3, steps=3)
    found.reason.text = reason
    return pb.RunEvent(number=number, state=found)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ---------------------------------------------------------------- addresses and errors


def test_a_broker_that_is_not_there_is_unreachable() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(BrokerUnreachable, match=rf"{address} does not answer \(nobody listens"):
        shoal.connect(address)


def test_the_address_comes_from_argument_environment_or_login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_BROKER", raising=False)
    assert find_address() == "127.0.0.1:7077"  # where `shoal broker` listens by itself
    client_module.login("there:1")
    assert find_address() == "there:1"
    monkeypatch.setenv("SHOAL_BROKER", "env:2")
    assert find_address() == "env:2"
    assert find_address("here:3") == "here:3"


@pytest.mark.parametrize(
    "address", ["ho st", "host:", ":7", "host:0", "host:99999", "a b:7", 'a":7']
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="expected"):
        find_address(address)


def test_an_unknown_run_is_refused(client: Client) -> None:
    with pytest.raises(Refused, match='knows no run "r-9"'):
        client.run("r-9")
    with pytest.raises(Refused, match="no such run"):
        client.run("r-1").cancel()


# ---------------------------------------------------------------- watching


def test_watch_gives_every_event_once_over_breaks(client: Client, script: Script) -> None:
    script.streams = [
        [state(0, pb.RUNNING), step(1, 0), grpc.StatusCode.UNAVAILABLE],
        [step(2, 1)],  # ends although the run goes on
        [grpc.StatusCode.UNAVAILABLE],
        [step(3, 2), state(4, pb.DONE)],
    ]
    events = list(client.run("r-1").watch())
    assert [e.number for e in events] == [0, 1, 2, 3, 4]
    assert script.asked == [0, 2, 3, 3]


def test_watch_gives_up_on_a_broker_that_stays_away(
    client: Client, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_calls, "PATIENCE_S", 0.0)
    script.streams = [[grpc.StatusCode.UNAVAILABLE]] * 3
    with pytest.raises(BrokerUnreachable):
        list(client.run("r-1").watch())


def test_wait_records_every_step_once(client: Client, script: Script, tmp_path: Path) -> None:
    ends = [state(0, pb.RUNNING), step(1, 0), step(2, 1), state(3, pb.DONE)]
    script.streams = [ends, ends]
    run = client.run("r-1", tmp_path)
    assert run.wait().phase == "done"
    run.wait()  # a second watcher adds nothing
    rows = [json.loads(x) for x in (tmp_path / "r-1" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1]
    assert {"loss", "lr", "grad_norm", "seconds"} <= set(rows[0])
    assert list((tmp_path / "r-1").glob("events.out.*"))


def test_a_failed_run_says_why(client: Client, script: Script, tmp_path: Path) -> None:
    script.streams = [[state(0, pb.FAILED, "peer home-1 was lost")]]
    with pytest.raises(RunFailed, match="failed after 3 of 3 steps: peer home-1 was lost"):
        client.run("r-1", tmp_path).wait()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["followed", "waited for"])
def test_an_interrupt_while_a_library_takes_a_lock_ends_the_watching(
    script: Script, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes as TensorBoard's queue has its lock: closing it would wait for that for ever."""
    script.streams = [[step(0, 0), step(1, 1), state(2, pb.DONE)]]
    add, enter = Recorder.add, threading.Condition.__enter__
    armed: list[bool] = []

    def added(self: Recorder, done: pb.StepDone) -> None:
        armed.extend([True] * (done.step == 1))  # when everything is loaded
        add(self, done)

    def entered(self: threading.Condition) -> bool:
        taken = enter(self)
        if armed and threading.current_thread() is threading.main_thread():
            armed.clear()
            signal.raise_signal(signal.SIGINT)
        return taken

    monkeypatch.setattr(Recorder, "add", added)
    monkeypatch.setattr(threading.Condition, "__enter__", entered)
    with serving(script) as address, shoal.connect(address) as client:
        run = client.run("r-1", tmp_path)
        with pytest.raises(KeyboardInterrupt):
            follow(run, json=True) if how == "followed" else run.wait()
    assert not armed
    assert len((tmp_path / "r-1" / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_stream_of_events_is_read_in_another_thread(
    script: Script, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC takes locks for each; see net/interrupts.py."""
    script.streams = [[step(i, i) for i in range(3)]]
    read = []
    following = grpc._channel._MultiThreadedRendezvous._next

    def noted(self: Any) -> Any:
        read.append(threading.current_thread())
        return following(self)

    monkeypatch.setattr(grpc._channel._MultiThreadedRendezvous, "_next", noted)
    assert [e.number for e in client.watch("r-1", 0)] == [0, 1, 2]
    assert len(read) == 4
    assert threading.main_thread() not in read


# ---------------------------------------------------------------- records


def test_a_torn_line_is_written_again(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, tokens_per_step=100)
    recorder.add(step(0, 0).step)
    recorder.add(step(0, 1).step)
    recorder.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-7])
    again = Recorder(tmp_path, tokens_per_step=100)
    again.add(step(0, 0).step)
    again.add(step(0, 1).step)
    again.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["tokens_per_s"]) for r in rows] == [(0, 200.0), (1, 200.0)]


@given(turns=st.lists(st.integers(0, 2), max_size=30))
def test_a_step_is_written_once_however_many_follow_a_run_in_one_folder(turns: list[int]) -> None:
    with TemporaryDirectory() as name:
        followers = [Recorder(Path(name)) for _ in range(3)]
        at = [0, 0, 0]
        for who in turns:
            followers[who].add(step(0, at[who]).step)
            followers[who].add(step(0, at[who]).step, replica=1)
            at[who] += 1
        for follower in followers:
            follower.close()
        path = Path(name) / "metrics.jsonl"
        lines = path.read_text().splitlines() if turns else []
        rows = [(row.get("replica"), row["step"]) for row in map(json.loads, lines)]
    assert rows == [(replica, n) for n in range(max(at)) for replica in (None, 1)]


def test_a_mean_of_replicas_by_themselves_is_told_from_the_loss_of_a_version() -> None:
    found = pb.VersionEvaluated(round=4, step=16, evaluation=pb.Evaluation(loss=3.0), replicas=4)
    assert evaluation_numbers(found) == {"round": 4, "step": 16, "replicas": 4, "eval_loss": 3.0}
    found.replicas, found.replica = 0, 2
    assert evaluation_numbers(found) == {"round": 4, "step": 16, "replica": 2, "eval_loss": 3.0}


def test_a_diverged_loss_is_null_in_json(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.add(pb.StepDone(step=0, outcome=pb.Outcome(loss=float("nan"))))
    recorder.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] is None


# ---------------------------------------------------------------- models and weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.norm(self.b(self.a(x))) - y).square().mean()


def test_weights_come_back_under_the_users_names(tmp_path: Path) -> None:
    first, second = Tied(), Tied()
    state = dict(first.state_dict())
    path = weights.write(state, tmp_path / "r-1", None, "safetensors")
    assert path == tmp_path / "r-1" / "model.safetensors"
    second.load_state_dict(load_file(path))  # strict: every name is there
    assert torch.equal(second.a.weight, first.a.weight)
    del state["b.weight"]  # one name of a tied tensor is enough
    third = Tied()
    load_named(third, state)
    assert torch.equal(third.b.weight, first.a.weight)


def test_weights_take_the_place_of_weights_alone(tmp_path: Path) -> None:
    state, job = dict(Tied().state_dict()), tmp_path / "job.toml"
    job.write_text("version = 1\n")
    with pytest.raises(weights.ExportError, match=r"job.toml is there, and by its name no weights"):
        weights.write(state, tmp_path / "r-1", job, "safetensors")
    assert job.read_text() == "version = 1\n"
    for _ in range(2):
        weights.write(state, tmp_path / "r-1", tmp_path / "a.safetensors", "safetensors")


@pytest.mark.parametrize("format", ["hf", "peft", "safetensors"])
@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"factory": "hf:base"}, "base"),
        ({"factory": "hf:base"}, "base/of-mine"),
        ({"factory": "hf:base"}, "link"),
        ({"factory": "a:b", "weights": "base/model.safetensors"}, "base"),
        ({"factory": "a:b", "weights": "base/model.safetensors"}, "base/model.safetensors"),
    ],
)
def test_an_export_never_takes_the_place_of_what_the_run_began_with(
    tmp_path: Path, model: dict[str, Any], path: str, format: Any
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name in ("config.json", "model.safetensors"):
        (base / name).write_text("as it was")
    (tmp_path / "link").symlink_to(base)
    own = replace(Job(model=model, steps=1), folder=tmp_path)
    write_run(tmp_path / "runs/r-1", record_of("r-1", own, "runs/", "", 0))
    unused: Any = None
    with pytest.raises(weights.ExportError, match=f"is in {base}.*expected another folder"):
        Run(unused, "r-1", tmp_path / "runs").export(tmp_path / path, format)
    assert {p.read_text() for p in base.iterdir()} == {"as it was"}


def test_weights_that_do_not_fit_change_nothing() -> None:
    module = Tied()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(models.ModelError, match=r"missing \(a.weight"):
        load_named(module, {"c": torch.zeros(1)})
    wrong = {**before, "a.weight": torch.zeros(2, 2)}
    with pytest.raises(models.ModelError, match=r'"a.weight" has shape \(2, 2\)'):
        load_named(module, wrong)
    with pytest.raises(models.ModelError, match=r"on 'meta', which keeps no values"):
        load_named(Tied().to("meta"), before)
    assert all(torch.equal(v, module.state_dict()[k]) for k, v in before.items())


def test_an_hf_export_needs_what_was_kept_at_submission(tmp_path: Path) -> None:
    with pytest.raises(weights.ExportError, match="where the run was submitted"):
        weights.write({}, tmp_path, None, "hf")


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("nofile.py:fn", 'names "nofile.py"'),
        ("net.py:missing", 'has no function "missing"'),
        ("net.py:broken", r"raised ValueError: too wide \(.*net.py, line 2\)"),
        ("net.py:nothing", "returned int: expected a torch.nn.Module"),
        ("no.such.module:fn", "cannot be imported: ModuleNotFoundError"),
        ("bad.py:fn", "cannot be imported: SyntaxError"),
        ("hf:nowhere", 'names "nowhere"'),
        ("hf:.", "there is no config.json"),
    ],
)
def test_a_factory_that_does_not_work_is_named(tmp_path: Path, factory: str, says: str) -> None:
    if factory.startswith("hf:"):
        pytest.importorskip("transformers")
    (tmp_path / "net.py").write_text(
        "def broken():\n    raise ValueError('too wide')\ndef nothing():\n    return 1\n"
    )
    (tmp_path / "bad.py").write_text("def fn(:\n")
    with pytest.raises(models.ModelError, match=says):
        models.build(Job(model=factory, steps=1, folder=tmp_path))


def test_a_factory_is_looked_up_in_the_jobs_folder_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, width in ((here, 1), (there, 2)):
        folder.mkdir()
        code = f"import torch\ndef fn():\n    return torch.nn.Linear({width}, 1)\n"
        (folder / "net.py").write_text(code)
    monkeypatch.chdir(here)
    module = models.build(Job(model="net.py:fn", steps=1, folder=there))
    assert isinstance(module, nn.Linear)
    assert module.in_features == 2


def test_freezing_leaves_a_live_module_as_it_was() -> None:
    module = Tied().eval()
    job = Job(model={"factory": "a:b", "freeze": ["b.*"]}, steps=1)
    with models.ready(module, job):
        assert not module.a.weight.requires_grad  # its other name
        assert module.norm.weight.requires_grad
    assert module.a.weight.requires_grad
    with (
        pytest.raises(models.ModelError, match=r'"c\.\*", which matches no parameter'),
        models.ready(module, Job(model={"factory": "a:b", "freeze": ["c.*"]}, steps=1)),
    ):
        pass


def test_a_copy_is_changed_and_tied_alike_and_the_users_own_is_not() -> None:
    module = nn.ModuleDict({"tied": Tied(), "rnn": nn.LSTM(2, 3)}).eval()
    module["tied"].norm.weight.requires_grad_(False)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    made = models._copied(module, lambda tensor: tensor + 1)
    assert made["tied"].a.weight is made["tied"].b.weight
    assert not made["tied"].norm.weight.requires_grad
    assert not made.training
    assert made["rnn"](torch.zeros(1, 1, 2))[0].shape == (1, 1, 3)
    for name, tensor in made.state_dict().items():
        torch.testing.assert_close(tensor, before[name] + 1)
    with torch.no_grad():
        made["tied"].a.weight.zero_()
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_a_model_on_the_cpu_is_taken_itself_and_one_without_values_is_refused() -> None:
    module = Tied()
    assert models.on_cpu(module) is module
    with pytest.raises(models.ModelError, match=r'"a\.weight" is on the meta device.*to_empty'):
        models.on_cpu(Tied().to("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_live_model_on_a_gpu_is_captured_and_stays_there(arrays: Path) -> None:
    module = Tied().cuda()
    job = tiny(arrays)
    with prepare(replace(job, module=module)) as prepared:
        found = load_file(prepared.weights)
    assert all(p.is_cuda for p in module.parameters())
    for name, p in module.named_parameters():
        assert torch.equal(found[name], p.detach().cpu())


# ---------------------------------------------------------------- submission


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    import numpy as np

    rng = np.random.default_rng(0)
    path = tmp_path / "data.npz"
    x = rng.normal(size=(40, 4)).astype(np.float32)
    np.savez(path, x=x, y=x[:, ::-1].copy())
    return path


def tiny(arrays: Path, **more: Any) -> Job:
    data = {"kind": "arrays", "source": arrays.name, "holdout": 0.25}
    length = {} if "passes" in more else {"steps": 2}
    more = {"eval_batches": 1, **length, **more}
    return Job(model=Tied(), data=data, batch=8, folder=arrays.parent, **more)


def test_a_prepared_job_has_everything_that_peers_need(arrays: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with prepare(tiny(arrays, passes=2), said.append) as prepared:
        assert prepared.job.train.steps == 8  # 2 passes over 30 samples in batches of 8
        assert prepared.job.train.microbatch == 2
        tensors = load_file(prepared.weights)
        assert set(tensors) >= {p.name for p in prepared.graph.parameters}
        assert set(tensors) >= {b.name for b in prepared.graph.buffers}
        assert prepared.core is not None
        prepared.keep(tmp_path / "r-1", "r-1")
        inside = prepared.weights.parent
    assert not inside.exists()  # nothing stays behind
    assert said[:2] == ["reading the data", "capturing the model"]
    assert said[2] == "checking the capture, for 60 s at most"
    assert len(said) == 5
    assert said[3].startswith("no microbatches of 1: ")  # a batch norm
    assert said[4] == (
        "microbatches of 2, whatever the plan: its buffers take statistics of each microbatch"
    )
    assert read_run(tmp_path / "r-1")["tokens_per_step"] == 8
    assert Job.from_table(read_run(tmp_path / "r-1")["job"]).train.steps == 8


class Rows(nn.Module):
    """No statistics over the samples of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (F.gelu(self.inner(x)) - y).square().mean()


class Words(nn.Module):
    def __init__(self, words: int, positions: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 4), nn.Embedding(positions, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        h = self.drop(self.norm(h.flatten(0, 1)))
        return F.cross_entropy(h @ self.words.weight.T, y.flatten())


def spoken(folder: Path, module: nn.Module, length: int = 8, **more: Any) -> Job:
    (folder / "text.txt").write_text("sixty-four times the sea. " * 20)
    data = {"source": "text.txt", "length": length}
    return Job(model=module, data=data, batch=8, steps=2, folder=folder, **more)


@pytest.mark.parametrize(
    ("words", "positions", "says"),
    [(256, 7, "'places' .* row 7, and has 0 to 6"), (64, 8, "'words' .* row 1.*has 0 to 63")],
    ids=["too few positions", "too few words"],
)
@pytest.mark.parametrize("small", [True, False])
def test_data_that_the_model_does_not_take_is_found_before_anything_is_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: int,
    positions: int,
    says: str,
    small: bool,
) -> None:
    if not small:
        monkeypatch.setattr(models, "SMALL", 0)
    job = spoken(tmp_path, Words(words, positions))
    submit = prepare if small else contextmanager(lambda job: iter([draft(job)]))
    with (
        pytest.raises(models.ModelError, match=rf"x int64\[2, 8\], y .*{says}.*data\.length"),
        submit(job),
    ):
        pass


def test_what_only_values_show_is_found_in_a_small_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Learned(Words):
        """The row that is looked up depends on a weight."""

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            beyond = (self.norm.weight.mean() * 0 + len(self.places.weight)).long()
            return super().forward(x, y) + self.places(beyond).mean()

    with pytest.raises(models.ModelError, match=r"IndexError.*data\.length"):
        draft(spoken(tmp_path, Learned(256, 8)))
    monkeypatch.setattr(models, "SMALL", 0)
    draft(spoken(tmp_path, Learned(256, 8)))


def test_the_trial_leaves_the_model_and_randomness_as_they_were(tmp_path: Path) -> None:
    module = Words(256, 8)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    seed = torch.get_rng_state()
    with prepare(spoken(tmp_path, module)):
        pass
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


def test_what_the_machine_cannot_is_no_fault_of_the_data() -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.empty(2**60)

    said: list[str] = []
    batch = {"x": torch.zeros(2, 4), "y": torch.zeros(2, 4)}
    models.check_takes(Large(), capture(Rows(), batch).graph, batch, said.append)
    assert "no batch could be tried here (RuntimeError:" in said[0]


def test_an_export_that_could_not_be_made_is_refused_at_submission(tmp_path: Path) -> None:
    job = spoken(tmp_path, Words(256, 8), output={"format": "hf"})
    with (
        pytest.raises(SettingsError, match=r"`output\.format` is \"hf\".*config\.json"),
        prepare(job),
    ):
        pass
    (tmp_path / "config.json").write_text("{}")
    table = {"factory": "a:b", "sidecars": ["config.json"]}
    with prepare(replace(job, model=Model(**table))) as prepared:
        assert [path.name for path in prepared.sidecars] == ["config.json"]


def test_a_hugging_face_model_needs_targets(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=256, n_positions=8)
    job = spoken(tmp_path, transformers.GPT2LMHeadModel(config))
    job = replace(job, data=replace(job.data, targets=""))
    with (
        pytest.raises(models.ModelError, match=r"`data\.targets` is empty.*targets = \"y\""),
        prepare(job),
    ):
        pass


@pytest.mark.parametrize("small", [True, False])
def test_the_planner_may_choose_the_microbatch_where_nothing_depends_on_it(
    arrays: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if not small:
        monkeypatch.setattr(models, "SMALL", 0)
    with prepare(replace(tiny(arrays), module=Rows())) as prepared:
        assert prepared.job.train.microbatch == 2
        assert prepared.microbatch_sizes == (1, 4, 8)
        assert prepared.core is not None
        for size in (1, 2, 4, 8):
            wanted = lower(prepared.graph.bind(size))
            assert prepared.core.graph.bind(size) == wanted.graph
            assert prepared.core.start == wanted.start
    with prepare(tiny(arrays)) as prepared:  # batch norm
        assert prepared.microbatch_sizes == ()
    with prepare(replace(tiny(arrays, microbatch=4), module=Rows())) as prepared:
        assert prepared.microbatch_sizes == ()
        assert prepared.job.train.microbatch_size == 4


def test_without_held_out_data_nothing_is_evaluated(arrays: Path) -> None:
    job = Job(
        model=Tied(),
        data={"kind": "arrays", "source": str(arrays), "holdout": 0.0},
        batch=8,
        steps=1,
    )
    with prepare(job) as prepared:
        assert prepared.job.train.evaluation_microbatches == 0


def test_more_stages_than_operators_are_refused(arrays: Path) -> None:
    with (
        pytest.raises(
            SettingsError, match=r"`plan.stages` is 1000, and the model has \d+ operators"
        ),
        prepare(tiny(arrays, plan={"stages": 1000})),
    ):
        pass


def test_starting_weights_come_from_a_file(arrays: Path, tmp_path: Path) -> None:
    start = Tied()
    path = weights.write(
        start.state_dict(), tmp_path, tmp_path / "start.safetensors", "safetensors"
    )
    job = Job(
        model={"factory": "a:b", "weights": path.name}, module=Tied(), steps=1, folder=tmp_path
    )
    built = models.build(job)
    assert isinstance(built, Tied)
    assert torch.equal(built.a.weight, start.a.weight)
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    bad = Job(
        model={"factory": "a:b", "weights": "bad.safetensors"},
        module=Tied(),
        steps=1,
        folder=tmp_path,
    )
    with pytest.raises(WeightFilesError, match="no safetensors file"):
        models.build(bad)


async def test_transfers_run_inside_a_notebooks_event_loop() -> None:
    async def work(blobs: object) -> str:
        await asyncio.sleep(0)
        return type(blobs).__name__

    assert transfer(Access("127.0.0.1:1", None), work) == "BlobClient"
