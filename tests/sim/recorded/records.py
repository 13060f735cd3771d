"""Records of named worlds: small JSON files, one a world.

answers  plans that the broker was given, and the formation of replicas (`fed.py`)
log      lines of the event log, and their SHA-256 (`bits.py`)
bits     by kind of machine, what depends on arithmetic:
    plain        losses of a plain loop in one process
    steps        replica, step, loss and norm of each committed step, hexadecimal floats
    evaluations  losses of evaluations, hexadecimal floats
    versions     of rounds, the hash of each version
    weights      SHA-256 of the weights that came out
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from shoal.dag.ir.graph import Graph

from .bits import evaluations_of, hash_of, log_hash, log_of, steps_of, weights_of
from .fed import Answers, visits_of
from .playing import PlayedWorld

FOLDER = Path(__file__).parent / "worlds"


def machine() -> str:
    """What bits may depend on beside the code: processor, its kernels, version of torch."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    kernels = torch.backends.cpu.get_cpu_capability()
    return f"{model}, {kernels}, torch {torch.__version__}"


def bits_of(found: PlayedWorld, loop: Any) -> dict[str, Any]:
    """What depends on arithmetic. `loop`: the plain loop of the job."""
    done = [e.round_done.hash for e in found.events if e.HasField("round_done")]
    return {
        "plain": [loss.hex() for loss in loop.losses],
        "steps": [list(step) for step in steps_of(found.events)],
        "evaluations": evaluations_of(found.events),
        "versions": [f"{h:016x}" for h in done],
        "weights": hash_of(weights_of(found.world, found.events)),
    }


def lines_of(found: PlayedWorld) -> list[str]:
    """The event log."""
    assert found.world.trace is not None
    return log_of(found.world.trace, found.events, found.run)


def log_of_world(lines: list[str]) -> dict[str, Any]:
    """Of an event log, what is recorded."""
    return {"lines": len(lines), "sha256": log_hash(lines)}


def assert_orders(answers: Answers, graph: Graph) -> None:
    """Peers visit the stages of recorded plans in the recorded order."""
    tables = [plan for table in answers.tables for plan in table["plans"]]
    for plan, table in zip(answers.plans, tables, strict=True):
        got, wanted = visits_of(plan, graph), table["visits"]
        assert got == wanted, f"{plan}: visits are {got}, and were {wanted}"


def file_of(folder: Path, name: str) -> Path:
    """Where the record of a name is."""
    return folder / f"{name.replace(' ', '-').replace('+', '-plus')}.json"


def write(folder: Path, name: str, record: dict[str, Any]) -> None:
    """One line for each key."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    file_of(folder, name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(folder: Path, name: str) -> dict[str, Any]:
    """Raises FileNotFoundError where nothing was recorded."""
    found: dict[str, Any] = json.loads(file_of(folder, name).read_text())
    return found
