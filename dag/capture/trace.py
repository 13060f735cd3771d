"""What a module's forward does to fake tensors, operator by operator and block by block.

A trace costs about a hundredth of an export: nothing is computed, and no size is a symbol. It has
every operator that torch dispatched, with its arguments, and says of each tensor where it comes
from *as seen from the block that reads it*: a weight of the block's own, the third result of the
block before. So two blocks that do the same with their own weights and their neighbours have equal
traces, and a model's trace is fully told by its blocks'. `blocks.py` lives by that.

A block is a child of a list of modules; what the model does between two blocks counts to the first
of them, what it does before the first block is the prefix.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._export.utils import _compiling_state_context
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .export import forward_of
from .modes import given_without_values, in_mode, without_values

__all__ = ["CaptureFingerprints", "ModuleChain", "UnclearError", "same_in_eval", "trace"]

LARGEST = 64 << 20
"""Bytes that may be computed with in a trace: ranges and masks that a forward makes."""

Event = tuple[Any, ...]
"""An operator: its name, whether gradients are on, and its arguments as plain data."""


class UnclearError(Exception):
    """A forward whose trace says too little: it is captured as a whole."""


@dataclass(frozen=True)
class ModuleChain:
    """A list of modules that the forward calls one after the other. `path` is its name in the
    module; its children, the blocks, are numbered."""

    container: nn.Module
    path: str


@dataclass(frozen=True)
class CaptureFingerprints:
    """Fingerprints of the operators before the first block and of those of each block, by chain;
    what the results are; and a fingerprint of all operators without what eval mode changes."""

    prefix: bytes
    blocks: list[list[bytes]]
    results: Event
    in_eval: bytes
    random: bool
    """Whether anything was drawn in what is left."""


@dataclass
class _Segment:
    """The operators of a block so far: how many, and all of them as a hash; and the calls that eval
    mode changes."""

    count: int = 0
    digest: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    flags: Any = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def both(self) -> bytes:
        fingerprint: bytes = self.digest.digest() + self.flags.digest()
        return fingerprint

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
    chains: Sequence[ModuleChain] = (),
) -> CaptureFingerprints:
    """Runs the forward for `batch` samples on tensors without values, in the module's present mode.

    What the eval form of a graph changes (dropout) is left out of the operators, and kept beside
    them. Raises UnclearError where blocks are not called once each and in order, or where a tensor
    comes from nowhere; and whatever the forward raises.
    """
    try:
        return _run(module, inputs, loss, batch, chains, on_meta=True)
    except Exception:  # tensors that the forward makes on the CPU do not go with those on meta
        return _run(module, inputs, loss, batch, chains, on_meta=False)


def same_in_eval(
    module: nn.Module, inputs: Mapping[str, Tensor], loss: Callable[..., Any] | None
) -> bool:
    """Whether the module does in eval mode what it does in train mode, apart from what the eval
    form of a graph changes; False where that is not certain."""
    try:
        traces = []
        for train in (True, False):
            with in_mode(module, train):
                traces.append(trace(module, inputs, loss, 5))
    except Exception:  # whatever the user's code raises without values, export explains
        return False
    # A mask that is drawn in both modes is one that the eval form would leave out.
    return len({(t.in_eval, t.results) for t in traces}) == 1 and not traces[1].random


def _run(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Any] | None,
    batch: int,
    chains: Sequence[ModuleChain],
    *,
    on_meta: bool,
) -> CaptureFingerprints:
    with without_values(module, on_meta) as tensors:
        recorder = _Recorder(chains, {id(t): n for n, t in tensors.items()})
        given = given_without_values(inputs, batch, on_meta)
        for name, tensor in given.items():
            recorder.from_outside(tensor, name)
        hook = register_module_forward_pre_hook(recorder.called)
        try:
            # As in an export: a forward may ask (transformers does).
            flags = _Flags(recorder) if module.training else nullcontext()
            with _compiling_state_context(), _untouched(module), recorder, flags:
                results = forward_of(module, given, loss)
        finally:
            hook.remove()
    if any(len(made) != len(_children(c)) for made, c in zip(recorder.made, chains, strict=True)):
        raise UnclearError("a block was not called")
    blocks = [[block.both() for block in made] for made in recorder.made]
    return CaptureFingerprints(
        recorder.prefix.both(),
        blocks,
        recorder.plain(results),
        recorder.all.digest.digest(),
        recorder.random,
    )


def _children(chain: ModuleChain) -> list[nn.Module]:
    return [m for m in chain.container._modules.values() if m is not None]


class _Flags(TorchFunctionMode):
    """Calls what knows the mode as eval mode does, in train mode too, as
    `dag/transforms/evaluation.py` changes it: dropout passes its input on, attention drops
    nothing."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.dropout:
            x, p, training, inplace = _given(
                args, kwargs, input=..., p=0.5, training=True, inplace=False
            )
            if training and not inplace and 0 < p < 1:
                self._recorder.flag("dropout", x, p)
                return x
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p")
            kwargs |= dict(zip(names, args[:5], strict=False))
            if p := kwargs.get("dropout_p", 0.0):
                self._recorder.flag("attention", p)
                kwargs["dropout_p"] = 0.0
            args = args[5:]
            if args:  # is_causal, by its place
                kwargs["is_causal"] = args[0]
            return func(**kwargs)
        return func(*args, **kwargs)


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], **defaults: Any) -> list[Any]:
    """The arguments of a call by the names and defaults of its function."""
    found = defaults | dict(zip(defaults, args, strict=False)) | dict(kwargs)
    return [found[name] for name in defaults]


