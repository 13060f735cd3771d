"""Stages one after the other in one process against plain autograd on the module."""

import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.capture.capture import Captured, capture
from shoal.dag.execute.execute import StageExecutor, TensorSpecError, check_spec
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.cut import Stage, cut
from shoal.dag.transforms.lower import Lowered, lower

BATCH = 3


class Skips(nn.Module):
    """Skip edges, one value with several readers, an integer edge, results that nobody reads, a
    frozen parameter, an unused one, a weight and a metric; a transpose that a later one undoes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        keep = y > 2
        early = self.frozen(self.rows(x))
        best, places = early.topk(3, dim=-1)
        h = torch.tanh(self.a(early)) + early
        wide = h.transpose(1, 2)
        h = torch.relu(self.b(h)) * wide.transpose(1, 2)
        h = (h + wide.transpose(1, 2).reshape(h.shape) + early).view(-1, 8)
        logits = self.head(h) + best.sum() + places.sum() * 1e-3
        losses = -F.log_softmax(logits, 1).gather(1, y.view(-1, 1)).squeeze(1)
        weight = keep.sum().float()
        loss = (losses * keep.flatten()).sum() / weight
        return {"loss": loss, "weight": weight, "highest": logits.detach().amax()}


class Norms(nn.Module):
    """Batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(4 * 4 * 4, 6)
        self.norm2 = nn.BatchNorm1d(6, momentum=0.3)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.first(x))))
        return F.cross_entropy(self.norm2(self.second(h.flatten(1))), y)


