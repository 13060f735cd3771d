"""The committed table of codecs is what benchmarks/learning/learning.py derives from the committed
results.

Both are made anew by `python benchmarks/learning/learning.py --write-table` (three seeds of every
row, an hour on two cores; finished runs are kept in .cache/learning), the table alone, from
benchmarks/learning/learning.json, by `python benchmarks/learning/learning.py --committed
--write-table`.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def results() -> ModuleType:
    return importlib.import_module("shoal.benchmarks.learning.results")


def test_the_committed_table_is_that_of_the_committed_results(results: ModuleType) -> None:
    _, runs = results.load(ROOT / "benchmarks" / "learning" / "learning.json")
    derived = results.table_text(results.codec_table(results.means(runs)))
    committed = (ROOT / "planner" / "codecs" / "codec_table.json").read_text()
    assert committed == derived, (
        "run: python benchmarks/learning/learning.py --committed --write-table"
    )


def run(
    row: str, loss: float, codecs: dict[str, str], errors: dict[str, float]
) -> dict[str, object]:
    ones = dict.fromkeys(codecs, 1)
    return {
        "row": row,
        "seed": 0,
        "loss": loss,
        "weights_loss": loss,
        "curve": [],
        "codecs": codecs,
        "errors": errors,
        "sent": ones,
        "dense": ones,
    }


def test_what_hurts_learning_is_left_out_and_the_least_error_comes_first(
    results: ModuleType,
) -> None:
    runs = [
        run("dense", 2.0, {"activation slow": "raw/1"}, {"activation slow": 0.0}),
        run("int4", 2.03, {"activation slow": "int4/1"}, {"activation slow": 0.1}),
        run("int8", 2.0, {"activation slow": "int8/1"}, {"activation slow": 0.01}),
        run("adatopk", 2.05, {"activation slow": "topk/1"}, {"activation slow": 0.5}),
        run("bf16", 2.0, {"grad": "bf16/1"}, {"grad": 0.002}),
    ]
    table = results.codec_table(results.means(runs))

    def rungs(role: str, link: str) -> list[tuple[str, float]]:
        return [(rung["codec"], rung["error"]) for rung in table[role][link]]

    assert rungs("activation", "slow") == [("lossless", 0), ("int8/1", 0.01), ("int4/1", 0.1)]
    assert rungs("activation", "fast") == [("lossless", 0)]
    assert rungs("sync", "fast") == rungs("sync", "slow") == [("lossless", 0), ("bf16/1", 0.002)]
