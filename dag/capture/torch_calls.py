"""The calls of torch that a forward makes, as its author wrote them.

`trace.py` sees what torch dispatches; which operators a call becomes depends on sizes (a reshape of
one sample copies nothing). Here each call counts as one, so that traces at different batch sizes
can be compared, and each has the user's line.

Every tensor has an identity: a hash of the call that made it and of the identities of what the call
read. Two forwards do the same exactly where their results have equal identities; what no result
depends on plays no part. A change in place gives the memory another identity. A tensor that an
earlier call of forward left is another one than any of this call, unless only constants went into
it (a table of positions that is made once and kept).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.capture_errors import Place, place_at, user_frame

__all__ = ["Call", "CallTrace", "TorchCalls", "same_identity", "unlike"]

_RANDOM = re.compile("rand|bernoulli|dropout|normal|uniform|exponential|multinomial|poisson|gumbel")
_UNCHANGED = frozenset({"contiguous", "to"})
"""Calls that give the tensor itself, or a copy of it, depending on strides."""


@dataclass(frozen=True, slots=True)
class TensorOrigin:
    """`full`: hash with all numbers; `bare`: without them. `pure`: only constants went into it.
    `call`: number of the call that made it, -1 for what came from outside."""

    full: bytes
    bare: bytes
    pure: bool
    call: int = -1


@dataclass(frozen=True, slots=True)
class Call:
    """One call of torch. `numbers`: all numbers among its arguments and the sizes of its results.
    `reads`: the calls that made its arguments. `seed`: torch's seed when it drew something.
    `earlier`: the place where a tensor was made that an earlier call of forward left."""

    name: str
    full: bytes
    bare: bytes
    numbers: tuple[float, ...]
    reads: tuple[int, ...]
    place: tuple[str, int] | None
    seed: int | None = None
    earlier: tuple[str, int] | None = None
    generator: bool = False

    @property
    def where(self) -> Place | None:
        """File, line number and text of the user's line."""
        return place_at(self.place)


@dataclass(frozen=True)
class CallTrace:
    """All calls of one forward, and the identities of its results."""

    calls: list[Call]
    results: tuple[TensorOrigin, ...]

    @property
    def live(self) -> list[int]:
        """Numbers of the calls that results depend on, in order."""
        found: set[int] = set()
        todo = [r.call for r in self.results if r.call >= 0]
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += self.calls[number].reads
        return sorted(found)


def same_identity(a: CallTrace, b: CallTrace) -> bool:
    """Whether two forwards do the same, number by number."""
    return [r.full for r in a.results] == [r.full for r in b.results]


def unlike(a: CallTrace, b: CallTrace, *, bare: bool = False) -> tuple[Call | None, Call | None]:
    """The first live calls in which two forwards differ; `bare`: whatever their numbers."""
    ours, theirs = ([t.calls[n] for n in t.live] for t in (a, b))
    for one, other in zip(ours, theirs, strict=False):
        if (one.bare, other.bare) != (other.bare, one.bare) or (
            not bare and one.full != other.full
        ):
            return one, other
    shorter = min(len(ours), len(theirs))
    return next(iter(ours[shorter:]), None), next(iter(theirs[shorter:]), None)


@dataclass
class _Parts:
    """What the arguments of a call say, with and without their numbers."""

    full: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    pure: bool = True
    reads: list[int] = field(default_factory=list)
    earlier: tuple[str, int] | None = None
    generator: bool = False

    def word(self, text: str) -> None:
        self.full.append(text)
        self.bare.append(text)

    def number(self, value: float, kind: str) -> None:
        self.full.append(f"{kind} {value!r}")
        self.bare.append(kind)
        self.numbers.append(float(value))


