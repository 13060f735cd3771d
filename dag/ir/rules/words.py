"""The words in which rules are written: what an argument must be, or RuleError. Arguments come by
their names in the schema, tensors as specs; nothing is known of them before: a number may stand
where a tensor should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..graph import TensorSpec

__all__ = [
    "Given",
    "Rule",
    "RuleError",
    "adding_to",
    "flag",
    "integer",
    "integers",
    "need",
    "rank",
    "shaped",
    "tensor",
    "tensors",
]


class RuleError(ValueError):
    """A rule that a call breaks: what was expected and what came."""


Given = Mapping[str, Any]

Rule = Callable[[Given], None]
"""Raises RuleError for arguments that an operator must not have."""


def adding_to(table: dict[str, Rule]) -> Callable[[str], Callable[[Rule], Rule]]:
    """What decorates a rule with its operators, between spaces, and puts it into the table."""

    def rule(names: str) -> Callable[[Rule], Rule]:
        def add(function: Rule) -> Rule:
            for name in names.split():
                table[name] = function
            return function

        return add

    return rule


def need(holds: bool, what: str) -> None:
    if not holds:
        raise RuleError(what)


def tensor(given: Given, name: str) -> TensorSpec:
    value = given.get(name)
    if not isinstance(value, TensorSpec):
        raise RuleError(f"{name} is {value!r}: expected a tensor")
    return value


def tensors(given: Given, name: str, count: int | None = None) -> tuple[TensorSpec, ...]:
    value = given.get(name)
    if not isinstance(value, tuple) or not all(isinstance(v, TensorSpec) for v in value):
        raise RuleError(f"{name}: expected a list of tensors")
    need(count in (None, len(value)), f"{name} has {len(value)} tensors: expected {count}")
    return value


def integer(given: Given, name: str, least: int | None = None) -> int:
    value = given.get(name)
    if type(value) is not int or (least is not None and value < least):
        more = "" if least is None else f" of at least {least}"
        raise RuleError(f"{name} is {value!r}: expected an integer{more}")
    return value


def integers(given: Given, name: str) -> tuple[int, ...]:
    value = given.get(name)
    value = (value,) if type(value) is int else value
    if not isinstance(value, tuple | list) or not all(type(v) is int for v in value):
        raise RuleError(f"{name} is {value!r}: expected a list of integers")
    return tuple(value)


def flag(given: Given, name: str) -> bool:
    value = given.get(name)
    if type(value) is not bool:
        raise RuleError(f"{name} is {value!r}: expected true or false")
    return value


def rank(spec: TensorSpec, name: str, least: int, most: int = 64) -> tuple[int, ...]:
    found = len(spec.shape)
    expected = f"{least}" if least == most else f"{least} to {most}"
    need(least <= found <= most, f"{name} has {found} dimensions: expected {expected}")
    return spec.sizes


def shaped(spec: TensorSpec, name: str, shape: Sequence[int], dtype: str | None = None) -> None:
    need(
        spec.sizes == tuple(shape) and dtype in (None, spec.dtype),
        f"{name} is {spec!r}: expected {dtype or spec.dtype}{list(shape)}",
    )
