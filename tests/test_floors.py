"""A room imports only from lower floors (docs/architecture.md has the table), and not from every
neighbour. A room inside a room does likewise, rooms are small, and each says what is in it."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = {
    "proto": 0,
    "compression": 1,
    "dag": 1,
    "net": 2,
    "planner": 2.5,
    "broker": 3,
    "peer": 3,
    "client": 4,
    "sim": 4.5,
    "cli": 5,
    "__init__": 5,
}
PLAIN_DATA = {"job"}  # holds data only; may be read from floor 2.5 up
FORBIDDEN = {"broker": {"peer"}, "peer": {"broker"}, "compression": {"dag"}, "dag": {"compression"}}

ORDER = {
    "broker": """
        access candidates course options < events < membership < links snapshots < records
        < lender_view policies recovery round_rows < runs < journal rounds < placement < registry
        < clients < machine < service validate""",
    "broker/policies": """
        disputes handing pairs segments < uploads < round_view stateful
        < client_reports < policy < federated gossip < hosts < buffered
        < policies""",
    "broker/service": """
        blobs broker_id door < needed secured < shell < calls page < admitting blobs_service
        < services < server""",
    "client": """
        chat errors < bench doctor files further_classes stages_of_clients job_data privacy
        templates < access models < matrices prepared sidecars < submission < uploading < runs
        < show < front""",
    "compression": """
        counter interface < checks < echo < plain < sparse stateful < codec""",
    "dag": """
        ir permutation < analysis plan < exchange < rounds < schedule transforms
        < capture cost execute""",
    "dag/schedule": """
        filled orders < schedule < flow < convert_plan convert_report replay
        < convert_slice slices""",
    "dag/ir": """
        fused quantized torch_parts < capture_errors draws experts graph random < convert_args
        < convert < fx_args operators < recipe rules validate < infer""",
    "net": """
        cap file_names finite grpc_quirks interrupts knocks links local printable surroundings
        < address repeats temporary < blobs web < identity < discovery transports""",
    "job": """
        encodings units words < settings < clients gossip log_options methods plan_options
        < rounds tables < sync training < job_tables stripped < refusals < spec""",
    "peer": """
        blobs data hours logs optimizers secure < sync < core host < rounds < federated
        < compute < shell < entry""",
    "peer/compute": """
        exchange graph_checks inputs order store < frame_codecs local_job warming < build
        < records stage_actions < rebuilt < device < stretch""",
    "peer/core": """
        peer_program snapshots < instructions < events
        < keeping options rates run_links step < reports rounds weights_export
        < part < assignment attachment < drain part_events < machine""",
    "peer/rounds": """
        coding local < methods < part_algebra < algebra client_rows < attempt tensors
        < client_tensors round_frames < work""",
    "peer/data": """
        manifest paced < columns_of_files file_types sample_keys sampler < array_files reader
        shard_writer < sources < partition survey""",
    "planner": """
        base routes < network < cost < baselines codecs search < skipping swarm < schedulers
        < replicas requests < answers < service""",
    "sim": """
        named_files plain processes scenario trace < ghost options report virtual
        < comparing faults following live monitor < verify < cluster modelled < shaped
        < simulate < grid""",
    "sim/report": """
        summary words < measures text < pictures tables < page side_by_side < rounds
        < write""",
}
"""By room that has rooms inside: these and its own files, from the ground up. What stands between
two `<` imports nothing of one another."""

ONLY_TYPES: set[tuple[str, str, str]] = set()
"""(room, lower, higher): the lower one names types of the higher one, for type checkers alone."""

MOST_FILES = 15
MOST_TESTS = 20
DATA = {".css", ".csv", ".html", ".js", ".json", ".toml"}
"""What code reads from beside itself."""
NAMESPACES = {"benchmarks", "compression", "proto"}
ACROSS = {
    "tests/benchmarks",
    "tests/examples",
    "tests/hostile",
    "tests/hostile/broker",
    "tests/hostile/client",
    "tests/hostile/operators",
    "tests/hostile/peer",
    "tests/hostile/planning",
    "tests/hostile/words",
    "tests/mutants",
    "tests/proto",
    "tests/sim/processes",
    "tests/sim/recorded",
    "tests/sim/recovery",
    "tests/sim/clients",
    "tests/sim/rounds",
}
"""Folders of tests that are of no one room."""


class Import(NamedTuple):
    """`target`: parts of a file or of a room's `__init__`. `types`: only type checkers read it."""

    target: tuple[str, ...]
    types: bool


