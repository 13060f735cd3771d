"""Which tensor of which file is which parameter of a model.

Names are those of the module's state, tried in this order: with the job's `rename`; as transformers
renames those of files; as they are; with or without the prefix of a Hugging Face class
("transformer."), as files of a model without its head have none; and by any other name of a tied
parameter. Experts that transformers keeps in one tensor are made of the files' separate ones: their
bytes lie one behind the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from typing import NamedTuple

import torch

from ...dag.ir.graph import Graph
from ...peer.blobs.weights import TensorLocation
from ..files.shards import Pretrained
from ..files.weight_files import Stored, WeightFilesError

__all__ = ["FileNames", "Wanted", "fit", "wanted_by"]

OF_LAYERS = ("*.lora_*", "*.ia3_l.*", "*.oft_R.*")
ADAPTERS = (*OF_LAYERS, "*.modules_to_save.*", "*.trainable_tokens_*")
"""Parameters that peft puts beside a model's own: no file of the model has them. Those of layers
begin as if they were not there."""


class Wanted(NamedTuple):
    """A parameter or buffer. names: all that it has, its own first; needed: whether files without
    it do not fit."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    needed: bool


class FileNames(NamedTuple):
    """What transformers makes of the names of files. sources: by the name of a parameter, the
    tensors of files that it is, one of which is meant; made: by the name of a tensor of files that
    it joins, splits or turns, the names of its operations; experts: by the name of a parameter with
    experts in its first dimension, the tensors that the rows of each one are."""

    sources: Mapping[str, Sequence[str]] = {}
    made: Mapping[str, str] = {}
    experts: Mapping[str, Sequence[Sequence[str]]] = {}


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
    renamed: Callable[[Iterable[str]], FileNames] = lambda names: FileNames(),
    fresh: Sequence[str] = (),
    unsaved: Collection[str] = (),
    but: Collection[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Pretrained:
    """The tensors of files by the names of a model. `fresh`: globs of parameters that begin as the
    factory makes them, whatever files have; `unsaved`: names of those that do where files have them
    not; `but`: names that begin otherwise. A module that peft trains beside its original
    (`modules_to_save`) begins as that. What files have beside is left out, and said.

    Raises WeightFilesError for one that is missing, one of another shape or kind, and one that
    files have with several values.
    """
    given = renamed(stored.entries)
    taken = {source for sources in given.sources.values() for source in sources}
    how = _Names(prefix, rename or {}, given, taken)
    entries = {name: e for name, e in stored.entries.items() if name not in given.made}
    found: dict[str, TensorLocation] = {}
    missing: list[str] = []
    used: set[str] = set()
    anew: set[str] = set()
    _say_tied(wanted, fresh, say)
    wanted = [_like_original(one, {w.names[0]: w for w in wanted}) for one in wanted]
    for one in wanted:
        if one.names[0] in but:
            continue
        made = _first(entries, one, how)
        if _is_fresh(one, fresh):
            anew.update(made[2] if made else ())
            continue
        if made is None:
            spared = one.names[0] in unsaved or any(fnmatch(one.names[0], g) for g in ADAPTERS)
            if one.needed and not spared:
                missing.append(one.names[0])
            continue
        name, entry, sources = made
        _check(stored, one, name, entry)
        _check_equal(stored, one, how, entries)
        found[one.names[0]] = entry
        used.update(sources)
    # The other names of a tied one are no more of the files than of the model.
    known = used | anew | {name for one in wanted for name in _candidates(one.names, how)}
    left = [name for name in stored.entries if name in given.made or name not in known]
    if missing:
        raise WeightFilesError(_why_missing(missing, left, given.made))
    _say_rest(wanted, found, left, anew, fresh, say)
    return Pretrained(stored, found)


class _Names(NamedTuple):
    """How names of parameters become those of files. taken: all sources that are given."""

    prefix: str
    rename: Mapping[str, str]
    given: FileNames
    taken: Collection[str]


def _first(
    entries: Mapping[str, TensorLocation], one: Wanted, how: _Names
) -> tuple[str, TensorLocation, tuple[str, ...]] | None:
    """The name that files have a parameter under, its tensor, and those of the files that it is of;
    None: there is none."""
    for name in _candidates(one.names, how):
        if (made := _entry(entries, name, one.shape, how)) is not None:
            return name, *made
    return None


def _is_fresh(one: Wanted, fresh: Sequence[str]) -> bool:
    """Whether a glob names a parameter, by its first name; one beside an original is as that."""
    own = one.names[: 2 if _SAVED.fullmatch(one.names[0]) else 1]
    return any(fnmatch(name, glob) for name in own for glob in fresh)


def _why_missing(missing: Sequence[str], left: Sequence[str], made: Mapping[str, str]) -> str:
    why = (
        f"the weights do not fit the model: {len(missing)} of its parameters are missing "
        f"({_some(missing)}), and {len(left)} tensors of the files are unknown to it "
        f"({_some(left)}): name them by model.rename, or those that begin as the factory makes "
        "them by model.fresh"
    )
    if turned := [name for name in left if name in made]:
        how = ", ".join(sorted({made[name] for name in turned}))
        why += (
            f". {len(turned)} of those tensors from_pretrained joins, splits or turns ({how}: "
            f"{_some(turned)}), which Shoal does not: load the folder with from_pretrained, write "
            "the model's state_dict() into a safetensors file, and name that by model.weights"
        )
    return why


def _say_tied(wanted: Sequence[Wanted], fresh: Sequence[str], say: Callable[[str], None]) -> None:
    """Say which parameters a glob names by another of their names alone: they keep their values."""
    for one in wanted:
        others = [n for n in one.names[1:] if any(fnmatch(n, glob) for glob in fresh)]
        if others and not _is_fresh(one, fresh):
            say(
                f'"{others[0]}" is "{one.names[0]}", which model.fresh does not name: it begins as '
                "the files have it"
            )


def _say_rest(
    wanted: Sequence[Wanted],
    found: Mapping[str, TensorLocation],
    left: Sequence[str],
    anew: Collection[str],
    fresh: Sequence[str],
    say: Callable[[str], None],
) -> None:
    """Say what begins as the factory makes it, and what of the files is left out."""
    if anew:
        say(
            f"{len(anew)} tensors of the files are left out, as model.fresh says: their parameters "
            f"begin as the factory makes them ({_some([*anew])})"
        )
    rest = [one for one in wanted if one.names[0] not in found and not _is_fresh(one, fresh)]
    if absent := [one.names[0] for one in rest if not one.needed]:
        say(
            f"{len(absent)} buffers are not in the files, and begin as the factory makes them "
            f"({_some(absent)})"
        )
    if left:
        say(f"{len(left)} tensors of the files are not the model's, and left out ({_some(left)})")


_COMPARED_BYTES = 8 << 20
"""How much of a tensor is compared at a time."""


def _check_equal(
    stored: Stored, wanted: Wanted, how: _Names, entries: Mapping[str, TensorLocation]
) -> None:
    """Raise WeightFilesError where files have a parameter several times, as a tied one under all of
    its names, and with other values: to begin with either would be another model than whoever
    wrote them had."""
    there: dict[str, TensorLocation] = {}
    for name in wanted.names:
        names = [c for c in _candidates((name,), how) if c in entries]
        sources = how.given.sources.get(name, ())
        several = [c for c in names if c in sources] if names[:1] and names[0] in sources else []
        there |= {c: entries[c] for c in several or names[:1]}
    if len(there) < 2:
        return
    (first, entry), *others = there.items()
    for name, other in others:
        _check(stored, wanted, name, other)
        if not _are_equal(stored, entry, other, wanted.dtype):
            raise WeightFilesError(
                f'the weights do not fit the model: "{first}" and "{name}" are one parameter of '
                "the model, and differ in the files: expected equal values, one of the two, or a "
                "model that does not tie them (of Hugging Face args = { tie_word_embeddings = "
                "false })"
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


def _candidates(names: Sequence[str], how: _Names) -> Iterator[str]:
    """What a parameter with these names may be called in files, the likeliest first. A tensor that
    transformers takes for one parameter is no other, unless the job says so."""
    for name in names:
        changed = name
        for old, new in how.rename.items():
            changed = changed.replace(old, new)
        if changed != name:
            yield changed
        yield from how.given.sources.get(name, ())
        others = [changed, name]
        if dot := how.prefix and f"{how.prefix}.":
            others.append(changed.removeprefix(dot) if changed.startswith(dot) else dot + changed)
        yield from (other for other in others if other not in how.taken)


def _entry(
    entries: Mapping[str, TensorLocation], name: str, shape: tuple[int, ...], how: _Names
) -> tuple[TensorLocation, tuple[str, ...]] | None:
    """The tensor of a name, and those of the files that it is of; None: there is none. Experts that
    the files have one by one are a tensor of `shape`."""
    if name in entries:
        return entries[name], (name,)
    each = how.given.experts.get(name, ())
    if not each or not shape or len(each) != shape[0]:
        return None
    sources = [one for expert in each for one in expert]
    first, found = entries[sources[0]], [entries[s] for s in sources]
    rows = sum(e.shape[0] for e in found if e.shape)
    if {(e.dtype, e.shape[1:]) for e in found} != {(first.dtype, first.shape[1:])}:
        return None
    sizes = (shape[0], rows // shape[0], *first.shape[1:])
    return TensorLocation(first.dtype, sizes, tuple(p for e in found for p in e.parts)), (*sources,)


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
