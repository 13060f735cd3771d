"""Giving a tensor without values its values: the operators that it is made of run, in their order,
and no others. What a later one does not need is given up at once. Where a recipe can be read, that
is carried out instead, so that nobody sees other values than peers make.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ...dag.ir.recipe import make
from .contents import Op, StorageContent, StorageView, is_random, read_by, written
from .recorded import Reading

__all__ = ["depends_on_draws", "tensors_in", "value_of"]


def value_of(view: StorageView, seed: int, reading: Reading) -> Tensor:
    """A tensor with its values, on the CPU. Draws are those of a recipe under this seed; of what no
    recipe has (a permutation, say), torch's own, by seed and operator."""
    assert view.content is not None, "a tensor has a content"
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        return _lying(view, _Making(view.content, seed, reading).storage())


def depends_on_draws(view: StorageView) -> bool:
    """Whether random numbers went into a tensor."""
    assert view.content is not None, "a tensor has a content"
    order, _ = _plan(view.content, None)
    return any(content.op is not None and is_random(content.op) for content in order)


class _Making:
    """Computes one content, by the operators that it is made of."""

    def __init__(self, wanted: StorageContent, seed: int, reading: Reading) -> None:
        self._wanted, self._seed, self._reading = wanted, seed, reading
        self._order, self._uses = _plan(wanted, reading)
        self._made: dict[StorageContent, torch.UntypedStorage] = {}

    def storage(self) -> torch.UntypedStorage:
        """The storage with the content."""
        for content in self._order:
            if content in self._made:
                continue
            if content.real is not None:
                self._made[content] = content.real.untyped_storage()
            elif content.read is not None:
                assert content.like is not None, "a tensor that is read is known by how it lies"
                self._made[content] = _stored(content.read(), content.like)
            elif (initial := self._reading.storage(content)) is not None:
                made = make(initial, self._seed, threads=torch.get_num_threads())
                self._made[content] = made.untyped_storage()
            else:
                assert content.op is not None, "what is not from outside was made by an operator"
                self._run(content.op)
        wanted = self._made[self._wanted]
        return _copy(wanted) if self._wanted.real is not None else wanted

    def _run(self, op: Op) -> None:
        """Makes what an operator makes or changes."""
        writes = {id(view.content) for view in written(op.func, op.args, op.kwargs, StorageView)}
        storages: dict[int, torch.UntypedStorage] = {}

        def real(view: StorageView) -> Tensor:
            key = id(view.content)
            if key not in storages:
                if view.content is None:
                    storages[key] = _storage(view.storage_bytes)
                else:
                    storages[key] = self._taken(view.content, key in writes)
            return _lying(view, storages[key])

        results = self._called(
            op,
            tree_map_only(StorageView, real, op.args),
            tree_map_only(StorageView, real, op.kwargs),
        )
        for content in self._order:
            if content.op is not op or content in self._made:
                continue
            if content.written is not None:
                self._made[content] = storages[id(content.written.content)]
            else:
                assert content.like is not None, "a result is known by how it lies"
                self._made[content] = _stored(results[content.result], content.like)

    def _taken(self, content: StorageContent, to_write: bool) -> torch.UntypedStorage:
        """The storage of a content for an operator that reads it or, with `to_write`, changes it:
        itself for the last one that wants it."""
        self._uses[content] -= 1
        last = not self._uses[content]
        storage = self._made.pop(content) if last else self._made[content]
        return _copy(storage) if to_write and not (last and content.real is None) else storage

    def _called(self, op: Op, args: Any, kwargs: Any) -> list[Tensor]:
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


def _lying(view: StorageView, storage: torch.UntypedStorage) -> Tensor:
    """The tensor of a view in a storage with values."""
    empty = torch.empty(0, dtype=view.dtype)
    return empty.set_(storage, view.offset, view.shape, view.stride)


def _storage(size_bytes: int) -> torch.UntypedStorage:
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    made = _storage(storage.nbytes())
    made.copy_(storage)
    return made


def _stored(result: Tensor, like: StorageView) -> torch.UntypedStorage:
    """The storage of a result, as it lies on meta."""
    lies = (result.storage_offset(), tuple(result.shape), tuple(result.stride()))
    storage = result.untyped_storage()
    if lies == (like.offset, like.shape, like.stride) and storage.nbytes() == like.storage_bytes:
        return storage
    storage = _storage(like.storage_bytes)
    _lying(like, storage).copy_(result)
    return storage


def _plan(
    wanted: StorageContent, reading: Reading | None
) -> tuple[dict[StorageContent, None], Counter[StorageContent]]:
    """What has to be made, the first first, and by how many operators each is read; nothing in
    front of what has a recipe."""
    order: dict[StorageContent, None] = {}
    uses: Counter[StorageContent] = Counter({wanted: 1})
    stack: list[tuple[StorageContent, bool]] = [(wanted, False)]
    counted: set[Op] = set()
    while stack:
        content, done = stack.pop()
        if content in order:
            continue
        recipe = reading.storage(content) if reading is not None else None
        if done or content.op is None or recipe is not None:
            order[content] = None
            continue
        stack.append((content, True))
        read = dict.fromkeys(read_by(content.op))
        if content.op not in counted:
            counted.add(content.op)
            uses.update(read.keys())
        stack += [(c, False) for c in read]
    return order, uses
