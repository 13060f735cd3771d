"""The verbs: what they print, their exit codes, and a whole run by real processes."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import shoal
from shoal import cli
from shoal.cli.groups import GROUPS
from shoal.sim.processes import LocalCluster

VERBS = [
    "bench",
    "broker",
    "cancel",
    "compare",
    "doctor",
    "eval",
    "export",
    "finish",
    "init",
    "invite",
    "join",
]
VERBS += ["kick", "login", "logs", "page", "pause", "peers", "plan", "resume", "runs"]
VERBS += ["sample", "sim"]
VERBS += ["status", "train", "unpause", "watch"]

JOB = """
version = 1
[model]
factory = "net.py:net"
[data]
source = "text.bin"
length = 8
holdout = 0.3
[train]
steps = 6
batch = 8
eval_every = 3
eval_batches = 2
[output]
to = "out"
"""

NET = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(256, 8)
        self.mix = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 256, bias=False)
        self.outer.weight = self.inner.weight

    def forward(self, x, y):
        logits = self.outer(self.mix(self.inner(x)).tanh())
        right = (logits.argmax(2) == y).float().mean()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), y.flatten()), "accuracy": right}

def net():
    return Net()
"""


def call(*arguments: str) -> tuple[int, str]:
    """(exit code, stdout and stderr) of a verb in this process."""
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(autouse=True)
def _alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No broker is known, and what a verb writes lands in a folder of the test."""
    monkeypatch.delenv("SHOAL_BROKER", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "net.py").write_text(NET)
    (folder / "text.bin").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "small.toml").write_text(JOB)
    return folder / "small.toml"


# ---------------------------------------------------------------- help


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from shoal.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'grpc', 'numpy', 'google.protobuf', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_help_lists_the_verbs_that_exist() -> None:
    code, text = call("--help")
    assert code == 0
    sections = text[text.index("Try it on this machine:") :]
    listed = re.findall(r"^\W*([a-z]+)  +[A-Z]", sections, re.MULTILINE)
    assert sorted(listed) == VERBS
    assert re.findall(r"^([A-Z].*):$", sections, re.MULTILINE) == list(GROUPS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_says_what_it_does_with_an_example(verb: str) -> None:
    code, text = call(verb, "--help")
    assert code == 0
    assert f"Example: shoal {verb}" in re.sub(r"\s+", " ", text)


def test_what_only_simulations_need_is_not_in_the_help() -> None:
    _, text = call("join", "--help")
    assert "--via" in text
    assert "--port" in text
    assert "--stretch" not in text


# ---------------------------------------------------------------- wrong input: 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["train"],
        ["train", "no.toml"],
        ["train", "--nonsense", "x"],
        ["status", "--broker", "no sense"],
        ["login", "no sense"],
        ["sim", "--peers", "0"],
        ["broker", "--public", "no sense"],
        ["broker", "--insecure", "--host", "0.0.0.0"],
        ["join", "no sense", "--insecure"],
        ["join", "127.0.0.1:9", "--insecure", "--via", "no-such-file"],
        ["join", "127.0.0.1:9", "--insecure", "--port", "70000"],
        ["join", "127.0.0.1:9", "--insecure", "--stretch", "2"],  # without --threads 1
        ["join", "127.0.0.1:7077", "--state", "/nowhere/at/all"],  # without a token
        ["join", "127.0.0.1:7077", "--token", "shl1.abc"],
        ["join", "10.0.0.1:7077", "--insecure"],  # not this machine
        ["join", "127.0.0.1:7077", "--token-file", "no-such-file"],
        ["join", "127.0.0.1:7077", "--token", "a", "--token-file", "b"],
        ["join", "127.0.0.1:7077", "--insecure", "--memory", "10"],
        ["join"],
        ["join", "--swarm", "a b", "--token", "x"],
        ["join", "--swarm", "fish", "--bootstrap", "a:1", "--state", "/nowhere/at/all"],
        ["join", "--swarm", "fish", "--state", "/nowhere/at/all"],
        ["broker", "--swarm", "a b"],
        ["broker", "--bootstrap", "/ip4/1.2.3.4/tcp/1/p2p/x"],
        ["export", "r-1", "--format", "pt"],
    ],
)
def test_wrong_input_gives_one_clear_line_and_code_2(arguments: list[str]) -> None:
    code, text = call(*arguments)
    assert code == 2
    assert "Traceback" not in text
    assert text.strip()


def test_a_wrong_job_names_file_and_line(job: Path) -> None:
    job.write_text(JOB.replace("batch = 8", "bacth = 8"))
    code, text = call("train", str(job))
    assert code == 2
    assert f"{job}:11: `train.bacth` is not a known key" in text


# ---------------------------------------------------------------- broker away: 3, our bug: 1


def test_a_broker_that_is_not_there_gives_code_3(job: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for arguments in (["status"], ["train", str(job)], ["cancel", "r-1"]):
        code, text = call(*arguments, "--broker", address)
        assert code == 3
        assert f"the broker at {address} does not answer" in text
        assert "Traceback" not in text


def test_a_bug_of_ours_shows_its_traceback_and_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(address: str) -> Path:
        raise KeyError("ours")

    monkeypatch.setattr("shoal.client.login", broken)
    code, text = call("login", "a:1")
    assert code == 1
    assert "Traceback" in text
    assert "please report it" in text


def test_login_is_remembered(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert call("login", address)[0] == 0
    code, text = call("status")
    assert code == 3
    assert address in text


def test_the_owner_pauses_a_host_without_asking_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    nowhere = ("--broker", f"127.0.0.1:{free_port()}")
    assert call("unpause") == (0, "this host was not paused\n")
    assert "this host is" not in call("status", *nowhere)[1]
    code, text = call("pause")
    assert code == 0
    assert "this host rests now, also after a restart: no peer runs here now" in text
    assert "`shoal unpause` undoes it" in text
    code, text = call("status", *nowhere)
    assert code == 3, "what is told of this host needs no broker"
    assert "this host is paused since 20" in text
    assert call("unpause") == (0, "this host's peers take part again\n")
    assert call("pause", "--state", "elsewhere")[0] == 0
    assert "this host is" not in call("status", *nowhere)[1]
    assert (tmp_path / "elsewhere" / "paused").exists()


# ---------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(peers=1) as cluster:
        yield cluster


@pytest.mark.process
def test_a_whole_run_from_train_to_export(cluster: LocalCluster, job: Path, tmp_path: Path) -> None:
    at = ["--broker", cluster.address]
    code, text = call("train", str(job), *at)
    assert code == 0, text + cluster.log("sim-1")
    run = re.findall(r"^run (r-\S+): small$", text, re.MULTILINE)[0]
    folder = tmp_path / "out" / run
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == list(range(6))
    code, text = call("train", str(job), "--set", "train.steps=2", "--json", *at)
    assert code == 0, text
    assert '"2 steps are done"' in text
    assert rows[-1]["accuracy"] >= 0
    assert set(load_file(folder / "model.safetensors")) == {
        "inner.weight",
        "mix.weight",
        "mix.bias",
        "outer.weight",
    }

    # What the plain module makes of the exported weights is what the peers said at the end.
    code, text = call("eval", run, "--to", "out", "--json", *at)
    assert code == 0, text
    assert json.loads(text)["loss"] == pytest.approx(rows[-1]["eval_loss"], rel=1e-5)

    code, text = call("runs", "--json", *at)
    assert [r["phase"] for r in json.loads(text)["runs"] if r["run"] == run] == ["done"]
    code, text = call("peers", "--json", *at)
    assert [p["name"] for p in json.loads(text)["peers"]] == ["sim-1"]
    code, text = call("export", run, "again.safetensors", "--json", *at)
    assert json.loads(text)["weights"] == "again.safetensors"
    code, text = call("export", run, "--format", "hf", *at)
    assert code == 2
    assert "config.json" in text
    code, text = call("cancel", "r-none", *at)
    assert code == 4
    assert "knows no run" in text


@pytest.mark.process
def test_a_live_module_trains_and_gets_its_weights_back(
    cluster: LocalCluster, job: Path, tmp_path: Path
) -> None:
    module = shoal_module(job)
    start = {k: v.clone() for k, v in module.state_dict().items()}
    text = torch.frombuffer(bytearray((job.parent / "text.bin").read_bytes()), dtype=torch.uint8)
    begun = float(module(text[None, :-1].long(), text[None, 1:].long())["loss"].detach())
    work = shoal.Job(
        model=module,
        data={"source": str(job.parent / "text.bin"), "length": 8, "holdout": 0.3},
        steps=3,
        batch=8,
        output={"to": str(tmp_path / "live")},
    )
    with shoal.connect(cluster.address) as client:
        run = client.submit(work)
        run.wait()
        run.load_into(module)
        assert run.evaluate(module)["loss"] < begun
    assert module.outer.weight is module.inner.weight
    assert not torch.equal(start["inner.weight"], module.inner.weight)


def shoal_module(job: Path) -> torch.nn.Module:
    from shoal.client.models import models

    return models.build(shoal.Job(model="net.py:net", steps=1, folder=job.parent))


@pytest.mark.process
def test_it_says_its_version() -> None:
    code, text = call("--version")
    assert code == 0
    assert re.fullmatch(r"shoal \d+\.\d+\S* \(torch \d\S+, Python 3\S+\)", text.strip())


def test_ctrl_c_detaches_and_the_run_goes_on(cluster: LocalCluster, job: Path) -> None:
    job.write_text(JOB.replace("steps = 6", "steps = 1000000"))
    train = subprocess.Popen(
        [sys.executable, "-m", "shoal.cli", "train", str(job), "--broker", cluster.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert train.stdout is not None
    run = re.findall(r"run (\S+):", train.stdout.readline())[0]
    train.send_signal(signal.SIGINT)
    _, said = train.communicate()
    # Python makes the second of the first when the signal came inside of an import.
    assert train.returncode in (130, -signal.SIGINT)
    assert f"shoal watch {run} --broker {cluster.address}" in said
    assert f"shoal cancel {run} --broker {cluster.address}" in said
    assert "Traceback" not in said
    with shoal.connect(cluster.address) as client:
        goes_on = client.run(run)
        assert goes_on.state().step < 1000000
        assert any(event.HasField("plan") for event in goes_on.watch()), "it is planned"
    code, text = call("logs", run, "--broker", cluster.address)  # of a run that goes on
    assert code == 0
    assert re.search(r"^ +0:\d\d:\d\d  plan of term 1: \d stage", text, re.MULTILINE), text
    for verb in ("export", "eval"):
        code, text = call(verb, run, "--broker", cluster.address)
        assert code == 1
        assert "of 1000000 steps" in text
        assert f"it has no weights before its end; shoal watch {run}" in text
    code, text = call("finish", run, "--broker", cluster.address)
    assert code == 4
    assert f"run {run} makes no rounds" in text
    code, text = call("cancel", run, "--broker", cluster.address)
    assert (code, text.strip()) == (0, f"run {run} is cancelled")
    assert call("watch", run, "--broker", cluster.address)[0] == 1  # it has no result
