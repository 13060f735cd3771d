"""Commands of the pages: each verb that they name is one, and has each flag that they show."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from shoal.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES += [ROOT / "benchmarks" / "README.md", *sorted(ROOT.glob("docs/deploy/*"))]
SPAN = re.compile(r"`([^`\n]+)`")
COMMAND = re.compile(r"(?:^|[\s/;&|=])shoal ([a-z]+)(?![\w.-]*:)([^#;|&·\n]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
BY_VERB: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def commands(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Verb, with what follows it, and flags of each command, in spans and in blocks."""
    text = page.read_text("utf-8")
    blocks = re.findall(r"^(?: {4,}|ExecStart=).*$|^```(?:console)?\n(?:.*\n)*?```$", text, re.M)
    for code in (*SPAN.findall(text), *"\n".join(blocks).splitlines()):
        for verb, rest in COMMAND.findall(code.partition("#")[0].replace("/opt/shoal/bin/", "")):
            yield [verb, *rest.split()], FLAG.findall(rest)


def found(verb: str, *rest: str) -> Any:
    """The command of one verb, or of a verb below another."""
    command = BY_VERB.get(verb)
    return getattr(command, "commands", {}).get("".join(rest[:1]), command)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_each_verb_and_flag_of_a_page_is_there(page: Path) -> None:
    wrong = []
    for words, flags in commands(page):
        command = found(*words)
        if command is None:
            wrong.append(f"shoal {words[0]}")
            continue
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        wrong += [f"shoal {words[0]} {flag}" for flag in flags if flag not in {*known, "--help"}]
    assert not wrong


def test_commands_are_found() -> None:
    every = [c for page in PAGES for c in commands(page)]
    assert len(every) > 60
    assert sum(len(flags) for _, flags in every) > 60
