"""Building a module without its weights: the factory runs on tensors that have no values, and what
it does to them is kept.

Every operator that the factory calls is seen below autograd (`_Seeing`). Tensors that it makes lie
on `meta`; per storage the recording keeps a `StorageContent`: which operator wrote it last, on
what. That is a graph of operators in which nothing is ever overwritten, so that afterwards any
tensor

- can be read as a recipe (`recorded.py`), or
- can be given its value alone (`Recording.value`): its own operators run, and no others.

A factory that looks at a value (`.item()`, a branch, numpy) gets it in the same way: a draw is made
by the recording's seed with `dag/ir/recipe.py`, so what the factory saw is what the recipe will
make. What comes from outside (a file, numpy) is real, and stays what it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ...dag.capture.capture import REGISTERED, check_memory, check_parts
from ...dag.ir.recipe import Initial, Recipe
from .adapters import plain_name
from .contents import Op, StorageContent, StorageView, written
from .making import depends_on_draws, tensors_in, value_of
from .recorded import Reading

__all__ = ["Recording", "recipe_of", "record", "replace_tensors"]

aten = torch.ops.aten


@dataclass
class Recording:
    """Record of the tensors that a factory made. `seed`: that of their draws."""

    seed: int
    looked: bool = False
    """Whether the factory has seen a value that depends on the seed, or a buffer has one."""
    reading: Reading = field(default_factory=Reading)
    """What has been read of it as recipes."""
    _contents: dict[int, StorageContent] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _count: int = 0

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor was made here, and has no values."""
        return _where(tensor) in self._contents

    def view(self, tensor: Tensor) -> StorageView:
        """How a tensor of the recording lies, as things are now."""
        return StorageView.of(tensor, self._contents[_where(tensor)])

    def value(self, tensor: Tensor, seed: int | None = None) -> Tensor:
        """A tensor of the recording with its values, on the CPU: only what it is made of is made,
        and given up again. `seed`: another one for its draws."""
        seed = self.seed if seed is None else seed
        return value_of(self.view(tensor), seed, self.reading)

    def read_from(self, tensor: Tensor, read: Callable[[], Tensor]) -> None:
        """Gives a tensor of the recording other values, as of a file: those that `read` returns, of
        its shape and dtype, whenever they are asked for."""
        self._put(tensor, StorageContent(read=read, like=StorageView.of(tensor, None)))

    def is_read(self, tensor: Tensor) -> bool:
        """Whether a tensor has the values that `read_from` gave it, unchanged."""
        return self.has(tensor) and self._contents[_where(tensor)].read is not None

    def shown(self, tensor: Tensor) -> Tensor:
        """Return a tensor's value for the factory itself, and note whether its draws were looked
        at."""
        self.looked = self.looked or depends_on_draws(self.view(tensor))
        return self.value(tensor)

    # ------------------------------------------------------------ seeing operators

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of the factory's, on meta where it can, and keeps what it did."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        ours = any(self.has(t) for t in given)
        if not ours and not (_makes(func) and not given and _is_here(kwargs.get("device"))):
            return func(*args, **kwargs)
        schema = func._schema
        into = written(func, args, kwargs, Tensor)
        if str(func._schema.name) in _MOVES:
            return func(*args, **kwargs)
        if func in _LOOKS or any(not self.has(t) for t in into):
            return self._looked_at(func, args, kwargs, [])
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        if any(a.name == "device" for a in schema.arguments):
            kwargs = {**kwargs, "device": torch.device("meta")}
            if any(a.name == "pin_memory" for a in schema.arguments):
                kwargs["pin_memory"] = False
        shadows = tree_map_only(Tensor, self._shadow, (args, kwargs))
        try:
            results = func(*shadows[0], **shadows[1])
        except (NotImplementedError, RuntimeError):  # its shape depends on values, or it has none
            return self._looked_at(func, args, kwargs, into)
        self._keep(func, args, kwargs, into, tensors_in(results))
        return results

    def _keep(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        into: list[Tensor],
        results: list[Tensor],
    ) -> None:
        fresh = [(i, t) for i, t in enumerate(results) if _where(t) not in self._contents]
        if not fresh and not into:
            return
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        over = func in _OVERWRITES and sum(_where(t) == _where(into[0]) for t in given) == 1

        def seen(tensor: Tensor) -> StorageView:
            if not self.has(tensor):  # from outside
                return StorageView.of(tensor, StorageContent(real=tensor.detach()))
            view = self.view(tensor)
            lost = over and tensor is into[0] and view.is_whole
            return replace(view, content=None) if lost else view

        self._count += 1
        views = tree_map_only(Tensor, seen, (args, kwargs))
        op = Op(self._count, func, views[0], dict(views[1]))
        if _makes(func) and results:  # the default may be another one later
            op.kwargs["dtype"] = results[0].dtype
            op.kwargs["device"] = torch.device("cpu")
        elif "device" in op.kwargs:
            op.kwargs["device"] = torch.device("cpu")
        for tensor, view in zip(into, written(func, op.args, op.kwargs, StorageView), strict=True):
            self._put(tensor, StorageContent(op, written=view))
        for i, tensor in fresh:
            self._put(tensor, StorageContent(op, result=i, like=StorageView.of(tensor, None)))

    def _put(self, tensor: Tensor, content: StorageContent) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # while it is here, nobody else has its address
        self._contents[storage._cdata] = content

    def _shadow(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.dim() == 0:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _looked_at(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], into: list[Tensor]
    ) -> Any:
        """Runs an operator on values; what it wrote into tensors of the recording is real then."""
        reals: dict[int, Tensor] = {}

        def real(tensor: Tensor) -> Tensor:
            if id(tensor) not in reals:
                reals[id(tensor)] = self.shown(tensor) if self.has(tensor) else tensor
            return reals[id(tensor)]

        values = tree_map_only(Tensor, real, (args, kwargs))
        results = func(*values[0], **values[1])
        back = {id(reals[id(t)]): t for t in into}
        for tensor in into:
            self._put(tensor, StorageContent(real=reals[id(tensor)]))
        return tree_map_only(Tensor, lambda t: back.get(id(t), t), results)


