"""Giving a tensor without values its values: the operators that it is made of run, in their order,
and no others. What a later one does not need is given up at once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ..dag.recipe import Initial, Step, make
from .contents import Content, Op, View, drawn, is_random, read_by, written_by

__all__ = ["depends_on_draws", "tensors_in", "value_of"]


def value_of(view: View, seed: int) -> Tensor:
    """A tensor with its values, on the CPU. Draws are those of a recipe under this seed; of what no
    recipe has (a permutation, say), torch's own, by seed and operator."""
    assert view.content is not None, "a tensor has a content"
    with torch.no_grad(), _disable_current_modes():
        return _lying(view, _Making(view.content, seed).storage())


def depends_on_draws(view: View) -> bool:
    """Whether random numbers went into a tensor."""
    assert view.content is not None, "a tensor has a content"
    order, _ = _plan(view.content)
    return any(content.op is not None and is_random(content.op) for content in order)


class _Making:
    """Of one content."""

    def __init__(self, wanted: Content, seed: int) -> None:
        self._wanted, self._seed = wanted, seed
        self._order, self._uses = _plan(wanted)
        self._made: dict[Content, torch.UntypedStorage] = {}

    def storage(self) -> torch.UntypedStorage:
        """The storage with the content."""
        for content in self._order:
            if content in self._made:
                continue
            if content.real is not None:
                self._made[content] = content.real.untyped_storage()
            else:
                assert content.op is not None, "what is not from outside was made by an operator"
                self._run(content.op)
        wanted = self._made[self._wanted]
        return wanted.clone() if self._wanted.real is not None else wanted

    def _run(self, op: Op) -> None:
        """Makes what an operator makes or changes."""
        writes = {id(view.content) for view in written_by(op)}
        storages: dict[int, torch.UntypedStorage] = {}

        def real(view: View) -> Tensor:
            key = id(view.content)
            if key not in storages:
                if view.content is None:
                    storages[key] = torch.UntypedStorage(view.storage_bytes)
                else:
                    storages[key] = self._taken(view.content, key in writes)
            return _lying(view, storages[key])

        results = self._called(
            op, tree_map_only(View, real, op.args), tree_map_only(View, real, op.kwargs)
        )
        for content in self._order:
            if content.op is not op:
                continue
            if content.written is not None:
                self._made[content] = storages[id(content.written.content)]
            else:
                assert content.like is not None, "a result is known by how it lies"
                self._made[content] = _stored(results[content.result], content.like)

    def _taken(self, content: Content, to_write: bool) -> torch.UntypedStorage:
        """The storage of a content for an operator that reads it or, with `to_write`, changes it:
        itself for the last one that wants it."""
        self._uses[content] -= 1
        last = not self._uses[content]
        storage = self._made.pop(content) if last else self._made[content]
        return storage.clone() if to_write and not (last and content.real is None) else storage

    def _called(self, op: Op, args: Any, kwargs: Any) -> list[Tensor]:
        kind = drawn(op)
        if kind is not None:
            op.stream = op.stream or f"#{op.number}"  # `#` begins no name of a parameter
            like: Tensor = args[0] if op.name.endswith("_") else _empty(op, args, kwargs)
            count = like.numel()
            dtype = str(like.dtype).removeprefix("torch.")
            steps = (Step(kind[0], 0, count, kind[1], op.stream),) if count else ()
            like.copy_(make(Initial((count,), dtype, steps), self._seed).view(like.shape))
            return [like]
        if not is_random(op):
            return tensors_in(op.func(*args, **kwargs))
        words = hashlib.blake2b(f"{self._seed} {op.number}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(words, "little"))
            return tensors_in(op.func(*args, **kwargs))


def tensors_in(results: Any) -> list[Tensor]:
    """What an operator returned, as a list."""
    if isinstance(results, Tensor):
        return [results]
    return list(results) if isinstance(results, (list, tuple)) else []


def _empty(op: Op, args: Any, kwargs: Any) -> Tensor:
    """Memory for the result of a drawing operator that makes a tensor."""
    if op.name.endswith("_like"):
        return torch.empty_like(args[0], **kwargs)
    sizes = next(a for a in args if isinstance(a, (list, tuple)))
    return torch.empty(sizes, dtype=kwargs["dtype"])


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
        read = dict.fromkeys(read_by(content.op))
        if content.op not in counted:
            counted.add(content.op)
            uses.update(read)
        stack += [(c, False) for c in read]
    return order, uses
