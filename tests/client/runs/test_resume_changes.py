"""What becomes of each key of a job that is changed when a run goes on: it is taken, or refused
with a reason, and never passed over."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shoal.client.files import outside
from shoal.client.files.records import record_of, write_run
from shoal.client.runs import resume
from shoal.client.runs.broker_calls import BrokerCalls
from shoal.job import Job, SettingsError
from shoal.job.settings import plain
from shoal.proto.broker_pb2 import Checkpoint, Recalled, RunSpec

NOT = "may not change when a run goes on"
IDLE = "changes nothing with"
AWAY = "expected --job FILE"
TAKEN = ""
CHANGES: dict[str, str] = {
    "name=again": TAKEN,
    "seed=3": NOT,
    "priority=2": TAKEN,
    "version=2": "expected 1",
    "model.factory=b:c": NOT,
    "model.args.width=9": NOT,
    "model.weights=other.safetensors": NOT,
    "model.loss=loss.py:mine": NOT,
    'model.freeze=["a.*"]': NOT,
    'model.fresh=["head.*"]': NOT,
    "model.dtype=bf16": NOT,
    "model.lora={r=8}": NOT,
    'model.sidecars=["x.json"]': NOT,
    "data.kind=tokens": NOT,
    "data.source=u.txt": NOT,
    "data.holdout=0.1": NOT,
    "data.length=8": NOT,
    "data.inputs=ids": NOT,
    "data.tokenizer=bytes": NOT,
    "data.validation=u.txt": NOT,
    "train.steps=80": TAKEN,
    "train.tokens=4096": TAKEN,
    "train.passes=2": TAKEN,
    "train.batch=16": NOT,
    "train.microbatch=4": NOT,
    "train.optimizer=lion": NOT,
    "train.lr=1e-4": TAKEN,
    "train.betas=[0.8,0.9]": TAKEN,
    "train.eps=1e-6": TAKEN,
    "train.momentum=0.5": IDLE,
    'train.no_muon=["a"]': NOT,
    "train.state_dtype=bf16": TAKEN,
    "train.weight_decay=0": TAKEN,
    'train.no_decay=["a"]': TAKEN,
    "train.schedule=linear": TAKEN,
    "train.warmup=3": TAKEN,
    "train.lr_final=0.5": TAKEN,
    "train.clip=0": TAKEN,
    "train.eval_every=3": TAKEN,
    "train.eval_batches=3": TAKEN,
    "train.ema=0.9": TAKEN,
    "train.loss_scale.init_scale=8": 'dtype = "fp16"',
    "train.stop.loss=2.0": TAKEN,
    "plan.stages=2": TAKEN,
    "plan.scheduler=uniform": TAKEN,
    "plan.schedule=gpipe": TAKEN,
    "plan.replicas=2": "sync.kind",
    "plan.recompute=true": TAKEN,
    "plan.replan=false": TAKEN,
    "plan.skip_warmup=3": "skip",
    "codec.default=int8": TAKEN,
    "codec.sync=int8": IDLE,
    "codec.ratio=5": IDLE,
    "codec.feedback=ef21": IDLE,
    "sync.method=powersgd": TAKEN,
    "sync.method=diloco": TAKEN,
    "sync.kind=local": TAKEN,
    "sync.every=5": "sync",
    "sync.options.rank=3": "rank",
    "sync.collective=ring": TAKEN,
    "sync.per_round=3": "federated",
    'recovery.ladder=["checkpoint"]': TAKEN,
    "recovery.warm_spares=2": TAKEN,
    "recovery.lease=30s": TAKEN,
    "output.to=elsewhere/": TAKEN,
    "output.every=3": TAKEN,
    "output.keep=5": TAKEN,
    "output.format=hf": "RUN/sidecars",
    "output.format=peft": "RUN/sidecars",
    "output.push=hf://ann/mine": "no token to write with",
    "log.tensorboard=false": TAKEN,
    'log.wandb={project="fish"}': "pip install wandb",
}
ELSEWHERE = {
    "output.format=hf": AWAY,
    "output.format=peft": AWAY,
    "output.push=hf://ann/mine": AWAY,
    "log.tensorboard=false": AWAY,
    'log.wandb={project="fish"}': AWAY,
}
"""Of a run that was submitted from another machine, where it is another answer."""


def job(folder: Path, **more: Any) -> Job:
    given = Job(
        model={"factory": "a:b", "args": {"width": 8}},
        data={"source": "t.txt", "length": 16},
        train={"steps": 8, "batch": 8, "microbatch": 2},
    )
    return replace(given, folder=folder, **more)


class Broker:
    """One run that has ended, of a job, and a checkpoint of it."""

    access = None

    def __init__(self, own: Job) -> None:
        spec = RunSpec(job=own.resolved(8).to_json(), steps=8)
        self.found = Recalled(spec=spec, checkpoint=Checkpoint(run="r-1", step=4))

    def is_open(self, run: str) -> bool:
        return False

    def recall(self, run: str) -> Recalled:
        return self.found

    def translated(self) -> Any:
        return nullcontext()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job's record, and nothing else of this machine's."""
    manifest = SimpleNamespace(held_out=0, kind="text", training_tokens=4096, length=16)
    manifest.samples = manifest.training_samples = 256
    monkeypatch.setattr(resume, "manifest_of", lambda access, name: manifest)
    monkeypatch.setattr(resume, "resolved", lambda own, found: own.resolved(own.train.steps or 9))
    monkeypatch.setattr(outside, "find_spec", lambda name: None)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs/r-1", record_of("r-1", job(tmp_path).resolved(8), "runs/", "", 0))
    return tmp_path


