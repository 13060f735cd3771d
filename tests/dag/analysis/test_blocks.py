"""Repetition is found by structure and named by modules."""

import random
from functools import cache

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.analysis.blocks import Block, blocks, describe_interval
from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.examples.gpt import gpt
from shoal.examples.resnet_digits import resnet

ROW = TensorSpec((4,), "float32")


def chain(kinds: str, modules: list[str]) -> Graph:
    """One operator per letter; each has a weight and reads the one before."""
    targets = {"a": "aten.mul.Tensor", "b": "aten.add.Tensor", "c": "aten.sub.Tensor"}
    operators = tuple(
        Operator(
            f"v{i}",
            targets[kind],
            (Ref(f"v{i - 1}" if i else "in:x"), Ref(f"param:p{i}")),
            (),
            (Output(ROW, True),),
            module=module,
        )
        for i, (kind, module) in enumerate(zip(kinds, modules, strict=True))
    )
    parameters = tuple(Parameter(f"p{i}", ROW) for i in range(len(kinds)))
    return Graph((Input("x", ROW),), parameters, (), operators, f"v{len(kinds) - 1}")


@cache
def gpt_graph() -> Graph:
    text = torch.zeros(2, 16, dtype=torch.int64)
    return capture(gpt(4, 16, 2, 16), {"x": text, "y": text}).graph


def summary(found: tuple[Block, ...]) -> list[tuple[str, str]]:
    return [(b.name, b.kind) for b in found]


def test_a_transformer_is_its_blocks_between_embedding_and_head() -> None:
    found = blocks(gpt_graph())
    layers = [(f"blocks.{i}", "blocks.0") for i in range(4)]
    ends = [(n, n) for n in ("bytes", "positions", "drop", "norm", "head")]
    assert summary(found) == [*ends[:3], *layers, *ends[3:]]
    assert len({b.stop - b.start for b in found if b.kind == "blocks.0"}) == 1
    for block in found:
        inside = {op.module for op in gpt_graph().operators[block.start : block.stop]}
        if block.kind == "blocks.0":
            assert all(f"{module}.".startswith(f"{block.name}.") for module in inside)


def test_binding_the_batch_changes_no_block() -> None:
    assert blocks(gpt_graph()) == blocks(gpt_graph().bind(8))


def test_an_interval_in_words() -> None:
    graph = gpt_graph()
    found = {b.name: b for b in blocks(graph)}
    start, stop = found["blocks.1"].start, found["norm"].stop
    assert describe_interval(graph, start, stop) == "blocks.1 to blocks.3, norm"
    inner = describe_interval(graph, start + 2, found["blocks.3"].stop - 1)
    assert inner == "blocks.1 (end) to blocks.3 (begin)"
    assert describe_interval(graph, start + 1, start + 3) == "blocks.1 (middle)"
    whole = describe_interval(graph, 0, len(graph.operators))
    assert whole == "bytes, positions, drop, blocks.0 to blocks.3, norm, head"


def test_the_path_above_all_layers_is_left_out_of_words() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt(4, 16, 2, 16)
            self.scale = nn.Linear(1, 1)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.scale(self.model(x, y).view(1, 1)).mean()

    text = torch.zeros(2, 16, dtype=torch.int64)
    graph = capture(Model(), {"x": text, "y": text}).graph
    words = describe_interval(graph, 0, len(graph.operators))
    assert "blocks.0 to blocks.3" in words
    assert "model.blocks" not in words
    assert words.endswith("scale")


def test_layers_of_other_widths_are_other_kinds() -> None:
    images = {"x": torch.zeros(2, 1, 8, 8), "y": torch.zeros(2, dtype=torch.int64)}
    graph = capture(resnet(), images).graph
    found = blocks(graph)
    assert "layers.0 to layers.5" in describe_interval(graph, 0, len(graph.operators))
    layers = [b for b in found if b.name.startswith("layers.")]
    assert [b.name for b in layers] == [f"layers.{i}" for i in range(6)]
    assert layers[0].kind == layers[1].kind
    assert len({b.kind for b in layers}) == 5


def test_residuals_outside_the_submodule_belong_to_its_block() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return F.mse_loss(x, torch.ones_like(x))

    found = blocks(capture(Loop(), {"x": torch.zeros(2, 8)}).graph)
    assert [b.name for b in found[:3]] == ["layers.0", "layers.1", "layers.2"]
    assert [(b.start, b.stop) for b in found[:3]] == [(0, 4), (4, 8), (8, 12)]


def test_repetition_without_submodules_is_numbered() -> None:
    found = blocks(chain("cababab", [""] * 7))
    assert summary(found)[1:] == [(f"block[{i}]", "block[0]") for i in range(3)]


def test_the_shortest_period_wins_and_one_operator_is_no_block() -> None:
    modules = ["net.0", "net.1", "net.2", "net.3", "net.4", "net.5", "net.6", "net.7"]
    assert len({b.kind for b in blocks(chain("abababab", modules)) if b.stop - b.start == 2}) == 1
    assert all(b.stop - b.start == 1 for b in blocks(chain("aaa", ["q", "k", "v"])))


def test_equal_operators_wired_otherwise_are_not_one_kind() -> None:
    """v1 reads v0 in one repetition and the input in the other."""
    graph = chain("abab", ["l.0", "l.0", "l.1", "l.1"])
    skewed = list(graph.operators)
    skewed[3] = Operator(
        "v3", skewed[3].target, (Ref("v1"), Ref("param:p3")), (), skewed[3].outputs, module="l.1"
    )
    other = Graph(graph.inputs, graph.parameters, (), tuple(skewed), graph.loss)
    assert len({b.kind for b in blocks(graph)}) == 1
    assert len({b.kind for b in blocks(other)}) == 2


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 24))
def test_blocks_cover_every_operator_once_under_unique_names(seed: int, size: int) -> None:
    rng = random.Random(seed)
    unit = "".join(rng.choice("abc") for _ in range(rng.randint(1, 5)))
    kinds = (unit * size)[:size]
    graph = chain(kinds, [rng.choice(["", "a", "a.0", "a.1", "b", "b.c.d"]) for _ in kinds])
    found = blocks(graph)
    edges = [b.start for b in found] + [found[-1].stop]
    assert edges[0] == 0
    assert edges[-1] == size
    assert all(b.start < b.stop for b in found)
    assert [b.stop for b in found[:-1]] == edges[1:-1]
    assert len({b.name for b in found}) == len(found)
    for kind in {b.kind for b in found}:
        assert len({kinds[b.start : b.stop] for b in found if b.kind == kind}) == 1
    assert describe_interval(graph, 0, size)
