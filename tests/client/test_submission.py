"""A job is prepared for peers: graph, weights and data, tried before anything is sent."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.client.access import Access
from shoal.client.files.records import read_run
from shoal.client.models import models
from shoal.client.submission import draft, prepare
from shoal.client.uploading import transfer
from shoal.dag.capture.capture import capture
from shoal.dag.transforms.lower import lower
from shoal.job import Job, Model, SettingsError

from .small_models import Tied


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


async def test_transfers_run_inside_a_notebooks_event_loop() -> None:
    async def work(blobs: object) -> str:
        await asyncio.sleep(0)
        return type(blobs).__name__

    assert transfer(Access("127.0.0.1:1", None), work) == "BlobClient"
