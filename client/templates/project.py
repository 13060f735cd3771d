"""A new project from a template: its files as they lie here, and what its make_*.py makes of them.

Python files of a template end in .py.txt here, for they are texts to copy and no part of the
package.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

__all__ = ["NEEDS", "TEMPLATES", "ProjectError", "about", "begin", "next_line"]

TEMPLATES = ("pretrain", "finetune", "classify", "federated", "compare")
NEEDS = {"finetune": ("transformers", "peft")}
"""Packages that a template's run imports, beyond what Shoal itself needs."""
_HERE = Path(__file__).parent
_PYTHON = ".py.txt"


class ProjectError(ValueError):
    """A project that cannot be begun; says why and what to do."""


def about(name: str) -> str:
    """Return what a template is, in one sentence: the first comment of its job."""
    return (_HERE / name / "job.toml").read_text(encoding="utf-8").splitlines()[0].lstrip("# ")


def next_line(name: str) -> str:
    """Return the command that its README shows first."""
    text = (_HERE / name / "README.md").read_text(encoding="utf-8")
    found = re.search(r"^ {4}(shoal .*)$", text, re.M)
    assert found is not None, f"the README of {name} shows no command"
    return found[1]


def begin(folder: Path, name: str) -> None:
    """Write the project of a template into a folder that is empty or not there yet. Raises
    ProjectError, OSError."""
    if name not in TEMPLATES:
        raise ProjectError(f'there is no template "{name}": expected {", ".join(TEMPLATES)}')
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProjectError(
            f"{folder} is there and not empty: expected a new folder, or one without files"
        )
    if missing := [package for package in NEEDS.get(name, ()) if find_spec(package) is None]:
        raise ProjectError(
            f'the template "{name}" needs {" and ".join(missing)}: pip install "shoal[hf]"'
        )
    for file in _files(_HERE / name):
        target = folder / file.relative_to(_HERE / name)
        if file.name.endswith(_PYTHON):
            target = target.with_name(file.name.removesuffix(".txt"))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    for script in sorted(folder.glob("make_*.py")):
        done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ProjectError(f"{script} failed: {last}")


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())