@contextmanager
def _untouched(module: nn.Module) -> Iterator[None]:
    """Raises UnclearError where a forward changes the module's attributes, which are as before
    afterwards: what it would leave there has no values."""
    before = [(m, dict(m.__dict__), _contents(m)) for m in module.modules()]
    try:
        yield
    finally:
        changed = False
        for part, attributes, contents in before:
            if part.__dict__.keys() != attributes.keys() or any(
                part.__dict__[k] is not v for k, v in attributes.items()
            ):
                changed = True
                part.__dict__.clear()
                part.__dict__.update(attributes)
            for holder, (keys, values) in contents:
                now = _of(holder)[1]
                if len(now) == len(values) and all(
                    a is b for a, b in zip(now, values, strict=True)
                ):
                    continue
                changed = True
                holder.clear()
                if isinstance(holder, dict):
                    holder.update(zip(keys, values, strict=True))
                else:
                    holder.extend(values)
        if changed:
            raise UnclearError("the forward changes attributes of the module")


def _of(holder: Any) -> tuple[list[Any], list[Any]]:
    """Keys and values of a dict or list."""
    if isinstance(holder, dict):
        return list(holder), list(holder.values())
    return [], list(holder)


def _contents(part: nn.Module) -> list[tuple[Any, tuple[list[Any], list[Any]]]]:
    """The dicts and lists among the attributes of a module, with what is in them."""
    return [(v, _of(v)) for v in part.__dict__.values() if isinstance(v, (dict, list))]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(self, chains: Sequence[ModuleChain], names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prefix, self.all = _Segment(), _Segment()
        self.made: list[list[_Segment]] = [[] for _ in chains]
        self._names = names
        self._lengths = [len(_children(c)) for c in chains]
        self._blocks = {
            id(m): (number, place, f"{c.path}.{place}." if c.path else f"{place}.")
            for number, c in enumerate(chains)
            for place, m in enumerate(_children(c))
        }
        self._chain, self._block, self._path = -1, 0, ""
        self._now = self.prefix
        self._from: dict[int, Any] = {}
        self._kept: list[Tensor] = []  # else the id of one that died could be another's
        self._thread = threading.get_ident()
        self._real = 0
        self.random = False

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
        event = (str(func), torch.is_grad_enabled(), *given)
        at = self._now.add(event)
        self.random |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.all.add(event)
        results = func(*args, **(kwargs or {}))
        made = results if isinstance(results, (tuple, list)) else (results,)
        for number, tensor in enumerate(made):
            if isinstance(tensor, Tensor):
                if not isinstance(tensor, FakeTensor) and not tensor.is_meta:
                    self._real += tensor.nbytes
                self._from[id(tensor)] = ("made", self._chain, self._block, at, number)
                self._kept.append(tensor)
        if self._real > LARGEST:
            raise UnclearError("the forward makes large tensors on the CPU")
        return results

    def flag(self, name: str, *given: Any) -> None:
        """A call that eval mode changes."""
        self._now.flags.update(repr((name, self._now.count, self.plain(given))).encode())

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
