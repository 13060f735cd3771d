"""The tensors of a module's own state_dict: what a run of it exports, under which names.

    state_dict()   name there  ->  parameter or buffer of the graph, dtype there     (`Graph.state`)

A graph has each tensor once, under its first name and without an adapter's wrappers; it also has
tensors that no state_dict has (buffers that are not persistent, constants).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...dag.capture.capture import Captured
from ...dag.ir.fx_args import dtype_name
from ...dag.ir.graph import Buffer, TensorSpec
from ...peer.blobs.weights import spec_of
from .adapters import plain_name
from .factories import ModelError

__all__ = ["load_named", "tied_names", "with_state"]

StateEntries = tuple[tuple[str, str, str], ...]
"""As `Graph.state`."""


def with_state(captured: Captured, module: nn.Module) -> Captured:
    """The capture of a module with `Graph.state`, and with those tensors of the state_dict that no
    operator reads. Raises ModelError for a state_dict that holds what no export could."""
    entries, extra = _entries(module)
    graph, tensors = captured.graph, dict(captured.tensors)
    saved = {tensor for _, tensor, _ in entries}
    buffers = [replace(b, persistent=b.persistent or b.name in saved) for b in graph.buffers]
    known = {p.name for p in graph.parameters} | {b.name for b in buffers}
    for name, tensor in extra.items():
        if name not in known:
            spec = TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))
            buffers.append(Buffer(name, spec))
            tensors[name] = tensor.detach()
    graph = replace(graph, buffers=tuple(buffers), state=entries)
    return replace(captured, graph=graph, tensors=tensors)


def _entries(module: nn.Module) -> tuple[StateEntries, dict[str, Tensor]]:
    """`Graph.state` of a module, and its tensors that are no parameters, by the graph's names."""
    plain = plain_name(module)
    parameters = [(plain(n), p) for n, p in module.named_parameters()]
    others = [(plain(n), b) for n, b in module.named_buffers()]
    first = {_place(t): name for name, t in reversed([*parameters, *others])}
    found: list[tuple[str, str, str]] = []
    extra = dict(others)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise ModelError(
                f'the state_dict has "{name}", which is {type(tensor).__name__}: no weights file '
                "can hold it, so none would load again. Let get_extra_state return a tensor, or "
                "nothing"
            )
        there = first.get(_place(tensor))
        if there is None and name.rpartition(".")[2] == "_extra_state":
            there, extra[name] = name, tensor
        if there is None:
            raise ModelError(
                f'the state_dict has "{name}", which is neither a parameter nor a buffer of the '
                "module (a hook, or a state_dict of its own, made it): nobody would train it, and "
                "an export would have it as it is now. Register it, or leave it out"
            )
        found.append((name, there, dtype_name(tensor.dtype)))
    return tuple(found), extra


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Where a tensor lies: equal for a tensor and for its detached self."""
    lies = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))
    return (tensor.untyped_storage()._cdata, *lies)


def tied_names(module: nn.Module) -> dict[str, str]:
    """Every name in the module's state, mapped to the first name of the same tensor."""
    first: dict[int, str] = {}
    names: list[tuple[str, Tensor]] = [*module.named_parameters(remove_duplicate=False)]
    names += module.named_buffers(remove_duplicate=False)
    return {name: first.setdefault(id(tensor), name) for name, tensor in names}


def load_named(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copies weights into a module by the names of its state_dict; one name of a tied tensor is
    enough. Raises ModelError, before anything changes, when a name is missing or unknown, a shape
    differs, or a tensor has no memory to copy to."""
    state = module.state_dict(keep_vars=True)
    _check_names(module, state, weights)
    with torch.no_grad():
        for name in weights:  # which may be read one at a time
            state[name].copy_(weights[name])


def _check_names(
    module: nn.Module, state: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> None:
    """Raises ModelError as `load_named` does."""
    first = tied_names(module)
    unknown = sorted(set(weights) - set(state))
    given = {first.get(name, name) for name in weights}
    missing = sorted({first.get(n, n) for n, t in state.items() if isinstance(t, Tensor)} - given)
    if unknown or missing:
        raise ModelError(
            f"the weights do not fit the module: {len(missing)} names are missing "
            f"({', '.join(missing[:3])}{' …' if len(missing) > 3 else ''}), {len(unknown)} are "
            f"unknown to it ({', '.join(unknown[:3])}{' …' if len(unknown) > 3 else ''})"
        )
    for name in weights:
        if state[name].shape != (shape := spec_of(weights, name).shape):
            raise ModelError(
                f'weight "{name}" has shape {tuple(shape)}: '
                f"the module's has {tuple(state[name].shape)}"
            )
        if state[name].is_meta:
            raise ModelError(
                f"\"{name}\" of the module is on 'meta', which keeps no values: give it memory "
                'first, with module.to_empty(device="cpu")'
            )
