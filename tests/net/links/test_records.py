"""Immutable records: all of a frozen dataclass but what it does when somebody sets a field."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest

from shoal.net.links import frame, messages, transport
from shoal.net.links.frame import immutable
from shoal.peer.core import events


@immutable
class Point:
    x: int
    y: int = 2


@dataclass(frozen=True, slots=True)
class Frozen:
    x: int
    y: int = 2


@pytest.mark.parametrize("values", [(1,), (1, 3)])
def test_it_is_as_a_frozen_dataclass_with_slots(values):
    made, frozen = Point(*values), Frozen(*values)
    assert repr(made).partition("(")[2] == repr(frozen).partition("(")[2]
    assert hash(made) == hash(frozen)
    assert made == Point(*values) != replace(made, x=7)
    assert [f.name for f in fields(made)] == [f.name for f in fields(frozen)]
    assert Point.__match_args__ == Frozen.__match_args__
    with pytest.raises(AttributeError):
        made.z = 0


def test_every_record_of_the_wire_and_the_machine_can_be_hashed():
    for module in (frame, messages, transport, events):
        here = {n: v for n, v in vars(module).items() if isinstance(v, type)}
        kinds = {n: k for n, k in here.items() if k.__module__ == module.__name__}
        assert kinds
        for name, kind in kinds.items():
            if hasattr(kind, "__dataclass_fields__"):
                assert kind.__hash__ is not None, name
                assert hasattr(kind, "__slots__"), name