def prepared(own: Job, *changes: str, other: Job | None = None, to: Path | None = None) -> Any:
    calls = cast("BrokerCalls", Broker(own))
    return resume.prepared(calls, "r-1", changes, other, to, lambda line: None)


def at(table: Any, key: str) -> Any:
    for name in key.split("."):
        table = table[name]
    return table


@pytest.mark.parametrize("where", ["here", "elsewhere"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_taken_or_refused(here: Path, change: str, where: str) -> None:
    if where == "elsewhere":
        (here / "runs/r-1/run.json").unlink()
    says = (ELSEWHERE if where == "elsewhere" else {}).get(change, CHANGES[change])
    if says:
        with pytest.raises(SettingsError, match=says) as refused:
            prepared(job(here), change)
        assert change.partition("=")[0].split(".")[0] in str(refused.value)
        return
    found, key = prepared(job(here), change), change.partition("=")[0]
    now = json.loads(found.spec.job) | {"output": {**json.loads(found.spec.job)["output"]}}
    now["output"]["to"] = found.to
    if key.startswith("log."):
        now = plain(found.own)
    if key in ("train.tokens", "train.passes"):  # which are steps by now
        key = "train.steps"
    assert at(now, key) != at(plain(job(here).resolved(8)), key)


def test_each_matrix_stays_with_its_optimizer(here: Path) -> None:
    muon = job(here).with_changes(["train.optimizer=muon"])
    said = muon.with_changes(['train.no_muon=["a.*"]'])  # as a submission does
    with pytest.raises(SettingsError, match=rf"train\.no_muon.*{NOT}"):
        prepared(said, 'train.no_muon=["head.*"]')
    assert prepared(said, other=muon).own.train.no_muon == ("a.*",)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("data.source=u.txt", "data.source"),
        ("data.tokenizer=bytes", "data.tokenizer"),
        ("model.factory=b:c", "model.factory"),
        ("train.lr=1e-4", ""),
    ],
)
def test_a_job_in_its_place_is_of_the_same_model_and_data(
    here: Path, change: str, key: str
) -> None:
    other = job(here).with_changes([change])
    if key:
        with pytest.raises(SettingsError, match=rf"`{key}` .* {NOT}"):
            prepared(job(here), other=other)
    else:
        assert prepared(job(here), other=other).own.train.lr == 1e-4


@pytest.mark.parametrize("was", ["hf:/cache/of/name", "live:Net"])
def test_what_is_in_a_record_as_fetched_is_what_the_job_names(here: Path, was: str) -> None:
    model = replace(job(here).model, factory=was)
    own = job(here, model=model)
    write_run(here / "runs/r-1", record_of("r-1", own.resolved(8), "runs/", "", 0))
    named = replace(own, model=replace(model, factory="hf://ann/name"))
    assert prepared(own, other=named).own.model.factory == "hf://ann/name"


def test_data_of_a_job_for_anothers_run_is_looked_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "runs/r-1/run.json").unlink()
    asked: list[Any] = []
    monkeypatch.setattr(resume, "_bring_data", lambda access, own, *rest: asked.append(own))
    own = job(here)
    prepared(own, other=own)
    assert asked == [own]


@pytest.mark.parametrize("form", ["hf", "peft"])
def test_what_goes_with_an_export_comes_along(here: Path, form: str) -> None:
    config = here / "runs/r-1/sidecars" / ("config.json" if form == "hf" else "adapter_config.json")
    config.parent.mkdir()
    config.write_text("{}")
    found = prepared(job(here), f"output.format={form}").sidecars
    assert found.resolve() == config.parent
