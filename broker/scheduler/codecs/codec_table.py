"""What `auto` tries, by role and class of link: codec_table.json, which
`benchmarks/learning/learning.py --write-table` makes of learning runs.

    {"activation": {"fast": [{"codec": "int8:block=256", "error": 0.0071}, …], "slow": […]}, …}

for each role of CODED_ROLES. A ladder goes from no error to much; `error` is the relative L2 error
that is typical of such tensors, not the codec's bound. One that hurts learning on a link is not in
its ladder, whatever budget is given. A link is slow when, uncompressed, it carries its
role for longer in a step than the busiest peer computes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..base.interface import CODED_ROLES

__all__ = ["CLASSES", "PATH", "LinkClass", "Rung", "Table", "read", "table"]

LinkClass = Literal["fast", "slow"]
CLASSES: tuple[LinkClass, ...] = ("fast", "slow")
PATH = Path(__file__).with_name("codec_table.json")


class Rung(NamedTuple):
    """One codec of a ladder, and its typical error."""

    codec: str
    error: float


Table = Mapping[str, Mapping[LinkClass, tuple[Rung, ...]]]
"""By role and class of link, the ladder."""


@cache
def table() -> Table:
    """The committed one."""
    return read(json.loads(PATH.read_text()))


def read(found: Any) -> Table:
    """Raises ValueError for what is no table: roles, classes or fields that are missing or unknown,
    errors that are not finite or fall, codecs that there are not."""
    from ....compression.codec import parse

    result: dict[str, dict[LinkClass, tuple[Rung, ...]]] = {}
    _same_keys(found, CODED_ROLES, "the table")
    for role in CODED_ROLES:
        _same_keys(found[role], CLASSES, role)
        result[role] = {}
        for kind in CLASSES:
            where = f"{role} on {kind} links"
            ladder = []
            for rung in found[role][kind]:
                _same_keys(rung, Rung._fields, where)
                parse(rung["codec"])
                error = float(rung["error"])
                if not (math.isfinite(error) and error >= 0):
                    raise ValueError(f"{where}: {rung['codec']} has error {error}")
                ladder.append(Rung(rung["codec"], error))
            for a, b in pairwise(ladder):
                if a.error > b.error:
                    raise ValueError(
                        f"{where}: {a.codec} with error {a.error} stands before {b.codec} with "
                        f"{b.error}: expected ascending errors"
                    )
            result[role][kind] = tuple(ladder)
    return result


def _same_keys(found: Any, expected: tuple[str, ...], where: str) -> None:
    keys = list(found) if isinstance(found, dict) else found
    if not isinstance(found, dict) or set(keys) != set(expected):
        raise ValueError(f"{where} has {keys}: expected {', '.join(expected)}")
