"""The committed stubs are what the .proto files give, byte for byte."""

from __future__ import annotations

import os
import subprocess
import sys
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
    assert len(made) == 3 * len(list((ROOT / "proto").glob("*.proto")))
    for name, content in made.items():
        assert (ROOT / "proto" / name).read_bytes() == content, (
            f"{name} is stale: bash proto/generate.sh"
        )
