"""What a run begins with: tensors of weights files and, of what no file has, those that its recipe
makes here. Nothing is read or made before it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..dag.graph import Graph, TensorSpec
from ..dag.recipe import Recipe, RecipeError, make
from .weight_shards import WeightShard
from .weights import Lazy, Spec, Weights

__all__ = ["Starting", "check_recipe"]


class Starting(Lazy):
    """See the module. `recipe` has whole tensors; rows of one are made without the others."""

    def __init__(self, files: Weights, recipe: Recipe) -> None:
        self.files, self.recipe = files, recipe

    def __getitem__(self, name: str) -> Tensor:
        """A fresh CPU tensor. Raises KeyError for an unknown name."""
        return self.files[name] if name in self.files else self._made(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self.files or name in self.recipe.tensors

    def spec(self, name: str) -> Spec:
        """Of a tensor, without making it. Raises KeyError for an unknown name."""
        if name in self.files:
            return self.files.spec(name)
        initial = self.recipe.tensors[name]
        return Spec(initial.shape, getattr(torch, initial.dtype))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor. Raises KeyError for an unknown name, ValueError for rows
        that it does not have."""
        if name in self.files:
            return self.files.rows(name, start, stop)
        return self._made(name, (start, stop))

    def shards(self, name: str) -> tuple[WeightShard, ...]:
        return self.files.shards(name)

    def _made(self, name: str, rows: tuple[int, int] | None) -> Tensor:
        threads = torch.get_num_threads()
        return make(self.recipe.tensors[name], self.recipe.seed, rows, threads=threads)

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self.files, *self.recipe.tensors))

    def __len__(self) -> int:
        return len({*self.files, *self.recipe.tensors})


def check_recipe(recipe: Recipe, graph: Graph) -> None:
    """Raises RecipeError where the recipe makes a tensor other than the graph has it: what it makes
    is allocated first, so it is looked at before. What the graph does not have, nobody makes."""
    parameters = {name: p.spec for p in graph.parameters for name in (p.name, *p.tied)}
    known = parameters | {b.name: b.spec for b in graph.buffers}
    for name, initial in recipe.tensors.items():
        spec, got = known.get(name), TensorSpec(initial.shape, initial.dtype)
        if spec and not (spec.shape == got.shape and spec.is_floating):
            raise RecipeError(f"the recipe of {name!r} makes {got!r}: the graph has {spec!r}")
