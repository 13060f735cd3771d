"""A backward in two halves against an undivided one, in one process.

    python benchmarks/schedules/split.py [--json FILE] [--rounds N]

The models are those of examples/gpt_bytes.toml and examples/resnet_digits.toml, with their
microbatches of 16, each as one stage. What halves cost hangs on how much is computed with each
number, so both are there wider as well: a GPT of width 512, a ResNet of width 64 on pictures of
32 x 32. A round is one microbatch undivided and one in halves, in
changing order; a figure is the median of the rounds' ratios, in CPU time of the process.

    split_backward_over_plain   (both halves) / (undivided backward), the larger of all models
    split_step_over_plain_…     forward and backward, so also what a forward takes down for it
    split_weight_share_…        weight half / (both halves)

Before anything is timed, gradients are compared bit by bit over three microbatches; if one differs,
there are no figures. `weight_share_OPERATOR` has the share of single operators.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.capture.capture import capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import cut
from shoal.examples.gpt import gpt
from shoal.examples.resnet_digits import resnet

Inputs = dict[str, Tensor]


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measured pairs of each model")
    options = parser.parse_args()
    figures: list[Figure] = []
    over: list[float] = []
    for name, module, inputs in models():
        pair = Pair(module, inputs)
        if different := pair.different():
            print(f"{name}: the gradients of {', '.join(different)} differ", file=sys.stderr)
            return 1
        rounds = [pair.round(i) for i in range(3 + options.rounds)][3:]
        backward, step, share = (statistics.median(column) for column in zip(*rounds, strict=True))
        over.append(backward)
        figures += [
            Figure(f"split_backward_over_plain_{name}", backward, "ratio", "lower"),
            Figure(f"split_step_over_plain_{name}", step, "ratio", "lower"),
            Figure(f"split_weight_share_{name}", share, "ratio", "higher"),
        ]
    figures.insert(0, Figure("split_backward_over_plain", max(over), "ratio", "lower"))
    for name, module, inputs in operators():
        pair = Pair(module, inputs)
        shares = [pair.round(i)[2] for i in range(3 + options.rounds)][3:]
        figures.append(Figure(f"weight_share_{name}", statistics.median(shares), "ratio", "higher"))
    report("split", figures, options.json)
    return 0


def models() -> Iterator[tuple[str, nn.Module, Inputs]]:
    torch.manual_seed(0)
    for name, batch, module, length in (
        ("gpt", 16, gpt(layers=4, width=128, heads=4, length=64, dropout=0.1), 64),
        ("gpt_512", 8, gpt(layers=4, width=512, heads=8, length=128, dropout=0.1), 128),
    ):
        text = torch.randint(0, 256, (batch, length + 1))
        yield name, module, {"x": text[:, :-1].contiguous(), "y": text[:, 1:].contiguous()}
    for name, batch, width, side in (("resnet", 16, 16, 8), ("resnet_64", 8, 64, 32)):
        pictures = {"x": torch.rand(batch, 1, side, side), "y": torch.randint(0, 10, (batch,))}
        yield name, resnet(width=width, blocks=2), pictures


class Behind(nn.Module):
    """An operator behind a scale, so that it has both halves where its input is a number."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = x * self.scale
        loss: Tensor = self.layer(x).square().mean()
        return loss


def operators() -> Iterator[tuple[str, nn.Module, Inputs]]:
    """Single operators of the sizes of such models."""
    tokens, pictures = torch.randn(1024, 128), torch.randn(16, 32, 16, 16)
    yield "linear", Behind(nn.Linear(128, 512)), {"x": tokens}
    yield "convolution", Behind(nn.Conv2d(32, 32, 3, padding=1)), {"x": pictures}
    yield "embedding", Behind(nn.Embedding(256, 128)), {"x": torch.randint(0, 256, (16, 64))}
    yield "layer_norm", Behind(nn.LayerNorm(128)), {"x": tokens}


class Pair:
    """A module as one stage, twice: with an undivided backward, and with one in halves."""

    def __init__(self, module: nn.Module, inputs: Inputs) -> None:
        captured = capture(module, inputs)
        graph = captured.graph.bind(len(inputs["x"]))
        (stage,) = cut(graph, [(0, len(graph.operators))])
        self.inputs = inputs
        self.plain, self.halves = (
            StageExecutor(graph, stage, captured.tensors, split=split) for split in (False, True)
        )

    def different(self) -> list[str]:
        """The parameters whose gradients differ in a bit, after three microbatches."""
        for m in range(3):
            self.plain.forward(0, m, {}, self.inputs)
            self.halves.forward(0, m, {}, self.inputs)
            self.plain.backward(0, m, {}, 0.5)
            self.halves.backward_input(0, m, {}, 0.5)
        for m in range(3):
            self.halves.backward_weight(0, m)
        return [
            name
            for name, p in self.plain.parameters.items()
            if not _same(p.grad, self.halves.parameters[name].grad)
        ]

    def round(self, number: int) -> tuple[float, float, float]:
        """Backward in halves over undivided, the same with the forward, share of the weight half;
        gradients are added to those that are there."""
        forward, backward, ours, first, second = 0.0, 0.0, 0.0, 0.0, 0.0
        for halves in (True, False) if number % 2 else (False, True):
            if halves:
                ours = seconds(lambda: self.halves.forward(1, number, {}, self.inputs))
                first = seconds(lambda: self.halves.backward_input(1, number, {}))
                second = seconds(lambda: self.halves.backward_weight(1, number))
            else:
                forward = seconds(lambda: self.plain.forward(1, number, {}, self.inputs))
                backward = seconds(lambda: self.plain.backward(1, number, {}))
        both = first + second
        return both / backward, (ours + both) / (forward + backward), second / both


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a, b))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
