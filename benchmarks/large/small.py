"""What a submission costs before anything is sent: capture of 32 and of 80 layers without weights,
and a small job from the command to its plan.

- `capture_32_seconds`, `capture_80_seconds`, `capture_32_gib`, `capture_80_gib`: `dag.capture` of
  Llama 3.1 of 8B and 70B parameters on `meta`, without the import of transformers; the peak is
  that of the process, imports included. `capture_layers_ratio`: 80 layers over 32; blocks that
  repeat are exported once, so it is near 1 and not 2.5.
- `submit_seconds_gpt_bytes`: `shoal plan examples/gpt_bytes.toml --cluster testbed-8.toml`, the
  second of two runs. Where it goes is printed: loading Python and torch, data and module, capture,
  trial, search.
- `plan_gpt2_seconds`, `plan_gpt2_gib`: the same for a live GPT-2 of 124M parameters, 8 x 256.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from shoal.benchmarks.large.child import SHOAL, Ran, run
from shoal.benchmarks.table import Figure

__all__ = ["figures"]

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "sim" / "scenarios" / "testbed-8.toml"
LENGTH = 1024


def figures() -> list[Figure]:
    """See the module."""
    found: list[Figure] = []
    seconds = {}
    for model, layers in (("8b", 32), ("70b", 80)):
        ran = _ran([sys.executable, __file__, model])
        seconds[layers] = float(ran.output.split()[-1])
        print(f"  {layers} layers: {seconds[layers]:.1f} s, {ran.gib:.2f} GiB", flush=True)
        found += [
            Figure(f"capture_{layers}_seconds", seconds[layers], "s", "lower"),
            Figure(f"capture_{layers}_gib", ran.gib, "GiB", "lower"),
        ]
    found.append(Figure("capture_layers_ratio", seconds[80] / seconds[32], "ratio", "lower"))
    job = str(ROOT / "examples" / "gpt_bytes.toml")
    for _ in range(2):
        ran = _ran([SHOAL, "plan", job, "--cluster", str(CLUSTER)])
    print(f"  gpt_bytes: {ran.seconds:.1f} s, {ran.gib:.2f} GiB", flush=True)
    print(_ran([sys.executable, __file__, "where", job]).output, flush=True)
    found.append(Figure("submit_seconds_gpt_bytes", ran.seconds, "s", "lower"))
    ran = _ran([sys.executable, __file__, "gpt2"])
    print(f"  GPT-2 124M: {ran.seconds:.1f} s, {ran.gib:.2f} GiB", flush=True)
    return [
        *found,
        Figure("plan_gpt2_seconds", ran.seconds, "s", "lower"),
        Figure("plan_gpt2_gib", ran.gib, "GiB", "lower"),
    ]


def _ran(command: list[str]) -> Ran:
    ran = run(command)
    if ran.status:
        raise SystemExit(ran.output)
    return ran


# ---------------------------------------------------------------- in a process of its own


def _capture(model: str) -> None:
    """Prints the seconds of one capture."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, LlamaConfig

    from shoal.benchmarks.large.models import CONFIGS
    from shoal.client.models.losses import with_loss
    from shoal.dag.capture.capture import capture

    given = {k: v for k, v in CONFIGS[model].items() if k not in ("model_type", "architectures")}
    with torch.device("meta"):
        causal: Any = AutoModelForCausalLM  # its from_config has no annotations
        module: nn.Module = causal.from_config(LlamaConfig(**given))
        text = torch.zeros(2, LENGTH, dtype=torch.long)
    module.__class__ = with_loss(type(module), "x", "y")
    began = time.perf_counter()
    graph = capture(module, {"x": text, "y": text}).graph
    took = time.perf_counter() - began
    print(f"{len(graph.operators)} operators in {took:.2f}")


def _where(job: str) -> None:
    """Prints where the seconds of a plan go."""
    began = time.perf_counter()
    from shoal.client import submission
    from shoal.client.models import models
    from shoal.job import Job
    from shoal.sim.scenario.scenario import Scenario
    from shoal.sim.simulate import preview_cluster

    took = {"imports": time.perf_counter() - began}

    def timed(name: str, where: object, function: str) -> None:
        plain = getattr(where, function)

        def call(*args: object, **kwargs: object) -> object:
            start = time.perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                took[name] = took.get(name, 0.0) + time.perf_counter() - start

        setattr(where, function, call)

    timed("data", submission, "_data")
    timed("capture", submission, "capture")
    timed("trial of the data", models, "check_takes")
    timed("trial of divisions", submission, "_divisions")
    start = time.perf_counter()
    drafted = submission.draft(Job.from_toml(Path(job)))
    took["module and the rest"] = time.perf_counter() - start - sum(list(took.values())[1:])
    start = time.perf_counter()
    preview_cluster(Scenario.from_toml(CLUSTER, job=Path(job)), *drafted)
    took["search"] = time.perf_counter() - start
    print("\n".join(f"    {name:<20} {seconds:5.2f} s" for name, seconds in took.items()))


def _gpt2() -> None:
    """Plans a live GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from shoal.client.submission import draft
    from shoal.job import Job
    from shoal.sim.scenario.scenario import Scenario
    from shoal.sim.simulate import preview_cluster

    job = Job(model=GPT2LMHeadModel(GPT2Config()), data={"length": 256}, batch=8, steps=2)
    answer = preview_cluster(Scenario.from_toml(CLUSTER), *draft(job))
    print("a plan" if answer.HasField("plan") else answer.reason.text)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["where", job]:
            _where(job)
        case ["gpt2"]:
            _gpt2()
        case [model]:
            _capture(model)
        case _:
            sys.exit(f"run it as: python {Path(__file__).with_name('large.py')} --only small")
