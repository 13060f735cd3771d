"""Somebody else's run, taken up by an operator: its job and its checkpoint are data, of which
nothing is imported, read or written on the operator's machine."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from fsspec.core import url_to_fs
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.client import connect
from shoal.client.errors import RecordError
from shoal.client.runs.checkpoints import CheckpointError
from shoal.client.submission import prepare
from shoal.client.uploading import upload
from shoal.job import Job, SettingsError
from shoal.job.settings import Settings, plain
from shoal.net.file_names import is_file_name

from ...client.files.test_pretrained import Lab, Net, lab

__all__ = ["lab"]

FACTORY = "evil.py:net"
EVIL = """
from pathlib import Path
Path("{mark}").write_text("run")
from shoal.tests.client.files.test_pretrained import Net
def net(): return Net()
def loss(output, batch): return output
"""
JOB = {"version": 1, "model": {"factory": FACTORY}, "train": {"steps": 3, "batch": 4}}
MARK = "S0M3WH3R3"
WORDS = {
    "name", "model.args", "model.rename", "model.fresh", "model.freeze", "model.lora",
    "data.inputs", "data.targets", "sync.options", "sync.quorum", "train.no_decay",
    "train.no_muon",
}  # fmt: skip
"""Keys whose free text names nothing on a machine: what goes to people, patterns of names, and
arguments of a factory that is the reader's own."""


def free_texts(cls: type, prefix: str = "") -> Iterator[str]:
    """Every key of the tables that may have a text, be it one of a few words only."""
    for name, hint in get_type_hints(cls).items():
        key = f"{prefix}{name}"
        if name.isupper() or name in getattr(cls, "OURS", ()):
            continue
        if dataclasses.is_dataclass(hint) and issubclass(hint, Settings):  # type: ignore[arg-type]
            yield from free_texts(hint, f"{key}.")  # type: ignore[arg-type]
        elif "str" in str(hint) or "Any" in str(hint):
            yield key


def with_text(key: str, text: str) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(json.dumps(JOB))
    at = table
    *tables, last = key.split(".")
    for name in tables:
        at = at.setdefault(name, {})
    at[last] = text
    return table


def test_every_key_that_may_name_a_place_is_dropped_from_a_strangers_job() -> None:
    seen = 0
    for key in free_texts(Job):
        for text in (f"{MARK}.py:net", [f"{MARK}/*"], MARK):
            table = with_text(key, text)  # type: ignore[arg-type]
            try:
                Job.from_table(table)
            except SettingsError:
                continue
            seen += 1
            left = json.dumps(plain(Job.from_json(json.dumps(table))))
            assert MARK not in left or key in WORDS, f"{key} of a stranger's job is kept: {left}"
    assert seen > 10


@settings(max_examples=50)
@given(st.text(), st.text(), st.text(), st.lists(st.text(min_size=1), max_size=3))
def test_a_strangers_job_names_no_place(
    module: str, source: str, to: str, files: list[str]
) -> None:
    table = json.loads(json.dumps(JOB)) | {"data": {"source": source}, "output": {"to": to}}
    table["model"] = {
        "factory": f"{module}:f", "loss": f"{module}:g", "sidecars": files,
        "weights": files or "init",
    }  # fmt: skip
    try:
        job = Job.from_json(json.dumps(table))
    except SettingsError:
        return
    neutral = Job.from_json(json.dumps(JOB))
    assert (job.model, job.data, job.output) == (neutral.model, neutral.data, neutral.output)
    assert (job.module, job.folder) == (None, Path())


# ---------------------------------------------------------------- taken up by an operator


@dataclasses.dataclass
class Scene:
    """A stranger's run of a job whose every place is evil, and an operator in another folder."""

    run: str
    own: Job
    mark: Path
    outside: Path

    def nothing_happened(self) -> None:
        assert not self.mark.exists(), "the stranger's factory was run"
        assert not self.outside.exists(), "outputs went where the stranger said"