_LOOKS = {aten._local_scalar_dense.default, aten.equal.default}
_OVERWRITES = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
}
"""In-place operators whose result does not depend on what was there."""
_MOVES = {
    f"aten::{name}"
    for name in ("as_strided_", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_")
} | {"aten::unsqueeze_"}
"""Those that change a tensor's place in its memory and nothing there."""


def _where(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _makes(func: Any) -> bool:
    """Whether an operator makes a tensor of nothing."""
    names = {a.name for a in func._schema.arguments}
    takes = any("Tensor" in str(a.type) for a in func._schema.arguments)
    return "device" in names and not takes


def _is_here(device: Any) -> bool:
    return device is None or torch.device(device).type in ("cpu", "meta")


# ---------------------------------------------------------------- the modes


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is untyped
        self._recording = recording

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recording.call(func, args, dict(kwargs or {}))


class _Posing(TorchFunctionMode):
    """Tensors of the recording pass for ordinary ones: initialisers leave out what is on meta."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _POSES and self._recording.has(args[0]):
            return _POSES[func]
        if func in _LEAVES and self._recording.has(args[0]):
            return func(self._recording.shown(args[0]), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_POSES: dict[Any, Any] = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]  # a descriptor of C
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]  # a descriptor of C
    torch.Tensor.device.__get__: torch.device("cpu"),
}
_LEAVES = {torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__}


def _truncated(
    tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> Tensor:
    """`trunc_normal_` by the inverse of the distribution, as torch had it before it drew again and
    again: the same distribution, and every element by itself."""
    with torch.no_grad():
        low, high = (
            torch.special.ndtr(torch.tensor((x - mean) / std, dtype=torch.float64)).item()
            for x in (a, b)
        )
        tensor.uniform_(2 * low - 1, 2 * high - 1)
        tensor.erfinv_().mul_(std * 2**0.5).add_(mean)
        return tensor.clamp_(min=a, max=b)


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def record(
    factory: Callable[[], Any],
    seed: int,
    then: Callable[[Any, Recording], Any] = lambda made, recording: made,
) -> tuple[Any, Recording]:
    """What the factory returns, made without values, and how these would be made. Buffers of a
    module, and tensors that are its plain attributes, have theirs. `then`: makes another of it,
    which is recorded too. Raises CaptureError for a module that no recipe can be of."""
    recording = Recording(seed)
    load = torch.load

    def loaded(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return load(*args, **kwargs)

    with (
        torch.random.fork_rng(devices=[]),
        _patched(torch.nn.init, "_no_grad_trunc_normal_", _truncated),
        _patched(torch, "load", loaded),
        _Posing(recording),
        _Seeing(recording),
    ):
        torch.manual_seed(seed)
        made = then(factory(), recording)
    if isinstance(made, nn.Module):
        check_parts(made)
        check_memory(made)
        _give_values(made, recording)
    return made, recording


def _give_values(module: nn.Module, recording: Recording) -> None:
    """To everything but parameters: it is small, or data that the model cannot do without."""
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or not recording.has(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = recording.shown(tensor)
        return made[id(tensor)]

    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = real(buffer)
        replace_tensors(part, real)


def recipe_of(
    module: nn.Module, recording: Recording, seed: int
) -> tuple[Recipe, dict[str, Tensor], list[str]]:
    """The recipe of a module's parameters; those that need values, by name: real ones, and others
    that `recording.value` makes; and the names of those that nothing ever filled, which are 0. Each
    under its first name. An adapter moves the names of what it wraps and changes no draw of it.
    Raises ValueError for two parameters over the same memory."""
    plain = plain_name(module)
    found: dict[str, Initial] = {}
    values: dict[str, Tensor] = {}
    empty: list[str] = []
    check_memory(module)
    for name, parameter in module.named_parameters():
        initial = None
        if recording.has(parameter):
            initial = recording.reading.initial(plain(name), recording.view(parameter))
        if initial is None:
            values[name] = parameter
        else:
            found[name] = initial
            empty += [] if initial.steps or not initial.elements else [name]
    return Recipe(seed, found), values, empty


def replace_tensors(part: nn.Module, new: Callable[[Tensor], Tensor]) -> None:
    """Replaces tensors among the plain attributes of a module, or in lists and the like there."""
    for name, value in vars(part).items():
        if name in REGISTERED or not isinstance(value, (Tensor, list, tuple, dict)):
            continue
        if any(t is not new(t) for t in tree_leaves(value) if isinstance(t, Tensor)):
            vars(part)[name] = tree_map_only(Tensor, new, value)
