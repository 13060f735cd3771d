"""What a run begins with: files, and what its recipe makes of the rest."""

from __future__ import annotations

import pytest
import torch

from shoal.dag.ir.graph import Buffer, Graph, Parameter, TensorSpec
from shoal.dag.ir.recipe import Initial, Recipe, RecipeError, Step, make
from shoal.dag.transforms.split_weights import blocks
from shoal.peer.blobs.starting import Starting, check_recipe
from shoal.peer.blobs.weights import Weights, WeightsFile, serialize, starting_tensor

HEAD = Initial((11, 3), "float32", (Step("normal", 0, 33, (0.0, 1.0), "head"),))
BODY = Initial((4,), "bfloat16", (Step("uniform", 0, 4, (0.0, 1.0), "body"),))
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