class Tied(nn.Module):
    """A weight used at both ends, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 8)
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.rows.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.rows(x)
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norm(h + mixed.transpose(1, 2).reshape(h.shape))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def batch(name: str, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    if name == "norms":
        x = torch.randn(BATCH, 1, 6, 6, generator=rng)
        return {"x": x, "y": torch.randint(0, 6, (BATCH,), generator=rng)}
    top = 11 if name == "skips" else 9
    draw = torch.randint(0, top, (2, BATCH, 5), generator=rng)
    return {"x": draw[0], "y": draw[1]}


@cache
def model(name: str) -> tuple[nn.Module, Captured, Graph]:
    torch.manual_seed(5)
    module = {"skips": Skips, "norms": Norms, "tied": Tied}[name]()
    captured = capture(module, batch(name, 0))
    return module, captured, captured.graph.bind(BATCH)


@cache
def core_form(name: str) -> Lowered:
    return lower(model(name)[2])


def plain(name: str, microbatches: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor | None]]:
    """The oracle: weighted losses of the module itself, gradients by name."""
    module = model(name)[0].train()
    module.zero_grad()
    found = []
    for m in range(microbatches):
        out = module(**batch(name, m))
        out = out if isinstance(out, dict) else {"loss": out, "weight": torch.tensor(1.0)}
        (out["loss"] * out["weight"]).backward()
        found.append({k: v.detach() for k, v in out.items()})
    named = module.named_parameters()
    return found, {n: None if p.grad is None else p.grad.clone() for n, p in named}


class Line:
    """The stages of a cut in one process; values and gradients go by hand."""

    def __init__(self, name: str, cuts: list[int], core: bool = False, seed: int = 0) -> None:
        _, captured, graph = model(name)
        edges = [0, *cuts, len(graph.operators)]
        self.graph = graph
        self.stages = cut(graph, list(itertools.pairwise(edges)))
        lowered = core_form(name) if core else None
        self.executors = [
            StageExecutor(
                lowered.graph if lowered else graph,
                stage,
                captured.tensors,
                seed=seed,
                operators=lowered and (lowered.start[stage.start], lowered.start[stage.stop]),
            )
            for stage in self.stages
        ]
        self.values: dict[int, dict[str, Tensor]] = {}
        self.statistics: list[dict[str, Tensor]] = []

    def _ports(self, stage: Stage, values: dict[str, Tensor]) -> dict[str, Tensor]:
        for port in stage.receives:
            check_spec(port.value, values[port.value], port.spec)
        return {p.value: values[p.value].contiguous() for p in stage.receives}

    def forward(self, m: int, inputs: dict[str, Tensor], step: int = 0) -> dict[str, Tensor]:
        """Returns the results by name: loss, weight and metrics."""
        values: dict[str, Tensor] = {}
        results: dict[str, Tensor] = {}
        statistics: dict[str, Tensor] = {}
        for stage, executor in zip(self.stages, self.executors, strict=True):
            out = executor.forward(step, m, self._ports(stage, values), inputs)
            values |= out.ports
            results |= out.results
            statistics |= out.updates
            assert set(out.ports) == {p.value for p in stage.sends}
            assert not any(t.requires_grad for t in (*out.ports.values(), *out.results.values()))
        self.statistics.append(statistics)
        names = {"loss": self.graph.loss, "weight": self.graph.weight, **dict(self.graph.metrics)}
        return {name: results[value] for name, value in names.items() if value}

    def backward(self, m: int, weight: float = 1.0, step: int = 0) -> None:
        grads: dict[str, dict[int, Tensor | None]] = {}
        for stage, executor in reversed(list(zip(self.stages, self.executors, strict=True))):
            if not stage.has_backward:
                continue
            given = {
                p.value: [grads[p.value][t] for t in p.grad_targets] for p in stage.sends if p.grad
            }
            back = executor.backward(step, m, given, weight)
            wanted = {p.value for p in stage.receives if stage.index in p.grad_targets}
            assert set(back) == wanted
            for value, grad in back.items():
                grads.setdefault(value, {})[stage.index] = grad
        assert all((step, m) not in executor.live for executor in self.executors)

    def grads(self) -> dict[str, Tensor | None]:
        """Gradients by parameter, summed over the stages that hold it."""
        found: dict[str, Tensor | None] = {}
        for executor in self.executors:
            for name, p in executor.parameters.items():
                if p.grad is not None:
                    sofar = found.get(name)
                    found[name] = p.grad if sofar is None else sofar + p.grad
                found.setdefault(name, None)
        return found


def some_cuts(name: str, data: st.DataObject) -> list[int]:
    operators = len(model(name)[2].operators)
    places = st.lists(st.integers(1, operators - 1), unique=True, max_size=4)
    return sorted(data.draw(places, label="cuts"))


def assert_same_grads(got: dict[str, Tensor | None], want: dict[str, Tensor | None]) -> None:
    for name, grad in got.items():
        expected = want[name]
        if grad is None or expected is None:
            assert grad is None, name
            assert expected is None, name
        else:
            torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("name", ["skips", "tied"])
@settings(max_examples=12)
@given(data=st.data())
def test_every_cut_has_the_losses_and_gradients_of_the_module(
    name: str, core: bool, data: st.DataObject
) -> None:
    want, want_grads = plain(name, 2)
    line = Line(name, some_cuts(name, data), core)
    got = [line.forward(m, batch(name, m)) for m in range(2)]  # both live at once
    for m in range(2):
        line.backward(m, float(got[m].get("weight", torch.tensor(1.0))))
        for key, value in got[m].items():
            torch.testing.assert_close(value, want[m][key], rtol=1e-6, atol=1e-6)
    assert_same_grads(line.grads(), want_grads)


@pytest.mark.parametrize("name", ["skips", "tied"])
def test_one_stage_is_bit_identical_to_the_module(name: str) -> None:
    want, want_grads = plain(name, 1)
    line = Line(name, [])
    got = line.forward(0, batch(name, 0))
    line.backward(0, float(got.get("weight", torch.tensor(1.0))))
    assert all(torch.equal(got[key], want[0][key]) for key in got)
    for key, grad in line.grads().items():
        expected = want_grads[key]
        assert grad is expected is None or torch.equal(grad, expected), key  # type: ignore[arg-type]


@settings(max_examples=15)
@given(data=st.data())
def test_the_cut_changes_no_dropout_mask_and_no_gradient(data: st.DataObject) -> None:
    whole, parts = Line("norms", [], seed=3), Line("norms", some_cuts("norms", data), seed=3)
    for line in (whole, parts):
        line.forward(1, batch("norms", 1), step=7)
        line.backward(1, step=7)
    assert_same_grads(parts.grads(), whole.grads())


def test_a_mask_depends_on_seed_step_and_microbatch() -> None:
    losses = {
        key: float(
            Line("norms", [], seed=key[0]).forward(key[2], batch("norms", 0), key[1])["loss"]
        )
        for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    }
    assert len(set(losses.values())) == 4
    again = Line("norms", [], seed=1).forward(0, batch("norms", 0))["loss"]
    assert float(again) == losses[1, 0, 0]


@settings(max_examples=8)
@given(data=st.data())
def test_running_statistics_follow_in_microbatch_order(data: st.DataObject) -> None:
    module, _, _ = model("norms")
    other = Norms().train()
    other.load_state_dict(module.state_dict())
    other.drop.p = 0.0  # the second norm would see the plain loop's own masks
    line = Line("norms", some_cuts("norms", data))
    for m in range(3):
        other(**batch("norms", m))
        line.forward(m, batch("norms", m))
    for executor in line.executors:
        before = {name: b.clone() for name, b in executor.buffers.items()}
        executor.apply_updates(line.statistics)
        assert executor.stage.updates == () or any(
            not torch.equal(before[name], executor.buffers[name]) for name in before
        )
    got = {n: b for executor in line.executors for n, b in executor.buffers.items()}
    want = dict(other.named_buffers())
    for name in ("norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-6, atol=1e-7)
    assert got["norm.num_batches_tracked"] == got["norm2.num_batches_tracked"] == 3


@pytest.mark.parametrize("core", [False, True])
@pytest.mark.parametrize("name", ["skips", "tied", "norms"])
def test_evaluation_is_the_module_in_eval_mode(name: str, core: bool) -> None:
    module, _, graph = model(name)
    line = Line(name, [3, len(graph.operators) // 2], core)
    values: dict[str, Tensor] = {}
    results: dict[str, Tensor] = {}
    for stage, executor in zip(line.stages, line.executors, strict=True):
        out = executor.evaluate({p.value: values[p.value] for p in stage.receives}, batch(name, 4))
        values |= out.ports
        results |= out.results
        assert not executor.live
    want = module.eval()(**batch(name, 4))
    want = want["loss"] if isinstance(want, dict) else want
    torch.testing.assert_close(results[graph.loss], want.detach(), rtol=1e-6, atol=1e-6)


def test_a_zero_weight_leaves_no_gradient_and_no_nan() -> None:
    line = Line("skips", [6])
    inputs = batch("skips", 0)
    inputs["y"] = torch.zeros_like(inputs["y"])  # nothing is kept: the loss is 0 / 0
    got = line.forward(0, inputs)
    assert got["loss"].isnan()
    assert got["weight"] == 0
    line.backward(0, 0.0)
    assert all(grad is None for grad in line.grads().values())


def test_what_is_read_twice_gets_the_sum_of_both_gradients_once() -> None:
    """y = w·x leaves for two stages and is read at home: dL/dw = x·(2 + 3 + 5)."""
    spec, scalar = TensorSpec((2,), "float32"), TensorSpec((), "float32")

    def op(name: str, target: str, *args: object, spec: TensorSpec = spec) -> Operator:
        return Operator(name, f"aten.{target}", args, (), (Output(spec, True),))  # type: ignore[arg-type]

    graph = Graph(
        inputs=(Input("x", spec),),
        parameters=(Parameter("w", spec),),
        buffers=(),
        operators=(
            op("y", "mul.Tensor", Ref("param:w"), Ref("in:x")),
            op("home", "mul.Scalar", Ref("y"), 2.0),
            op("near", "mul.Scalar", Ref("y"), 3.0),
            op("sum1", "add.Tensor", Ref("home"), Ref("near")),
            op("far", "mul.Scalar", Ref("y"), 5.0),
            op("sum2", "add.Tensor", Ref("sum1"), Ref("far")),
            op("loss", "sum.default", Ref("sum2"), spec=scalar),
        ),
        loss="loss",
        batch=2,
    )
    x = torch.tensor([1.0, -2.0])
    first, second, third = (
        StageExecutor(graph, stage, {"w": torch.ones(2)})
        for stage in cut(graph, [(0, 2), (2, 4), (4, 7)])
    )
    a = first.forward(0, 0, {}, {"x": x}).ports
    b = second.forward(0, 0, a, {}).ports
    third.forward(0, 0, {"y": a["y"], "sum1": b["sum1"]}, {})
    far = third.backward(0, 0, {}, 0.5)
    near = second.backward(0, 0, {"sum1": far["sum1"]})
    assert first.backward(0, 0, {"y": [near["y"], far["y"]], "home": near["home"]}) == {}
    grad = first.parameters["w"].grad
    assert grad is not None
    assert torch.equal(grad, 0.5 * x * 10)
    assert far["y"] is not None
    assert torch.equal(far["y"], torch.full((2,), 2.5))  # what came in was not written into


def test_no_gradient_from_anyone_is_no_gradient() -> None:
    line = Line("tied", [2, 8])
    line.forward(0, batch("tied", 0))
    stage, executor = line.stages[1], line.executors[1]
    given = {p.value: None for p in stage.sends}
    back = executor.backward(0, 0, given)
    assert back
    assert all(grad is None for grad in back.values())
    assert all(p.grad is None for p in executor.parameters.values())


def test_a_stage_without_backward_keeps_nothing() -> None:
    _, captured, graph = model("skips")
    first, _ = cut(graph, [(0, 1), (1, len(graph.operators))])
    executor = StageExecutor(graph, first, captured.tensors)
    executor.forward(0, 0, {}, batch("skips", 0))
    assert first.has_backward or executor.live == ()
    line = Line("skips", [])
    line.forward(0, batch("skips", 0))
    assert line.executors[0].live == ((0, 0),)
    line.executors[0].forget()
    assert line.executors[0].live == ()


def test_two_stages_own_their_copies() -> None:
    _, captured, _ = model("tied")
    line = Line("tied", [4])
    first, second = (
        e.parameters["head.weight" if "head.weight" in e.parameters else "rows.weight"]
        for e in line.executors
    )
    assert first.data_ptr() != second.data_ptr()
    assert all(
        t.data_ptr() not in (first.data_ptr(), second.data_ptr()) for t in captured.tensors.values()
    )


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    spec = TensorSpec((2, 3), "float32")
    check_spec("h", torch.zeros(2, 3), spec)
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6)):
        with pytest.raises(TensorSpecError, match=r"h: expected float32\[2, 3\], got"):
            check_spec("h", wrong, spec)
    _, captured, graph = model("tied")
    tensors = {**captured.tensors, "norm.bias": torch.zeros(9)}
    with pytest.raises(
        TensorSpecError, match=r"param:norm.bias: expected float32\[8\], got float32\[9\]"
    ):
        StageExecutor(graph, cut(graph, [(0, len(graph.operators))])[0], tensors)


def test_names_in_a_graph_never_become_code() -> None:
    evil = "x\n    raise SystemExit('code from a graph')\n    y"
    spec, scalar = TensorSpec((2,), "float32"), TensorSpec((), "float32")
    graph = Graph(
        inputs=(Input(evil, spec),),
        parameters=(Parameter(evil, spec),),
        buffers=(),
        operators=(
            Operator(
                evil,
                "aten.mul.Tensor",
                (Ref(f"in:{evil}"), Ref(f"param:{evil}")),
                (),
                (Output(spec, True),),
                module=evil,
            ),
            Operator("loss", "aten.sum.default", (Ref(evil),), (), (Output(scalar, True),)),
        ),
        loss="loss",
        batch=2,
    )
    (stage,) = cut(graph, [(0, 2)])
    executor = StageExecutor(graph, stage, {evil: torch.ones(2)})
    assert executor.forward(0, 0, {}, {evil: torch.ones(2)}).results["loss"] == 2.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_cuda_stage_equals_the_cpu() -> None:
    _, captured, graph = model("tied")
    (stage,) = cut(graph, [(0, len(graph.operators))])
    found = {}
    for device in ("cpu", "cuda"):
        executor = StageExecutor(graph, stage, captured.tensors, device=device)
        loss = executor.forward(0, 0, {}, batch("tied", 0)).results[graph.loss]
        executor.backward(0, 0, {})
        found[device] = (loss, {n: p.grad for n, p in executor.parameters.items()})
    torch.testing.assert_close(found["cuda"][0].cpu(), found["cpu"][0], rtol=1e-5, atol=1e-5)
    for name, grad in found["cpu"][1].items():
        other = found["cuda"][1][name]
        assert grad is not None
        assert other is not None
        torch.testing.assert_close(other.cpu(), grad, rtol=1e-4, atol=1e-5)
