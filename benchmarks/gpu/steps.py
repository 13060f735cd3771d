"""Forward and backward of whole models on one device in fp32 and bf16, against the CPU's loss, and
how fast tensors of a link's size come onto the device and off it.

    python benchmarks/gpu/steps.py [--json FILE] [--device cuda]
"""

from __future__ import annotations

import statistics
import time
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.capture.capture import capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import cut
from shoal.examples import gpt, moe

MIB = 1 << 20
PRECISIONS: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device, figures = torch.device(options.device), []
    small = device.type == "cpu"
    sizes = (
        {"layers": 2, "width": 64, "heads": 4} if small else {"layers": 8, "width": 512, "heads": 8}
    )
    torch.manual_seed(0)
    for name, module in (
        ("gpt", gpt.gpt(**sizes, length=128, dropout=0.0)),
        ("moe", moe.moe(**sizes, length=128)),
        ("mixtral", mixtral(sizes["width"], sizes["layers"])),
    ):
        for dtype in PRECISIONS:
            figures += step(name, module, dtype, device, batch=4 if small else 8)
    for size in (1, 16) if small else (1, 16, 256):
        figures += staging(size * MIB, device)
    report("steps on one device", figures, options.json)
    worst = max(f.value for f in figures if f.name.startswith("loss_error"))
    return 0 if worst < 0.02 else 1


def mixtral(width: int, layers: int) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, vocab_size=256,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2,
        max_position_embeddings=128,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def step(
    name: str, module: nn.Module, dtype: Literal["fp32", "bf16"], device: torch.device, batch: int
) -> list[Figure]:
    """Seconds of a step and its loss against the CPU's in the same precision."""
    first, second = ("input_ids", "labels") if name == "mixtral" else ("x", "y")
    ids = torch.randint(0, 256, (batch, 129))
    data = {first: ids[:, :-1], second: ids[:, 1:].contiguous()}
    captured = capture(module, {k: t[:2] for k, t in data.items()}, dtype=dtype)
    graph = captured.graph.bind(batch)
    (stage,) = cut(graph, [(0, len(graph.operators))])
    losses: dict[str, float] = {}
    seconds: list[float] = []
    for kind in dict.fromkeys(("cpu", str(device))):
        ours = StageExecutor(graph, stage, captured.tensors, device=kind)
        there = {k: t.to(kind) for k, t in data.items()}
        for i in range(1 if kind == "cpu" and device.type != "cpu" else 6):
            wait(device)
            started = time.perf_counter()
            loss = ours.forward(0, i, {}, there).results[graph.loss]
            ours.backward(0, i, {})
            wait(device)
            seconds.append(time.perf_counter() - started)
            losses.setdefault(kind, float(loss))
    figure = f"{name}_{dtype}"
    error = abs(losses[str(device)] - losses["cpu"]) / losses["cpu"]
    return [
        Figure(f"step_s_{figure}", statistics.median(seconds[-4:]), "s", "lower"),
        Figure(f"loss_error_{figure}", error, "ratio", "lower"),
    ]


def staging(size: int, device: torch.device) -> list[Figure]:
    """MB/s of a tensor of `size` bytes onto the device and off it, from pageable and pinned memory,
    as the frames of a link are."""
    found = []
    there = torch.empty(size, dtype=torch.uint8, device=device)
    kinds = {"pageable": False, "pinned": True} if device.type == "cuda" else {"pageable": False}
    for kind, pinned in kinds.items():
        here = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for way, source, target in (("on", here, there), ("off", there, here)):
            rate = size / 1e6 / statistics.median(copied(source, target, device) for _ in range(9))
            name = f"staging_{way}_{kind}_{size // MIB}MiB"
            found.append(Figure(name, rate, "MB/s", "higher"))
    return found


def copied(source: Tensor, target: Tensor, device: torch.device) -> float:
    wait(device)
    started = time.perf_counter()
    target.copy_(source, non_blocking=True)
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    raise SystemExit(main())
