"""The committed stubs are what the .proto files give, byte for byte."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_stubs_are_generated_from_the_specification(tmp_path):
    pytest.importorskip("grpc_tools")
    subprocess.run(
        ["bash", str(ROOT / "proto/generate.sh"), str(tmp_path)],
        env={**os.environ, "PYTHON": sys.executable},
        check=True,
        timeout=50,
    )
    made = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    files = list((ROOT / "proto").glob("*.proto"))
    services = [f for f in files if re.search(r"^service", f.read_text(), re.MULTILINE)]
    assert len(made) == 2 * len(files) + len(services)
    assert made.keys() == {p.name for p in (ROOT / "proto").glob("*_pb2*")}
    for name, content in made.items():
        assert (ROOT / "proto" / name).read_bytes() == content, (
            f"{name} is stale: bash proto/generate.sh"
        )


def test_what_is_installed_can_read_the_stubs():
    """A stub refuses a library that is older than what wrote it, when it is imported."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floors = dict(line.split(">=") for line in project["dependencies"] if ">=" in line)
    written = (ROOT / "proto/broker_pb2.py").read_text(encoding="utf-8")
    written += (ROOT / "proto/broker_pb2_grpc.py").read_text(encoding="utf-8")
    for library, said in (
        ("protobuf", r"Protobuf Python Version: ([\d.]+)"),
        ("grpcio", r"GRPC_GENERATED_VERSION = '([\d.]+)'"),
    ):
        found = re.search(said, written)
        assert found
        assert floors[library] == found[1], f"{library} in pyproject.toml: proto/ needs {found[1]}"


@pytest.mark.parametrize("file", sorted((ROOT / "proto").glob("*.proto")), ids=lambda f: f.stem)
def test_every_message_and_field_has_a_sentence(file):
    """The files are the specification: what a field is, in which unit, and who fills it."""
    lines = file.read_text(encoding="utf-8").splitlines()
    for above, line in itertools.pairwise(lines):
        declares = re.match(r"\s*message \w+ \{", line) or re.search(r" = \d+;", line)
        told = "//" in line or above.strip().startswith("//")
        assert not declares or told, f"{file.name}: nothing is said about {line.strip()!r}"
