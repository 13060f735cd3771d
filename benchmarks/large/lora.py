"""A LoRA adapter for a Llama of 1.35B parameters in bfloat16, trained for real by four peers, none
of which could hold all of it.

    python benchmarks/large/lora.py [--json FILE] [--layers 24] [--keep FOLDER]

Every part is a process of its own, and all run on this machine:

base    A folder as Hugging Face has them: a config, and random weights, one layer after another, in
        shards with an index. 2.7 GB.
swarm   A broker, four peers that offer PEER_OFFER each and have one thread, and `shoal train` of a
        job with `model.lora`, for STEPS steps. Peak resident sets are read from the kernel
        (VmHWM), those of a peer's processes added up: `lora_peer_gib` (the largest of the four,
        at most 1.6), `lora_submitter_gib` and `lora_broker_gib` (at most 1.5 each).
plain   The same loop in one process with transformers, peft and torch alone, from the same starting
        adapter: `lora_loss_difference` is the largest relative difference of a step's loss.
loaded  `PeftModel.from_pretrained` over the base with the exported adapter:
        `lora_loaded_difference` is how far the held-out loss then is, relatively, from that of the
        plain loop's model after its last step; `lora_adapter_difference` how far the adapter's
        change has come from the plain loop's, of its norm.

`lora_minutes` is all of it. On a CPU without instructions for bfloat16, torch's own backward of a
bfloat16 product is a hundred times slower than in float32: the plain loop's products cast there,
too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.benchmarks.table import Figure, arguments, report

GIB = 1 << 30
PEERS = 4
PEER_OFFER = "1GiB"
STEPS, BATCH, MICROBATCH, LENGTH = 5, 4, 2, 32
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOST_GIB = {"peer": 1.6, "submitter": 1.5, "broker": 1.5}


def figures(layers: int = 24, keep: Path | None = None) -> list[Figure]:
    """All of it. Raises RuntimeError where a part fails."""
    began = time.monotonic()
    folder = keep or Path(tempfile.mkdtemp(prefix="shoal-lora-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        base, job = folder / "base", folder / "lora.toml"
        if not (base / "config.json").exists():
            _part("base", base, layers)
        job.write_text(_job(base))
        losses, adapter, peaks = _swarm(job, folder)
        _part("plain", job, folder / "plain")
        plain = json.loads((folder / "plain/found.json").read_text())
        _part("loaded", job, adapter, folder / "plain")
        loaded = json.loads((folder / "plain/loaded.json").read_text())
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, plain["losses"], strict=True)]
    print("losses", *(f"{x:.5f}" for x in losses))
    print("plain ", *(f"{x:.5f}" for x in plain["losses"]))
    found = [Figure(f"lora_{role}_gib", peaks[role] / GIB, "GiB", "lower") for role in MOST_GIB]
    held_out = abs(loaded["held_out"] - plain["held_out"]) / abs(plain["held_out"])
    return [
        *found,
        Figure("lora_loss_difference", max(apart), "ratio", "lower"),
        Figure("lora_loaded_difference", held_out, "ratio", "lower"),
        Figure("lora_adapter_difference", loaded["adapter"], "ratio", "lower"),
        Figure("lora_minutes", (time.monotonic() - began) / 60, "min", "lower"),
    ]


def _job(base: Path) -> str:
    lora = ", ".join(f"{k} = {json.dumps(v)}" for k, v in LORA.items())
    return f"""version = 1
[model]
factory = "hf:{base}"
args = {{ dtype = "bfloat16" }}
lora = {{ {lora} }}
[data]
length = {LENGTH}
[train]
steps = {STEPS}
batch = {BATCH}
microbatch = {MICROBATCH}
lr = 1e-3
warmup = 0
schedule = "constant"
eval_every = 0
[output]
to = "{base.parent}/runs"
format = "peft"
"""


def _part(name: str, *given: object) -> None:
    """Runs a part of this file as a process of its own. Raises RuntimeError."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, __file__, name, *map(str, given)], check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with exit code {done.returncode}")
    print(f"{name} took {time.monotonic() - began:.0f} s", flush=True)


# ---------------------------------------------------------------- base


