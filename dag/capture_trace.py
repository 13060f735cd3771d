"""What a module's forward does to fake tensors, operator by operator and block by block.

A trace costs about a hundredth of an export: nothing is computed, and no size is a symbol. It has
every operator that torch dispatched, with its arguments, and says of each tensor where it comes
from *as seen from the block that reads it*: a weight of the block's own, the third result of the
block before. So two blocks that do the same with their own weights and their neighbours have equal
traces, and a model's trace is fully told by its blocks'. `capture_blocks.py` lives by that.

A block is a child of a list of modules; what the model does between two blocks counts to the first
of them, what it does before the first block is the prefix.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .capture_export import forward_of

__all__ = ["Chain", "Trace", "UnclearError", "trace"]

Event = tuple[Any, ...]
"""An operator: its name, whether gradients are on, and its arguments as plain data."""


class UnclearError(Exception):
    """A forward whose trace says too little: it is captured as a whole."""


@dataclass(frozen=True)
class Chain:
    """A list of modules that the forward calls one after the other. `path` is its name in the
    module, `names` those of its children, the blocks, in order."""

    container: nn.Module
    path: str
    names: Mapping[int, str]
    """id of a child → its full name, also while the list is shortened."""


@dataclass(frozen=True)
class Trace:
    """Fingerprints (16 bytes) of the operators before the first block and of those of each block,
    by chain; and what the results are."""

    prefix: bytes
    blocks: list[list[bytes]]
    results: Event


@dataclass
class _Segment:
    """The operators of a block so far: how many, and all of them as a hash."""

    count: int = 0
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, event: Event) -> int:
        """Returns the operator's number in the block."""
        self.digest.update(repr(event).encode())
        self.count += 1
        return self.count - 1


def trace(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Any] | None,
    batch: int,
    chains: Sequence[Chain],
    names: Mapping[int, str],
) -> Trace:
    """Runs the forward for `batch` samples. `names`: id of every parameter and buffer → its name.

    Raises UnclearError where blocks are not called once each and in order, or where a tensor comes
    from nowhere; and whatever the forward raises.
    """
    recorder = _Recorder(chains, names)
    with torch.random.fork_rng(devices=[]), _fake(module):
        given = {
            name: torch.empty((batch, *t.shape[1:]), dtype=t.dtype, device=t.device)
            for name, t in inputs.items()
        }
        for name, tensor in given.items():
            recorder.from_outside(tensor, name)
        hook = register_module_forward_pre_hook(recorder.called)
        try:
            with recorder:
                results = forward_of(module, given, loss)
        finally:
            hook.remove()
    if any(len(made) != len(_children(c)) for made, c in zip(recorder.made, chains, strict=True)):
        raise UnclearError("a block was not called")
    blocks = [[block.digest.digest() for block in made] for made in recorder.made]
    return Trace(recorder.prefix.digest.digest(), blocks, recorder.plain(results))


@contextmanager
def _fake(module: nn.Module) -> Iterator[None]:
    """The fake mode of the module's weights, if these are fake; otherwise a new one. Real tensors
    may meet fake ones in it."""
    mode = detect_fake_mode([*module.parameters(), *module.buffers()]) or FakeTensorMode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def _children(chain: Chain) -> list[nn.Module]:
    return [m for m in chain.container._modules.values() if m is not None]


class _Recorder(TorchDispatchMode):
    def __init__(self, chains: Sequence[Chain], names: Mapping[int, str]) -> None:
        super().__init__()
        self.prefix = _Segment()
        self.made: list[list[_Segment]] = [[] for _ in chains]
        self._names = names
        self._lengths = [len(_children(c)) for c in chains]
        self._blocks = {
            id(m): (number, place, c.names[id(m)] + ".")
            for number, c in enumerate(chains)
            for place, m in enumerate(_children(c))
        }
        self._chain, self._block, self._path = -1, 0, ""
        self._now = self.prefix
        self._from: dict[int, Any] = {}
        self._kept: list[Tensor] = []  # else the id of one that died could be another's
        self._thread = threading.get_ident()

    def called(self, module: nn.Module, args: Any) -> None:
        """A module is about to run; where it is a block, what follows is that block's."""
        found = self._blocks.get(id(module))
        if found is None or threading.get_ident() != self._thread:
            return
        chain, block, path = found
        if chain < self._chain or block != len(self.made[chain]):
            raise UnclearError(f"block {path} is not called once, after the ones before it")
        self._now = _Segment()
        self.made[chain].append(self._now)
        self._chain, self._block, self._path = chain, block, path

    def from_outside(self, tensor: Tensor, name: str) -> None:
        self._from[id(tensor)] = ("in", name)
        self._kept.append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = self.plain(args), self.plain(kwargs or {})
        at = self._now.add((str(func), torch.is_grad_enabled(), *given))
        results = func(*args, **(kwargs or {}))
        made = results if isinstance(results, (tuple, list)) else (results,)
        for number, tensor in enumerate(made):
            if isinstance(tensor, Tensor):
                self._from[id(tensor)] = ("made", self._chain, self._block, at, number)
                self._kept.append(tensor)
        return results

    def plain(self, arg: Any) -> Any:
        """An argument as plain data; the type tells 1 from 1.0 and True."""
        if isinstance(arg, Tensor):
            return self._place(arg)
        if isinstance(arg, (tuple, list)):
            return tuple(self.plain(a) for a in arg)
        if isinstance(arg, dict):
            return tuple((k, self.plain(a)) for k, a in sorted(arg.items()))
        if arg is None or isinstance(
            arg,
            (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format),
        ):
            return type(arg).__name__, repr(arg)
        raise UnclearError(f"an argument is a {type(arg).__name__}")

    def _place(self, tensor: Tensor) -> Event:
        """Where a tensor comes from, as seen from the block that is running."""
        name = self._names.get(id(tensor))
        if name is not None:
            own = name.startswith(self._path) and self._path != ""
            about = tuple(tensor.shape), str(tensor.dtype), str(tensor.device), tensor.requires_grad
            return ("own" if own else "named", name.removeprefix(self._path), *about)
        found = self._from.get(id(tensor))
        if found is None:
            return self._constant(tensor)
        if found[0] == "in" or found[1] == -1:
            return tuple(found)
        _, chain, block, at, number = found
        if chain == self._chain:
            return "back", self._block - block, at, number
        return "chain", chain, self._lengths[chain] - block, at, number

    def _constant(self, tensor: Tensor) -> Event:
        """A tensor that the forward brought along, by its values."""
        if isinstance(tensor, FakeTensor):
            raise UnclearError("a tensor was made by no operator")
        self._kept.append(tensor)
        if tensor.is_meta:
            return "constant", id(tensor)
        with _disable_current_modes():
            raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        about = tuple(tensor.shape), str(tensor.dtype), str(tensor.device)
        return ("constant", hashlib.sha256(raw).hexdigest(), *about)
