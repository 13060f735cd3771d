"""Rebuilding lost stages: block by block, for any cut, against an oracle by hand."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.analysis.blocks import blocks
from shoal.dag.capture.capture import capture
from shoal.dag.execute.neighbour import mean, rebuild, repeated
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import Stage, cut
from shoal.examples.gpt import gpt

LAYERS = 6


def captured(module: nn.Module) -> Graph:
    text = torch.zeros(2, 8, dtype=torch.int64)
    return capture(module, {"x": text, "y": text}).graph.bind(2)


@cache
def whole_graph() -> Graph:
    return captured(gpt(LAYERS, 8, 1, 8, 0.0))


def block_starts() -> list[int]:
    return [b.start for b in blocks(whole_graph()) if b.name.startswith("blocks.")]


@cache
def sizes_of_parameters() -> dict[str, tuple[int, ...]]:
    graph = whole_graph()
    return {p.name: tuple(graph.spec[f"param:{p.name}"].sizes) for p in graph.parameters}


def stages_at(starts: list[int]) -> tuple[Stage, ...]:
    return cut(whole_graph(), list(itertools.pairwise([0, *starts, len(whole_graph().operators)])))


def block_of(name: str) -> int:
    """-1: of none."""
    found = re.match(r"blocks\.(\d+)\.", name)
    return int(found[1]) if found else -1


def test_blocks_of_a_model_correspond_by_name() -> None:
    found = repeated(whole_graph())
    assert [b.name for b in found] == [f"blocks.{i}" for i in range(LAYERS)]
    for i, block in enumerate(found):
        assert {*block.parameters} == {n for n in sizes_of_parameters() if block_of(n) == i}
        for mine, first in zip(block.parameters, found[0].parameters, strict=True):
            assert mine.replace(f"blocks.{i}.", "blocks.0.") == first


def test_equal_stages() -> None:
    """One block each, and the ends by themselves: the paper's case."""
    stages = stages_at(
        [*block_starts(), next(b.start for b in blocks(whole_graph()) if b.name == "norm")]
    )
    found = rebuild(whole_graph(), stages, [3], [k for k in range(len(stages)) if k != 3])
    assert not found.lacking
    assert not found.copies
    assert {block_of(name) for name in found.means} == {2}
    for name, origins in found.means.items():
        rest = name.removeprefix("blocks.2.")
        assert [source for source, _ in origins] == [f"blocks.1.{rest}", f"blocks.3.{rest}"]
    first = rebuild(whole_graph(), stages, [1], [k for k in range(len(stages)) if k != 1])
    assert {len(origins) for origins in first.means.values()} == {1}, "one side: a copy"
    swapped = rebuild(whole_graph(), stages, [1], [0, *range(2, len(stages))], swapped=[(1, 2)])
    assert swapped.means.keys() == first.means.keys()


def test_stages_that_change_places_stand_in_for_each_other() -> None:
    ends = block_starts()[::2][1:]
    stages = stages_at(ends)
    found = rebuild(whole_graph(), stages, [1], [0, 2], swapped=[(1, 2)])
    for name, ((source, _),) in found.means.items():
        assert block_of(source) == block_of(name) + 2, "block by block, in its place"


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_cut_and_any_loss(data: st.DataObject) -> None:
    """The oracle looks at names: they say which block a parameter belongs to."""
    count = len(whole_graph().operators)
    starts = sorted(data.draw(st.sets(st.integers(1, count - 1), min_size=1, max_size=7)))
    stages = stages_at(starts)
    lost = data.draw(st.sets(st.integers(0, len(starts)), min_size=1, max_size=3))
    alive = [k for k in range(len(stages)) if k not in lost]
    found = rebuild(whole_graph(), stages, lost, alive)

    here = {p for k in alive for p in stages[k].parameters}
    whole = [
        i
        for i in range(LAYERS)
        if all(n in here for n in sizes_of_parameters() if block_of(n) == i)
    ]
    wanted = {p for k in lost for p in stages[k].parameters}
    assert {*found.copies} == wanted & here
    for name in wanted - here:
        i = block_of(name)
        near = [j for j in whole if j < i][-1:] + [j for j in whole if j > i][:1]
        if i < 0 or not near:
            assert name in found.lacking
        else:
            sources = [s for s, _ in found.means[name]]
            assert sources == [name.replace(f"blocks.{i}.", f"blocks.{j}.") for j in near]
    assert {*found.copies, *found.means, *found.lacking} == wanted
    assert bool(found.why_not) == bool(found.lacking)

    torch.manual_seed(data.draw(st.integers(0, 99)))
    tensors = {n: torch.randn(sizes_of_parameters()[n]) for n in found.sources}
    squares = {n: float(torch.rand(())) for n in found.weighed}
    for name, tensor in found.made(tensors, squares):
        sources = [s for s, _ in found.means[name]]
        if len(sources) == 1:
            assert torch.equal(tensor, tensors[sources[0]])
            continue
        weights = [
            sum(squares[n] for n in sizes_of_parameters() if block_of(n) == block_of(s))
            for s in sources
        ]
        total = sum(w * tensors[s] for w, s in zip(weights, sources, strict=True))
        assert torch.allclose(tensor, total / sum(weights), atol=1e-5)
        low, high = (f(*(tensors[s] for s in sources)) for f in (torch.minimum, torch.maximum))
        assert ((tensor >= low - 1e-6) & (tensor <= high + 1e-6)).all(), "between the two"


def test_a_stage_with_another_holder_is_copied() -> None:
    stages = stages_at(block_starts()[2:5:2])
    found = rebuild(whole_graph(), stages, [1], [0, 1, 2])
    assert not found.means
    assert not found.lacking
    assert {*found.copies} == {*stages[1].trainable}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means(dtype: torch.dtype) -> None:
    a, b = torch.randn(5, 3).to(dtype), torch.randn(5, 3).to(dtype)
    plain = ((a.double() + b.double()) / 2).to(dtype)
    assert torch.equal(mean([a, b], [0.7, 0.7]), plain), "equal norms: the plain mean"
    assert torch.equal(mean([a, b], [0.0, 0.0]), plain), "no gradient at all: too"
    assert torch.allclose(mean([a, b], [1.0, 0.0]), a, atol=1e-6)
    assert mean([a, b], [1.0, 3.0]).dtype == dtype
    alone = mean([a], [0.0])
    assert torch.equal(alone, a)
    assert alone.data_ptr() != a.data_ptr()


class Odd(nn.Module):
    """Two layers alike and one with a weight that both of another pair share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.shared = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = torch.tanh(self.shared(torch.tanh(layer(h))))
        return nn.functional.cross_entropy(h.flatten(0, 1), y.flatten() % 8)


def test_a_weight_that_all_blocks_share_survives_with_any_of_them() -> None:
    graph = captured(Odd())
    found = repeated(graph)
    assert len(found) == 2
    behind = next(b.start for b in blocks(graph) if b.name == found[1].name)
    stages = cut(graph, [(0, behind), (behind, len(graph.operators))])
    lost = rebuild(graph, stages, [1], [0])
    assert "shared.weight" in lost.copies
    assert lost.means.keys() <= {"layers.1.weight", "layers.1.bias"}
