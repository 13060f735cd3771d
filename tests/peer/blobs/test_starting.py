"""What a run begins with: files, and what its recipe makes of the rest."""

from __future__ import annotations

import pytest
import torch

from shoal.dag.ir import quantized
from shoal.dag.ir.graph import Buffer, Graph, Parameter, TensorSpec
from shoal.dag.ir.recipe import Initial, Recipe, RecipeError, RecipeStep, make
from shoal.dag.transforms.split_weights import blocks
from shoal.peer.blobs.starting import ByGraph, Starting, check_recipe
from shoal.peer.blobs.weights import (
    WeightError,
    Weights,
    WeightsFile,
    has_start,
    serialize,
    starting_tensor,
)

HEAD = Initial((11, 3), "float32", (RecipeStep("normal", 0, 33, (0.0, 1.0), "head"),))
BODY = Initial((4,), "bfloat16", (RecipeStep("uniform", 0, 4, (0.0, 1.0), "body"),))
RECIPE = Recipe(9, {"head": HEAD, "body": BODY})


@pytest.fixture
def starting() -> Starting:
    data = serialize({"body": torch.arange(4.0), "mask": torch.ones(2)})
    read = lambda _, offset, length: data[offset : offset + length]  # noqa: E731  (short)
    return Starting(Weights([WeightsFile("ab", len(data))], read), RECIPE)


def test_a_file_wins_over_the_recipe_by_name(starting: Starting) -> None:
    assert torch.equal(starting["body"], torch.arange(4.0))
    assert starting.spec("body") == ((4,), torch.float32)
    assert torch.equal(starting["head"], make(HEAD, 9))
    assert starting.spec("head") == ((11, 3), torch.float32)
    assert sorted(starting) == ["body", "head", "mask"]
    assert len(starting) == 3
    assert "tail" not in starting
    with pytest.raises(KeyError):
        starting["tail"]


@pytest.mark.parametrize("parts", [2, 3, 11])
def test_blocks_of_a_split_parameter_are_its_rows(starting: Starting, parts: int) -> None:
    made = [starting_tensor(starting, str(block)) for block in blocks("head", parts)]
    assert torch.equal(torch.cat([m for m in made if m is not None]), starting["head"])
    assert all(len(m) < 11 for m in made if m is not None)


def graph(head: TensorSpec, body: TensorSpec) -> Graph:
    parameters = (Parameter("h", head, True, ("head",)), Parameter("other", body, True, ()))
    return Graph((), parameters, (Buffer("body", body),), (), loss="")


def test_a_recipe_of_other_tensors_than_the_graphs_is_refused_before_they_are_made() -> None:
    fits = TensorSpec((11, 3), "float32"), TensorSpec((4,), "float32")
    check_recipe(RECIPE, graph(*fits))
    check_recipe(Recipe(0, {"nowhere": HEAD}), graph(*fits))
    with pytest.raises(RecipeError, match=r"'head' makes float32\[11, 3\]: the graph has"):
        check_recipe(RECIPE, graph(TensorSpec((1 << 40, 3), "float32"), fits[1]))
    with pytest.raises(RecipeError, match=r"'body' makes bfloat16\[4\]: the graph has int64\[4\]"):
        check_recipe(RECIPE, graph(fits[0], TensorSpec((4,), "int64")))


def in_8_bits(*names: str, scales: tuple[int, ...] = (11, 1)) -> Graph:
    """A graph of one weight (11, 3) in 8 bits, by its names."""
    tied = (names[1:], tuple(f"{n}..scale" for n in names[1:]))
    parameters = (
        Parameter(names[0], TensorSpec((11, 3), "int8"), False, tied[0]),
        Parameter(f"{names[0]}..scale", TensorSpec(scales, "float32"), False, tied[1]),
    )
    return Graph((), parameters, (), (), loss="")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_a_weight_in_8_bits_is_read_once_some_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: int
) -> None:
    """By the formula of the whole weight, in whichever dtype a file has it."""
    monkeypatch.setattr(quantized, "SLICE", 3 * rows)
    weight = torch.randn(11, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    data, read = serialize({"tied": weight}), list[tuple[int, int]]()

    def bytes_at(_: str, offset: int, length: int) -> memoryview:
        read.append((offset, length))
        return data[offset : offset + length]

    made = ByGraph(Weights([WeightsFile("ab", len(data))], bytes_at), in_8_bits("own", "tied"))
    numbers, scale = made["own"], made["own..scale"]
    wide = weight.float()
    wanted = wide.abs().amax(1, keepdim=True) / 127
    assert torch.equal(scale, wanted)
    assert torch.equal(numbers, (wide / wanted).round().to(torch.int8))
    header = int.from_bytes(data[:8], "little") + 8
    assert sum(length for offset, length in read if offset >= header) == weight.nbytes
    assert max(length for offset, length in read if offset >= header) <= 3 * rows * dtype.itemsize
    assert torch.equal(made["own..scale"], scale)  # also alone
    for block in blocks("own", 4):
        graph = Graph(
            (),
            (
                Parameter(str(block), TensorSpec((2 + (block.index > 0), 3), "int8"), False),
                Parameter(
                    f"own..scale..{block.index}/4",
                    TensorSpec((2 + (block.index > 0), 1), "float32"),
                    False,
                ),
            ),
            (),
            (),
            loss="",
        )
        files = Weights([WeightsFile("ab", len(data))], bytes_at)
        part = ByGraph({"own": files["tied"]}, graph)
        start, stop = block.rows(11)
        assert torch.equal(part[str(block)], numbers[start:stop])
        assert torch.equal(part[f"own..scale..{block.index}/4"], scale[start:stop])


def test_what_a_recipe_makes_is_in_8_bits_too(starting: Starting) -> None:
    graph = in_8_bits("head", scales=(1, 3))  # of outputs in columns
    check_recipe(RECIPE, graph)
    made, wide = ByGraph(starting, graph), make(HEAD, 9)
    scale = wide.abs().amax(0, keepdim=True) / 127
    assert torch.equal(made["head..scale"], scale)
    assert torch.equal(made["head"], (wide / scale).round().to(torch.int8))
    assert has_start(starting, "head..scale")
    assert has_start(starting, "head..scale..1/4")
    assert not has_start(starting, "tail..scale")


def test_weights_that_have_no_8_bits_are_refused(starting: Starting) -> None:
    with pytest.raises(WeightError, match=r"'head', in 8 bits: expected .*scales for their rows"):
        ByGraph(starting, in_8_bits("head", scales=(11, 3)))["head"]
    wrong = torch.ones(11, 3)
    wrong[7, 1] = float("nan")
    with pytest.raises(WeightError, match="'head': a weight is infinite or NaN"):
        ByGraph({"head": wrong}, in_8_bits("head"))["head..scale"]
    with pytest.raises(WeightError, match=r"no weights file has 'tail'"):
        ByGraph(starting, in_8_bits("tail"))["tail..scale"]
    with pytest.raises(RecipeError, match=r"'head' makes float32\[11, 3\]: the graph has int8"):
        check_recipe(RECIPE, graph(TensorSpec((11, 3), "int8"), TensorSpec((4,), "float32")))
