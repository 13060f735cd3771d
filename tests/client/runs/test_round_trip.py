"""Trained in four stages, exported in each format, loaded strictly by plain torch, transformers or
peft: the held-out loss is what the run itself said at its end. Checkpoints load so, too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from shoal.client import Client, Run, connect
from shoal.client.models import models
from shoal.job import Job
from shoal.peer.data.manifest import Manifest
from shoal.peer.data.reader import Reader

from ..files.test_pretrained import Lab, lab  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STEPS = 3
STAGES = 4
TRAIN = {"steps": STEPS, "batch": 8, "microbatch": 2, "eval_every": STEPS, "eval_batches": 1}


class Net(nn.Module):
    """A tied pair, a norm with statistics, buffers of each kind under one name and under two, and
    parameters that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.still = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 256, bias=False)
        self.head.weight = self.tokens.weight
        self.unread = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("shift", torch.full((8,), 0.25))
        self.shared = nn.Module()
        self.shared.register_buffer("again", self.shift)
        self.shared.register_buffer("saved", self.scale)
        self.table = torch.linspace(0, 1, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.still(self.tokens(x) * self.scale + self.shift + self.table)
        h = self.norm(torch.tanh(self.mix(h)).transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Trained:
    """A run that is over, its events, and its job."""

    def __init__(self, client: Client, run: Run, job: Job) -> None:
        steps = [e.step for e in run.watch() if e.HasField("step")]
        run.checked(run.state())
        run.keep_checkpoint()
        self.client, self.run, self.job = client, run, job
        self.loss = steps[-1].evaluation.loss

    def agrees(self, loss: float) -> None:
        """Asserts that a loss is the run's."""
        assert loss == pytest.approx(self.loss, rel=1e-6)

    @torch.no_grad()
    def held_out(self, module: nn.Module) -> float:
        """The loss of a module over what the run evaluated, by a loop of its own."""
        blobs = self.client.run(self.run.id).client  # only to read what was submitted
        record = json.loads((self.run.folder / "run.json").read_text())
        folder = self.run.folder / "data"
        folder.mkdir(exist_ok=True)
        manifest, size = _data(blobs, record["data"], folder), self.job.train.microbatch_size
        job = replace(self.job, train=replace(self.job.train, steps=STEPS))
        each = job.train.microbatches
        reader = Reader(manifest, folder.joinpath, seed=job.seed, microbatches=each)
        module.eval()
        total = weight = 0.0
        with models.ready(module, job):
            for m in range(each):
                made = module(**reader.held_out(m, size))
                loss = made if isinstance(made, Tensor) else made["loss"]
                own = 1.0 if isinstance(made, Tensor) else float(made.get("weight", 1.0))
                total, weight = total + own * float(loss), weight + own
        return total / weight


def _data(client: Client, hash: str, folder: Path) -> Manifest:
    from shoal.client.uploading import transfer

    manifest = Manifest.from_json(transfer(client.access, lambda blobs: blobs.fetch(hash)))

    async def fetch(blobs: Any) -> None:
        for shard in manifest.shards:
            await blobs.fetch_to(shard.hash, folder / shard.hash, most_bytes=shard.size_bytes)

    transfer(client.access, fetch)
    return manifest


async def trained(lab: Lab, job: Job, check: Callable[[Trained], None]) -> None:  # noqa: F811
    """Trains a job in four stages, and checks what came of it."""
    await asyncio.gather(*(lab.join(f"p{i}") for i in range(STAGES)))

    def follow() -> None:
        with connect(lab.broker.address) as client:
            check(Trained(client, client.submit(job), job))

    await asyncio.to_thread(follow)


def of(lab: Lab, source: Path, **tables: Any) -> Job:  # noqa: F811
    (lab.folder / "text.bin").write_bytes(bytes(range(256)) * 16)
    given = {
        "data": {"source": str(lab.folder / "text.bin"), "length": 8, "holdout": 0.2},
        "train": TRAIN,
        "plan": {"scheduler": "uniform", "stages": STAGES},
        "output": {"to": str(lab.folder / "runs"), "every": STEPS},
    }
    return Job(**{**given, "folder": source, **tables})


def checkpoint(found: Trained) -> dict[str, Tensor]:
    return load_file(found.run.folder / f"checkpoint-{STEPS:06d}" / "model.safetensors")


async def test_the_state_dict_comes_back_exactly(lab: Lab) -> None:  # noqa: F811
    torch.manual_seed(0)
    module = Net()

    def check(found: Trained) -> None:
        state = module.state_dict()
        for weights in (load_file(found.run.export()), checkpoint(found)):
            assert weights.keys() == state.keys()
            assert {n: t.dtype for n, t in weights.items()} == {
                n: t.dtype for n, t in state.items()
            }
            torch.manual_seed(0)
            fresh = Net()
            fresh.load_state_dict(weights)  # strict
            found.agrees(found.held_out(fresh))
        again = Net()
        found.run.load_into(again)
        found.agrees(found.held_out(again))
        found.agrees(found.run.evaluate(Net())["loss"])
        with found.run._brought() as first:  # as another process with the same folder does
            assert load_file(found.run.export()).keys() == state.keys()
            assert all(torch.equal(first[name], weights[name]) for name in state)
        assert not list(found.run.folder.glob(".parts*"))
        resumed = found.client.go_on(
            str(found.run.folder), ["train.steps=4"], to=lab.folder / "more"
        )
        assert resumed.wait().step == 4

    await trained(lab, of(lab, lab.folder, model={"factory": "live:Net"}, module=module), check)


# ---------------------------------------------------------------- Hugging Face

LLAMA: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 32}
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama, tied": ("llama", LLAMA | {"tie_word_embeddings": True}),
    "gpt2": ("gpt2", GPT2),
    "qwen2": ("qwen2", LLAMA),
    "mixtral": ("mixtral", LLAMA | EXPERTS),
    "qwen3_moe": ("qwen3_moe", LLAMA | EXPERTS | {"moe_intermediate_size": 8}),
}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


