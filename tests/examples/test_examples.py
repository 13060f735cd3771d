"""Every example builds from its own job file, learns eagerly, and can be captured."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.client.models import models
from shoal.client.models.state_dicts import tied_names
from shoal.dag.capture.capture import capture
from shoal.examples import resnet_digits, unet
from shoal.job import Job
from shoal.sim.options import Setting, SimOptions

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
JOBS = sorted(path.stem for path in EXAMPLES.glob("*.toml"))
SMALL_BY_DAY = {
    *("encoder_decoder", "hf_deepseek_v3", "hf_gpt2", "hf_llama"),
    *("moe", "resnet_digits", "unet"),
}
"""Those whose small forms are captured and trained in tests/sim/virtual/test_exactness.py."""
SCENARIOS = sorted(EXAMPLES.glob("federated/*.toml"))


def load(name: str) -> Job:
    if name.startswith("hf_"):
        pytest.importorskip("transformers")
    if "lora" in name:
        pytest.importorskip("peft")
    return Job.from_toml(EXAMPLES / f"{name}.toml")


@cache
def built(name: str) -> nn.Module:
    """The module of an example, as it begins: to be copied by who changes it."""
    return models.build(load(name))


def microbatch(job: Job, size: int) -> dict[str, Tensor]:
    """Random samples of the shapes that the job's data has, by argument name."""
    rng = torch.Generator().manual_seed(0)
    text = "gpt" in job.model.factory or job.model.factory.startswith("hf:")
    if job.data.kind == "arrays" and not text:
        side = 8 if "digits" in job.model.factory else 32
        x = torch.randn(size, 1, side, side, generator=rng)
        if side == 8:
            return {"x": x, "y": torch.randint(0, 10, (size,), generator=rng)}
        return {"x": x, "y": torch.randint(-1, 2, x.shape, generator=rng).float()}
    length = 64 if job.data.kind == "arrays" else job.data.length
    ids = torch.randint(0, 256, (size, job.model.args.get("length", length) + 1), generator=rng)
    found = {job.data.inputs: ids[:, :-1]}
    return found | ({job.data.targets: ids[:, 1:]} if job.data.targets else {})


def loss_of(output: object) -> Tensor:
    loss = output if isinstance(output, Tensor) else output["loss"]  # type: ignore[index]
    assert isinstance(loss, Tensor)
    return loss


def test_there_is_an_example_of_every_kind() -> None:
    assert set(JOBS) >= {
        "encoder_decoder",
        "federated_digits",
        "federated_lora",
        "federated_text",
        "federated_writers",
        "gpt_bytes",
        "hf_deepseek_v3",
        "hf_gpt2",
        "hf_llama",
        "hf_lora",
        "hf_mixtral",
        "hf_qwen3_moe",
        "moe",
        "resnet_digits",
        "unet",
    }


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_scenario_of_the_examples_finds_its_job(path: Path) -> None:
    setting = Setting.of(SimOptions(scenario=str(path)))
    assert setting.job.sync.kind == "federated"
    assert setting.job.plan.replicas == setting.peers, "each peer plays a share of the clients"


@pytest.mark.parametrize("name", JOBS)
def test_an_example_learns_one_microbatch(name: str) -> None:
    job = load(name)
    module = copy.deepcopy(built(name))
    batch = microbatch(job, 4)
    with models.ready(module, job):
        torch.manual_seed(0)
        first = loss_of(module(**batch))
        first.backward()
        wanted = [p for p in module.parameters() if p.requires_grad]
        trained = [p for p in module.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in trained:
                assert p.grad is not None
                p -= 0.01 * p.grad / max(1.0, float(p.grad.norm()))
        assert len(trained) == len(wanted)
        torch.manual_seed(0)  # the same dropout: else its luck is larger than the gain
        assert loss_of(module(**batch)) < first


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SMALL_BY_DAY else n for n in JOBS]
)
def test_an_example_is_captured_for_any_batch_size(name: str) -> None:
    job = load(name)
    module = built(name)
    with models.ready(module, job):
        graph = capture(module, microbatch(job, 2)).graph
    assert {p.name for p in graph.parameters} <= set(dict(module.named_parameters()))
    for size in (1, 3):
        assert graph.bind(size).spec[graph.loss].shape == ()


@pytest.mark.parametrize("name", JOBS)
def test_an_example_starts_from_the_same_weights_under_the_same_seed(name: str) -> None:
    first, second = built(name).state_dict(), models.build(load(name)).state_dict()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_tied_and_normed_parameters_are_what_they_should_be() -> None:
    gpt = built("gpt_bytes")
    assert tied_names(gpt)["head.weight"] == "bytes.weight"
    resnet = built("resnet_digits")
    assert any(name.endswith("running_mean") for name, _ in resnet.named_buffers())


def test_the_data_writers_write_what_their_jobs_read(tmp_path: Path) -> None:
    from shoal.peer.data.sources import resolve

    resnet_digits.write_digits(tmp_path / "digits.npz")
    unet.write_discs(tmp_path / "discs.npz", count=20)
    for name, kind in (("digits.npz", "int64"), ("discs.npz", "float32")):
        manifest, _ = resolve(tmp_path / "out", kind="arrays", source=str(tmp_path / name))
        assert manifest.fields["x"].dtype == "float32"
        assert manifest.fields["y"].dtype == kind


def test_examples_are_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) < 150, path.name