def rooms() -> list[tuple[str, Path]]:
    files = [(p.stem, p) for p in ROOT.glob("*.py")]
    for room in (*FLOORS, *PLAIN_DATA):
        files += [(room, p) for p in sorted((ROOT / room).rglob("*.py"))]
    return [(room, p) for room, p in files if "_pb2" not in p.name]


@cache
def packages() -> list[Path]:
    """Every folder of the product that has Python files."""
    folders = {p.parent for room, p in rooms() if room != "__init__" and p.parent != ROOT}
    return sorted(folders | {ROOT / name for name in ("benchmarks", "examples", "proto")})


@cache
def imports(path: Path) -> list[Import]:
    """What a file of ours imports from us, at any depth, functions included."""
    folder = path.relative_to(ROOT).parts[:-1]
    return [
        Import(target, types)
        for node, types in _statements(ast.parse(path.read_text()), False)
        for target in _targets(node, folder)
    ]


def _statements(node: ast.AST, types: bool) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, types
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            yield from _statements(ast.Module(child.body, []), True)
            yield from _statements(ast.Module(child.orelse, []), types)
        else:
            yield from _statements(child, types)


def _targets(node: ast.stmt, folder: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = tuple(alias.name.split("."))
            if parts[0] == "shoal":
                yield _existing(parts[1:])
    elif isinstance(node, ast.ImportFrom):
        named = tuple((node.module or "").split(".")) if node.module else ()
        if node.level:
            named = (*folder[: len(folder) - node.level + 1], *named)
        elif named[:1] == ("shoal",):
            named = named[1:]
        else:
            return
        for alias in node.names:
            yield _existing((*named, alias.name))


def _existing(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The file that has this name: itself, or without its last part, which is a name in it."""
    for known in (parts, parts[:-1]):
        if known and (ROOT / Path(*known)).with_suffix(".py").exists():
            return known
        if (ROOT / Path(*known)).is_dir() and known:
            return (*known, "__init__")
    return parts[:1] or ("__init__",)


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from, at any depth, type-checking blocks included."""
    return {i.target[0] for i in imports(path)}


@pytest.mark.parametrize(("room", "path"), rooms(), ids=lambda x: str(x).removeprefix(f"{ROOT}/"))
def test_a_room_imports_only_from_lower_floors(room: str, path: Path) -> None:
    for other in imported(path) - {room}:
        if other in PLAIN_DATA:
            assert room in PLAIN_DATA or FLOORS[room] >= 2.5, f"{path}: {room} may not read {other}"
            continue
        if other not in FLOORS:
            continue
        if room in PLAIN_DATA:
            pytest.fail(f"{path}: {room} is plain data and imports {other}")
        assert other not in FORBIDDEN.get(room, set()), f"{path}: {room} may not import {other}"
        if room == "__init__":
            continue
        assert FLOORS[other] < FLOORS[room] or FLOORS[room] == 5, (
            f"{path}: {room} (floor {FLOORS[room]}) imports {other} (floor {FLOORS[other]})"
        )


@pytest.mark.parametrize("room", ORDER)
def test_a_room_inside_a_room_imports_only_from_lower_ones(room: str) -> None:
    height = {name: i for i, tier in enumerate(ORDER[room].split("<")) for name in tier.split()}
    folder = ROOT / room
    inside = {p.name for p in packages() if p.parent == folder}
    inside |= {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert set(height) == inside, "the order names every file and room, and no other"
    parts = Path(room).parts
    for path in sorted(folder.rglob("*.py")):
        here = path.relative_to(folder).with_suffix("").parts[0]
        if here == "__init__":
            continue  # it may offer what is in its room
        for target, types in imports(path):
            there = target[len(parts)] if target[: len(parts)] == parts else here
            if there == here or (types and (room, here, there) in ONLY_TYPES):
                continue
            assert there != "__init__", f"{path} imports the room that it is in"
            assert height[there] < height[here], f"{path}: {here} may not import {there}"


def test_every_room_with_rooms_inside_has_an_order() -> None:
    outer = {p.parent for p in packages()} - {ROOT}
    # Beside the kinds that these rooms are made of nothing lies in them.
    assert {str(p.relative_to(ROOT)) for p in outer} == set(ORDER)


def test_no_files_import_each_other_when_they_run() -> None:
    """Neither when they are loaded nor later, from inside a function."""
    known = {path.relative_to(ROOT).with_suffix("").parts: path for _, path in rooms()}
    left = {
        name: {i.target for i in imports(path) if not i.types and i.target in known} - {name}
        for name, path in known.items()
    }
    while done := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in done}
    assert not left, "in circles, or above one: " + ", ".join("/".join(name) for name in left)


@pytest.mark.parametrize("folder", packages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_is_small_and_says_what_is_in_it(folder: Path) -> None:
    name = str(folder.relative_to(ROOT))
    files = [p for p in folder.glob("*.py") if "_pb2" not in p.name and p.stem != "__init__"]
    assert len(files) <= MOST_FILES
    if name in NAMESPACES:
        return
    tree = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(tree)
    listed = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    froms = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    bound = {alias.asname or alias.name for n in froms for alias in n.names}
    bound |= {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    assert len(listed) == bool(bound), "what it binds it lists; its files and rooms the folder does"
    assert all(set(names) <= bound for names in listed), "it names what is there"


def test_scripts_lie_in_rooms() -> None:
    scripts = [p.relative_to(ROOT) for p in (ROOT / "benchmarks").rglob("*.py")]
    assert {p.name for p in scripts if len(p.parts) == 2} == {"table.py"}
    assert max(Counter(p.parent for p in scripts).values()) <= MOST_FILES


def test_tests_lie_as_the_rooms_do() -> None:
    folders = {p.parent for p in (ROOT / "tests").rglob("*.py")} - {ROOT / "tests"}
    for folder in sorted(folders):
        name = str(folder.relative_to(ROOT))
        assert name in ACROSS or ROOT / Path(*Path(name).parts[1:]) in packages(), name
        assert len(list(folder.glob("*.py"))) <= MOST_TESTS, name
    of_all = {"conftest.py", "test_docs.py", "test_floors.py"}
    assert {p.name for p in (ROOT / "tests").glob("*.py")} == of_all


def test_every_room_is_in_the_wheel() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed = setup["packages"]
    # Scripts in examples/ make the folders of tutorials.
    folders = [*packages(), *(file.parent for file in ROOT.glob("examples/*/__init__.py"))]
    there = {".".join(("shoal", *p.relative_to(ROOT).parts)) for p in folders}
    assert set(listed) == {"shoal", *there} - {"shoal.benchmarks"}
    assert len(set(listed)) == len(listed)
    shipped = {
        file
        for name, patterns in setup["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*name.split(".")[1:]).glob(pattern)
    }
    read = {file for folder in folders for file in folder.iterdir() if file.suffix in DATA}
    assert not read - shipped, "files that the wheel lacks"


def test_only_the_node_of_a_swarm_imports_hivemind() -> None:
    """It loads torch and starts a daemon: nobody else is to pay for that, or to need it."""
    users = {
        path
        for _, path in rooms()
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hivemind"))
        or (isinstance(node, ast.Import) and any(a.name.startswith("hivemind") for a in node.names))
    }
    assert users == {ROOT / "net/discovery/node.py"}


def test_only_the_processes_that_plan_know_sockets() -> None:
    for room, path in rooms():
        if room == "planner" and path.parent != ROOT / "planner/service":
            known = {i.target for i in imports(path) if i.target[0] == "net"}
            assert known <= {("net", "web", "places")}, f"{path}: addresses as text, and no more"
            roots = {name.split(".")[0] for name in _outside(path)}
            assert not roots & {"asyncio", "grpc", "multiprocessing", "socket", "subprocess"}, path


def _outside(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


def test_only_the_command_line_and_the_root_import_the_simulator() -> None:
    users = [p.relative_to(ROOT) for room, p in rooms() if room != "sim" and "sim" in imported(p)]
    assert {p.parts[0] for p in users} <= {"cli", "__init__.py"}


def test_compression_and_proto_stay_namespace_folders() -> None:
    # A regular package named `compression` at the top of a checkout would hide Python 3.14's own.
    assert not (ROOT / "compression" / "__init__.py").exists()
    assert not (ROOT / "proto" / "__init__.py").exists()
