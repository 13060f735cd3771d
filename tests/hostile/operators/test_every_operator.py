"""Every operator on the allow-lists is called, on memory between guard pages."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.dag.ir.operators import CORE, FULL
from shoal.dag.ir.rules.rules import RULES
from shoal.dag.ir.rules.table import RESULTS, STEPS, TABLE
from shoal.dag.ir.rules.windows import WINDOWS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def part() -> Any:
    """Gives a script of benchmarks/ as a module."""
    return lambda name: importlib.import_module(f"shoal.benchmarks.operators.{name}")


def test_every_operator_has_calls_to_begin_with_and_rules_are_for_listed_ones(part: Any) -> None:
    """Whoever adds an operator adds a line to benchmarks/operators/seeds.py, so that the next test
    calls it; where that finds something, a rule or a stand-in."""
    seeds = part("seeds").SEEDS
    assert sorted(FULL | CORE) == sorted(seeds)
    assert {*RULES, *RESULTS, *STEPS} <= FULL | CORE
    assert not TABLE.keys() & WINDOWS.keys(), "which of two rules counts would be nobody's choice"
    case, refused = part("cases"), part("worker").accepted
    for target, calls in seeds.items():
        for i in range(len(calls)):
            refused(case.draw(target, 0, i))  # raises GraphError


@pytest.mark.timeout(600)  # of a busy machine; 30 s of a processor
def test_a_sample_of_calls_of_every_operator_reaches_nothing_else(
    part: Any, tmp_path: Path
) -> None:
    fuzz = part("fuzz")
    library = fuzz.guard(tmp_path) if shutil.which("cc") else None
    orders = "".join(f"{target} 7 0 6\n" for target in sorted(FULL | CORE))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(BENCHMARKS / "operators" / "worker.py"), "cpu"],
        input=orders,
        capture_output=True,
        text=True,
        env=fuzz.guarded(library) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(FULL | CORE)
    assert [fault for row in rows for fault in row["faults"]] == []
    assert all(row["outcomes"].get("ran", 0) for row in rows)


def test_the_fuzzer_sees_what_it_is_there_for(part: Any, tmp_path: Path) -> None:
    """The fused weight norm of torch reads a strided v as if it were contiguous."""
    fuzz = part("fuzz")
    library = fuzz.guard(tmp_path) if shutil.which("cc") else None
    code = (
        "import torch, shoal.benchmarks.operators.worker as w\n"
        "from shoal.benchmarks.operators.seeds import Like\n"
        "from shoal.benchmarks.operators.cases import Case\n"
        "from shoal.dag.execute import stand_ins as s\n"
        "from shoal.dag.ir.graph import Operator, Ref\n"
        "del s._STAND_INS['aten._weight_norm_interface.default']\n"
        "name = 'aten._weight_norm_interface.default'\n"
        "op = Operator('op', name, (Ref('v'), Ref('g'), 0), (), (), True)\n"
        "likes = {'v': Like((64, 64, 2), layout='expanded'), 'g': Like((64, 1, 1))}\n"
        "print(w.attempt(Case(op, likes), torch.device('cpu')))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS,
        capture_output=True,
        text=True,
        env=fuzz.guarded(library),
    )
    assert found.returncode < 0 or "unwritten" in found.stderr, found
