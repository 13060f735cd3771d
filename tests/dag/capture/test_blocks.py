"""Blocks that repeat are exported once. The oracle is the export of the whole module: the graph
must be the same one, names and numbers of random operators included."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shoal.dag.capture import capture as capturing
from shoal.dag.capture.blocks import Repeat, repeats
from shoal.dag.capture.capture import Captured, capture
from shoal.examples.gpt import gpt

X = {"x": torch.zeros(2, 3, 4)}
TEXT = {"x": torch.zeros(2, 8, dtype=torch.long), "y": torch.zeros(2, 8, dtype=torch.long)}


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.inner(x)).tanh()


class Normed(nn.Module):
    """Its statistics are state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(x))


class Scaled(nn.Module):
    """Does something else in each place."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.inner, self.by = nn.Linear(4, 4), by

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.by


class Stack(nn.Module):
    """Blocks after each other, between two weights of its own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(4, 4), nn.ModuleList(blocks)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h).square().mean()


def both(
    module: nn.Module, inputs: dict[str, Tensor], dtype: str = "fp32"
) -> tuple[Captured, Captured]:
    """The module captured by its blocks, and as a whole."""
    ours = capture(module, inputs, dtype=dtype, core=True)  # type: ignore[arg-type]
    with mock.patch.object(capturing, "repeats", return_value=()):
        whole = capture(module, inputs, dtype=dtype, core=True)  # type: ignore[arg-type]
    return ours, whole


def assert_same(ours: Captured, whole: Captured) -> None:
    assert ours.graph == whole.graph
    assert ours.core == whole.core
    assert ours.tensors.keys() == whole.tensors.keys()
    assert all(ours.tensors[n].data_ptr() == t.data_ptr() for n, t in whole.tensors.items())


def stack(*kinds: Callable[[], nn.Module]) -> Stack:
    return Stack(*(kind() for kind in kinds))


class Sums(Stack):
    """A value of the first rows is read in every block, and one runs along with the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        h, along = self.first(x), torch.zeros_like(x)
        mask = (x > 0).float()
        for block in self.blocks:
            along = along + h * mask
            h = block(h) + mask
        return self.last(h + along).square().mean()


class Chained(nn.Module):
    """Two lists, the second of which reads what the first one made; a container is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*(Plain() for _ in range(7)))
        self.up = nn.ModuleList(Plain() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.down(x)
        h = x
        for i in range(len(self.up)):
            h = self.up[i](h) * memory
        return h.square().mean()


SAME: dict[str, tuple[Callable[[], nn.Module], tuple[Repeat, ...]]] = {
    "all alike": (lambda: stack(*[Plain] * 9), (Repeat("blocks", 9, 1, 1, 7),)),
    "statistics": (lambda: stack(*[Normed] * 8), (Repeat("blocks", 8, 1, 1, 6),)),
    "taking turns": (
        lambda: stack(*[Plain, Normed] * 5),
        (Repeat("blocks", 10, 1, 2, 4),),
    ),
    "others before and behind": (
        lambda: stack(Normed, Normed, *[Plain] * 7, Normed),
        (Repeat("blocks", 10, 3, 1, 6),),
    ),
    "a value that runs along": (
        lambda: Sums(*(Plain() for _ in range(8))),
        (Repeat("blocks", 8, 1, 1, 6),),
    ),
    "two lists": (Chained, (Repeat("down", 7, 1, 1, 6), Repeat("up", 8, 1, 1, 6))),
    "a list alone": (
        lambda: nn.Sequential(*(Plain() for _ in range(7)), Mean()),
        (Repeat("", 8, 1, 1, 6),),
    ),
}


class Mean(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.square().mean()


LONGER = ("others before and behind", "taking turns", "statistics")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONGER else ()) for n in SAME]
)
def test_the_graph_is_that_of_the_whole_module(name: str) -> None:
    make, found = SAME[name]
    module = make()
    inputs = {"input": X["x"]} if isinstance(module, nn.Sequential) else X
    assert repeats(module, inputs, None) == found
    before = [n for n, _ in module.named_modules()]
    assert_same(*both(module, inputs))
    assert [n for n, _ in module.named_modules()] == before


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_a_gpt_with_dropout_and_tied_weights(dtype: str) -> None:
    module = gpt(layers=8, width=8, heads=2, length=8, dropout=0.1)
    for parameter in module.blocks[2].parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    assert repeats(module, TEXT, None) == (Repeat("blocks", 8, 3, 1, 4),)
    assert_same(*both(module, TEXT, dtype))


def test_the_export_sees_few_blocks() -> None:
    seen: list[int] = []
    module = stack(*[Plain] * 40)

    def export(module: nn.Module, *args: object) -> object:
        seen.append(len(module.blocks))  # type: ignore[arg-type]
        return exported(module, *args)  # type: ignore[arg-type]

    exported = capturing.export
    with mock.patch.object(capturing, "export", export):
        graph = capture(module, X).graph
    assert seen == [4]
    assert len({op.module for op in graph.operators if op.module.endswith(".inner")}) == 40


class Gathered(Stack):
    """The end reads what every block made."""

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for block in self.blocks:
            found.append(block(found[-1]))
        return torch.stack(found).square().mean()


class Skips(Stack):
    """As a U-Net: the last blocks read what the first ones made."""

    def forward(self, x: Tensor) -> Tensor:
        h, kept = x, []
        for i, block in enumerate(self.blocks):
            h = block(h if i < 4 else h + kept.pop())
            kept += [h] if i < 4 else []
        return h.square().mean()


class Counts(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in self.blocks:
            h = block(h) / len(self.blocks)
        return h.square().mean()


class Special(Stack):
    """One block in the middle is left without a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, block in enumerate(self.blocks):
            with torch.set_grad_enabled(i != 4):
                h = block(h)
        return self.last(h).square().mean()


class Remembers(Stack):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return super().forward(x)


class Twice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        h = x
        for block in [*self.blocks, *self.blocks]:
            h = block(h)
        return self.last(h).square().mean()


class Large(Stack):
    """Tells large microbatches from small ones in one of its blocks: such a module is refused."""

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, block in enumerate(self.blocks):
            h = block(h) * (2 if i == 4 and len(x) > 4 else 1)
        return self.last(h).square().mean()


def plains(count: int = 8) -> list[nn.Module]:
    return [Plain() for _ in range(count)]


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(stack(*[Plain] * 5), id="few"),
        pytest.param(Stack(*[Plain()] * 8), id="one module in many places"),
        pytest.param(Stack(*(Scaled(float(i)) for i in range(8))), id="other numbers"),
        pytest.param(Gathered(*plains()), id="all read at the end"),
        pytest.param(Skips(*plains()), id="skips"),
        pytest.param(Counts(*plains()), id="counts"),
        pytest.param(Special(*plains()), id="one without gradient"),
        pytest.param(Remembers(*plains()), id="remembers"),
        pytest.param(Twice(*plains()), id="twice"),
        pytest.param(Large(*plains()), id="tells the batch"),
    ],
)
def test_what_is_not_certain_is_exported_as_a_whole(module: nn.Module) -> None:
    before = dict(module.__dict__)
    found = repeats(module, X, None)
    assert sum(r.count - 2 for r in found) <= 1  # of 8; the first or last ones may be left
    assert module.__dict__ == before


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from([Plain, Normed]), min_size=6, max_size=12))
def test_any_order_of_blocks(kinds: list[Callable[[], nn.Module]]) -> None:
    assert_same(*both(stack(*kinds), X))
