"""A chat run that goes on is the run that it would have been, whether its samples lie at the broker
or are made here again; what a job names outside is looked for before anything is sent."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.client import connect
from shoal.client.files import outside
from shoal.client.runs import resume
from shoal.job import Job, SettingsError

from ..files.test_pretrained import Lab, lab  # noqa: F401 (a fixture)
from .chats import other_words, write_chats, write_model

STEPS = 12


def job_of(folder: Path, **train: Any) -> Job:
    return Job(
        model={"factory": "hf:model"},
        data={"kind": "chat", "source": "*.jsonl", "length": 64, "holdout": 0.2},
        train={"steps": STEPS, "batch": 2, "microbatch": 1, "lr": 1e-2, "eval_every": 2}
        | {"eval_batches": 1}
        | train,
        plan={"scheduler": "uniform", "stages": 1},
        output={"to": str(folder / "runs"), "every": 2, "keep": 9},
        folder=folder,
    )


def losses(run: Any) -> dict[int, float]:
    return {e.step.step: e.step.outcome.loss for e in run.watch() if e.HasField("step")}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_chat_run_goes_on_with_the_same_samples(lab: Lab, tmp_path: Path) -> None:  # noqa: F811
    write_model(tmp_path / "model", "llama")
    source = write_chats(tmp_path / "chats.jsonl")
    await lab.join("p0")

    def follow() -> None:
        with connect(lab.broker.address) as client:
            whole = client.submit(job_of(tmp_path))
            whole.wait()
            wanted = losses(whole)
            assert len(set(wanted.values())) == STEPS
            short = client.submit(job_of(tmp_path, stop={"loss": 99.0}))
            short.wait()
            done = losses(short)
            assert 2 <= len(done) < STEPS, "it ended early"
            assert done == {n: wanted[n] for n in done}
            further = client.go_on(short.id, ["train.stop={}"])
            further.wait()
            found = losses(further)
            assert max(found) == STEPS - 1
            assert found == {n: wanted[n] for n in found}
            # The samples are made again here.
            kept = min((tmp_path / "runs" / whole.id).glob("checkpoint-*"))
            last = client.go_on(str(kept), to=tmp_path / "runs")
            last.wait()
            assert last.recorder().tokens_per_step == 2 * 64
            assert (last.export(format="hf") / "config.json").is_file()
            assert losses(last) == {n: wanted[n] for n in range(int(kept.name[-6:]), STEPS)}
            # So they are of another tokenizer, and of a file of the same size and time.
            folder, time = tmp_path / "model", source.stat().st_mtime_ns
            shutil.copytree(folder, tmp_path / "before")
            words = other_words()
            words.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
            words.save_pretrained(folder)
            refused(client, kept)
            shutil.copytree(tmp_path / "before", folder, dirs_exist_ok=True)
            text = source.read_text()
            source.write_text(text.replace("When.", "Then."))
            os.utime(source, ns=(time, time))
            assert len(source.read_text()) == len(text)
            refused(client, kept)

    await asyncio.to_thread(follow)


def refused(client: Any, folder: Path) -> None:
    with pytest.raises(SettingsError, match="other data than the checkpoint"):
        client.go_on(str(folder), to=folder.parents[1])


class Asked:
    """A client and a checkpoint of which no more is asked than what it is of."""

    spec, checkpoint = None, SimpleNamespace(run="r-1")

    def is_open(self, run: str) -> bool:
        return False

    def recall(self, run: str) -> Asked:
        return self

    def HasField(self, name: str) -> bool:  # noqa: N802 (as protobuf has it)
        return True


@pytest.mark.parametrize("source", ["r-1", "folder"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('log.wandb={project = "fish"}', r"log\.wandb.*pip install wandb"),
        ("output.push=hf://ann/mine", r"output\.push.*no token to write with"),
    ],
)
def test_what_a_job_names_outside_is_looked_for_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, change: str, says: str
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(outside, "find_spec", lambda name: None)
    kept = Asked()
    monkeypatch.setattr(resume.checkpoints, "is_folder", lambda name: name == "folder")
    monkeypatch.setattr(resume.checkpoints, "read", lambda name: kept)
    with pytest.raises(SettingsError, match=says):
        resume.prepared(kept, source, (change,), job_of(tmp_path), None, print)  # type: ignore[arg-type]
