"""What torch.export prepares anew for each decomposition is prepared once: a quarter of the capture
of a small model, and tests capture hundreds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._export.utils import _special_op_to_preserve_cia as kept
from torch._subclasses import fake_impls
from torch.export import exported_program

Kernels = dict[Any, Any]


def prepare_once() -> None:
    """Let torch keep, for the rest of this process, how composite operators are preserved."""
    exported_program._override_composite_implicit_decomp = _Preserved(  # type: ignore[assignment]
        exported_program._override_composite_implicit_decomp
    ).shown
    of_namespaces = exported_program._collect_all_valid_cia_ops

    @cache
    def all_valid(known: int) -> frozenset[Any]:
        return frozenset(of_namespaces())

    # Whose operators are registered once it is there.
    exported_program._collect_all_valid_cia_ops = lambda: all_valid(len(torch.ops._dir))  # type: ignore[assignment]


class _Preserved:
    """Tables of operators that stay composite, by operator, with what they were before. `prepare`:
    how torch makes them; it has those that decompose in a way of their own each time."""

    def __init__(self, prepare: Callable[[Mapping[Any, Any]], Any]) -> None:
        self._prepare = prepare
        self._known: dict[Any, tuple[Kernels, Kernels, Any]] = {}

    @contextmanager
    def shown(self, rules: Mapping[Any, Any]) -> Iterator[None]:
        """Decompose by rules inside, as torch's own does."""
        again = [op for op, rule in rules.items() if rule is kept and self._is_as_before(op)]
        ours = set(again)
        with self._prepare({op: rule for op, rule in rules.items() if op not in ours}):
            new = {op for op, rule in rules.items() if rule is kept} - ours
            for op in again:
                _, kernels, shape_rule = self._known[op]
                _show(op, kernels)
                fake_impls.op_implementations_dict.setdefault(op, shape_rule)
            for op in new:
                self._known[op] = {}, dict(op.py_kernels), fake_impls.op_implementations_dict[op]
            try:
                yield
            finally:
                for op in again:
                    _show(op, self._known[op][0])
                    fake_impls._deregister_op_impl(op)
        for op in new:  # which has what it had again
            self._known[op] = dict(op.py_kernels), *self._known[op][1:]

    def _is_as_before(self, op: Any) -> bool:
        return op in self._known and op.py_kernels == self._known[op][0]


def _show(op: Any, kernels: Kernels) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()