def base(folder: Path, layers: int) -> None:
    """Writes the model shard by shard: no more than one layer is ever here."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    wide, inner, words = (CONFIG[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    count, total, places = layers + 2, 0, dict[str, str]()
    for i in range(count):
        shapes: dict[str, tuple[Any, ...]] = {}
        if i < layers:
            at = f"model.layers.{i}"
            shapes = {f"{at}.self_attn.{k}_proj.weight": (wide, wide) for k in "qkvo"}
            shapes |= {f"{at}.mlp.{k}_proj.weight": (inner, wide) for k in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.weight"] = (wide, inner)
            norms = ("input_layernorm", "post_attention_layernorm")
            shapes |= {f"{at}.{k}.weight": (wide,) for k in norms}
        elif i == layers:
            shapes = {"model.embed_tokens.weight": (words, wide)}
        else:
            shapes = {"model.norm.weight": (wide,), "lm_head.weight": (words, wide)}
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        made = {}
        for key, shape in shapes.items():
            made[key] = torch.empty(shape, dtype=torch.bfloat16)
            if len(shape) == 1:
                made[key].fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(len(places) + len(made))
            made[key].normal_(0.0, 0.02, generator=generator)
        total += sum(t.nbytes for t in made.values())
        save_file(made, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(made, name)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = CONFIG | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    print(f"{total / 2e9:.2f}B parameters in {count} shards, {total / GIB:.2f} GiB")


# ---------------------------------------------------------------- swarm


def _swarm(job: Path, folder: Path) -> tuple[list[float], Path, dict[str, int]]:
    """Losses by step, the exported adapter, and the peak resident set by role."""
    from shoal.sim.processes import LocalCluster

    began = time.monotonic()
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    shutil.rmtree(folder / "cluster", ignore_errors=True)
    flags = ["--memory", PEER_OFFER]
    with LocalCluster(
        peers=PEERS, threads=1, folder=folder / "cluster", join_flags=flags
    ) as cluster:
        environment = os.environ | {"SHOAL_BROKER": cluster.address}
        command = [sys.executable, "-m", "shoal.cli", "train", str(job)]
        with subprocess.Popen(command, cwd=folder, env=environment) as submitter:
            roots = {name: p.pid for name, p in cluster.processes.items()}
            with _peaks(roots | {"submitter": submitter.pid}) as peaks:
                submitter.wait()
        for name in cluster.processes if submitter.returncode else ():
            print(f"--- {name}\n{cluster.log(name, 30)}")
    if submitter.returncode:
        raise RuntimeError(f"shoal train ended with exit code {submitter.returncode}")
    print(f"swarm took {time.monotonic() - began:.0f} s", flush=True)
    for name, size in peaks.items():
        print(f"  {name:<10} {size / GIB:.2f} GiB at its peak")
    (run,) = runs.iterdir()
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    of_role = {role: peaks.get(role, 0) for role in MOST_GIB}
    of_role["peer"] = max(size for name, size in peaks.items() if name.startswith("sim-"))
    return [s["loss"] for s in steps], run / "adapter", of_role


@contextmanager
def _peaks(roots: dict[str, int]) -> Iterator[dict[str, int]]:
    """By name, the peak resident set of a process and of all that it starts, added up; filled while
    it runs."""
    from shoal.sim.processes import started_by

    found: dict[str, dict[int, int]] = {name: {} for name in roots}
    total: dict[str, int] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.1):
            for name, root in roots.items():
                for pid in _family(root, started_by):
                    with suppress(OSError, StopIteration):
                        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                        line = next(x for x in lines if x.startswith("VmHWM"))
                        found[name][pid] = int(line.split()[1]) * 1024

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield total
    finally:
        ended.set()
        thread.join()
        total |= {name: sum(sizes.values()) for name, sizes in found.items()}


def _family(root: int, started_by: Any) -> list[int]:
    found = [root]
    for pid in found:
        found += started_by(pid)
    return found


# ---------------------------------------------------------------- plain


def plain(job_file: Path, folder: Path) -> None:
    """The loop of one process; leaves its losses, the held-out loss and the adapter."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import save_file

    from shoal.sim.plain import oracle

    folder.mkdir(parents=True, exist_ok=True)
    job, reader = _read(job_file, folder)
    model = get_peft_model(_base(job_file), LoraConfig(task_type="CAUSAL_LM", **LORA))
    state = {n: p for n, p in model.named_parameters() if p.requires_grad}
    start = _starting_adapter(job)
    with torch.no_grad():
        for name, parameter in state.items():
            parameter.copy_(start[name.removeprefix("base_model.model.")])
    loop = _Loop(model)
    microbatches = BATCH // MICROBATCH
    with _products():
        seen = oracle.train(
            loop,
            lambda step, m: reader.batch(step, m, MICROBATCH),
            job.train,
            steps=STEPS,
            microbatches=microbatches,
        )
        found = {"losses": seen.losses, "held_out": _held_out(loop, reader)}
    (folder / "found.json").write_text(json.dumps(found))
    mine = {n.replace(".default.", "."): p.detach() for n, p in state.items()}
    save_file(mine, folder / "adapter.safetensors")
    begun = {f"base_model.model.{n}".replace(".default.", "."): t for n, t in start.items()}
    save_file(begun, folder / "start.safetensors")


