"""A backward in two halves gives, bit for bit, the gradients of an undivided one, runs no kernel
twice, and keeps between its halves what was counted ahead."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.client.models import models
from shoal.dag.analysis.weight_gradients import weight_gradients
from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.cost.weight_costs import WaitingMemory
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import cut
from shoal.tests.dag.execute.stage_lines import MODELS, Line, assert_same_bits, batch, model
from shoal.tests.examples.test_examples import JOBS, built, load, microbatch


def assert_halves_change_no_bit(name: str, core: bool, rng: random.Random) -> None:
    operators = len(model(name)[1].operators)
    count = rng.randint(1, 4)
    cuts = sorted(rng.sample(range(1, operators), count - 1))
    again = {i for i in range(count) if rng.random() < 0.3}
    want = Line(name, cuts, set(), core).step(name)
    assert_same_bits(Line(name, cuts, again, core, halves=rng).step(name), want)


def test_no_bit_of_a_gpt_depends_on_when_weights_have_their_turn() -> None:
    assert_halves_change_no_bit("gpt", False, random.Random(1))


@pytest.mark.slow
@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
@settings(max_examples=6)
@given(seed=st.integers(0, 2**32))
def test_no_bit_depends_on_when_weights_have_their_turn(name: str, core: bool, seed: int) -> None:
    assert_halves_change_no_bit(name, core, random.Random(seed))


def pair(module: nn.Module, x: Tensor) -> tuple[StageExecutor, StageExecutor]:
    """The module as one stage, with an undivided backward and with one in halves."""
    captured = capture(module, {"x": x})
    graph = captured.graph.bind(len(x))
    (stage,) = cut(graph, [(0, len(graph.operators))])
    plain, halves = (
        StageExecutor(graph, stage, captured.tensors, split=split) for split in (False, True)
    )
    return plain, halves


def train(plain: StageExecutor, halves: StageExecutor, x: Tensor) -> None:
    """Three microbatches through both, the halves apart."""
    for m in range(3):
        plain.forward(0, m, {}, {"x": x + m})
        plain.backward(0, m, {}, 0.3)
        halves.forward(0, m, {}, {"x": x + m})
        halves.backward_input(0, m, {}, 0.3)
    for m in range(3):
        halves.backward_weight(0, m)


class Odd(nn.Module):
    """An input half in front of what is tried: a scale that every number of the data meets."""

    def __init__(self, width: int, call: Callable[["Odd", Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.scale = nn.Parameter(torch.randn(width))
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.rms = nn.RMSNorm(width)
        self.table = nn.Parameter(torch.randn(4, width))
        self.kernel = nn.ConvTranspose1d(4, 4, 3, padding=1)
        self.wide = nn.Conv1d(4, 6, 3, padding="same", dilation=2)
        self.recurrent = nn.GRU(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x * self.scale).square().mean()


def thrice(m: Odd, x: Tensor) -> Tensor:
    for _ in range(3):
        x = m.a(torch.tanh(x))
    return x


def tied_and_made(m: Odd, x: Tensor) -> Tensor:
    return F.linear(m.a(x), m.a.weight.t() * 2)


def adapted(m: Odd, x: Tensor) -> Tensor:
    return F.linear(m.norm(x), m.a.weight + m.b.weight @ m.c.weight, m.a.bias)


def learned_bias(m: Odd, x: Tensor) -> Tensor:
    mask = (m.table @ m.table.t())[None, None]
    q = m.a(x).unsqueeze(1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


CASES: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "thrice": thrice,
    "tied_and_made": tied_and_made,
    "adapted": adapted,
    "learned_bias": learned_bias,
    "strided": lambda m, x: m.a(x.transpose(0, 1)) + m.b(x).transpose(0, 1),
    "no_bias": lambda m, x: F.linear(x.transpose(0, 1), m.a.weight),
    "plain_product": lambda m, x: x.transpose(0, 1) @ m.a.weight,
    "rms": lambda m, x: m.rms(m.norm(x)),
    "positions": lambda m, x: m.a(x + m.table) * m.table + m.table,
    "convolutions": lambda m, x: m.wide(m.kernel(x)),
    "recurrent": lambda m, x: m.recurrent(m.a(x))[0],
    "penalty": lambda m, x: m.a(x).sum() + m.a.weight.square().sum(),
    "frozen": lambda m, x: F.linear(x, m.a.weight.detach(), m.a.bias),
    "one_row": lambda m, x: F.linear(x, m.a.weight[:1]),
}


class Every(nn.Module):
    """Every case, each on weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cases = nn.ModuleDict({name: Odd(8, call) for name, call in CASES.items()})

    def forward(self, x: Tensor) -> Tensor:
        return sum((case(x) for case in self.cases.values()), torch.zeros((), dtype=x.dtype))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(torch.float64, marks=pytest.mark.slow),
    ],
)
def test_odd_readers_of_weights_give_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(5, 4, 8, dtype=dtype)
    plain, halves = pair(Every().to(dtype), x)
    train(plain, halves, x)
    for name, parameter in plain.parameters.items():
        got = halves.parameters[name].grad
        assert (parameter.grad is None) == (got is None), name
        if parameter.grad is not None:
            assert got is not None
            assert torch.equal(got, parameter.grad), name
            assert got.stride() == parameter.grad.stride()


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_halves_of_every_example_give_the_same_bits(name: str) -> None:
    job, module = load(name), built(name)
    inputs = microbatch(job, 2)
    with models.ready(module, job):
        captured = capture(module, inputs)
    graph = captured.graph.bind(2)
    third = len(graph.operators) // 3
    stages = cut(graph, [(0, third), (third, 2 * third), (2 * third, len(graph.operators))])
    made = []
    for split in (False, True):
        line = [StageExecutor(graph, stage, captured.tensors, split=split) for stage in stages]
        for m in range(2):
            values: dict[str, Tensor] = {}
            for executor in line:
                ports = {p.value: values[p.value] for p in executor.stage.receives}
                values |= executor.forward(0, m, ports, inputs).ports
            grads: dict[str, dict[int, Tensor | None]] = {}
            for executor in reversed(line):
                if not executor.stage.has_backward:
                    continue
                sends = [p for p in executor.stage.sends if p.grad]
                given_ = {p.value: [grads[p.value][t] for t in p.grad_targets] for p in sends}
                half = executor.backward_input if split else executor.backward
                for value, grad in half(0, m, given_, 0.5).items():
                    grads.setdefault(value, {})[executor.stage.index] = grad
        for executor in line:
            for step, m in executor.waiting:
                executor.backward_weight(step, m)
        made.append([{n: p.grad for n, p in executor.parameters.items()} for executor in line])
    assert_same_bits(made[1], made[0])


