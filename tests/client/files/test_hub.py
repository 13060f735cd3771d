"""Models from a Hub and pushed to one, by the real library against a Hub of the test's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import load

from shoal.client.errors import ClientError
from shoal.client.files.hub import PushError, can_push, fetched, push
from shoal.client.runs.session import Client
from shoal.job import Job, SettingsError
from shoal.sim.processes import LocalCluster
from shoal.tests.client.files.hub_server import REVISION, TOKEN, Hub, serving_hub

LLAMA = (Path(__file__).parents[3] / "examples" / "hf_llama" / "config.json").read_bytes()


def at(patch: pytest.MonkeyPatch, address: str) -> None:
    """Have the library go there: it reads HF_ENDPOINT once, when it is imported."""
    patch.setattr(constants, "ENDPOINT", address)
    of_file = address + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", of_file)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serving_hub() as served:
        at(monkeypatch, served.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        served.repositories["ann/small"] = {
            "config.json": LLAMA,
            "README.md": b"small",
            "x.h5": b"no",
        }
        yield served


def job(factory: str = "hf://ann/small", **output: Any) -> Job:
    return Job(model=factory, steps=1, output=output)


def nothing(line: str) -> None: ...


def test_a_model_of_a_hub_is_its_folder_from_then_on(hub: Hub) -> None:
    said: list[str] = []
    found = fetched(job(), said.append)
    folder = Path(found.model.factory.removeprefix("hf:"))
    assert folder.name == REVISION
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert said == ["fetching ann/small"]
    assert fetched(found, nothing) is found


def test_a_revision_is_fetched_and_what_was_fetched_needs_no_network(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetched(job(f"hf://ann/small@{REVISION}"), nothing)
    at(monkeypatch, nobody())
    assert fetched(job(f"hf://ann/small@{REVISION}"), nothing).model == first.model


def nobody() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def refusal(of: Job, check: Any = None) -> str:
    with pytest.raises(SettingsError) as caught:
        check(of) if check else fetched(of, nothing)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_without_a_network_one_line_says_so(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, address := nobody())
    text = refusal(job())
    assert text.startswith(f'`model.factory` is "hf://ann/small": {address} does not answer')
    assert "a folder on this disk is hf:DIR" in text


def test_what_is_not_there_is_named(hub: Hub) -> None:
    assert "has none of that name" in refusal(job("hf://ann/large"))
    assert "no such revision" in refusal(job("hf://ann/small@old"))
    assert "expected hf://ORG/NAME" in refusal(job("hf://small"))
    with pytest.raises(SettingsError, match=r"output\.push"):
        job(push="s3://x")


def test_weights_of_a_hub_in_the_older_form_are_fetched_too(hub: Hub) -> None:
    hub.repositories["ann/small"]["pytorch_model.bin"] = b"weights"
    folder = Path(fetched(job(), nothing).model.factory.removeprefix("hf:"))
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "pytorch_model.bin"]


# ---------------------------------------------------------------- push


def test_push_without_a_right_token_is_refused_before_training(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = job("a:b", push="hf://ann/mine")
    assert "there is no token to write with" in refusal(wanted, can_push)
    with pytest.raises(SettingsError, match="no token to write with"):
        Client.submit(object(), wanted)  # type: ignore[arg-type]  # before anything of a client
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "answers 401: is the token (HF_TOKEN) right?" in refusal(wanted, can_push)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    can_push(wanted)
    assert "no @REVISION" in refusal(job("a:b", push="hf://ann/mine@main"), can_push)
    can_push(job("a:b"))
    can_push(job("a:b", push="hf://sea/mine"))
    said = refusal(job("a:b", push="hf://bob/mine"), can_push)
    assert "writes for ann and sea, not bob" in said
    assert "cannot have -- or .." in refusal(job("a:b", push="hf://ann/a--b"), can_push).lower()
    hub.role = "read"
    assert "may read only" in refusal(wanted, can_push)


def test_a_folder_and_a_file_are_pushed_in_one_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "model" / "more").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_bytes(LLAMA)
    (tmp_path / "model" / "more" / "a").write_bytes(b"a")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    written = [tmp_path / "model", tmp_path / "model.safetensors"]
    assert push("hf://ann/mine", written, "run r-1") == f"{hub.address}/ann/mine"
    assert hub.repositories["ann/mine"] == {
        "config.json": LLAMA,
        "more/a": b"a",
        "model.safetensors": b"weights",
    }
    assert sum("commit" in path for path in hub.asked) == 1
    at(monkeypatch, nobody())
    with pytest.raises(PushError, match=r"is written, and not pushed: .* does not answer"):
        push("hf://ann/mine", written, "run r-1")
    assert issubclass(PushError, ClientError)


def test_nobody_else_is_told_where_it_is_pushed() -> None:
    text = job(push="hf://ann/mine").to_json()
    assert json.loads(text)["output"]["push"] == ""


JOB = """
version = 1
[model]
factory = "hf://ann/small"
[data]
kind = "text"
length = 16
[train]
steps = 2
batch = 4
microbatch = 2
eval_every = 0
[output]
format = "hf"
push = "hf://ann/mine"
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
def test_a_model_comes_from_a_hub_and_goes_to_one(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    own = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "hub")}
    with LocalCluster(peers=1, folder=tmp_path / "cluster") as cluster:
        program = [sys.executable, "-m", "shoal.cli", "train", "job.toml"]
        env = os.environ | own | {"SHOAL_BROKER": cluster.address}
        done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = tmp_path.glob("runs/*/model")
    here = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.repositories["ann/mine"] == here
    assert json.loads(here["config.json"])["model_type"] == "llama"
    assert load(here["model.safetensors"])
    [record] = tmp_path.glob("runs/*/run.json")
    assert json.loads(record.read_text())["job"]["model"]["factory"].endswith(REVISION)