class TorchCalls(TorchFunctionMode):
    """Follows one forward after another (`begin`). `names`: of parameters and buffers, by id;
    `known`: those whose changes the graph has (running statistics). `sees_through`: a tensor that
    is expanded from one sample to all of them stays what it is, as it does where there is one."""

    def __init__(
        self,
        names: Mapping[int, str],
        known: frozenset[str] = frozenset(),
        *,
        sees_through: bool = False,
    ) -> None:
        super().__init__()
        self._names, self._known = names, known
        self._sees_through, self._samples = sees_through, 0
        self._kept: list[Tensor] = []  # else the id of one that died could be another's
        self._of: dict[int, TensorOrigin] = {}
        self._changes: dict[int, TensorOrigin] = {}
        self._made_at: dict[bytes, tuple[str, int] | None] = {}
        self._constants: dict[int, TensorOrigin] = {}
        self._round = 0
        # All values that became fake tensors in this forward (torch.from_numpy): which became which
        # is not seen.
        self._lifted = hashlib.sha256()
        self.calls: list[Call] = []
        self.running = -1
        """Number of the call that runs."""

    def begin(self, inputs: Mapping[str, Tensor]) -> None:
        """Another forward begins: what earlier ones left counts as theirs."""
        self._round += 1
        for table in (self._of, self._changes):
            for key, was in table.items():
                table[key] = self._left(was)
        self.calls = []
        self._lifted = hashlib.sha256()
        self._constants.clear()  # their memory may have changed, by numpy's hand
        self._samples = len(next(iter(inputs.values()))) if inputs else 0
        for name, tensor in inputs.items():
            self._of[id(tensor)] = _identity(f"input {name}", f"input {name}", pure=False)
            self._kept.append(tensor)

    def _left(self, was: TensorOrigin) -> TensorOrigin:
        """What an earlier forward made, as a later one sees it."""
        if was.pure:
            return TensorOrigin(was.full, was.bare, True)
        text = f"left before round {self._round}: {was.full.hex()}"
        left = _identity(text, text, pure=False)
        place = self.calls[was.call].place if was.call >= 0 else self._made_at.get(was.full)
        self._made_at[left.full] = place
        return left

    def trace(self, results: Sequence[Tensor]) -> CallTrace:
        """The forward since `begin`, which gave these results."""
        return CallTrace(self.calls, tuple(self.identity(r) for r in results))

    def identity(self, tensor: Tensor) -> TensorOrigin:
        """Says what a tensor is, as its memory is now."""
        name = self._names.get(id(tensor))
        own = (
            _identity(f"named {name}", f"named {name}", pure=False)
            if name is not None
            else self._of.get(id(tensor)) or self._constant(tensor)
        )
        if name in self._known:
            return own
        change = self._changes.get(_memory(tensor))
        if change is None:
            return own
        # The last change knows those before it, and what it changed.
        mixed = _identity(
            own.full.hex() + change.full.hex(),
            own.bare.hex() + change.bare.hex(),
            pure=own.pure and change.pure,
            call=max(own.call, change.call),
        )
        for source in (own, change):
            if source.full in self._made_at:
                self._made_at[mixed.full] = self._made_at[source.full]
        return mixed

    def _constant(self, tensor: Tensor) -> TensorOrigin:
        """A tensor that the forward brought along, by its values."""
        found = self._constants.get(id(tensor))
        if found is None:
            about = f"{tuple(tensor.shape)} {tensor.dtype}"
            if isinstance(tensor, FakeTensor):
                values = self._lifted.hexdigest()
            elif tensor.is_meta:
                values = str(id(tensor))
            else:
                with _disable_current_modes():
                    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    values = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
            found = _identity(f"constant {values} {about}", f"constant {about}", pure=True)
            self._constants[id(tensor)] = found
            self._kept.append(tensor)
        return found

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        parts = _Parts()
        name = _name(func)
        parts.word(f"{name} {torch.is_grad_enabled()}")
        self._say(parts, args)
        self._say(parts, kwargs)
        before = [_version(t) for t in parts.tensors]
        if name.startswith("lift_fresh"):
            self._lifted.update(self._constant(args[0]).full)
        seed = torch.initial_seed() if _RANDOM.search(name) else None
        self.running = len(self.calls)
        result = func(*args, **kwargs)
        self.running = -1
        made = list(_tensors(result))
        changed = [t for t, v in zip(parts.tensors, before, strict=True) if _version(t) != v]
        if name.endswith("__set__"):  # x.data = y changes no version
            changed += parts.tensors[:1]
        if made or changed:
            self._note(name, parts, made, changed, seed)
        return result

    def _note(
        self,
        name: str,
        parts: _Parts,
        made: Sequence[Tensor],
        changed: Sequence[Tensor],
        seed: int | None,
    ) -> None:
        for tensor in made:
            parts.word(f"-> {tensor.dim()} {tensor.dtype}")
            for size in tensor.shape:
                parts.number(size, "size")
        whole = _identity("\n".join(parts.full), "\n".join(parts.bare), pure=True)
        at = len(self.calls)
        self.calls.append(
            Call(
                name, whole.full, whole.bare, tuple(parts.numbers), tuple(parts.reads),
                user_frame(), seed, parts.earlier, parts.generator,
            )
        )  # fmt: skip
        pure = parts.pure and seed is None
        for place, tensor in enumerate(made):
            if any(tensor is t for t in parts.tensors):
                continue  # the tensor itself, changed or not
            if self._same(name, parts.tensors, tensor):
                self._of[id(tensor)] = self.identity(parts.tensors[0])
            else:
                text = f"{whole.full.hex()} {place}", f"{whole.bare.hex()} {place}"
                self._of[id(tensor)] = _identity(*text, pure=pure, call=at)
            self._kept.append(tensor)
        for tensor in changed:
            self._changes[_memory(tensor)] = TensorOrigin(whole.full, whole.bare, pure, at)

    def _same(self, name: str, read: Sequence[Tensor], made: Tensor) -> bool:
        """Whether a call gives what it reads, or a copy of it."""
        if name in _UNCHANGED:
            return made.dtype == read[0].dtype
        if name != "expand" or not self._sees_through or not read[0].dim():
            return False
        was = read[0].shape
        return made.shape == (self._samples, *was[1:]) and was[0] in (1, self._samples)

    def _say(self, parts: _Parts, arg: Any) -> None:
        if isinstance(arg, Tensor):
            self._say_tensor(parts, arg)
        elif isinstance(arg, (tuple, list)):
            parts.word(f"{len(arg)} of")
            for one in arg:
                self._say(parts, one)
        elif isinstance(arg, dict):
            for key in sorted(arg, key=str):
                parts.word(f"{key}=")
                self._say(parts, arg[key])
        elif isinstance(arg, slice):
            parts.word("slice")
            self._say(parts, (arg.start, arg.stop, arg.step))
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
            parts.number(arg, type(arg).__name__)
        elif type(arg).__module__ == "numpy":
            self._say_numpy(parts, arg)
        elif isinstance(arg, torch.Generator):
            parts.generator = True
        elif callable(arg) and not isinstance(arg, (type, torch.dtype)):
            parts.word(str(getattr(arg, "__qualname__", type(arg).__name__)))
        elif arg is None or isinstance(
            arg, (bool, str, complex, torch.dtype, torch.device, torch.layout, torch.memory_format)
        ):
            parts.word(f"{type(arg).__name__} {arg!r}")
        else:
            parts.word(type(arg).__name__)

    def _say_tensor(self, parts: _Parts, tensor: Tensor) -> None:
        identity = self.identity(tensor)
        parts.full.append(identity.full.hex())
        parts.bare.append(identity.bare.hex())
        parts.tensors.append(tensor)
        parts.pure = parts.pure and identity.pure
        if identity.call >= 0:
            parts.reads.append(identity.call)
        for one in (self._of.get(id(tensor)), self._changes.get(_memory(tensor))):
            if one is not None and one.call >= 0:
                parts.reads.append(one.call)
        if identity.full in self._made_at:
            parts.earlier = self._made_at[identity.full]

    def _say_numpy(self, parts: _Parts, arg: Any) -> None:
        if getattr(arg, "ndim", 1) == 0 and hasattr(arg, "item"):
            self._say(parts, arg.item())
        else:
            values = hashlib.sha256(arg.tobytes()).hexdigest() if hasattr(arg, "tobytes") else ""
            parts.full.append(values)
            parts.word(f"numpy {getattr(arg, 'shape', '')} {getattr(arg, 'dtype', '')}")


def _identity(full: str, bare: str, *, pure: bool, call: int = -1) -> TensorOrigin:
    def short(text: str) -> bytes:
        return hashlib.blake2b(text.encode(), digest_size=16).digest()

    return TensorOrigin(short(full), short(bare), pure, call)


def _name(func: Any) -> str:
    name = str(getattr(func, "__name__", func))
    owner = getattr(func, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        return f"{getattr(owner, '__name__', '')}.{name}"
    return name


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for one in result:
            yield from _tensors(one)
    elif isinstance(result, dict):
        yield from _tensors(list(result.values()))
