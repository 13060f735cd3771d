"""A room imports only from lower floors (README.md has the table), and not from every neighbour."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

FLOORS = {
    "proto": 0,
    "compression": 1,
    "dag": 1,
    "net": 2,
    "broker": 3,
    "peer": 3,
    "sim": 4,
    "cli": 5,
    "client": 5,
    "__init__": 5,
}
PLAIN_DATA = {"job"}  # holds data only; may be read from floor 3 up
FORBIDDEN = {"broker": {"peer"}, "peer": {"broker"}, "compression": {"dag"}, "dag": {"compression"}}


def rooms() -> list[tuple[str, Path]]:
    files = [(p.stem, p) for p in ROOT.glob("*.py")]
    for room in (*FLOORS, *PLAIN_DATA):
        files += [(room, p) for p in sorted((ROOT / room).rglob("*.py"))]
    return [(room, p) for room, p in files if "_pb2" not in p.name]


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from, at any depth, type-checking blocks included."""
    folder = path.relative_to(ROOT).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                package = folder[: len(folder) - node.level + 1]
                module = (*package, *(node.module or "").split(".")) if node.module else package
                names = [module[0]] if module else [alias.name for alias in node.names]
                found.update(names)
            elif node.module and node.module.split(".")[0] == "shoal":
                rest = node.module.split(".")[1:]
                found.update(rest[:1] or [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "shoal" and len(parts) > 1:
                    found.add(parts[1])
    return found


@pytest.mark.parametrize(("room", "path"), rooms(), ids=lambda x: str(x).removeprefix(f"{ROOT}/"))
def test_a_room_imports_only_from_lower_floors(room: str, path: Path) -> None:
    for other in imported(path) - {room}:
        if other in PLAIN_DATA:
            assert room in PLAIN_DATA or FLOORS[room] >= 3, f"{path}: {room} may not read {other}"
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


def test_only_the_command_line_imports_the_simulator() -> None:
    users = {room for room, p in rooms() if room != "sim" and "sim" in imported(p)}
    assert users <= {"cli"}


def test_compression_and_proto_stay_namespace_folders() -> None:
    # A regular package named `compression` at the top of a checkout would hide Python 3.14's own.
    assert not (ROOT / "compression" / "__init__.py").exists()
    assert not (ROOT / "proto" / "__init__.py").exists()