def loaded(job_file: Path, adapter: Path, folder: Path) -> None:
    """What the exported adapter is worth to somebody who loads it with peft."""
    from peft import PeftModel
    from safetensors.torch import load_file

    _, reader = _read(job_file, folder)
    theirs = load_file(adapter / "adapter_model.safetensors")
    ours, start = (load_file(folder / f"{n}.safetensors") for n in ("adapter", "start"))
    assert theirs.keys() == ours.keys(), f"{theirs.keys() ^ ours.keys()} are in one of them only"
    changed = sum(float((ours[n] - start[n]).square().sum()) for n in ours)
    apart = sum(float((ours[n] - theirs[n]).square().sum()) for n in ours)
    model = PeftModel.from_pretrained(_base(job_file), adapter)
    with _products():
        held_out = _held_out(_Loop(model), reader)
    found = {"held_out": held_out, "adapter": (apart / changed) ** 0.5}
    (folder / "loaded.json").write_text(json.dumps(found))


def _base(job_file: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job_file.parent / "base", dtype=torch.bfloat16)


def _read(job_file: Path, folder: Path) -> tuple[Any, Any]:
    """The job and its samples."""
    from shoal.client.job_data import JobData, read_data, resolved
    from shoal.job import Job
    from shoal.peer.data.reader import Reader

    job = Job.from_toml(job_file)
    data: JobData = read_data(job, folder / "data", print, None)
    shards = data.shards.__getitem__
    reader = Reader(data.manifest, shards, seed=job.seed, microbatches=BATCH // MICROBATCH)
    return resolved(job, data.manifest), reader


def _starting_adapter(job: Any) -> dict[str, Any]:
    """How the adapter begins in the run: by its recipe, without the base."""
    from shoal.client.models import models
    from shoal.dag.ir.recipe import make

    recipe = models.outline(job).recipe
    assert recipe is not None, "peft's initialisation is recorded"
    return {n: make(i, recipe.seed) for n, i in recipe.tensors.items() if ".lora_" in n}


def _held_out(loop: Any, reader: Any) -> float:
    import torch

    with torch.no_grad():
        return float(loop(**reader.held_out(0, MICROBATCH))["loss"])


def _Loop(model: Any) -> Any:  # noqa: N802  # it makes a module; torch is imported late
    import torch
    import torch.nn.functional as F

    class Loop(torch.nn.Module):
        """Next tokens, mean over all of them."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.model(input_ids=x, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            return {"loss": loss, "weight": torch.tensor(float(y.numel()))}

    return Loop()


@contextmanager
def _products() -> Iterator[None]:
    """bfloat16 products in float32, where the processor has no instructions for them."""
    import torch
    import torch.nn.functional as F

    class Wide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(weight)
            return (x.float() @ weight.float().t()).to(x.dtype)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return (grads[0].float() @ weight.float()).to(grads[0].dtype), None

    own = F.linear

    def linear(x: Any, weight: Any, bias: Any = None) -> Any:
        if weight.dtype is torch.bfloat16 and bias is None and not weight.requires_grad:
            return Wide.apply(x, weight)  # type: ignore[no-untyped-call]
        return own(x, weight, bias)

    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        yield
        return
    F.linear = linear  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = own


_PARTS = {"base": base, "plain": plain, "loaded": loaded}


def main(given: Sequence[str]) -> None:
    if given and given[0] in _PARTS:
        took = [int(x) if x.isdigit() else Path(x) for x in given[1:]]
        _PARTS[given[0]](*took)  # type: ignore[operator]
        return
    parser = arguments(__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave everything there")
    options = parser.parse_args(given)
    report("large_lora", figures(options.layers, options.keep), options.json)


if __name__ == "__main__":
    main(sys.argv[1:])
