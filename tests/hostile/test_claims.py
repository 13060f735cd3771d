"""docs/security.md and the tests that hold it: `claims.toml` has, by section and in the page's
order, the first words of each claim and the names of the tests that would fail if it were false,
or a sentence that says why there can be none."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "security.md").read_text("utf-8")
CLAIMS: dict[str, dict[str, str | list[str]]] = tomllib.loads(
    (TESTS / "hostile" / "claims.toml").read_text("utf-8")
)
HEAD = re.compile(r"\| (?:who|limit) \||\|--")
"""The first two rows of a table."""


def blocks(text: str) -> Iterator[str]:
    """Paragraphs, bullets and rows of a section, each in one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        for block in re.split(r"\n(?=- |\d+\. |\| |\|--)", paragraph.strip("\n")):
            if (line := " ".join(block.split())) and not HEAD.match(line):
                yield line


SECTIONS = {
    title.strip("# "): [*blocks(text)]
    for title, _, text in (part.partition("\n") for part in PAGE.split("\n## "))
}


def test_the_sections_are_the_pages() -> None:
    assert list(CLAIMS) == list(SECTIONS)


@pytest.mark.parametrize("section", CLAIMS)
def test_every_claim_stands_on_the_page_and_everything_there_is_a_claim(section: str) -> None:
    text, at = "\n".join(SECTIONS.get(section, ())), 0
    for words in CLAIMS[section]:
        assert text.count(words) == 1, f"{words!r} stands there {text.count(words)} times"
        assert text.index(words) >= at, f"{words!r} stands further up on the page"
        at = text.index(words)
    bare = [b for b in SECTIONS[section] if not any(words in b for words in CLAIMS[section])]
    assert not bare, "what no entry of claims.toml is about"


def test_every_test_of_a_claim_is_there_once() -> None:
    defined = Counter(
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text("utf-8"), re.M)
    )
    for section, of in CLAIMS.items():
        for words, held in of.items():
            assert held, f"{section}: {words!r} has neither a test nor a reason"
            if isinstance(held, list):
                wrong = [name for name in held if defined[name] != 1]
                assert not wrong, f"{section}: {words!r} names tests that are not there once"
