"""The tables of docs/job.md name each key of a job, no others, and the defaults that it has."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from shoal.job.log_options import Log
from shoal.job.plan_options import PlanOptions
from shoal.job.settings import plain
from shoal.job.spec import Job
from shoal.job.sync import Sync
from shoal.job.tables import Codec, Data, Model, Output, Recovery
from shoal.job.training import Train

PAGE = (Path(__file__).parents[2] / "docs" / "job.md").read_text("utf-8")
TABLES: dict[str, Any] = {
    "[model]": Model,
    "[data]": Data,
    "[train]": Train,
    "[plan]": PlanOptions,
    "[codec]": Codec,
    "[sync]": Sync,
    "[recovery]": Recovery,
    "[output]": Output,
    "[log]": Log,
}
HEAD = "| key | type | default | what it does |"
IN_WORDS = {"sync.method", "codec.snapshot"}
"""Keys whose default follows from others, as the page says it."""


def documented(section: str) -> dict[str, str]:
    """Cells of the defaults by key, of all tables of keys in a section."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for part in text.split(HEAD)[1:]:
        for line in part.splitlines()[2:]:
            if not line.startswith("| `"):
                break
            key, _, default = re.split(r" \| ", line.removeprefix("| "))[:3]
            assert key.strip("`") not in found, f"{section} {key} twice"
            found[key.strip("`")] = default.strip()
    return found


@pytest.mark.parametrize("section", [*TABLES])
def test_each_key_of_a_table_is_on_the_page_with_its_default(section: str) -> None:
    kind, shown = TABLES[section], documented(section)
    own = {f.name: f for f in fields(kind) if f.name not in kind.OURS}
    assert set(shown) == set(own)
    for key, cell in shown.items():
        if f"{section.strip('[]')}.{key}" in IN_WORDS:
            continue
        made = own[key].default_factory is not MISSING
        value = plain(own[key].default_factory() if made else own[key].default)
        try:
            said = tomllib.loads(f"x = {cell.strip('`')}")["x"]
        except tomllib.TOMLDecodeError:  # words: nothing, or what stands elsewhere
            options = list(value.values()) if isinstance(value, dict) else [value]
            assert all(one in (None, MISSING) for one in options), (key, cell, value)
            continue
        if isinstance(said, dict):  # of its options those that the page names there
            value = {name: value[name] for name in said}
        assert said == value, (key, cell, value)


def test_the_keys_beside_the_tables_are_on_the_page() -> None:
    own = {f.name for f in fields(Job)} - Job.OURS - {s.strip("[]") for s in TABLES}
    assert set(documented("Top level")) == own | {"version"}
