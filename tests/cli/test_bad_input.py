"""What a user does wrong: one clear error, the right exit code, no traceback, nothing left behind.

Each case goes through `shoal train` to a real broker, as far as it gets. Wrong files:
tests/job/test_job.py; wrong frames: tests/net/transports/test_refusals.py; wrong tensors and plans:
tests/peer/compute/test_device_refusals.py; all of these within a run:
tests/sim/virtual/test_bad_input_world.py.
"""

from __future__ import annotations

import asyncio
import copy
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.job.units import ByteCount, Duration, Rate
from shoal.peer.host.config import PeerConfig
from shoal.sim.simulate import SimOptions, simulate

JOB = """\
version = 1
[model]
factory = "net.py:Net"
[data]
source = "text.bin"
length = 8
[train]
steps = 6
batch = 8
"""

NET = """\
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Embedding(256, 8), nn.Linear(8, 256)

    def logits(self, x):
        return self.outer(self.inner(x))

    def forward(self, x, y):
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten())

class NoLoss(Net):
    def forward(self, x, y):
        self.logits(x)

class Logits(Net):
    def forward(self, x, y):
        return {"logits": self.logits(x)}

class Vector(Net):
    def forward(self, x, y):
        return self.logits(x)

class Branch(Net):
    def forward(self, x, y):
        loss = super().forward(x, y)
        if loss > 3:
            return 2 * loss
        return loss

class Forbidden(Net):
    def forward(self, x, y):
        return super().forward(x, y) + torch.linalg.svdvals(self.logits(x)).mean()

class Shape(Net):
    def forward(self, x, y):
        return F.cross_entropy(F.linear(self.inner(x), torch.ones(3, 9)).flatten(0, 1), y.flatten())

class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)

class Broken(Net):
    def __init__(self):
        super().__init__()
        self.more = not_there

class Others(Net):
    def forward(self, tokens):
        return self.logits(tokens).mean()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A real broker in a thread of this process."""
    found: list[str] = []
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    leave = asyncio.Event()

    async def serve() -> None:
        async with Broker(BrokerConfig(port=0, insecure=True)) as broker:
            found.append(broker.address)
            ready.set()
            await leave.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(30)
    yield found[0]
    loop.call_soon_threadsafe(leave.set)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The user's folder. Temporary files of the code land in `temporary`; none may stay."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.bin").write_bytes(b"the quick brown fox. " * 40)
    (tmp_path / "no.safetensors").write_bytes(b"no")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("SHOAL_BROKER", raising=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert [p.name for p in temporary.iterdir() if p.name.startswith("shoal-")] == []


def call(*arguments: str) -> tuple[int, str]:
    """(exit code, stdout and stderr) of a verb in this process."""
    result = CliRunner().invoke(cli.app, list(arguments))
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def errors(output: str) -> list[str]:
    return [x for x in output.splitlines() if x.startswith("shoal: ")]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("batch = 8", "bacth = 8", 'job.toml:9: `train.bacth` is not a known key; did you mean "b'),
        ("steps = 6", 'steps = "six"', 'job.toml:8: `train.steps` is "six": expected an integer'),
        ("batch = 8", "batch = 8\n[recovery]\nlease = 10", "10 has no unit: expected a time such"),
        ("batch = 8", "batch = 8\nmicrobatch = 3", "batch = 8 is not divisible by it"),
        ("batch = 8", "batch = 8\n[plan]\nstages = 99", "is 99, and the model has 5 operators"),
        ("Net", "NoLoss", "forward returned NoneType: expected a scalar loss"),
        ("Net", "Logits", "returned no loss (it has logits)"),
        ("Net", "Vector", "the loss is float32[batch, 8, 256]: expected a floating scalar"),
        ("Net", "Branch", "net.py:31: if loss > 3:"),
        ("Net", "Forbidden", "net.py:37: return super()"),
        ("Net", "Shape", "net.py:41: return F.cross_entropy"),
        ("Net", "Frozen", "no trainable parameter"),
        ("Net", "Broken", "NameError: name 'not_there' is not defined (/"),
        ("Net", "Others", "takes (tokens), the example inputs are x, y"),
        ("Net", "Nothing", 'net.py has no function "Nothing"'),
        ("net.py:Net", "no.py:Net", '"no.py", which is neither in'),
        ("net.py:Net", "no.where:Net", "ModuleNotFoundError: No module named 'no'"),
        ('Net"', 'Net"\nargs = {depth = 3}', "unexpected keyword argument 'depth'"),
        ('Net"', 'Net"\nweights = "no.safetensors"', "has 2 bytes: no safetensors file"),
        ("text.bin", "none.bin", "no file matches"),
        ("length = 8", "length = 8000", "training and evaluation need a window"),
    ],
)
def test_a_wrong_job_gives_one_error_and_code_2(
    address: str, folder: Path, old: str, new: str, says: str
) -> None:
    (folder / "job.toml").write_text(JOB.replace(old, new))
    code, output = call("train", "job.toml", "--broker", address)
    assert code == 2
    assert len(errors(output)) == 1
    assert says in output
    assert "frozen importlib" not in output


