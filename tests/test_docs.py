"""Pages say what is there: each path names a file, each invariant that code cites is defined."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/tutorials/*.md"),
        *ROOT.glob("*.md"),
        ROOT / "benchmarks" / "README.md",
    ],
    key=lambda page: page.relative_to(ROOT).as_posix(),
)
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+/?")
"""A word that may be a path from the root of the repository."""
INVARIANT = re.compile(r"\bI(?:[1-9]|1[0-5])\b")  # "I16" is a type of safetensors
DESIGN = re.compile(r"\bdesign (?:§|I\d)")


def tracked() -> list[str]:
    """Files of the repository; those that are there, where it is no checkout."""
    if (ROOT / ".git").exists():
        listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
        found = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
        return [name for name in found.splitlines() if (ROOT / name).is_file()]
    return [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file()]


TRACKED = tracked()
FOLDERS = {name.partition("/")[0] for name in TRACKED if "/" in name}
FILES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in TRACKED
    if name.endswith((".py", ".proto"))
}


def paths(page: Path) -> Iterator[str]:
    """Paths in code of a page: words that begin with a folder of the root."""
    for span in SPAN.findall(page.read_text(encoding="utf-8")):
        for word in re.split(r"[\s,;()'\"]+|::", span):
            if PATH.fullmatch(word) and word.partition("/")[0] in FOLDERS:
                yield word


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_path_of_a_page_is_there(page: Path) -> None:
    gone = sorted({p for p in paths(page) if not (ROOT / p).exists()})
    assert not gone, f"{page.relative_to(ROOT)} names what is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_names_files_in_full(page: Path) -> None:
    """By their paths from the root, so that a reader finds them and a move is noticed."""
    if page.name == "decisions.md":
        pytest.skip("it tells of files as they were")
    names = {Path(p).name for p in FILES} - {"__init__.py"}
    spans = SPAN.findall(page.read_text(encoding="utf-8"))
    assert not sorted({s for s in spans if s in names}), f"{page.relative_to(ROOT)}: short names"


def test_every_invariant_that_is_cited_is_defined() -> None:
    defined = set(re.findall(r"^\| \*\*(I\d+)\*\* \|", ARCHITECTURE, re.MULTILINE))
    assert defined == {f"I{n}" for n in range(1, 13)}
    cited = {
        name: sorted(missing)
        for name, text in FILES.items()
        if (missing := set(INVARIANT.findall(text)) - defined)
    }
    assert not cited


def test_nothing_cites_a_design_that_is_not_in_the_repository() -> None:
    assert not [name for name, text in FILES.items() if DESIGN.search(text)]


def test_sections_that_code_cites_are_there() -> None:
    """A section is cited by its name in quotes, behind the page; a line may end in between."""
    sections = set(re.findall(r"^## (.+)$", ARCHITECTURE, re.MULTILINE))
    cited = {
        (name, re.sub(r"[\s#]+", " ", found))
        for name, text in FILES.items()
        for found in re.findall(r'docs/architecture\.md,[\s#]+"([^"]+)"', text)
    }
    assert cited
    assert not sorted((name, what) for name, what in cited if what not in sections)


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    pages = [p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")]
    assert not [page for page in pages if f": {page}" not in nav]
