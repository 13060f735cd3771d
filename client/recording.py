"""Building a module without its weights: the factory runs on tensors that have no values, and what
it does to them is kept.

Every operator that the factory calls is seen below autograd (`_Seeing`). Tensors that it makes lie
on `meta`; per storage the recording keeps a `Content`: which operator wrote it last, on what. That
is a graph of operators in which nothing is ever overwritten, so that afterwards any tensor

- can be read as a recipe (`recorded.py`), or
- can be given its value alone (`Recording.value`): its own operators run, and no others.

A factory that looks at a value (`.item()`, a branch, numpy) gets it in the same way: a draw is made
by the recording's seed with `dag/recipe.py`, so what the factory saw is what the recipe will make.
What comes from outside (a file, numpy) is real, and stays what it is.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..dag.recipe import Initial, Step, make

__all__ = ["Content", "Op", "Recording", "View", "drawn", "record"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class View:
    """A tensor that an operator read: where it lies in a storage with this content. `content` is
    None where all of it is overwritten."""

    content: Content | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage_bytes: int

    @property
    def elements(self) -> int:
        """How many."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def interval(self) -> tuple[int, int] | None:
        """The elements of the storage, if they are an interval in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return None
            expected *= size
        return self.offset, self.offset + self.elements

    @property
    def is_whole(self) -> bool:
        """Whether it has each element of its storage once."""
        return self.elements * self.dtype.itemsize == self.storage_bytes and (
            self.interval is not None or _is_dense(self.shape, self.stride)
        )


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


@dataclass(eq=False, slots=True)
class Op:
    """A call of an operator; its tensors are views. `stream`: of a draw, once it has one."""

    number: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stream: str = ""

    @property
    def name(self) -> str:
        """As in `aten.normal_`, without its overload."""
        return str(self.func._schema.name).removeprefix("aten::")


@dataclass(eq=False, slots=True)
class Content:
    """What lies in a storage: result `result` of an operator, or what it wrote into the storage of
    `written`, or else the tensor `real`, which came from outside."""

    op: Op | None = None
    result: int = 0
    written: View | None = None
    real: Tensor | None = None
    like: View | None = None
    """How a result lies in its storage."""


def drawn(op: Op) -> tuple[str, tuple[float, float]] | None:
    """The kind of step and the numbers of an operator that draws each element by itself."""
    name, numbers = op.name, [a for a in op.args if isinstance(a, (int, float))]
    if name in ("uniform_", "normal_"):
        low, high = (*numbers, *((0.0, 1.0)[len(numbers) :]))
        return name[:-1], (float(low), float(high))
    if name == "normal" and str(op.func._overloadname) == "float_float":
        return "normal", (float(numbers[0]), float(numbers[1]))
    kinds = {"rand": "uniform", "rand_like": "uniform", "randn": "normal", "randn_like": "normal"}
    return (kinds[name], (0.0, 1.0)) if name in kinds else None


@dataclass
class Recording:
    """What is known of the tensors that a factory made. `seed`: that of their draws."""

    seed: int
    looked: bool = False
    """Whether the factory has seen a value that depends on the seed."""
    _contents: dict[int, Content] = field(default_factory=dict)
    _storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    _count: int = 0
    _values: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def has(self, tensor: Tensor) -> bool:
        """Whether the tensor was made here, and has no values."""
        return _where(tensor) in self._contents

    def view(self, tensor: Tensor) -> View:
        """How a tensor of the recording lies, as things are now."""
        storage = tensor.untyped_storage()
        return View(
            self._contents[storage._cdata],
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            storage.nbytes(),
        )

    def value(self, tensor: Tensor) -> Tensor:
        """A tensor of the recording with its values, on the CPU: only what it is made of is made,
        and given up again."""
        view = self.view(tensor)
        assert view.content is not None, "a tensor of the recording has a content"
        with torch.no_grad(), _disable_current_modes():
            return _lying(view, self._made(view.content))

    def shown(self, tensor: Tensor) -> Tensor:
        """The same for the factory itself."""
        content = self.view(tensor).content
        assert content is not None, "a tensor of the recording has a content"
        ops = (c.op for c in _plan(content)[0] if c.op is not None)
        self.looked = self.looked or any(_is_random(op) for op in ops)
        return self.value(tensor)

    # ------------------------------------------------------------ making values

    def _made(self, wanted: Content) -> torch.UntypedStorage:
        """The storage of a content, a fresh one."""
        order, uses = _plan(wanted)
        made: dict[Content, torch.UntypedStorage] = {}

        def take(content: Content) -> torch.UntypedStorage:
            uses[content] -= 1
            return made[content] if uses[content] else made.pop(content)

        for content in order:
            if content in made:
                continue
            if content.real is not None:
                made[content] = content.real.untyped_storage()
            else:
                assert content.op is not None, "what is not from outside was made by an operator"
                made |= self._run(content.op, order, take, uses)
        return made[wanted]

    def _run(
        self,
        op: Op,
        order: dict[Content, None],
        take: Callable[[Content], torch.UntypedStorage],
        uses: Counter[Content],
    ) -> dict[Content, torch.UntypedStorage]:
        """The storages that an operator makes or changes, of those wanted."""
        writes = {id(v.content) for v in _written(op)}
        storages: dict[int, torch.UntypedStorage] = {}

        def real(view: View) -> Tensor:
            key = id(view.content)
            if key not in storages:
                if view.content is None:
                    storages[key] = torch.UntypedStorage(view.storage_bytes)
                else:
                    storage, left = take(view.content), uses[view.content]
                    from_outside = view.content.real is not None
                    copied = key in writes and (left or from_outside)
                    storages[key] = storage.clone() if copied else storage
            return _lying(view, storages[key])

        args = tree_map_only(View, real, op.args)
        kwargs = tree_map_only(View, real, op.kwargs)
        results = self._called(op, args, kwargs)
        found: dict[Content, torch.UntypedStorage] = {}
        for content in order:
            if content.op is not op:
                continue
            if content.written is not None:
                found[content] = storages[id(content.written.content)]
            else:
                assert content.like is not None, "a result is known by how it lies"
                found[content] = _stored(results[content.result], content.like)
        return found

    def _called(self, op: Op, args: Any, kwargs: Any) -> list[Tensor]:
        kind = drawn(op)
        if kind is not None:
            op.stream = op.stream or f"#{op.number}"  # `#` begins no name of a parameter
            like: Tensor = args[0] if op.name.endswith("_") else _empty(op, args, kwargs)
            count = like.numel()
            dtype = str(like.dtype).removeprefix("torch.")
            steps = (Step(kind[0], 0, count, kind[1], op.stream),) if count else ()
            like.copy_(make(Initial((count,), dtype, steps), self.seed).view(like.shape))
            return [like]
        if not _is_random(op):
            return _tensors(op.func(*args, **kwargs))
        words = hashlib.blake2b(f"{self.seed} {op.number}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(words, "little"))
            return _tensors(op.func(*args, **kwargs))

    # ------------------------------------------------------------ seeing operators

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator of the factory's, on meta where it can, and keeps what it did."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        ours = any(self.has(t) for t in given)
        if not ours and not (_makes(func) and not given and _is_here(kwargs.get("device"))):
            return func(*args, **kwargs)
        schema = func._schema
        written = [
            t
            for a, value in _by_argument(schema, args, kwargs)
            if a.alias_info is not None and a.alias_info.is_write
            for t in tree_leaves(value)
            if isinstance(t, Tensor)
        ]
        if func in _LOOKS or any(not self.has(t) for t in written):
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
            return self._looked_at(func, args, kwargs, written)
        self._keep(func, args, kwargs, written, _tensors(results))
        return results

    def _keep(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: list[Tensor],
        results: list[Tensor],
    ) -> None:
        fresh = [(i, t) for i, t in enumerate(results) if _where(t) not in self._contents]
        if not fresh and not written:
            return
        overwritten = {_where(t) for t in written} if func in _OVERWRITES else set()

        def seen(tensor: Tensor) -> View:
            if not self.has(tensor):  # from outside
                return _view_of(tensor, Content(real=tensor.detach()))
            view = self.view(tensor)
            if tensor is written_first and view.is_whole and _where(tensor) in overwritten:
                others = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
                if sum(_where(t) == _where(tensor) for t in others if self.has(t)) == 1:
                    return _without(view)
            return view

        written_first = written[0] if written else None
        self._count += 1
        views = tree_map_only(Tensor, seen, (args, kwargs))
        op = Op(self._count, func, views[0], dict(views[1]))
        if _makes(func) and results:  # the default may be another one later
            op.kwargs["dtype"] = results[0].dtype
            op.kwargs["device"] = torch.device("cpu")
        elif "device" in op.kwargs:
            op.kwargs["device"] = torch.device("cpu")
        places = _written(op)
        for tensor, view in zip(written, places, strict=True):
            self._put(tensor, Content(op, written=view))
        for i, tensor in fresh:
            content = Content(op, result=i)
            self._put(tensor, content)
            content.like = _without(self.view(tensor))

    def _put(self, tensor: Tensor, content: Content) -> None:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage  # while it is here, nobody else has its address
        self._contents[storage._cdata] = content

    def _shadow(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta or tensor.dim() == 0:
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _looked_at(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Runs an operator on values; what it wrote into tensors of the recording is real then."""
        reals: dict[int, Tensor] = {}

        def real(tensor: Tensor) -> Tensor:
            if id(tensor) not in reals:
                reals[id(tensor)] = self.shown(tensor) if self.has(tensor) else tensor
            return reals[id(tensor)]

        values = tree_map_only(Tensor, real, (args, kwargs))
        results = func(*values[0], **values[1])
        back = {id(reals[id(t)]): t for t in written}
        for tensor in written:
            self._put(tensor, Content(real=reals[id(tensor)]))
        return tree_map_only(Tensor, lambda t: back.get(id(t), t), results)


