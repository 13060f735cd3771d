"""Costs against calculations by hand and against what autograd really keeps."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shoal.dag.capture.capture import Captured, capture
from shoal.dag.cost.cost import (
    _TRIALS,
    FLOPS_PER_BYTE,
    OperatorCost,
    StageCost,
    cost,
    stage_cost,
)
from shoal.dag.cost.count import OPERATOR, SCORE, SCORE_BACKWARD, VIEW
from shoal.dag.cost.speed import Work
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.ir import random as shoal_random
from shoal.dag.ir.convert import graph_from_bytes, graph_to_bytes
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut

B, T, D, V = 3, 5, 8, 11  # batch, positions, width, vocabulary
ITEM = 4  # bytes of a float32


def saved_bytes(costs: Sequence[OperatorCost]) -> int:
    """Of what they keep for their backwards, each storage once."""
    return sum(dict(item for c in costs for item in c.saves).values())


class Attention(nn.Module):
    """Tied embedding, attention over two heads, a wide layer, dropout 0."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.rows = nn.Embedding(V, D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D, bias=False)
        self.norm = nn.LayerNorm(D)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.rows.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.rows(x)
        q, k, v = self.qkv(h).view(*h.shape[:2], 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = self.norm(h + self.drop(self.out(mixed.transpose(1, 2).reshape(h.shape))))
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, groups=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return F.cross_entropy(self.last(self.frozen(h)), y)


def inputs(name: str) -> dict[str, Tensor]:
    if name == "convolution":
        return {"x": torch.randn(B, 2, 7, 7), "y": torch.randint(0, 4, (B,))}
    return {"x": torch.randint(0, V, (B, T)), "y": torch.randint(0, V, (B, T))}


@cache
def captured(name: str) -> tuple[nn.Module, Captured]:
    module = {
        "attention": Attention,
        "dropout": lambda: Attention(0.5),
        "convolution": Convolution,
    }[name]()
    return module, capture(module, inputs(name))


def by_target(name: str, target: str) -> list[OperatorCost]:
    graph = captured(name)[1].graph.bind(B)
    return [c for op, c in zip(graph.operators, cost(graph), strict=True) if target in op.target]


def test_a_graph_is_bound_and_reckoned_once() -> None:
    graph = captured("dropout")[1].graph
    again = graph_from_bytes(graph_to_bytes(graph))
    assert again is graph_from_bytes(graph_to_bytes(graph)), "of the same bytes, the same object"
    assert again.bind(4) is again.bind(4)
    found = cost(again.bind(4))
    assert cost(again.bind(4)) is found
    assert found == cost(graph.bind(4)), "and no other than of a graph that is new"
    assert found != cost(graph.bind(5))


def test_a_linear_layer_is_two_flops_per_weight_and_token() -> None:
    qkv, out, head = by_target("attention", "linear")
    tokens = B * T
    assert qkv.flops_forward == 2 * tokens * D * 3 * D
    assert out.flops_forward == 2 * tokens * D * D
    assert out.flops_backward == 2 * out.flops_forward  # half for the input, half for the weight
    bias = FLOPS_PER_BYTE * ITEM * (tokens * 3 * D + 3 * D)  # its gradient is a sum over tokens
    assert qkv.flops_backward == 2 * qkv.flops_forward + bias
    assert qkv.parameter_bytes == ITEM * (3 * D * D + 3 * D)
    assert head.parameter_bytes == 0  # the embedding read it first


def test_attention_is_four_products_of_the_square_and_a_softmax() -> None:
    (attention,) = by_target("attention", "scaled_dot_product")
    scores = B * 2 * T * T  # of two heads
    assert attention.forward.attention == 4 * B * T * T * D + SCORE * scores
    backward = 5 * 2 * B * T * T * D  # the scores once more, four gradients
    assert attention.backward.attention == backward + SCORE_BACKWARD * scores


def test_a_convolution_counts_its_groups_and_places() -> None:
    (conv,) = by_target("convolution", "conv2d")
    assert conv.forward.convolution == 2 * B * 7 * 7 * 3 * 3 * 2 * 6 // 2
    # The weights' half: nothing trains below it.
    assert conv.backward.convolution == conv.forward.convolution


def test_a_frozen_layer_costs_half_the_backward() -> None:
    frozen, last = by_target("convolution", "linear")
    assert frozen.flops_backward == frozen.flops_forward == 2 * B * 6 * 6
    assert last.flops_backward == 2 * 2 * B * 6 * 4 + FLOPS_PER_BYTE * ITEM * (B * 4 + 4)  # bias


def test_views_move_nothing_and_the_rest_moves_bytes() -> None:
    (permute,) = by_target("attention", "permute")
    assert permute.forward == Work(calls=VIEW + OPERATOR)
    (add,) = by_target("attention", "add.Tensor")
    assert add.forward == Work(memory=ITEM * 3 * B * T * D, calls=1 + OPERATOR)
    assert add.backward == Work(calls=1)  # the gradient goes on as it is


@pytest.mark.parametrize("name", ["attention", "dropout", "convolution"])
def test_saved_bytes_are_what_autograd_keeps(name: str) -> None:
    _, made = captured(name)
    graph = made.graph.bind(B)
    costs = cost(graph)
    (stage,) = cut(graph, [(0, len(graph.operators))])
    executor = StageExecutor(graph, stage, made.tensors)
    given = inputs(name)
    outside = [*executor.parameters.values(), *executor.buffers.values(), *given.values()]
    kept: dict[int, tuple[int, Tensor]] = {}  # the tensor is held so that no address comes twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    executor.forward(0, 0, {}, given)  # the executor itself counts in its first microbatch
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        executor.forward(0, 1, {}, given)
    known = {t.untyped_storage().data_ptr() for t in outside}
    real = sum(size for pointer, (size, _) in kept.items() if pointer not in known)
    assert saved_bytes(costs) == real
    here = sum(t.nbytes for t in given.values())  # the model reads it anyway, a stage keeps it
    assert real <= executor.saved_bytes <= real + here + graph.spec[graph.loss].size_bytes


def test_an_interval_counts_shared_things_once_and_two_intervals_twice() -> None:
    graph = captured("attention")[1].graph.bind(B)
    costs = cost(graph)
    n = len(costs)
    whole = stage_cost(costs, 0, n)
    assert whole.parameter_bytes == ITEM * (V * D + 3 * D * D + 3 * D + D * D + 2 * D)
    assert whole.flops_forward == sum(c.flops_forward for c in costs)
    for at in range(1, n):
        first, second = stage_cost(costs, 0, at), stage_cost(costs, at, n)
        assert saved_bytes(costs[:at]) + saved_bytes(costs[at:]) >= saved_bytes(costs)
        assert first.flops_backward + second.flops_backward == whole.flops_backward
    tied = stage_cost(costs, 0, 1).parameter_bytes + stage_cost(costs, 1, n).parameter_bytes
    assert tied == whole.parameter_bytes + ITEM * V * D
    assert stage_cost(costs, 4, 4) == StageCost(Work(), Work(), 0)


def test_costs_do_not_depend_on_what_ran_before() -> None:
    graph = captured("dropout")[1].graph.bind(B)
    before = cost(graph)
    assert cost(replace(graph)) == before, "of trials that another graph has made"
    shoal_random.dropout(torch.ones(10_000), 0.5, 0, key=1)  # fills the tables of the hash
    _TRIALS.clear()
    assert cost(replace(graph)) == before
    (drop,) = by_target("dropout", "shoal.dropout")
    assert saved_bytes([drop]) == B * T * D  # one byte per element


@pytest.mark.parametrize("name", ["attention", "dropout", "convolution"])
def test_no_class_of_work_shrinks_with_the_batch_or_is_negative(name: str) -> None:
    graph = captured(name)[1].graph
    n = len(graph.operators)
    before = Work()
    for batch in (2, 3, 8, 64):
        whole = stage_cost(cost(graph.bind(batch)), 0, n)
        now = whole.forward + whole.backward
        assert all(a <= b for a, b in zip(before, now, strict=True))
        before = now
    assert before.calls == now.calls


def test_costs_grow_with_the_batch_and_equal_operators_cost_the_same() -> None:
    graph = captured("attention")[1].graph
    costs = [cost(graph.bind(b)) for b in (1, 2, 8)]
    sums = [stage_cost(c, 0, len(graph.operators)) for c in costs]
    assert sums[0].flops_forward < sums[1].flops_forward < sums[2].flops_forward
    assert saved_bytes(costs[0]) < saved_bytes(costs[1]) < saved_bytes(costs[2])
    assert len({s.parameter_bytes for s in sums}) == 1


def test_a_model_that_fits_nowhere_is_costed_in_no_memory() -> None:
    width = 1 << 20  # one weight of 4 TiB

    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).mean()

    with torch.device("meta"):
        module = Huge()
    graph: Graph = capture(module, {"x": torch.empty(2, width, device="meta")}).graph.bind(2)
    assert stage_cost(cost(graph), 0, 2).parameter_bytes == ITEM * width**2
