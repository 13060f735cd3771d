"""What a job wants of its data, against what there is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.client.job_data import ClientSizes, check_tokenizer, resolved
from shoal.client.submission import draft
from shoal.job import Job, SettingsError
from shoal.peer.data import Manifest, Sampler


@given(
    held_out=st.integers(1, 60),
    batch=st.integers(1, 24),
    batches=st.integers(1, 8),
    seed=st.integers(0, 9),
)
def test_no_held_out_sample_counts_twice_or_a_line_says_so(
    held_out: int, batch: int, batches: int, seed: int
) -> None:
    said: list[str] = []
    manifest = Manifest("arrays", (), (), 100 + held_out, held_out)
    job = Job(
        model={"factory": "m.py:make"},
        seed=seed,
        steps=1,
        batch=batch,
        eval_every=1,
        eval_batches=batches,
    )
    train = resolved(job, manifest, said.append).train
    sampler = Sampler(manifest, seed, train.microbatches)
    count = range(train.evaluation_microbatches)
    found = [sampler.held_out(m, train.microbatch_size) for m in count]
    times = Counter(np.concatenate(found).tolist())
    assert max(times.values()) == 1 or "some count twice" in said[0]
    assert max(times.values()) - min(times.values()) <= 1
    if said and batch <= held_out:
        assert sum(times.values()) > held_out - batch  # none is left out that fits


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model"]
)
@pytest.mark.parametrize("by", ["weights", "file"])
def test_text_is_no_bytes_for_a_model_with_a_tokenizer(tmp_path: Path, name: str, by: str) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "model.safetensors").touch()
    tables: dict[str, str] = {
        "weights": {"factory": "m.py:make", "weights": "llama"},
        "file": {"factory": "m.py:make", "weights": "llama/model.safetensors"},
    }[by]

    def job(**data: str) -> Job:
        return replace(Job(model=tables, data=data, steps=1), folder=tmp_path)

    check_tokenizer(job())  # no tokenizer is there
    (folder / name).touch()
    with pytest.raises(SettingsError, match=rf"data\.tokenizer.*{name}.*tokenizer = \"bytes\""):
        check_tokenizer(job())
    check_tokenizer(job(tokenizer="bytes"))
    check_tokenizer(job(kind="tokens", source="ids.npy"))


def test_only_text_has_a_tokenizer() -> None:
    with pytest.raises(SettingsError, match="are numbers already"):
        Job(model={"factory": "m.py:make"}, data={"kind": "arrays", "tokenizer": "bytes"}, steps=1)


@pytest.mark.parametrize(
    ("trained", "held_out", "local", "alone"),
    [
        ((8, 16), (), {"passes": 1}, ("", "")),
        ((8, 17), (), {"passes": 1}, ("trains on 17", "")),
        ((1, 8), (), {"passes": 1}, ("trains on 1 ", "")),
        ((17,), (), {"steps": 2}, ("", "")),
        ((17,), (), {"steps": 3}, ("trains on 17", "")),
        ((8,), (0, 9), {"passes": 1}, ("", "holds out 9")),
    ],
)
def test_a_client_has_a_sample_alone_where_whole_batches_leave_one(
    trained: tuple[int, ...], held_out: tuple[int, ...], local: dict[str, int], alone: tuple[str]
) -> None:
    job = Job(
        model={"factory": "m.py:make"},
        data={"kind": "arrays", "source": "x.npz", "partition": {"kind": "iid", "clients": 4}},
        sync={"kind": "federated", "local": local},
        rounds=1,
        batch=8,
    )
    for found, words in zip(ClientSizes(trained, held_out).alone(job), alone, strict=True):
        assert words in found
        assert bool(found) == bool(words)
    one = replace(job, train=replace(job.train, batch=1))
    assert ClientSizes((5,)).alone(one).trained


@pytest.mark.parametrize(
    ("role", "text", "problem"),
    [
        ("activation", "zip", "'zip' names no codec"),
        ("sync", "zip", "'zip' names no codec"),
        ("sync", "adatopk", "'adatopk' names no codec"),
        ("sync", "auto", "'auto' names no codec"),
        ("sync", "efd+int8", "expected a codec without ef"),
    ],
)
def test_a_codec_that_there_is_not_is_refused_before_anything_is_read(
    role: str, text: str, problem: str
) -> None:
    job = Job(
        model={"factory": "m.py:make"},
        data={"kind": "arrays", "source": "x.npz"},
        sync={"kind": "local", "method": "diloco"} if role == "sync" else {},
        codec={role: text},
        steps=3,
    )
    with pytest.raises(SettingsError, match=f"codec.{role}.*{problem}"):
        draft(job)
