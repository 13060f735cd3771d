"""The files that a model begins with: which they are, what of them is which tensor, and a base that
has their values before an adapter is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...job import Job
from ...peer.blobs.weights import TensorLocation
from ..files import weight_files
from ..files.shards import Pretrained
from ..files.weight_files import Stored
from .adapters import plain_name
from .factories import ModelError, find, is_hugging_face, pretrained_weights, unwrapped
from .fitting import FileNames, Wanted, fit
from .recording import Recording
from .state_dicts import tied_names

__all__ = ["changed", "fit_options", "fitted", "loaded", "starting_files"]


def starting_files(job: Job) -> Stored | None:
    """The files that the job's model begins with; None: what its factory gives. Headers are read.
    Raises ModelError, WeightFilesError."""
    model = job.model
    if model.weights != "init":
        here = partial(find, folder=job.folder, key="model.weights")
        return weight_files.find(
            [name if "://" in name else str(here(name)) for name in model.weight_names]
        )
    if model.factory.startswith("hf:") and job.module is None:
        folder = find(model.factory.removeprefix("hf:"), job.folder, "model.factory")
        found = pretrained_weights(folder, job)
        return None if found is None else weight_files.find([str(found)])
    return None


def fitted(module: nn.Module, job: Job, but: frozenset[str] = frozenset()) -> Pretrained | None:
    """What files have of a module's weights, by the names without adapters, `but` some."""
    stored = starting_files(job)
    if stored is None:
        return None
    plain, state = plain_name(module), _state(module)
    first = {plain(name): plain(one) for name, one in tied_names(module).items()}
    names: dict[str, list[str]] = {}
    for name in state:
        names.setdefault(first.get(name, name), []).append(name)
    wanted = [
        Wanted(
            (name, *(other for other in all_ if other != name)),
            tuple(state[name].shape),
            state[name].dtype,
            isinstance(state[name], nn.Parameter),
        )
        for name, all_ in names.items()
        if isinstance(state.get(name), Tensor)
    ]
    return fit(stored, wanted, **fit_options(module, job, but))


def fit_options(module: nn.Module, job: Job, but: frozenset[str]) -> dict[str, Any]:
    """What `fitting.fit` is told of a module. Raises ModelError for a glob of `fresh` that names
    none of its parameters."""
    _check_fresh(module, job.model.fresh)
    told: dict[str, Any] = {"rename": job.model.rename, "fresh": job.model.fresh, "but": but}
    if not is_hugging_face(module):
        return told
    prefix = getattr(module, "base_model_prefix", "")
    return told | {"prefix": prefix, "renamed": _renamed_by(module), "unsaved": _unsaved(module)}


def _check_fresh(module: nn.Module, fresh: tuple[str, ...]) -> None:
    """Raise ModelError for a glob that makes nothing begin fresh: what was meant would begin as the
    files have it."""
    plain = plain_name(module)
    first = {plain(name): plain(one) for name, one in tied_names(module).items()}
    anew = {one for one in first.values() if any(fnmatch(one, glob) for glob in fresh)}
    for glob in fresh:
        named = [name for name in first if fnmatch(name, glob)]
        if not named:
            raise ModelError(f'`model.fresh` has "{glob}", which matches no parameter')
        if not any(first[name] in anew for name in named):
            raise ModelError(
                f'`model.fresh` has "{glob}", and "{named[0]}" is tied to "{first[named[0]]}": '
                "name that, or let the model not tie them (of Hugging Face args = "
                "{ tie_word_embeddings = false })"
            )


def _unsaved(module: nn.Module) -> frozenset[str]:
    """The fixed parameters that transformers writes into no file, as sinusoidal positions:
    `from_pretrained` makes them anew."""
    base = unwrapped(module)
    fixed = {name for name, p in base.named_parameters() if not p.requires_grad}
    return frozenset(fixed.intersection(getattr(base, "_keys_to_ignore_on_save", None) or ()))


def _renamed_by(module: nn.Module) -> Callable[[Iterable[str]], FileNames]:
    """How `from_pretrained` renames what files have to the names of a model: by transformers' own
    rules of its class, which a version before 5 has not."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:
        return lambda names: FileNames()
    state, base = _state(module), unwrapped(module)

    def renamed(names: Iterable[str]) -> FileNames:
        rules = get_model_conversion_mapping(base)
        plain = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        making = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix = base.base_model_prefix
        sources: dict[str, list[str]] = {}
        made: dict[str, str] = {}
        parts: dict[str, dict[str, list[str]]] = {}
        # A rule may hold from the first name on that another one begins with: their order counts.
        for name in sorted(names, key=dot_natural_key):
            to, rule = rename_source_key(name, plain, making, prefix, state)
            if to not in state and name in state:
                to, rule = rename_source_key(name, [], [], prefix, state)
            if rule is None and to in state:
                sources.setdefault(to, []).append(name)
            elif rule is not None:
                by = next(m for m in making if rule in m.source_patterns)
                how = [(type(o).__name__, getattr(o, "dim", None)) for o in by.operations]
                if how in _OF_EXPERTS:
                    parts.setdefault(to, {p: [] for p in by.source_patterns})[rule].append(name)
                else:
                    made[name] = " and ".join(kind for kind, _ in how)
        # Those of one pattern came in the order of their experts.
        whole = {to: of for to, of in parts.items() if len({*map(len, of.values())}) == 1}
        return FileNames(
            sources, made, {to: [*zip(*of.values(), strict=True)] for to, of in whole.items()}
        )

    return renamed


_OF_EXPERTS = [
    [("MergeModulelist", 0)],
    [("MergeModulelist", 0), ("Concatenate", 1)],
]
"""What transformers does with tensors of single experts: the bytes of the result lie one behind the
other in them."""


def _state(module: nn.Module) -> dict[str, Any]:
    """The module's own tensors by their names without adapters."""
    plain = plain_name(module)
    return {plain(name): t for name, t in module.state_dict(keep_vars=True).items()}


def loaded(module: nn.Module, files: Pretrained, recording: Recording | None) -> None:
    """Gives a base the values that files have, in place, before an adapter is made of them; of a
    recording they are read when they are asked for."""
    for _, parameter, read in _in_files(module, files):
        if recording is None:
            parameter.data.copy_(read())
        else:
            recording.read_from(parameter, read)


def changed(
    module: nn.Module, recording: Recording | None, files: Pretrained | None
) -> frozenset[str]:
    """The names that files have of parameters which an adapter changed when it was made."""
    if files is None:
        return frozenset()
    found = _in_files(module, files)
    if recording is not None:
        return frozenset(name for name, parameter, _ in found if not recording.is_read(parameter))
    return frozenset(name for name, parameter, read in found if not torch.equal(read(), parameter))


def _in_files(
    module: nn.Module, files: Pretrained
) -> Iterator[tuple[str, nn.Parameter, Callable[[], Tensor]]]:
    """The parameters that files have: the name there, the parameter, and what reads its values."""
    plain = plain_name(module)

    def read(entry: TensorLocation, dtype: torch.dtype) -> Tensor:
        return files.stored.weights.read(entry).to(dtype)

    for name, parameter in module.named_parameters():
        if (entry := files.entries.get(plain(name))) is not None:
            yield plain(name), parameter, partial(read, entry, parameter.dtype)
