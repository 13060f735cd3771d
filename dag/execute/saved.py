"""Counting what autograd keeps of a forward until its backward: on a CPU, torch itself counts no
allocations."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["SavedTensors"]


class SavedTensors(saved_tensors_hooks):
    """Counts the tensors that autograd saves while it is active, each storage once.

    Within it everything is computed to the same bits: a saved tensor is looked at, not changed.
    """

    def __init__(self) -> None:
        self._found: dict[int, UntypedStorage] = {}  # Held, so that no address comes twice.
        super().__init__(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._note(tensor)
        return tensor.detach()  # A tensor that its own node saved would never be freed.

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._found[storage.data_ptr()] = storage

    def count(self, also: Iterable[Tensor], without: Iterable[Tensor]) -> int:
        """Bytes of all that was saved, and of `also`; the storages of `without` do not count.
        Forgets them."""
        for tensor in also:
            self._note(tensor)
        for tensor in without:
            self._found.pop(tensor.untyped_storage().data_ptr(), None)
        total = sum(storage.nbytes() for storage in self._found.values())
        self._found.clear()
        return total
