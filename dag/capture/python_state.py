"""What a forward may remember from one call to the next, apart from parameters and buffers.

Attributes of modules and of the objects that they hold, attributes of classes, globals, variables
of closures, values of default arguments: all that functions in files of the user's own name is
found, kept and put back, so that a capture leaves a module as it was, and each trial of a forward
can begin with the same state. Generators of random numbers are among it, Python's, numpy's and
torch's own ones too.
"""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.capture_errors import is_own_file

__all__ = ["Number", "PythonState"]

MOST = 20_000
"""Objects that are looked into."""

_ABSENT = object()


@dataclass(frozen=True)
class Number:
    """A number, or the length of a list, that calls of forward change. `name`: for people."""

    name: str
    before: float
    now: float
    put: Callable[[float], None]


@dataclass
class _Kept:
    """One thing that is put back. `read` gives what is compared, by identity or equality."""

    name: str
    restore: Callable[[], object]
    numbers: Callable[[], list[Number]] = list


@dataclass
class PythonState:
    """The state as it is when it is made; `restore` puts it back. `generators`: those of random
    numbers that the module holds, with a way to begin them anew from a seed."""

    module: nn.Module
    loss: Callable[..., Any] | None = None
    generators: list[Any] = field(default_factory=list)
    _kept: list[_Kept] = field(default_factory=list)
    _seen: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path, part in self.module.named_modules():
            self._object(part, f"attribute %s of module {path!r}" if path else "attribute %s")
        for function in (self.loss, type(self.module).forward):  # a class may be made around
            self._value(function, "the loss")
        self._shared()

    def restore(self) -> None:
        """Puts everything back."""
        with _disable_current_modes():  # one that computes nothing would put nothing back
            for kept in self._kept:
                kept.restore()

    def numbers(self) -> list[Number]:
        """Finds the numbers that are not what they were."""
        return [n for kept in self._kept for n in kept.numbers()]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts everything back afterwards."""
        try:
            yield
        finally:
            self.restore()

    # ------------------------------------------------------------ what is found

    def _new(self, thing: Any) -> bool:
        if id(thing) in self._seen or len(self._seen) >= MOST:
            return False
        self._seen[id(thing)] = thing
        return True

    def _object(self, thing: Any, name: str) -> None:
        """The attributes of an object, and of its class. `name` has a %s for the attribute's."""
        if not self._new(thing):
            return
        self._table(vars(thing), name)
        for kind in type(thing).__mro__:
            if _is_own_type(kind) and self._new(kind):
                self._class(kind)

    def _class(self, kind: type) -> None:
        for key, value in list(vars(kind).items()):
            function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            if isinstance(function, property):
                function = function.fget
            if isinstance(function, types.FunctionType):
                self._function(function)
            elif not key.startswith("__"):
                get = partial(vars(kind).get, key, _ABSENT)
                self._one(
                    f"class attribute {kind.__name__}.{key}", get, partial(setattr, kind, key)
                )
                self._value(value, f"class attribute {kind.__name__}.{key}")

    def _table(self, table: MutableMapping[Any, Any], name: str) -> None:
        before = dict(table)

        def restore() -> None:
            if table.keys() != before.keys() or any(table[k] is not v for k, v in before.items()):
                table.clear()
                table.update(before)

        def numbers() -> list[Number]:
            return [
                n
                for key, value in before.items()
                for n in _number(
                    _named(name, key), value, table.get(key), partial(table.__setitem__, key)
                )
            ]

        self._kept.append(_Kept(name, restore, numbers))
        for key, value in before.items():
            self._value(value, _named(name, key))

    def _value(self, value: Any, name: str) -> None:
        """Looks into a value."""
        if isinstance(value, Tensor):
            self._tensor(value, name)
        elif isinstance(value, (nn.Module, type, types.ModuleType)):
            return
        elif isinstance(value, (dict, list, deque, set)):
            self._container(value, name)
        elif isinstance(value, tuple):
            for one in value:
                self._value(one, name)
        elif isinstance(value, types.MethodType):
            self._value(value.__func__, name)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._cache(value, name)
        elif isinstance(value, (random.Random, torch.Generator)) or _is_numpy(value):
            self._generator(value, name)
        elif _has_attributes(value):
            self._object(value, f"attribute %s of {name}")

    def _container(self, value: Any, name: str) -> None:
        if not self._new(value):
            return
        if isinstance(value, dict):
            self._table(value, f"item %s of {name}")
            return
        before = list(value)

        def restore() -> None:
            if len(value) != len(before) or any(
                a is not b for a, b in zip(value, before, strict=True)
            ):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(before)

        def numbers() -> list[Number]:
            if isinstance(value, set):
                return []
            longer = _number(f"the length of {name}", len(before), len(value), grow)
            items = zip(range(len(before)), before, list(value), strict=False)
            return longer + [
                n
                for i, a, b in items
                for n in _number(f"item {i} of {name}", a, b, partial(value.__setitem__, i))
            ]

        def grow(length: float) -> None:
            while value and len(value) < min(length, 10_000):
                size = len(value)
                value.append(value[-1])
                if len(value) == size:  # a deque of bounded length
                    break

        self._kept.append(_Kept(name, restore, numbers))
        for one in before:
            self._value(one, name)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        """The values of a tensor that is no parameter or buffer."""
        own = isinstance(tensor, (nn.Parameter, FakeTensor)) or tensor.is_meta
        if own or not self._new(tensor) or tensor.is_inference() or tensor.layout != torch.strided:
            return
        if any(tensor is b for b in self._buffers()):
            return
        with _disable_current_modes():
            values = tensor.detach().clone()

        def restore() -> None:
            now = tensor.detach()
            if now.shape == values.shape and not torch.equal(now, values):
                now.copy_(values)

        self._kept.append(_Kept(name, restore))

    def _buffers(self) -> Iterator[Tensor]:
        for part in self.module.modules():
            yield from (b for b in part._buffers.values() if b is not None)

    def _generator(self, made: Any, name: str) -> None:
        if not self._new(made):
            return
        if isinstance(made, torch.Generator):
            state = made.get_state()
            self._kept.append(_Kept(name, lambda: made.set_state(state)))
            return
        if isinstance(made, random.Random):
            pythons = made.getstate()
            self._kept.append(_Kept(name, lambda: made.setstate(pythons)))
            self.generators.append(made)
            return
        kind = sys.modules["numpy"]
        if isinstance(made, kind.ndarray):
            values = made.copy()
            self._kept.append(_Kept(name, lambda: kind.copyto(made, values)))
        elif isinstance(made, kind.random.RandomState):
            numpys = made.get_state()
            self._kept.append(_Kept(name, lambda: made.set_state(numpys)))
            self.generators.append(made)
        elif isinstance(made, kind.random.Generator):
            bits = made.bit_generator.state
            self._kept.append(_Kept(name, lambda: setattr(made.bit_generator, "state", bits)))
            self.generators.append(made)

    def _function(self, function: types.FunctionType) -> None:
        if not self._new(function):
            return
        if not is_own_file(function.__code__.co_filename):
            for cell in function.__closure__ or ():  # a decorator, or a class around the user's
                self._value(_contents(cell), "a function")
            return
        self._table(vars(function), f"attribute %s of function {function.__name__}")
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value, f"a default argument of {function.__name__}")
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            get, put = partial(_contents, cell), partial(setattr, cell, "cell_contents")
            self._one(f"variable {name} around {function.__name__}", get, put)
            self._value(_contents(cell), f"variable {name} around {function.__name__}")
        self._globals(function.__globals__, set(_names(function.__code__)))

    def _cache(self, function: functools._lru_cache_wrapper[Any], name: str) -> None:
        """What functools keeps of a function cannot be read: it is emptied now, and wherever calls
        were added, among whose results are tensors without values."""
        if not self._new(function):
            return
        function.cache_clear()

        def restore() -> None:
            if function.cache_info().misses:
                function.cache_clear()

        self._kept.append(_Kept(name, restore))
        self._value(function.__wrapped__, name)

    def _globals(self, table: dict[str, Any], names: set[str]) -> None:
        for name in sorted(names & table.keys()):
            value = table[name]
            if isinstance(value, types.ModuleType):
                if is_own_file(getattr(value, "__file__", None) or ""):
                    self._globals(vars(value), names)
                continue
            if isinstance(value, type):
                if _is_own_type(value) and self._new(value):
                    self._class(value)
                continue
            get = partial(table.get, name, _ABSENT)
            self._one(f"global {name}", get, partial(table.__setitem__, name))
            self._value(value, f"global {name}")

    def _one(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """One place that has a value."""
        before = get()

        def restore() -> None:
            if before is not _ABSENT and get() is not before:
                put(before)

        self._kept.append(_Kept(name, restore, lambda: _number(name, before, get(), put)))

    def _shared(self) -> None:
        """The generators of random numbers that everybody shares."""
        python = random.getstate()
        self._kept.append(_Kept("random", lambda: random.setstate(python)))
        if (numpy := sys.modules.get("numpy")) is not None:
            state = numpy.random.get_state()
            self._kept.append(_Kept("numpy.random", lambda: numpy.random.set_state(state)))
        torchs = torch.get_rng_state()
        self._kept.append(_Kept("torch", lambda: torch.set_rng_state(torchs)))


def _number(name: str, before: Any, now: Any, put: Callable[[Any], None]) -> list[Number]:
    kinds = (int, float)
    if not isinstance(before, kinds) or not isinstance(now, kinds) or isinstance(now, bool):
        return []
    whole = type(now)
    return [Number(name, before, now, lambda x: put(whole(x)))] if now != before else []


def _named(name: str, key: Any) -> str:
    return name.replace("%s", str(key), 1)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _ABSENT


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_own_type(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_own_file(getattr(module, "__file__", None) or "")


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    kinds = (numpy.ndarray, numpy.random.RandomState, numpy.random.Generator)
    return isinstance(value, kinds) and not getattr(value, "hasobject", False)


def _has_attributes(value: Any) -> bool:
    """Whether it is an object with attributes of its own, and not of torch's or the language's."""
    root = type(value).__module__.partition(".")[0]
    foreign = root in {*sys.stdlib_module_names, "torch", "numpy"}
    plain = type(value).__name__ in ("Namespace", "SimpleNamespace")
    return hasattr(value, "__dict__") and (plain or not foreign)
