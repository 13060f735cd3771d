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


# What stands at the start and at the end of every verb's process.


def shoal(verb: str, before: str = "", **streams: object) -> subprocess.CompletedProcess[bytes]:
    code = f"import sys; sys.argv = ['shoal', *{verb.split()!r}]\n{before}\n"
    code += "from shoal.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code], check=False, **streams)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("verb", ["--version", "--help", "standing-is-no-verb", "bench"])
def test_output_that_takes_nothing_is_said_and_no_traceback(verb: str) -> None:
    with open("/dev/full", "wb") as full:
        done = shoal(verb, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode != 0
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    with open("/dev/full", "wb") as full:
        assert shoal(verb, stdout=full, stderr=full).returncode != 0


def test_closed_streams_have_numbers_that_no_file_gets() -> None:
    code = (
        "import os; [os.close(n) for n in (0, 1, 2)]\nsys.stdout = sys.stderr = sys.stdin = None\n"
    )
    code += "from shoal.cli.output import prepare_output; prepare_output()\n"
    code += "number = os.open('/dev/null', 0); os._exit(number)"
    assert shoal("--version", code).returncode > 2
    assert shoal("--version", code.split("\n")[0] + "\nsys.stdout = None").returncode == 0


def test_letters_that_a_terminal_does_not_have_are_no_error() -> None:
    code = "import io; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'latin-1')\n"
    code += (
        "from shoal.cli.output import prepare_output, echo; prepare_output(); echo('a \u2192 b')"
    )
    assert shoal("--version", code, stdout=subprocess.PIPE).stdout.startswith(b"a ? b\n")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_before_any_verb_runs_ends_the_program_without_a_word(name: str) -> None:
    # Process 1 of a container gets no signal that it has no handler for.
    code = "import os, signal; from shoal.cli.early import leave_when_told; leave_when_told()\n"
    # nohup has its children ignore SIGHUP.
    code = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)\n{code}"
    code += f"assert signal.getsignal(signal.{name}) is not signal.SIG_DFL\n"
    code += f"os.kill(os.getpid(), signal.{name})"
    done = shoal("--version", code, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
    program = code.replace("import os", "sys.argv[0] = 'program'; import os", 1)
    if name != "SIGINT":
        assert shoal("--version", program, capture_output=True).returncode != 130
