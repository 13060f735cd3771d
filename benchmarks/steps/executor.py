"""Running a stage costs what eager code costs: a whole GPT as one stage against the plain module.

    python benchmarks/steps/executor.py [--json FILE] [--pairs N] [--device cuda]

Forward and backward of one microbatch, gradients dropped in between. Both run in one process, one
iteration of each in turn and in changing order; a figure is the median of the ratios of neighbours,
so that a slow minute of the machine hits both sides. Seconds are wall clock.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.capture.capture import capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import cut
from shoal.examples.gpt import gpt

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 12, 256, 8, 128, 8


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="measured pairs per figure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    figures: list[Figure] = []
    for dropout, name in ((0.0, ""), (0.1, "_dropout")):
        eager, ours = contestants(dropout, torch.device(options.device))
        for _ in range(3):
            difference = abs(float(eager()) - float(ours()))
        if dropout == 0.0 and difference > 1e-6:
            print(f"the losses differ by {difference}: not the same work", file=sys.stderr)
            return 1
        wait = torch.cuda.synchronize if options.device.startswith("cuda") else lambda: None
        seconds = interleave(eager, ours, options.pairs, wait)
        ratios = [b / a for a, b in zip(*seconds, strict=True)]
        figures += [
            Figure(f"eager_s{name}", statistics.median(seconds[0]), "s", "lower"),
            Figure(f"executor_s{name}", statistics.median(seconds[1]), "s", "lower"),
            Figure(f"executor_over_eager{name}", statistics.median(ratios), "ratio", "lower"),
        ]
    report("executor", figures, options.json)
    return 0


def contestants(
    dropout: float, device: torch.device
) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """The plain module and the executor, each as one forward and backward that returns the loss."""
    torch.manual_seed(0)
    module: nn.Module = gpt(LAYERS, WIDTH, HEADS, LENGTH, dropout).to(device)
    text = torch.randint(0, 256, (BATCH, LENGTH + 1), device=device)
    inputs = {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}
    captured = capture(module, inputs)
    graph = captured.graph.bind(BATCH)
    (stage,) = cut(graph, [(0, len(graph.operators))])
    executor = StageExecutor(graph, stage, captured.tensors, device=device)

    def eager() -> Tensor:
        module.zero_grad()
        loss: Tensor = module(**inputs)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's is untyped
        return loss.detach()

    def ours() -> Tensor:
        executor.zero_grad()
        loss = executor.forward(0, 0, {}, inputs).results[graph.loss]
        executor.backward(0, 0, {})
        return loss

    return eager, ours


def interleave(
    first: Callable[[], Tensor],
    second: Callable[[], Tensor],
    pairs: int,
    wait: Callable[[], None],
) -> tuple[list[float], list[float]]:
    """Seconds of each run of both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            wait()
            start = time.perf_counter()
            (first, second)[which]()
            wait()
            seconds[which].append(time.perf_counter() - start)
    return seconds


if __name__ == "__main__":
    sys.exit(main())