@pytest.fixture
async def scene(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Scene:
    await lab.join("one")
    mark, outside, desk = (lab.folder / n for n in ("mark", "outside", "desk"))
    desk.mkdir()
    (desk / "evil.py").write_text(EVIL.format(mark=mark))  # importable, wherever it is looked up
    (desk / "own.py").write_text(EVIL.format(mark=lab.folder / "own"))
    monkeypatch.chdir(desk)
    job = lab.job(Net(), holdout=0.25)
    table = plain(job)
    table["output"] = {"to": str(outside), "every": 2}
    table["train"]["microbatch"] = 2

    def submit() -> str:
        with connect(lab.broker.address) as client, prepare(Job(**table, module=Net())) as ready:
            spec = upload(client.access, ready)
            evil = plain(ready.job) | {"output": table["output"]}
            evil["model"] |= {"factory": FACTORY, "loss": "evil.py:loss"}
            spec.job = json.dumps(evil)
            run = client.run(client.submit_spec(spec), "stranger")
            run.wait()
            return run.id

    run = await asyncio.to_thread(submit)
    own = Job(**table | {"model": table["model"] | {"factory": "own.py:net"}, "output": {}})
    return Scene(run, dataclasses.replace(own, folder=desk), mark, outside)


async def test_an_operator_takes_up_a_strangers_run_and_evaluates_with_a_job_of_his_own(
    lab: Lab, scene: Scene
) -> None:
    def operate() -> None:
        with connect(lab.broker.address) as client:
            first = client.run(scene.run)
            with pytest.raises(RecordError, match="name the job here"):
                first.evaluate()
            then = client.go_on(scene.run, ["train.steps=5"])
            then.wait()
            assert then.folder == Path("runs") / then.id
            with pytest.raises(RecordError, match="name the job here"):
                then.evaluate()
            with pytest.raises(SettingsError, match="may not change"):
                client.go_on(scene.run, ["train.steps=6", f"model.factory={FACTORY}"])
            then.export()
            scene.nothing_happened()
            wanted = then.evaluate_there()
            assert then.evaluate(job=scene.own)["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            other = dataclasses.replace(scene.own, seed=3)
            with pytest.raises(SettingsError, match="`seed` is 3, and the run had 0"):
                then.evaluate(job=other)
            mine = client.go_on(scene.run, ["train.steps=5"], scene.own, "mine")
            mine.wait()
            assert mine.evaluate()["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            scene.nothing_happened()

    await asyncio.to_thread(operate)


async def test_a_strangers_checkpoint_is_data(lab: Lab, scene: Scene) -> None:
    """Its job, its folder, a run.json beside it, and the names of its files are the stranger's."""

    def operate() -> None:
        with connect(lab.broker.address) as client:
            kept = Path(client.run(scene.run, "gift").keep_checkpoint())
            listed = kept / "checkpoint.json"
            record = json.loads(listed.read_text())
            job = client.recall(scene.run).spec.job
            assert FACTORY in job, "the broker keeps what was submitted"
            record["folder"], record["spec"]["job"] = str(Path().resolve()), job
            listed.write_text(json.dumps(record))
            beside = {"run": scene.run, "job": json.loads(job), "folder": str(Path().resolve())}
            (kept.parent / "run.json").write_text(json.dumps(beside))
            then = client.go_on(str(kept.parent), ["train.steps=5"])
            then.wait()
            with pytest.raises(RecordError, match="name the job here"):
                then.evaluate()
            scene.nothing_happened()
            for name in ("../../escaped", "/tmp/escaped", "a/b", "zip://x::http://127.0.0.1/y", ""):
                record["files"] = {name: {"sha256": "0" * 64, "bytes": 5}}
                listed.write_text(json.dumps(record))
                with pytest.raises(CheckpointError, match="expected plain names"):
                    client.go_on(str(kept), ["train.steps=5"])

    await asyncio.to_thread(operate)
    shutil.rmtree(lab.folder / "desk" / "gift")


NAMES = [
    "../../x",
    "/x",
    "a/b",
    "a\\b",
    "C:x",
    "..",
    ".",
    ".hidden",
    "",
    "~",
    "-rf",
    "zip://x::http://h",
]


@given(st.sampled_from(NAMES) | st.text(max_size=30) | st.text("xé🙂", max_size=255))
@example("é" * 200)
@example("\ud800")
def test_a_name_that_is_taken_stays_in_its_folder_and_fits(name: str) -> None:
    if is_file_name(name):
        assert len(f"{name}.coming-12345678".encode()) <= 255
        assert name == name.strip(" .")
        assert Path("/a/b", name).parent == Path("/a/b")
        assert name not in NAMES
        assert url_to_fs(f"memory://a/b/{name}")[1] == f"/a/b/{name}"


async def test_bytes_of_a_checkpoint_have_another_name_until_their_hash_is_right(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a URL whose server lies about what it has: nothing of it reaches the broker."""
    data = b"not the graph"
    files, root = url_to_fs("memory://gift/checkpoint-000004")
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data) - 1}
    record = {"version": 1, "checkpoint": {}, "spec": {}, "files": {"graph": entry}}
    files.pipe(f"{root}/checkpoint.json", json.dumps(record).encode())
    files.pipe(f"{root}/graph", data)
    monkeypatch.setattr(type(files), "size", lambda self, path: len(data) - 1)

    def operate() -> None:
        with (
            connect(lab.broker.address) as client,
            pytest.raises(CheckpointError, match="graph has another hash"),
        ):
            client.go_on("memory://gift/checkpoint-000004")

    await asyncio.to_thread(operate)
    assert not lab.broker.blobs.sizes([entry["sha256"]]), "more came than was listed"
