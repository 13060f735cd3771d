"""Which tensor of which file is which parameter of a model.

Names are those of the module's state, tried in this order: as they are; with the job's `rename`;
with or without the prefix of a Hugging Face class ("transformer."), as files of a model without its
head have none; and by any other name of a tied parameter. Experts that transformers keeps in one
tensor are made of the files' separate ones: their bytes lie one behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

import torch

from ...dag.ir.graph import Graph
from ...peer.blobs.weights import TensorLocation
from ..files.shards import Pretrained
from ..files.weight_files import Stored, WeightFilesError

__all__ = ["Wanted", "fit", "wanted_by"]

ADAPTERS = ("*.lora_*", "*.modules_to_save.*", "*.trainable_tokens_*")
"""Parameters that peft puts beside a model's own: no file of the model has them."""


class Wanted(NamedTuple):
    """A parameter or buffer. names: all that it has, its own first; needed: whether files without
    it do not fit."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    needed: bool


def wanted_by(graph: Graph) -> list[Wanted]:
    """What a graph begins with."""
    found = [
        Wanted((p.name, *p.tied), p.spec.sizes, getattr(torch, p.spec.dtype), True)
        for p in graph.parameters
    ]
    return found + [
        Wanted((b.name,), b.spec.sizes, getattr(torch, b.spec.dtype), False)
        for b in graph.buffers
        if b.persistent
    ]


def fit(
    stored: Stored,
    wanted: Sequence[Wanted],
    *,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    fresh: Sequence[str] = (),
    but: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Pretrained:
    """The tensors of files by the names of a model. `fresh`: globs of parameters that they need not
    have; `but`: names that begin otherwise, whatever files have. A module that peft trains beside
    its original (`modules_to_save`) begins as that. What files have beside is left out, and said.

    Raises WeightFilesError for one that is missing, one of another shape or kind, and one that is
    tied and that files have with several values.
    """
    found: dict[str, TensorLocation] = {}
    missing: list[str] = []
    used: set[str] = set()
    wanted = [_like_original(one, {w.names[0]: w for w in wanted}) for one in wanted]
    for one in wanted:
        if one.names[0] in but:
            continue
        for name in _candidates(one.names, prefix, rename or {}):
            if (made := _entry(stored.entries, name, one.shape)) is not None:
                entry, sources = made
                break
        else:
            spared = any(fnmatch(one.names[0], glob) for glob in (*fresh, *ADAPTERS))
            if one.needed and not spared:
                missing.append(one.names[0])
            continue
        _check(stored, one, name, entry)
        _check_tied(stored, one, prefix, rename or {})
        found[one.names[0]] = entry
        used.update(sources)
    left = [name for name in stored.entries if name not in used]
    # The other names of a tied one are no more of the files than of the model.
    known = {name for one in wanted for name in _candidates(one.names, prefix, rename or {})}
    left = [name for name in left if name not in known]
    if missing:
        raise WeightFilesError(
            f"the weights do not fit the model: {len(missing)} of its parameters are missing "
            f"({_some(missing)}), and {len(left)} tensors of the files are unknown to it "
            f"({_some(left)}): name them by model.rename, or those that begin as the factory makes "
            "them by model.fresh"
        )
    if absent := [one.names[0] for one in wanted if not one.needed and one.names[0] not in found]:
        say(
            f"{len(absent)} buffers are not in the files, and begin as the factory makes them "
            f"({_some(absent)})"
        )
    if left:
        say(f"{len(left)} tensors of the files are not the model's, and left out ({_some(left)})")
    return Pretrained(stored, found)


_COMPARED_BYTES = 8 << 20
"""How much of a tensor is compared at a time."""


def _check_tied(stored: Stored, wanted: Wanted, prefix: str, rename: Mapping[str, str]) -> None:
    """Raise WeightFilesError where files have a tied parameter under several of its names, and with
    other values: to begin with either would be another model than whoever wrote them had."""
    there: dict[str, TensorLocation] = {}
    for name in wanted.names:
        candidates = _candidates((name,), prefix, rename)
        if (found := next((c for c in candidates if c in stored.entries), None)) is not None:
            there[found] = stored.entries[found]
    if len(there) < 2:
        return
    (first, entry), *others = there.items()
    for name, other in others:
        _check(stored, wanted, name, other)
        if not _are_equal(stored, entry, other, wanted.dtype):
            raise WeightFilesError(
                f'the weights do not fit the model: "{first}" and "{name}" are one parameter of '
                "the model, and differ in the files: expected equal values, or a model that does "
                "not tie them (of Hugging Face args = { tie_word_embeddings = false })"
            )


def _are_equal(stored: Stored, a: TensorLocation, b: TensorLocation, dtype: torch.dtype) -> bool:
    """Whether two tensors of one shape are the same in a dtype; some rows at a time are read."""
    count = a.shape[0] if a.shape else 0
    rows = max(1, _COMPARED_BYTES * count // max(1, a.size_bytes))
    parts = [(i, min(i + rows, count)) for i in range(0, count, rows)]
    pieces = ((a.rows(*p), b.rows(*p)) for p in parts) if a.shape else iter([(a, b)])
    read = stored.weights.read
    return all(torch.equal(read(x).to(dtype), read(y).to(dtype)) for x, y in pieces)


_SAVED = re.compile(r"(.*)\.modules_to_save\.[^.]+\.(.*)")


def _like_original(one: Wanted, all_: Mapping[str, Wanted]) -> Wanted:
    """A parameter of `modules_to_save` with the names of its original besides."""
    match = _SAVED.fullmatch(one.names[0])
    if match is None:
        return one
    name = f"{match[1]}.{match[2]}"
    original = next((w for w in all_.values() if name in w.names), None)
    return one._replace(names=(*one.names, *(original.names if original else (name,))))


def _candidates(names: Sequence[str], prefix: str, rename: Mapping[str, str]) -> Iterator[str]:
    for name in names:
        changed = name
        for old, new in rename.items():
            changed = changed.replace(old, new)
        yield changed
        if changed != name:
            yield name
        if ".mlp.gate." in changed:
            yield changed.replace(".mlp.gate.", ".block_sparse_moe.gate.")  # of Mixtral's files
        if prefix:
            dot = f"{prefix}."
            yield changed.removeprefix(dot) if changed.startswith(dot) else dot + changed


def _entry(
    entries: Mapping[str, TensorLocation], name: str, shape: tuple[int, ...]
) -> tuple[TensorLocation, tuple[str, ...]] | None:
    """The tensor of a name, and those of the files that it is of; None: there is none."""
    if name in entries:
        return entries[name], (name,)
    for fused, of_one in _FUSED:
        if match := fused.fullmatch(name):
            return _fused(entries, match[1], of_one, shape)
    return None


def _fused(
    entries: Mapping[str, TensorLocation],
    layer: str,
    of_one: Sequence[Sequence[str]],
    shape: tuple[int, ...],
) -> tuple[TensorLocation, tuple[str, ...]] | None:
    """The experts of a layer as one tensor of `shape`, where the files have them one by one."""
    sources: list[str] = []
    for expert in range(shape[0] if shape else 0):
        for known in of_one:
            there = [n for n in (k.format(layer, expert) for k in known) if n in entries]
            if not there:
                return None
            sources.append(there[0])
    if not sources:
        return None
    first, found = entries[sources[0]], [entries[s] for s in sources]
    rows = sum(e.shape[0] for e in found if e.shape)
    if {(e.dtype, e.shape[1:]) for e in found} != {(first.dtype, first.shape[1:])}:
        return None
    sizes = (shape[0], rows // shape[0], *first.shape[1:])
    return TensorLocation(first.dtype, sizes, tuple(p for e in found for p in e.parts)), (*sources,)


_FUSED = (
    (
        re.compile(r"(.*)\.mlp\.experts\.gate_up_proj"),
        (
            ("{0}.mlp.experts.{1}.gate_proj.weight", "{0}.block_sparse_moe.experts.{1}.w1.weight"),
            ("{0}.mlp.experts.{1}.up_proj.weight", "{0}.block_sparse_moe.experts.{1}.w3.weight"),
        ),
    ),
    (
        re.compile(r"(.*)\.mlp\.experts\.down_proj"),
        (("{0}.mlp.experts.{1}.down_proj.weight", "{0}.block_sparse_moe.experts.{1}.w2.weight"),),
    ),
)
"""By the name of a fused tensor (experts, rows, columns): what the rows of one expert are made of,
by the names that Qwen-MoE and DeepSeek, and Mixtral, have in their files."""


def _check(stored: Stored, wanted: Wanted, name: str, entry: TensorLocation) -> None:
    cast = wanted.dtype.is_floating_point and entry.dtype.is_floating_point
    if entry.shape == wanted.shape and (cast or entry.dtype == wanted.dtype):
        return
    where = f" of {stored.file(entry.parts[0]).name}" if entry.parts else ""
    raise WeightFilesError(
        f'the weights do not fit the model: "{name}"{where} is {_spec(entry.dtype, entry.shape)}, '
        f'and "{wanted.names[0]}" of the model is {_spec(wanted.dtype, wanted.shape)}'
    )


def _spec(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{shown}{', …' if len(names) > 3 else ''}" if names else "none"
