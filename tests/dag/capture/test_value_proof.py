"""What a module gives is compared with what its graph gives, with the graph's own masks; a graph
that computes or draws anything else is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture.capture import capture
from shoal.dag.capture.from_fx import Names
from shoal.dag.capture.proof import Forward, Late
from shoal.dag.capture.value_proof import prove_values
from shoal.dag.ir.capture_errors import CaptureError
from shoal.dag.ir.graph import Graph, Operator

INPUTS = {"x": torch.zeros(3, 4, 6), "y": torch.zeros(3, dtype=torch.long)}


class Draws(nn.Module):
    """All that draws, one draw that nobody reads, a batch norm, and a branch that begins at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.maps = nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Dropout2d(0.4)
        self.inside, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.norm(self.inside(x))
        self.drop(h)
        q = self.drop(h)[:, None]
        p = 0.2 if self.training else 0.0
        h = F.scaled_dot_product_attention(q, q, q, dropout_p=p)[:, 0] + 0.1 * torch.rand_like(h)
        h = self.maps(h[..., None])[..., 0] * torch.bernoulli(torch.full((6,), 0.7))
        h = h + torch.randn(6) * 0.1 + self.scale * torch.bernoulli(h.detach().sigmoid())
        return {"loss": F.cross_entropy(self.out(h.mean(1)), y), "mean": h.mean()}


@pytest.fixture(scope="module")
def module() -> Draws:
    torch.manual_seed(0)
    return Draws()


@pytest.fixture(scope="module")
def graph(module: Draws) -> Graph:
    found = capture(module, INPUTS)
    assert found.unproved == ()
    return found.graph


UNTRIED = "what it computes was not compared with the model"
SAYS = "in its first call in train mode its (loss|mean) is"


def prove(module: nn.Module, graph: Graph, late: Late = lambda: False) -> str:
    parameters = {n: n for n, _ in module.named_parameters()}
    buffers = {n: n for n, _ in module.named_buffers()}
    names = Names(parameters, buffers, frozenset(parameters), frozenset(buffers))
    known = frozenset(buffers)
    before = {n: t.clone() for n, t in module.state_dict().items()}
    state = torch.get_rng_state()
    try:
        return prove_values(Forward(module, INPUTS, None, known), graph, names, {}, 2, None, late)
    finally:
        assert module.training
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())


def changed(graph: Graph, target: str, change) -> Graph:
    """The graph with its first operator of this name changed."""
    one = next(op for op in graph.operators if op.target.split(".")[1] == target)
    made: Operator = change(one)
    return replace(graph, operators=tuple(made if op is one else op for op in graph.operators))


def with_arg(place: int, value):
    return lambda op: replace(op, args=(*op.args[:place], value, *op.args[place + 1 :]))


def test_a_module_that_draws_gives_what_its_graph_gives(module: Draws, graph: Graph) -> None:
    assert sum(op.target.startswith("shoal.") for op in graph.operators) == 7
    assert prove(module, graph) == ""


@pytest.mark.parametrize("calls", range(9))
def test_a_comparison_that_runs_out_of_time_says_how_far_it_came(
    module: Draws, graph: Graph, calls: int
) -> None:
    """Three calls in each mode, and in each one that tells which draws count."""
    left = iter([False] * calls)
    done = max(0, min(calls - 1, 3)) + max(0, calls - 5)
    found = prove(module, graph, lambda: next(left, True))
    wanted = f"{done} of 6 calls were compared in 60 s"
    assert found == ("" if calls == 8 else f"{UNTRIED}: {wanted}")


def test_a_capture_says_what_its_proof_had_no_time_for(module: Draws, graph: Graph) -> None:
    now = iter([0.0, 10.0, 59.0])
    found = capture(module, INPUTS, choices=(4,), clock=lambda: next(now, 60.0))
    assert found.graph == graph
    assert len(found.unproved) == 2
    said: list[str] = []
    assert found.right_sizes((3, 4), said.append) == (3,)
    assert [line.split(",")[0] for line in said] == ["of the capture"] * 2 + [
        "no microbatches of 4: it was not tried in time"
    ]


def test_what_is_too_large_to_compare_is_said(
    module: Draws, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.dag.capture.value_proof.MOST_FLOPS", 1.0)
    assert "a call takes 0 GFLOP" in prove(module, graph)
    monkeypatch.setattr("shoal.dag.capture.value_proof.MOST_NUMBERS", 10)
    assert "it has 86 numbers, and up to 10 are tried" in prove(module, graph)


@pytest.mark.parametrize(
    ("target", "change", "says"),
    [
        ("dropout", with_arg(1, 0.31), "first call in train mode its loss"),
        ("feature_dropout", with_arg(1, 0.41), SAYS),
        ("sigmoid", lambda op: replace(op, target="aten.tanh.default"), SAYS),  # where it is 0
        ("mul", with_arg(1, 0.2), "its loss is"),
        ("_native_batch_norm_legit_functional", with_arg(7, 0.5), "its loss is"),
    ],
)
def test_another_computation_is_seen(module, graph, target, change, says) -> None:
    with pytest.raises(CaptureError, match=says):
        prove(module, changed(graph, target, change))


def test_another_momentum_is_seen(module: Draws, graph: Graph) -> None:
    slower = tuple(
        replace(b, update=replace(b.update, factor=0.2)) if b.update and b.update.value else b
        for b in graph.buffers
    )
    with pytest.raises(CaptureError, match=r"buffer norm\.running_mean is"):
        prove(module, replace(graph, buffers=slower))


def test_another_gradient_is_seen() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.a(x)
            return F.cross_entropy(self.b(h + h.detach()).mean(1), y)

    module = Stops()
    graph = capture(module, INPUTS).graph
    flowing = changed(graph, "detach", lambda op: replace(op, target="aten.alias.default"))
    with pytest.raises(CaptureError, match=r"the gradient of a\.weight"):
        prove(module, flowing)


def test_a_branch_that_an_export_alone_takes_is_refused() -> None:
    class Exported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            h = self.a(x).mean(1)
            return F.cross_entropy(h if torch.compiler.is_compiling() else 2 * h, y)

    with pytest.raises(CaptureError, match="no other branch while it is exported"):
        capture(Exported(), INPUTS)


class Once(nn.Module):
    """Raises in every call behind its first one, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.once, self.calls = nn.Linear(6, 3), False, 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.once and self.calls:
            raise RuntimeError("never twice")
        self.calls += self.once
        return F.cross_entropy(self.out(x.mean(1)), y)


@pytest.mark.parametrize("once", [False, True])
def test_data_that_raises_is_no_fault_of_the_calls_before(once: bool) -> None:
    module = Once()
    graph = capture(module, INPUTS).graph
    module.once = once

    def samples(number: int, size: int) -> dict[str, Tensor]:
        return {"x": torch.ones(size, 4, 6), "y": torch.tensor([0, 0 if once else -number])}

    names = {n: n for n, _ in module.named_parameters()}
    found = Names(names, {}, frozenset(names), frozenset())
    forward = Forward(module, INPUTS, None, frozenset())
    if once:
        with pytest.raises(CaptureError, match=r"second call .*\(never twice\)"):
            prove_values(forward, graph, found, {}, 2, samples)
    else:
        assert "Target -1 is out of" in prove_values(forward, graph, found, {}, 2, samples)