@pytest.mark.process
def test_torch_says_nothing_of_its_insides(folder: Path, address: str) -> None:
    (folder / "job.toml").write_text(JOB.replace("Net", "Shape"))
    command = [sys.executable, "-m", "shoal.cli", "train", "job.toml", "--broker", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "a and b must have same reduction dim" in done.stderr
    assert "torch/" not in done.stderr


def test_a_current_folder_that_is_gone_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert call("runs") == (
        2,
        "shoal: the current folder is gone, removed or renamed: `cd` into one that is there\n",
    )


def test_a_run_that_the_broker_does_not_know_is_refused_with_code_4(address: str) -> None:
    for verb in ("watch", "cancel", "finish", "export", "eval"):
        code, output = call(verb, "r-none", "--broker", address)
        assert code == 4
        assert len(errors(output)) == 1
        assert f'the broker at {address} knows no run "r-none": see shoal runs' in output


def test_a_good_job_is_taken_after_all_that(address: str, folder: Path) -> None:
    (folder / "job.toml").write_text(JOB)
    code, output = call("train", "job.toml", "--detach", "--broker", address)
    assert (code, errors(output)) == (0, [])


def test_a_port_that_is_taken_gives_code_2(address: str) -> None:
    code, output = call("broker", "--insecure", "--port", address.rpartition(":")[2])
    assert code == 2
    assert f"cannot listen on {address}: the port is taken" in errors(output)[0]


def test_a_report_that_cannot_be_written_is_told_before_the_run(folder: Path) -> None:
    code, output = call("sim", "--json", str(folder))
    assert (code, errors(output)) == (2, [f"shoal: {folder}: Is a directory"])
    with pytest.raises(OSError, match="File exists"):
        simulate(SimOptions(json=folder / "net.py" / "out.json"), front=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("verb", "file", "says"),
    [
        (["sim"], "job.toml", "jobs have it, and this was read as a scenario: `shoal train FILE`"),
        (["train"], "scenario.toml", "scenarios have it, which `shoal sim FILE` plays"),
    ],
)
def test_a_file_of_another_kind_is_named_as_what_it_is(
    tmp_path: Path, verb: list[str], file: str, says: str
) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "scenario.toml").write_text('version = 1\njob = "job.toml"\n')
    done = CliRunner().invoke(cli.app, [*verb, str(tmp_path / file)])
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize("made", [ByteCount("8GiB"), Duration("30ms"), Rate("20Mbit")])
def test_a_quantity_can_be_copied_with_its_unit(made: ByteCount | Duration | Rate) -> None:
    copied = copy.deepcopy(made)
    assert copied == made
    assert type(copied) is type(made)


def test_memory_reaches_the_worker(tmp_path: Path) -> None:
    config = PeerConfig(broker="a:1", state=tmp_path, name="a", memory_bytes=ByteCount("1MiB"))
    assert PeerConfig.from_json(config.to_json()).memory_bytes == 2**20


# ---------------------------------------------------------------- real processes


@pytest.mark.process
def test_a_peer_without_a_broker_gives_up_with_code_3(tmp_path: Path) -> None:
    with socket.socket() as s:  # bound and not listening: nobody else can take it
        s.bind(("127.0.0.1", 0))
        broker = f"127.0.0.1:{s.getsockname()[1]}"
        code = (
            "import sys; from pathlib import Path\n"
            "from shoal.peer.host.config import JoinConfig\n"
            "from shoal.peer.entry.supervisor import supervise\n"
            f"sys.exit(supervise(JoinConfig(broker={broker!r}, insecure=True, name='t',\n"
            f"  devices=('cpu',), state=Path({str(tmp_path)!r}), threads=1, first_s=0.2)))"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert f"no broker answers at {broker}; is `shoal broker` running there?" in done.stderr
    assert "Traceback" not in done.stderr
