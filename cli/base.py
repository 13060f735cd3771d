"""What every verb shares: the app, its options, and what an error means to a shell.

Exit codes: 0 done, 1 the run failed (or a bug of ours), 2 wrong input, 3 broker not reachable,
4 refused.
"""

from __future__ import annotations

import atexit
import functools
import gc
import json as json_module
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from ..net.finite import finite
from ..net.surroundings import check_place, fault_of, naming, user_path
from .early import leave
from .groups import Grouped
from .output import complain, echo, give_up_output, lost_output, say, unread

if TYPE_CHECKING:
    from ..proto.broker_pb2 import ReplicaState, RunState

__all__ = [
    "DONE",
    "FAILED",
    "INTERRUPTED",
    "REFUSED",
    "UNREACHABLE",
    "WRONG",
    "Broker",
    "Changes",
    "Insecure",
    "Json",
    "RunId",
    "To",
    "answer",
    "app",
    "complain",
    "echo",
    "few_collections",
    "phase_name",
    "print_json",
    "state_row",
    "verb",
]

P = ParamSpec("P")
_SHOAL = (__package__ or "").rpartition(".")[0]

DONE, FAILED, WRONG, UNREACHABLE, REFUSED = 0, 1, 2, 3, 4
"""WRONG: the input, or what it runs on (no home, a full disk, output that cannot be written)."""
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended. A run that was submitted goes on."""
UNREAD = 141
"""The same of one whose reader has left: `shoal runs | head`."""


def verb(function: Callable[P, None]) -> Callable[P, None]:
    """Turns whatever a verb raises into one line and an exit code; a termination and a closed
    terminal end it like Ctrl-C does, through every `finally`. When nobody reads what it prints any
    more it ends as well, without a word."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _interruptible():
                check_place()
                function(*args, **{name: _in_full(value) for name, value in kwargs.items()})
                with naming("stdout"):
                    sys.stdout.flush()  # here, where somebody hears of it
        except typer.Abort:
            raise
        except typer.Exit as end:
            unread()  # else the interpreter complains when it flushes
            if not end.exit_code and (lost := lost_output()):
                say(f"shoal: {lost}", err=True)
                raise typer.Exit(WRONG) from None
            raise
        except KeyboardInterrupt:
            say("shoal: interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError as error:
            raise typer.Exit(UNREAD if unread() else _explain(error)) from None
        except Exception as error:  # sorted by whose fault it is; a bug of ours shows its traceback
            raise typer.Exit(_explain(error)) from None
        finally:
            give_up_output()

    return run


def _in_full(value: Any) -> Any:
    """An argument with "~" as the home wherever it is a path, or a list of them."""
    if isinstance(value, Path):
        return user_path(value)
    return [_in_full(one) for one in value] if isinstance(value, list) else value


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt. Another one within a second must not
    break the cleaning up that follows, so it does nothing. Daemons put handlers of their own in the
    place of these."""
    came: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if came and now - came[-1] < 1.0:
            return
        came.append(now)
        raise KeyboardInterrupt

    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    usual = (signal.SIG_DFL, signal.default_int_handler, leave)
    ours = [n for n, handler in before.items() if handler in usual]  # not what nohup ignores
    if threading.current_thread() is not threading.main_thread():
        ours = []
    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception:
        if came:  # C++ code of a library has made an error of its own of it
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in ours:
            signal.signal(number, before[number])


@contextmanager
def few_collections() -> Iterator[None]:
    """For importing torch, capturing and planning, which make objects by the million that stay:
    going through them again and again for cycles is a quarter of the seconds of `shoal plan`. What
    is there when the process ends is not gone through either."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 20)
    atexit.register(gc.freeze)
    try:
        yield
    finally:
        gc.set_threshold(*before)


app = typer.Typer(
    cls=Grouped,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        ours, torchs, python = version("shoal"), version("torch"), sys.version.split()[0]
        echo(f"shoal {ours} (torch {torchs}, Python {python})")
        raise typer.Exit()


@app.callback()
def main(
    asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """Train one neural network on GPUs that nobody put in one room."""


Broker = Annotated[
    str | None,
    typer.Option(
        "--broker", metavar="HOST:PORT", help="Default: SHOAL_BROKER, login, 127.0.0.1:7077."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text.")]
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run.")]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="No identities and no encryption; on this machine only."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of its job: train.lr=1e-4."),
]
To = Annotated[Path, typer.Option("--to", help="The folder that holds the runs' folders.")]


# ---------------------------------------------------------------- whose fault it was


def _explain(error: Exception) -> int:
    """Prints what went wrong; returns the exit code."""
    with suppress(BrokenPipeError):
        return _explained(error)
    return UNREAD


def _explained(error: Exception) -> int:
    # Only when something of the client was loaded can its errors have come.
    client = sys.modules.get("shoal.client")
    if client is not None and isinstance(error, client.ClientError):
        complain(str(error))
        if isinstance(error, client.BrokerUnreachable):
            return UNREACHABLE
        return REFUSED if isinstance(error, client.Refused) else FAILED
    enroll = sys.modules.get("shoal.net.identity.enroll")
    if enroll is not None and isinstance(error, enroll.EnrollError):
        complain(str(error))
        return UNREACHABLE if isinstance(error, enroll.BrokerAwayError) else REFUSED
    access = sys.modules.get("shoal.client.access")
    if access is not None and isinstance(error, access.AccessError):
        complain(str(error))
        return REFUSED
    ours = type(error).__module__.startswith(("shoal.", f"{_SHOAL}."))
    if isinstance(error, ValueError) and ours:  # each ValueError of ours is about the user's input
        complain(str(error))
        return WRONG
    if (fault := fault_of(error)) is not None:  # a path that the user named, a disk that is full
        complain(str(fault))
        return WRONG
    echo("".join(traceback.format_exception(error)).rstrip("\n"), err=True)
    complain("this is a bug in Shoal: please report it with the lines above")
    return FAILED


def print_json(value: Any) -> None:
    with naming("stdout"):  # ASCII of any length, where `echo` bounds a line
        typer.echo(json_module.dumps(finite(value)))


def answer(value: Any, text: str, *, json: bool) -> None:
    """Prints JSON for programs, or the same as text."""
    if json:
        print_json(value)
    else:
        echo(text)


def phase_name(state: RunState | ReplicaState) -> str:
    from ..proto.broker_pb2 import Phase

    return Phase.Name(state.phase).lower()


def state_row(state: RunState) -> dict[str, Any]:
    return {
        "run": state.run,
        "name": state.name,
        "phase": phase_name(state),
        "reason": state.reason.text,
        "step": state.step,
        "steps": state.steps,
        "term": state.term,
        "round": state.round,
        "left_s": state.left_s or None,
        "replicas": [
            {"replica": r.replica, "phase": phase_name(r), "term": r.term, "step": r.step}
            for r in state.replicas
        ],
    }
