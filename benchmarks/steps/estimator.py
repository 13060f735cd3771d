"""How well the cost model predicts: speeds fitted from small layers, and then stages of the example
models, of shapes that no fit saw, predicted and timed.

    python benchmarks/steps/estimator.py [--json FILE] [--rounds N] [--models NAME,…] [--verbose]

Each model runs as one stage and as three; forward and backward of every stage are predictions of
their own. In each round the samples of the fit and all stages run once each, so that both see the
same machine; a time is the median of its rounds. One thread, and its CPU seconds, so that other
processes' turns do not count. The errors are relative to the measured time.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost, stage_cost
from shoal.dag.cost.speed import Work
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import cut
from shoal.examples.gpt import gpt
from shoal.examples.resnet_digits import resnet
from shoal.peer.host.calibrate import REPEATS, Bench

STAGES = 3


@dataclass
class Prediction:
    """A stage's forward or backward: its work, and its measured times in seconds."""

    name: str
    work: Work
    times: list[float] = field(default_factory=list)

    @property
    def measured(self) -> float:
        return statistics.median(self.times)


class Chain:
    """A model as a chain of stages on this machine."""

    def __init__(self, name: str, module: nn.Module, inputs: dict[str, Tensor], parts: int) -> None:
        captured = capture(module, inputs)
        graph = captured.graph.bind(len(next(iter(inputs.values()))))
        costs, n = cost(graph), len(graph.operators)
        bounds = [(k * n // parts, (k + 1) * n // parts) for k in range(parts)]
        self.inputs = inputs
        self.stages = [StageExecutor(graph, s, captured.tensors) for s in cut(graph, bounds)]
        self.predictions: list[tuple[Prediction, Prediction]] = []
        for start, stop in bounds:
            found = stage_cost(costs, start, stop)
            label = f"{name} [{start}, {stop})"
            self.predictions.append(
                (Prediction(f"{label} F", found.forward), Prediction(f"{label} B", found.backward))
            )

    def run(self) -> None:
        """One microbatch, timed."""
        ports: dict[str, Tensor] = {}
        for stage, (forward, _) in zip(self.stages, self.predictions, strict=True):
            stage.zero_grad()
            taken = {p.value: ports[p.value] for p in stage.stage.receives}
            began = time.thread_time()
            made = stage.forward(0, 0, taken, self.inputs)
            forward.times.append(time.thread_time() - began)
            ports |= made.ports
        grads: dict[str, list[Tensor | None]] = {}
        for stage, (_, backward) in zip(
            reversed(self.stages), reversed(self.predictions), strict=True
        ):
            own = {
                v: g[::-1] for v, g in grads.items() if v in {p.value for p in stage.stage.sends}
            }
            began = time.thread_time()
            back = stage.backward(0, 0, own)
            backward.times.append(time.thread_time() - began)
            for value, grad in back.items():
                grads.setdefault(value, []).append(grad)

    def drop_first(self, runs: int) -> None:
        """Forgets the first of the last `runs` runs."""
        for prediction in (p for pair in self.predictions for p in pair):
            del prediction.times[-runs]

    def forget(self) -> None:
        for prediction in (p for pair in self.predictions for p in pair):
            prediction.times.clear()


def models() -> Iterator[tuple[str, nn.Module, dict[str, Tensor]]]:
    yield "gpt-128", gpt(4, 128, 4, 64, 0.1), text(16, 64)
    yield "gpt-256", gpt(4, 256, 8, 128), text(4, 128)
    yield "resnet-16", resnet(16, 2), digits(16)
    yield "resnet-32", resnet(32, 2), digits(32)
    yield "llama-64", llama(64, 176, 2, 4, 2, 64), labelled(16, 64)
    yield "llama-192", llama(192, 512, 3, 6, 3, 96), labelled(8, 96)


def text(batch: int, length: int) -> dict[str, Tensor]:
    found = torch.randint(0, 256, (batch, length + 1))
    return {"x": found[:, :-1].contiguous(), "y": found[:, 1:].contiguous()}


def labelled(batch: int, length: int) -> dict[str, Tensor]:
    found = torch.randint(0, 256, (batch, length))
    return {"input_ids": found, "labels": found.clone()}


def digits(batch: int) -> dict[str, Tensor]:
    return {"x": torch.rand(batch, 1, 8, 8), "y": torch.randint(0, 10, (batch,))}


def llama(width: int, inner: int, layers: int, heads: int, groups: int, length: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            max_position_embeddings=length,
        )
    )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", default="", help="names, comma between; empty: all")
    parser.add_argument("--verbose", action="store_true", help="every stage's prediction")
    options = parser.parse_args()
    wanted = [name for name in options.models.split(",") if name]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    chains = {
        name: [Chain(name, module, inputs, parts) for parts in (1, STAGES)]
        for name, module, inputs in models()
        if not wanted or name in wanted
    }
    everything = [chain for some in chains.values() for chain in some]
    bench = Bench(torch.device("cpu"))
    for turn in range(-1, options.rounds):
        bench.round()
        for chain in everything:
            for _ in range(REPEATS):
                chain.run()
            chain.drop_first(REPEATS)  # it fills the caches, as the microbatch before in training
        if turn == -1:  # libraries are loaded by now
            bench.forget()
            for chain in everything:
                chain.forget()
    speeds = bench.speeds()
    print(speeds)
    errors: dict[str, list[float]] = {}
    for name, some in chains.items():
        for prediction in (p for chain in some for pair in chain.predictions for p in pair):
            seconds, measured = speeds.seconds(prediction.work), prediction.measured
            errors.setdefault(name, []).append(abs(seconds - measured) / measured)
            if options.verbose:
                parts = speeds.per_unit * prediction.work / seconds
                shares = zip(Work._fields, parts, strict=True)
                why = ", ".join(f"{c} {share:.0%}" for c, share in shares if share >= 0.02)
                print(
                    f"{prediction.name:24s} {measured * 1e3:8.2f} ms, predicted "
                    f"{seconds / measured:5.2f} of it ({why})"
                )
    figures = [Figure("fit_error_median", speeds.error, "ratio", "lower")]
    for name, found in errors.items():
        figures += summary(f"_{name}", found)
    figures += summary("", [e for found in errors.values() for e in found])
    report("estimator", figures, options.json)
    return 0


def summary(suffix: str, errors: list[float]) -> list[Figure]:
    return [
        Figure(f"estimator_error_median{suffix}", statistics.median(errors), "ratio", "lower"),
        Figure(f"estimator_error_worst{suffix}", max(errors), "ratio", "lower"),
    ]


if __name__ == "__main__":
    sys.exit(main())
