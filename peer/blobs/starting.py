"""What a run begins with: tensors of weights files and, of what no file has, those that its recipe
makes here. Nothing is read or made before it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ...dag.ir.graph import Graph, TensorSpec
from ...dag.ir.quantized import quantized, scale_sizes, slice_rows
from ...dag.ir.recipe import Recipe, RecipeError, make
from ...dag.transforms.split_weights import scale_name, weight_of
from ...net.links.buffers import TrimmedHeap
from .weight_shards import WeightShard
from .weights import (
    Lazy,
    ShapeDtype,
    WeightError,
    Weights,
    has_start,
    starting_rows,
    starting_spec,
    starting_tensor,
)

__all__ = ["ByGraph", "Starting", "check_recipe"]


class Starting(Lazy):
    """The tensors that a run begins with: from weights files, or made by the recipe when asked for.
    `recipe` has whole tensors; rows of one are made without the others."""

    def __init__(self, files: Weights, recipe: Recipe) -> None:
        self.files, self.recipe = files, recipe

    def __getitem__(self, name: str) -> Tensor:
        """A fresh CPU tensor. Raises KeyError for an unknown name."""
        return self.files[name] if name in self.files else self._made(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self.files or name in self.recipe.tensors

    def spec(self, name: str) -> ShapeDtype:
        """Shape and dtype of a tensor, without making it. Raises KeyError for an unknown name."""
        if name in self.files:
            return self.files.spec(name)
        initial = self.recipe.tensors[name]
        return ShapeDtype(initial.shape, getattr(torch, initial.dtype))

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


class ByGraph(Mapping[str, Tensor]):
    """The starting weights by the graph's own names, each checked against its spec; a file may have
    another floating-point dtype, such as bf16 for what is trained in fp32: each number is rounded
    once, when it is read. A weight that the graph has in 8 bits, and its scales, are made here of
    what files have (dag/ir/quantized.py): who asked for the weight gets its scales without another
    look at the files."""

    def __init__(self, files: Mapping[str, Tensor], graph: Graph) -> None:
        self._files, self._graph = files, graph
        self._heap = TrimmedHeap()
        self._tied = {p.name: p.tied for p in graph.parameters}
        self._beside: dict[str, Tensor] = {}  # scales of what was asked for

    def __getitem__(self, name: str) -> Tensor:
        if name in self._beside:
            return self._beside.pop(name)
        kind = "param" if name in self._tied else "buffer"
        spec = self._graph.spec[f"{kind}:{name}"]
        for there in (name, *self._tied.get(name, ())):
            if (found := starting_spec(self._files, there)) is None:
                continue
            # What is read is allocated first, so it is looked at before.
            got = TensorSpec(found.shape, str(found.dtype).removeprefix("torch."))
            wanted: torch.dtype = getattr(torch, spec.dtype)
            if wanted is torch.int8 and found.dtype.is_floating_point:
                return self._in_int8(name, there)
            cast = wanted.is_floating_point and found.dtype.is_floating_point
            if got.sizes != spec.sizes or not (cast or got.dtype == spec.dtype):
                raise WeightError(f"weights of {name!r}: expected {spec!r}, got {got!r}")
            tensor = starting_tensor(self._files, there)
            assert tensor is not None, "its spec is there"
            # Each is copied to its place, and came in pieces: the heap would be full of holes.
            self._heap.count(tensor.nbytes)
            return tensor.to(wanted)
        if (weight := weight_of(name)) in self._tied and weight != name:
            _ = self[weight]
            if name in self._beside:
                return self._beside.pop(name)
        raise WeightError(f"no weights file has {name!r}: the submitter has to upload it")

    def _in_int8(self, name: str, there: str) -> Tensor:
        """The int8 numbers of a weight that files have as `there`; leaves its scales beside."""
        scale = scale_name(name)
        found, beside = starting_spec(self._files, there), self._graph.spec.get(f"param:{scale}")
        spec = self._graph.spec[f"param:{name}"]
        assert found is not None, "its spec is there"
        both = (0, 1) if len(spec.sizes) in (2, 3) else ()
        sides = [TensorSpec(scale_sizes(spec.sizes, of), "float32") for of in both]
        if found.shape != spec.sizes or beside is None or beside not in sides:
            got = TensorSpec(found.shape, str(found.dtype).removeprefix("torch."))
            raise WeightError(
                f"weights of {name!r}, in 8 bits: expected matrices like {spec!r} with scales "
                f"for their rows or columns, got {got!r} with {beside!r}"
            )
        numbers, scales = torch.empty(spec.sizes, dtype=torch.int8), []
        rows, *columns = spec.sizes
        outputs = sides.index(beside)  # of columns a row alone does not tell the scales
        most = max(1, rows) if outputs and len(columns) == 1 else slice_rows(math.prod(columns))
        for at in range(0, rows, most):
            part = starting_rows(self._files, there, at, min(rows, at + most))
            try:
                numbers[at : at + most], scale_of_part = quantized(part, outputs)
            except ValueError as error:
                raise WeightError(f"weights of {name!r}: {error}") from None
            scales.append(scale_of_part)
            self._heap.count(part.nbytes)
        self._beside[scale] = torch.cat(scales) if scales else torch.ones(beside.sizes)
        return numbers

    def shards(self, names: Iterable[str]) -> list[WeightShard]:
        """Return the shards that are read as a whole for these, in their order."""
        if not isinstance(self._files, Lazy):
            return []
        found: list[WeightShard] = []
        asked = dict.fromkeys(names)
        for name in asked:
            if (weight := weight_of(name)) != name and weight in asked:
                continue  # read with its weight
            own = (name, *self._tied.get(name, ()))
            there = next((n for n in own if has_start(self._files, n)), name)
            found += self._files.shards(there)
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._tied
        yield from (b.name for b in self._graph.buffers)

    def __len__(self) -> int:
        return len(self._tied) + len(self._graph.buffers)


def check_recipe(recipe: Recipe, graph: Graph) -> None:
    """Raises RecipeError where the recipe makes a tensor other than the graph has it: what it makes
    is allocated first, so it is looked at before. What the graph does not have, nobody makes."""
    parameters = {name: p.spec for p in graph.parameters for name in (p.name, *p.tied)}
    known = parameters | {b.name: b.spec for b in graph.buffers}
    for name, initial in recipe.tensors.items():
        spec, got = known.get(name), TensorSpec(initial.shape, initial.dtype)
        as_made = spec and (spec.is_floating or scale_name(name) in known)
        if spec and not (spec.shape == got.shape and as_made):
            raise RecipeError(f"the recipe of {name!r} makes {got!r}: the graph has {spec!r}")
