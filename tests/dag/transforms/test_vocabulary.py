"""The head in blocks against the whole one: loss, every gradient, flags and names."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.capture.capture import capture
from shoal.dag.cost.cost import cost
from shoal.dag.ir.graph import GraphError
from shoal.dag.ir.infer import infer, with_grads
from shoal.dag.plan.cut import cut
from shoal.dag.transforms.split_weights import ParameterBlock, block_of, blocks, whole_name
from shoal.dag.transforms.vocabulary import can_split, head_operators, split_head

from .heads import MEAN, NONE, SUM, compare, head_graph, in_blocks, run, tensors


@settings(deadline=None)
@given(
    words=st.integers(2, 40),
    parts=st.integers(2, 7),
    batch=st.integers(1, 4),
    length=st.integers(1, 5),
    width=st.integers(1, 9),
    bias=st.booleans(),
    reduction=st.sampled_from([MEAN, SUM, NONE]),
    ignored=st.sampled_from([None, (-100, 0.5), (0, 0.5), (1, 0.3), (-1, 1.0), (-100, 1.0)]),
    seed=st.integers(0, 2**32),
)
def test_loss_and_gradients_are_those_of_the_whole_head(
    words, parts, batch, length, width, bias, reduction, ignored, seed
):
    ignore = ignored[0] if ignored else -100
    graph = head_graph(words, width, length, bias=bias, reduction=reduction, ignore=ignore)
    given = tensors(graph, batch, seed, ignored)
    compare(graph, given, min(parts, words), batch)


def test_a_mean_over_no_token_is_nan_with_gradient_zero():
    graph = head_graph()
    given = tensors(graph, 2, 0, (-100, 1.0))
    loss, grads = run(split_head(graph, 3), in_blocks(given, 3), 2)
    assert loss.isnan()
    assert all(bool((g == 0).all()) for g in grads.values())


def test_a_small_loss_beside_large_logits_keeps_its_digits():
    graph = head_graph(words=8, width=8, length=4, bias=True)
    given = tensors(graph, 2, 1)
    given["param:norm"] = torch.ones(8)
    given["param:head.weight"] = 1000.0 * torch.eye(8)
    given["param:head.bias"] = torch.linspace(0, 1, 8)
    given["in:x"] = torch.nn.functional.one_hot(given["in:y"], 8) * 0.005 + 2.0
    compare(graph, given, 3, 2)


def test_a_block_of_padding_words_that_are_minus_infinity():
    graph = head_graph(words=9)
    given = tensors(graph, 2, 2)
    given["in:y"] %= 6
    given["param:head.bias"][6:] = float("-inf")
    compare(graph, given, 3, 2)


@pytest.mark.parametrize("label", [-1, 11, 1000])
def test_a_label_that_is_no_word_fails_as_in_the_whole_loss(label):
    graph = head_graph(words=11)
    given = tensors(graph, 2, 0)
    given["in:y"][0, 0] = label
    with pytest.raises(GraphError, match="out of bounds"):
        run(graph, given, 2)
    with pytest.raises(GraphError, match="out of bounds"):
        run(split_head(graph, 3), in_blocks(given, 3), 2)


def test_scales_between_head_and_loss_are_each_blocks_own():
    graph = head_graph(scale=0.25)
    compare(graph, tensors(graph, 2, 0), 4, 2)


def test_under_mixed_precision_it_is_equal_to_the_precision_of_bfloat16():
    graph = head_graph(words=32, width=16, bf16=True)
    given = tensors(graph, 3, 0, (-100, 0.3))
    compare(graph, given, 4, 3, rel=1e-2)
    assert split_head(graph, 4).spec["linear/0"].dtype == "bfloat16"


@pytest.mark.parametrize("reduction", [MEAN, SUM, NONE])
@pytest.mark.parametrize("bf16", [False, True])
def test_specs_and_gradient_flags_are_those_that_torch_infers(reduction, bf16):
    split = split_head(head_graph(reduction=reduction, bf16=bf16), 3).bind(2)
    inferred = infer(split)
    assert {value: spec for value, (spec, _) in inferred.items()} == split.spec
    assert with_grads(split, inferred) == split
    assert split == split_head(head_graph(reduction=reduction, bf16=bf16).bind(2), 3)


def test_no_logits_cross_between_stages():
    graph, parts = head_graph(words=100, width=2, length=5), 4
    split = split_head(graph, parts).bind(3)
    bounds = head_operators(graph, parts)
    edges = [0, *(start for start, _ in bounds), bounds[-1][1], len(split.operators)]
    assert [stop for _, stop in bounds[:-1]] == [start for start, _ in bounds[1:]]
    stages = cut(split, list(itertools.pairwise(edges)))
    for stage in stages[1:]:
        assert all(port.spec.sizes[-1] <= 3 * 5 for port in stage.sends), stage.sends
        assert all(port.spec.elements <= 3 * 5 for port in stage.sends)
    for b, stage in enumerate(stages[1:-1]):
        own = {f"head.weight..{b}/4", f"head.bias..{b}/4"}
        assert set(stage.parameters) == own
        # h and the labels, not another block's numbers
        assert {p.source for p in stage.receives} == {0}
    # What the three numbers of a block carry back: its sum and its target, not its maximum.
    assert [p.value for p in stages[1].sends if p.grad] == ["linear/0/sum", "linear/0/target"]


def test_blocks_share_the_heads_work():
    graph = head_graph(words=64, width=512, length=8).bind(4)
    whole, split = cost(graph), cost(split_head(graph, 4))
    per_block = [
        sum(split[i].flops_forward for i in range(*where)) for where in head_operators(graph, 4)
    ]
    head = next(
        c.flops_forward for c, op in zip(whole, graph.operators, strict=True) if op.name == "linear"
    )
    assert all(head / 4 <= flops < head / 3 for flops in per_block)


def test_parameters_become_blocks_with_the_rows_of_the_whole():
    split = split_head(head_graph(words=11, width=4), 3)
    assert [(p.name, p.spec.shape, p.tied) for p in split.parameters] == [
        ("norm", (4,), ()),
        ("head.weight..0/3", (3, 4), ("output.weight..0/3",)),
        ("head.weight..1/3", (4, 4), ("output.weight..1/3",)),
        ("head.weight..2/3", (4, 4), ("output.weight..2/3",)),
        ("head.bias..0/3", (3,), ()),
        ("head.bias..1/3", (4,), ()),
        ("head.bias..2/3", (4,), ()),
    ]
    assert split.loss == "loss"
    assert split.operators[-1].name == "loss"


@given(rows=st.integers(1, 10**6), parts=st.integers(1, 64))
def test_blocks_of_rows_cover_each_row_once(rows, parts):
    edges = [block.rows(rows) for block in blocks("w", parts)]
    assert edges[0][0] == 0
    assert edges[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    sizes = [stop - start for start, stop in edges]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    "name", ["head.weight", "a..b", "a..0", "a..1/0", "a..2/2", "a..01/2", "..0/2", "a..0/2.b"]
)
def test_other_names_are_no_blocks(name):
    assert block_of(name) is None
    assert whole_name(name) == name


def test_the_name_of_a_block_says_what_it_is():
    assert block_of("head.weight..1/3") == ParameterBlock("head.weight", 1, 3)
    assert whole_name("head.bias..1/3") == "head.bias"
    with pytest.raises(KeyError):  # torch allows no such name in a module
        torch.nn.Module().register_parameter("w..0/3", None)


class Shifted(nn.Module):
    """The loss of older Hugging Face models: logits and labels shifted inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(13, 6)
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.words(x)) / 2
        shifted, labels = logits[..., :-1, :].contiguous(), y[..., 1:].contiguous()
        total = F.cross_entropy(shifted.view(-1, 13), labels.view(-1), reduction="sum")
        count = (labels != -100).sum()
        return {"loss": total / count.clamp(1), "weight": count.float()}


def test_a_captured_model_with_shifted_labels():
    module = Shifted()
    data = {"x": torch.randint(13, (3, 5)), "y": torch.randint(13, (3, 5))}
    data["y"][0, 2:] = -100
    graph = capture(module, data).graph
    assert can_split(graph) == ""
    given = {f"in:{name}": t for name, t in data.items()}
    given |= {f"param:{name}": t.detach() for name, t in module.state_dict().items()}
    compare(graph, given, 4, 3)
    split = split_head(graph, 4).bind(3)
    assert with_grads(split, infer(split)) == split
    assert split.weight == graph.weight
