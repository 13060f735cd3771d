"""`shoal VERB | head`: a reader that leaves ends the verb, without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Verbs of each way to print: line by line, JSON at once, a table by rich, and to stderr.
VERBS = """
import sys, typer
from shoal.cli.base import app, complain, print_json, verb

@app.command()
@verb
def lines() -> None:
    for i in range(100_000):
        typer.echo(f"line {i}")

@app.command()
@verb
def once() -> None:
    print("not flushed")
    raise typer.Exit(0)

@app.command()
@verb
def data() -> None:
    print_json(["x" * 100] * 10_000)

@app.command()
@verb
def table() -> None:
    from shoal.client.show.progress import print_table
    print_table("t", ["a"], [{"a": "x" * 100}] * 2_000)

@app.command()
@verb
def errors() -> None:
    for i in range(100_000):
        complain(f"line {i}")

@app.command()
@verb
def wire() -> None:
    raise BrokenPipeError(32, "a connection, not our output")

app()
"""


def call(verb: str, *, closed: str, unbuffered: bool = False) -> tuple[int, bytes]:
    """(exit code, what the other stream says) with a reader that has left `closed`."""
    read, write = os.pipe()
    os.close(read)
    other = {"stdout": "stderr", "stderr": "stdout"}[closed]
    environment = os.environ | {"PYTHONUNBUFFERED": "1" if unbuffered else ""}
    pipes: dict[str, int] = {closed: write, other: subprocess.PIPE}
    try:
        done = subprocess.run([sys.executable, "-c", VERBS, verb], env=environment, **pipes)  # type: ignore[call-overload]
    finally:
        os.close(write)
    return done.returncode, done.stderr if closed == "stdout" else done.stdout


@pytest.mark.parametrize("verb", ["lines", "data", "table"])
def test_a_verb_whose_reader_has_left_ends_without_a_word(verb: str) -> None:
    code, said = call(verb, closed="stdout")
    assert said == b""
    assert code in (1, 141)  # rich ends a table with 1


def test_without_buffers_and_with_an_exit_code_of_its_own() -> None:
    assert call("lines", closed="stdout", unbuffered=True) == (141, b"")
    assert call("once", closed="stdout") == (0, b"")


def test_nobody_reads_errors() -> None:
    assert call("errors", closed="stderr") == (141, b"")


def test_a_connection_that_breaks_is_still_explained() -> None:
    done = subprocess.run([sys.executable, "-c", VERBS, "wire"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a connection, not our output" in done.stderr