def of_folder(lab: Lab, kind: str, sizes: dict[str, Any], **tables: Any) -> Job:  # noqa: F811
    """The job of a folder of transformers with weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    at = lab.folder / "base"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(at)
    model = {"factory": f"hf:{at}", **tables.pop("model", {})}
    return of(lab, lab.folder, model=model, **tables)


def evaluations(found: Trained) -> None:
    """Here, and where the peers are."""
    found.agrees(found.run.evaluate()["loss"])
    found.agrees(found.run.evaluate_there()["loss"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ZOO)
async def test_a_model_of_the_zoo_comes_back(lab: Lab, name: str) -> None:  # noqa: F811
    kind, sizes = ZOO[name]
    job = of_folder(lab, kind, sizes)

    def check(found: Trained) -> None:
        transformers = pytest.importorskip("transformers")
        whole = found.run.export(format="hf")
        found.agrees(found.held_out(transformers.AutoModelForCausalLM.from_pretrained(whole)))
        plain = models.build(job)
        plain.load_state_dict(load_file(found.run.export(format="safetensors")))
        found.agrees(found.held_out(plain))
        plain.load_state_dict(checkpoint(found))
        evaluations(found)

    await trained(lab, job, check)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("more", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}])
async def test_an_adapter_comes_back(lab: Lab, more: dict[str, Any]) -> None:  # noqa: F811
    job = of_folder(lab, *ZOO["llama, tied"], model={"lora": LORA | more})

    def check(found: Trained) -> None:
        transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        load = transformers.AutoModelForCausalLM.from_pretrained
        found.agrees(found.held_out(load(found.run.export(format="hf"))))
        base = load(lab.folder / "base")
        alone = found.run.export(format="peft")
        found.agrees(found.held_out(peft.PeftModel.from_pretrained(base, alone).get_base_model()))
        plain = models.build(job)
        plain.load_state_dict(load_file(found.run.export(format="safetensors")))
        found.agrees(found.held_out(plain))
        plain.load_state_dict(checkpoint(found))
        evaluations(found)

    await trained(lab, job, check)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_an_adapter_over_8_bits_is_merged_into_the_base_as_it_was(lab: Lab) -> None:  # noqa: F811
    """The run's losses are those of the rounded base; all that leaves it has the base unrounded."""
    model = {"lora": LORA, "frozen_dtype": "int8"}
    job = of_folder(lab, *ZOO["llama, tied"], model=model)

    def check(found: Trained) -> None:
        transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
        load = transformers.AutoModelForCausalLM.from_pretrained
        base, merged = load(lab.folder / "base"), load(found.run.export(format="hf")).state_dict()
        trained = load_file(found.run.export(format="safetensors"))
        factor = LORA["lora_alpha"] / LORA["r"]  # type: ignore[operator]
        for name, weight in base.state_dict().items():
            layer = name.removesuffix(".weight")
            if (low := trained.get(f"{layer}.lora_A.default.weight")) is not None:
                weight = weight + factor * trained[f"{layer}.lora_B.default.weight"] @ low
            torch.testing.assert_close(merged[name], weight)
        plain = models.build(job)
        for weights in (trained, checkpoint(found)):
            plain.load_state_dict(weights)
        found.agrees(found.run.evaluate_there()["loss"])
        with torch.no_grad():
            for weight in base.parameters():
                if weight.dim() == 2:
                    scale = weight.abs().amax(1, keepdim=True) / 127
                    weight.copy_((weight / scale).round() * scale)
        alone = found.run.export(format="peft")
        found.agrees(found.held_out(peft.PeftModel.from_pretrained(base, alone).get_base_model()))
        apart = abs(found.run.evaluate()["loss"] - found.loss) / found.loss
        assert 1e-6 < apart < 1e-2, "evaluated here, the base is as it is"

    await trained(lab, job, check)


TEXTS = [p.stem for p in sorted(EXAMPLES.glob("*.toml")) if Job.from_toml(p).data.kind == "text"]
"""Examples whose data is text."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TEXTS)
async def test_an_example_comes_back(lab: Lab, name: str) -> None:  # noqa: F811
    job = Job.from_toml(EXAMPLES / f"{name}.toml")
    tables = {"train": TRAIN, "plan": {"scheduler": "uniform", "stages": STAGES}}
    own = of(lab, EXAMPLES, **tables, model=vars(job.model))
    job = replace(own, data=replace(job.data, length=16, source=own.data.source, holdout=0.2))

    def check(found: Trained) -> None:
        plain = models.build(job)
        plain.load_state_dict(load_file(found.run.export(format="safetensors")))
        found.agrees(found.held_out(plain))
        plain.load_state_dict(checkpoint(found))
        found.agrees(found.run.evaluate()["loss"])

    await trained(lab, job, check)