_LOOKS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_same_size.default}
_OVERWRITES = {
    aten.normal_.default,
    aten.uniform_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.copy_.default,
}
"""In-place operators whose result does not depend on what was there."""


def _where(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _view_of(tensor: Tensor, content: Content) -> View:
    return View(
        content,
        int(tensor.storage_offset()),
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )


def _without(view: View) -> View:
    return View(None, view.offset, view.shape, view.stride, view.dtype, view.storage_bytes)


def _lying(view: View, storage: torch.UntypedStorage) -> Tensor:
    """The tensor of a view in a storage with values."""
    empty = torch.empty(0, dtype=view.dtype)
    return empty.set_(storage, view.offset, view.shape, view.stride)


def _stored(result: Tensor, like: View) -> torch.UntypedStorage:
    """The storage of a result, as it lies on meta."""
    lies = (result.storage_offset(), tuple(result.shape), tuple(result.stride()))
    storage = result.untyped_storage()
    if lies == (like.offset, like.shape, like.stride) and storage.nbytes() == like.storage_bytes:
        return storage
    storage = torch.UntypedStorage(like.storage_bytes)
    _lying(like, storage).copy_(result)
    return storage


def _empty(op: Op, args: Any, kwargs: Any) -> Tensor:
    """Memory for the result of a drawing operator that makes a tensor."""
    if op.name.endswith("_like"):
        return torch.empty_like(args[0], **kwargs)
    sizes = next(a for a in args if isinstance(a, (list, tuple)))
    return torch.empty(sizes, dtype=kwargs["dtype"])


def _plan(wanted: Content) -> tuple[dict[Content, None], Counter[Content]]:
    """What has to be made, the first first, and by how many operators each is read."""
    order: dict[Content, None] = {}
    uses: Counter[Content] = Counter({wanted: 1})
    stack: list[tuple[Content, bool]] = [(wanted, False)]
    counted: set[Op] = set()
    while stack:
        content, done = stack.pop()
        if content in order:
            continue
        if done or content.op is None:
            order[content] = None
            continue
        stack.append((content, True))
        read = {id(c): c for c in _read(content.op)}
        if content.op not in counted:
            counted.add(content.op)
            uses.update(read.values())
        stack += [(c, False) for c in read.values()]
    return order, uses


def _read(op: Op) -> Iterator[Content]:
    for view in tree_leaves((op.args, op.kwargs)):
        if isinstance(view, View) and view.content is not None:
            yield view.content


def _written(op: Op) -> list[View]:
    return [
        v
        for a, value in _by_argument(op.func._schema, op.args, op.kwargs)
        if a.alias_info is not None and a.alias_info.is_write
        for v in tree_leaves(value)
        if isinstance(v, View)
    ]


def _by_argument(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    for i, argument in enumerate(schema.arguments):
        if i < len(args):
            yield argument, args[i]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _is_random(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in op.func.tags


def _makes(func: Any) -> bool:
    """Whether an operator makes a tensor of nothing."""
    names = {a.name for a in func._schema.arguments}
    takes = any("Tensor" in str(a.type) for a in func._schema.arguments)
    return "device" in names and not takes


def _is_here(device: Any) -> bool:
    return device is None or torch.device(device).type in ("cpu", "meta")


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results]
    return list(results) if isinstance(results, (list, tuple)) else []


# ---------------------------------------------------------------- the modes


class _Seeing(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
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
    torch.Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]  # of C
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


def record(factory: Callable[[], Any], seed: int) -> tuple[Any, Recording]:
    """What the factory returns, made without values, and how these would be made. Buffers of a
    module, and tensors that are its plain attributes, have theirs."""
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
        made = factory()
    if isinstance(made, nn.Module):
        _give_values(made, recording)
    return made, recording


def _give_values(module: nn.Module, recording: Recording) -> None:
    """To everything but parameters: it is small, or data that the model cannot do without."""
    made: dict[int, Tensor] = {}

    def real(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or not recording.has(tensor):
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = recording.value(tensor)
        return made[id(tensor)]

    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = real(buffer)
        for name, value in vars(part).items():
            if name in _OWN or not isinstance(value, (Tensor, list, tuple, dict)):
                continue
            if any(t is not real(t) for t in tree_leaves(value) if isinstance(t, Tensor)):
                vars(part)[name] = tree_map_only(Tensor, real, value)


_OWN = ("_parameters", "_buffers", "_modules")
"""What a module keeps its tensors and parts in."""
