"""Random numbers of Python's and numpy's, begun anew before each trial of a forward.

A draw that decides a branch may fall on the same side under many seeds. Where a generator is a
Mersenne Twister (Python's, numpy's older ones), its state is therefore also written so that what is
drawn next lies at one end of its range.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["FIRST", "OTHERS", "drawn", "reseed"]

FIRST = "1"
"""The seed of the call that others are compared with."""
OTHERS = ("2", "low", "high", "3", "4", "5")

_ENDS = {"low": 0, "high": 0x12DD9BB3}
"""Words of Mersenne Twister's state that are drawn as no bit and as all bits."""
_ENDED = 100
"""Words at one end, for 50 fractions. Those behind them are a seed's: what draws until a number
fits would never end."""


def reseed(own: Sequence[Any], kind: str) -> None:
    """Begins torch's generator, Python's and numpy's anew, with a seed or at one end; those that a
    module has itself (`own`) as well, but for FIRST, with which they go on where they are."""
    seed = int(kind) if kind.isdigit() else 6
    torch.manual_seed(seed)
    for made in (*_shared(), *(own if kind != FIRST else ())):
        if hasattr(made, "bit_generator"):  # numpy's newer ones
            made.bit_generator.state = type(made.bit_generator)(seed).state
            continue
        made.seed(seed)
        if kind not in _ENDS:
            continue
        ended = [_ENDS[kind]] * _ENDED
        if hasattr(made, "getstate"):
            version, words, _ = made.getstate()
            made.setstate((version, (*ended, *words[_ENDED:-1], 0), None))
        else:
            name, words, *_ = made.get_state()
            if name == "MT19937":
                made.set_state((name, [*ended, *map(int, words[_ENDED:])], 0))


def drawn(own: Sequence[Any]) -> list[str]:
    """What tells, before and after, whether anything was drawn but torch's numbers."""
    return [_state(made) for made in (*_shared(), *own)]


def _state(made: Any) -> str:
    if hasattr(made, "bit_generator"):
        return repr(made.bit_generator.state)
    state = made.getstate() if hasattr(made, "getstate") else made.get_state()
    return repr([x.tobytes() if hasattr(x, "tobytes") else x for x in state])


def _shared() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [random] if numpy is None else [random, numpy.random.get_state.__self__]
