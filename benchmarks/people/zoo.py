"""How many of the families of language models that people have are captured, cut in four stages,
and trained as a plain loop of torch trains them.

    python benchmarks/people/zoo.py [--json FILE] [--only NAME …] [--rows FILE] [--list] [--docs]

The families are the model types of transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES that it builds
itself from a small config (`shrink.py`) and steps: `zoo_families.json` names them, and those that
it does not, with why. `compared.py` says what is compared. Each family has a process of its own,
one at a time, with SECONDS of processor time and MOST_GIB of memory. Rows are kept in a file
of JSON lines, and a family that has one there is not run again, unless `--only` names it.

    zoo_families        families in the list
    zoo_captured_share  of these, those that are captured and equal the plain loop
    zoo_wrong           those that are captured and do not

--others: the tasks besides, a few families of each (`tasks.py`), as TASK/FAMILY:

    zoo_others         of these, those that transformers steps
    zoo_others_equal   those that are captured and equal the plain loop
    zoo_others_wrong   those that are captured and do not

--list: step every model type, write `zoo_families.json` anew, and end.
--docs: write docs/models.md.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from shoal.benchmarks.people.compared import Row, compared, stepped
from shoal.benchmarks.people.models_page import page
from shoal.benchmarks.people.tasks import OTHERS
from shoal.benchmarks.table import Figure, arguments, report

__all__ = ["FAMILIES", "figures", "listed", "run"]

SECONDS, MOST_GIB, PATIENCE_S = 60, 6, 1200
"""Of one family: processor time, memory, and time on a crowded machine."""
FAMILIES = Path(__file__).with_name("zoo_families.json")
PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def listed() -> list[str]:
    """Return the families in the committed list."""
    names: list[str] = json.loads(FAMILIES.read_text())["families"]
    return names


def every() -> list[str]:
    """Return the model types of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def run(family: str, what: Callable[[str], Row] = compared) -> Row:
    """Return a family's row, made in a process of its own."""
    fork = multiprocessing.get_context("fork")  # what is imported here need not be imported there
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_child, args=(what, family, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        if ours.poll(PATIENCE_S):
            return Row(**ours.recv())
        why = f"not done in {PATIENCE_S} s"
    except EOFError:
        why = f"not done in {SECONDS} s of processor time, or {MOST_GIB} GiB"
    finally:
        child.kill()
        child.join()
    return Row(family, "error", why)


def _child(what: Callable[[str], Row], family: str, to: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_GIB << 30, MOST_GIB << 30))
    to.send(what(family).plain())


def rows_of(file: Path) -> dict[str, Row]:
    """Return the last row of each family in a file."""
    if not file.exists():
        return {}
    lines = map(json.loads, file.read_text().splitlines())
    return {line["family"]: Row(**line) for line in lines}


def others() -> list[str]:
    """Return the names of the families of other tasks."""
    return [f"{task}/{family}" for task, names in OTHERS.items() for family in names]


def figures_of_others(rows: Iterable[Row]) -> list[Figure]:
    """Return the figures of other tasks."""
    built = [row.status for row in rows if row.status != "not built"]
    return [
        Figure("zoo_others", len(built), "families", "higher"),
        Figure("zoo_others_equal", built.count("equal"), "families", "higher"),
        Figure("zoo_others_wrong", built.count("wrong"), "families", "lower"),
    ]


def figures(rows: Iterable[Row]) -> list[Figure]:
    """Return the figures of the families that transformers builds."""
    built = [row for row in rows if row.status != "not built"]
    equal = sum(row.status == "equal" for row in built)
    wrong = sum(row.status == "wrong" for row in built)
    return [
        Figure("zoo_families", len(built), "families", "higher"),
        Figure("zoo_captured_share", equal / max(1, len(built)), "share", "higher"),
        Figure("zoo_wrong", wrong, "families", "lower"),
    ]


def _write_list() -> None:
    import transformers

    rows = []
    for family in every():
        rows.append(run(family, stepped))
        print(f"{family}: {rows[-1].status} {rows[-1].why}", flush=True)
    table = {
        "transformers": transformers.__version__,
        "families": [row.family for row in rows if row.status == "built"],
        "not built": {row.family: row.why[:160] for row in rows if row.status != "built"},
    }
    FAMILIES.write_text(json.dumps(table, indent=1) + "\n")


def _write_page(rows: dict[str, Row]) -> None:
    """The page of all families of the list, whichever were run now."""
    names = listed()
    untried = [n for n in names if n not in rows]
    version = json.loads(FAMILIES.read_text())["transformers"]
    found, further = ([rows[n] for n in of if n in rows] for of in (names, others()))
    PAGE.write_text(page(found, further, untried, version))


def main(given: Sequence[str]) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--rows", type=Path, metavar="FILE", default=Path(".cache/zoo.jsonl"))
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--docs", action="store_true")
    options = parser.parse_args(given)
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    import transformers.models.auto.modeling_auto  # noqa: F401  # here, once for all children

    if options.list:
        return _write_list()
    families = options.only or (others() if options.others else listed())
    rows = rows_of(options.rows)
    for number, family in enumerate(families):
        if options.only or family not in rows:
            rows[family] = row = run(family)
            with options.rows.open("a") as file:
                file.write(json.dumps(row.plain()) + "\n")
            print(f"{number + 1}/{len(families)} {family}: {row.status} {row.why}", flush=True)
    count = figures_of_others if options.others else figures
    report("zoo", count([rows[n] for n in families]), options.json)
    if options.docs:
        _write_page(rows)


if __name__ == "__main__":
    main(sys.argv[1:])