class Kernels(TorchDispatchMode):
    """Counts what runs, by operator; a backward with a mask by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.endswith("_backward") and isinstance(args[-1], list) and args[-1]:
            for part, asked in enumerate(args[-1]):
                self.ran[f"{name} {min(part, 1)}"] += bool(asked) if part < 2 else 0
        elif name in ("aten::mm", "aten::bmm", "aten::addmm"):
            self.ran[name] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", ["gpt", "resnet", pytest.param("unet", marks=pytest.mark.slow)])
def test_no_kernel_runs_twice_and_those_of_weights_run_later(name: str) -> None:
    (plain,) = Line(name, [], set()).executors
    (halves,) = Line(name, [], set(), halves=random.Random(0)).executors
    for executor in (plain, halves):
        executor.forward(0, 0, {}, batch(name, 0))
    with Kernels() as undivided:
        plain.backward(0, 0, {})
    with Kernels() as first:
        halves.backward_input(0, 0, {})
    with Kernels() as second:
        halves.backward_weight(0, 0)
    assert first.ran + second.ran == undivided.ran
    products = undivided.ran["aten::mm"]
    assert second.ran["aten::mm"] >= products // 2
    assert (
        second.ran["aten::convolution_backward 1"] == undivided.ran["aten::convolution_backward 1"]
    )


@pytest.mark.parametrize("name", ["gpt", "resnet"])
@pytest.mark.parametrize("part", [0, 1])
def test_what_waits_is_counted_ahead(name: str, part: int) -> None:
    """Never too little; a gradient that two values share is counted for both."""
    _, graph, _ = model(name)
    middle = len(graph.operators) // 2
    line = Line(name, [middle], set(), halves=random.Random(0))
    stage, executor = line.stages[part], line.executors[part]
    first, second = line.executors
    values = first.forward(0, 0, {}, batch(name, 0)).ports
    second.forward(0, 0, values, batch(name, 0))
    back = second.backward_input(0, 0, {})
    first.backward_input(0, 0, {value: [grad] for value, grad in back.items()})
    told, _ = WaitingMemory(graph, cost(graph)).of(stage.start, stage.stop)
    assert executor.waiting_bytes <= told <= 1.6 * executor.waiting_bytes
    executor.backward_weight(0, 0)
    assert executor.waiting_bytes == 0


def test_what_waits_is_forgotten_with_the_rest() -> None:
    (executor,) = Line("unet", [], set(), halves=random.Random(0)).executors
    executor.forward(0, 0, {}, batch("unet", 0))
    executor.backward_input(0, 0, {})
    executor.forget()
    assert executor.waiting == ()


def test_weights_wait_for_the_operators_that_torch_computes_in_halves() -> None:
    _, graph, _ = model("gpt")
    waits = weight_gradients(graph, 0, len(graph.operators), [graph.loss])
    assert waits.parameters == {f"param:{p.name}" for p in graph.parameters}
    kinds = {graph.operators[w.index].target.split(".")[1] for w in waits.operators}
    assert kinds == {"embedding", "linear", "layer_norm", "add"}
