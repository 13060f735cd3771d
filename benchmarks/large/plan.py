"""Planning models of 8B to 141B parameters from their configurations alone, as a user does: `shoal
plan JOB --cluster testbed-N.toml`, then `shoal sim testbed-N --ghost` for three steps of each.

`plan_MODEL_seconds` and `plan_MODEL_gib` are the larger of the two testbeds': everything from the
command's start to the text, imports and capture included, and the peak of that process. A testbed
on which a model has no plan is printed with the reason; a model that has none on either is an
error. `ghost_MODEL_seconds`: the same for its world. `plan_70b_whole_seconds`: how long it takes to
say that all of the 70B in fp32 with AdamW does not fit, and what would be enough.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from shoal.benchmarks.large.child import SHOAL, Ran, run
from shoal.benchmarks.large.models import STEPS, job
from shoal.benchmarks.table import Figure

__all__ = ["figures"]

TESTBEDS = (24, 48)
LIMIT = "48h"
"""Of a world's clock: minutes a step, and hours for weights over home uplinks."""
SCENARIOS = Path(__file__).parents[2] / "sim" / "scenarios"
MODELS = {"8b": True, "70b": False, "moe": False}
"""Whether all of the model is trained; otherwise an adaptation over its frozen base."""


def figures() -> list[Figure]:
    """See the module."""
    found = []
    with tempfile.TemporaryDirectory(prefix="shoal-large-") as name:
        folder = Path(name)
        for model, whole in MODELS.items():
            file = job(folder / model, model, whole=whole)
            planned = [_plan(file, n) for n in TESTBEDS]
            if not any(ran.status == 0 for ran in planned):
                raise SystemExit(f"{model} has no plan:\n{planned[-1].output}")
            found += [
                Figure(f"plan_{model}_seconds", max(r.seconds for r in planned), "s", "lower"),
                Figure(f"plan_{model}_gib", max(r.gib for r in planned), "GiB", "lower"),
            ]
            worlds = [
                _ghost(file, n) for n, ran in zip(TESTBEDS, planned, strict=True) if ran.status == 0
            ]
            found += [
                Figure(f"ghost_{model}_seconds", max(r.seconds for r in worlds), "s", "lower"),
                Figure(f"ghost_{model}_gib", max(r.gib for r in worlds), "GiB", "lower"),
            ]
        ran = _plan(job(folder / "70b-whole", "70b", whole=True), TESTBEDS[-1])
        assert ran.status, "1.1 TB of state fit nowhere"
        found.append(Figure("plan_70b_whole_seconds", ran.seconds, "s", "lower"))
    return found


def _plan(file: Path, peers: int) -> Ran:
    cluster = SCENARIOS / f"testbed-{peers}.toml"
    ran = run([SHOAL, "plan", str(file), "--cluster", str(cluster)])
    _say(f"plan {file.parent.name} on testbed-{peers}", ran)
    return ran


def _ghost(file: Path, peers: int) -> Ran:
    """A world of the testbed with as much time as three steps of a large model take. Raises
    SystemExit where it does not do them."""
    text = (SCENARIOS / f"testbed-{peers}.toml").read_text()
    for line in text.splitlines():
        if line.startswith("job = "):
            text = text.replace(line, f"job = {json.dumps(str(file))}\nlimit = {json.dumps(LIMIT)}")
    scenario = file.with_name(f"testbed-{peers}.toml")
    scenario.write_text(text)
    ran = run([SHOAL, "sim", str(scenario), "--ghost", "--steps", str(STEPS), "--quiet"])
    _say(f"ghosts of {file.parent.name} on testbed-{peers}", ran)
    if ran.status:
        raise SystemExit(ran.output)
    return ran


def _say(what: str, ran: Ran) -> None:
    print(f"  {what}: {ran.seconds:.1f} s, {ran.gib:.2f} GiB", flush=True)
    shown = ran.output.splitlines()
    kept = [line for line in shown if line.startswith(("predicted", "no plan", "speed", "error"))]
    for line in [*shown[:1], *kept] if ran.status == 0 else shown[-3:]:
        print(f"    {line}", flush=True)


if __name__ == "__main__":
    sys.exit(f"run it as: python {Path(__file__).with_name('large.py')} --only plan")
