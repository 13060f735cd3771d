"""The verbs of a run: submit, follow, end it, take its weights home."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..job.words import count_of
from ..net.printable import printable
from ..net.surroundings import fault_of
from .base import (
    INTERRUPTED,
    WRONG,
    Broker,
    Changes,
    Json,
    RunId,
    To,
    answer,
    app,
    complain,
    echo,
    few_collections,
    phase_name,
    print_json,
    state_row,
    verb,
)

if TYPE_CHECKING:
    from ..client import Client, Run

__all__ = [
    "cancel",
    "evaluate",
    "export",
    "finish",
    "logs",
    "pause_run",
    "resume",
    "train",
    "watch",
]


Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show plans in full, and what codecs did.")
]


class Format(Enum):
    """What `shoal export` writes."""

    SAFETENSORS = "safetensors"
    HF = "hf"
    PEFT = "peft"


@app.command()
@verb
def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job.toml.")],
    set: Changes = None,
    broker: Broker = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit and leave.")] = False,
    select: Annotated[
        str, typer.Option(metavar="FILE.py:FUNCTION", help="A rule for who is in a round.")
    ] = "",
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Submit a job and follow it; Ctrl-C detaches. Example: shoal train examples/gpt_bytes.toml"""
    from dataclasses import replace

    from ..job import Job, SettingsError

    loaded = Job.from_toml(job).with_changes(set or ())
    if select:
        loaded = replace(loaded, sync=replace(loaded.sync, select=select))
    if detach and loaded.sync.select:
        raise SettingsError(
            "sync.select",
            f'is "{loaded.sync.select}", which runs here for as long as this does: expected no '
            "--detach",
        )
    from .. import client as clients

    with clients.connect(broker) as client:
        with few_collections():
            run = client.submit(loaded, say=partial(echo, err=True))
        with _detachable(client, run):
            row = {"run": run.id, "folder": str(run.folder)}
            answer(row, f"run {run.id}: {loaded.name}", json=json)
            if detach:
                echo(_how_to_follow(client, run), err=True)
                return
            _follow(run, json=json, export=True, verbose=verbose)


@app.command()
@verb
def watch(
    run: RunId,
    broker: Broker = None,
    to: To = Path("runs"),
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Follow a run until it has ended; Ctrl-C leaves it alone. Example: shoal watch r-3f2"""
    with _opened(run, broker, to) as (client, found), _detachable(client, found):
        _follow(found, json=json, export=False, verbose=verbose)


@app.command()
@verb
def logs(run: RunId, broker: Broker = None, json: Json = False) -> None:
    """Show what happened in a run so far: plans, losses, recoveries. Example: shoal logs r-3f2"""
    from ..client.show.logs import lines
    from ..client.show.progress import row_of

    with _opened(run, broker, Path("runs")) as (_, found):
        if json:
            for event in found.so_far():
                print_json(row_of(event))
        else:
            for line in lines(found.so_far()):
                echo(line)


@app.command()
@verb
def cancel(run: RunId, broker: Broker = None, json: Json = False) -> None:
    """End a run and free its peers. Example: shoal cancel r-3f2"""
    with _opened(run, broker, Path("runs")) as (_, found):
        state = found.cancel()
        answer(state_row(state), f"run {run} is {phase_name(state)}", json=json)


@app.command()
@verb
def finish(run: RunId, broker: Broker = None, json: Json = False) -> None:
    """End a run in rounds early, and keep what it came to: with the round that is under way, or the
    one behind it, it is done and has its weights. Example: shoal finish r-3f2"""
    with _opened(run, broker, Path("runs")) as (_, found):
        state = found.finish()
        over = phase_name(state) == "done"
        ends = "is done" if over else f"ends soon, with its weights: shoal watch {run}"
        answer(state_row(state), f"run {run} {ends}", json=json)


@app.command()
@verb
def resume(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER", help="Id of a run, or a checkpoint: a folder, or a URL."
        ),
    ],
    set: Changes = None,
    job: Annotated[
        Path | None,
        typer.Option(help="A job.toml in place of its job; needed for what others submitted."),
    ] = None,
    broker: Broker = None,
    to: Annotated[
        str | None,
        typer.Option(help="Folder for the runs' folders; default: its job's, if yours."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Start it and leave.")] = False,
    json: Json = False,
) -> None:
    """Go on with a paused run, or from the newest checkpoint of another one: after it ended, over
    other peers, with another learning rate or more steps; model, data and seed stay.
    Example: shoal resume r-3f2 --set train.steps=2000"""
    from .. import client as clients
    from ..job import Job

    changes, other = set or [], None if job is None else Job.from_toml(job)
    with clients.connect(broker) as client:
        # One that has not ended is meant to go on itself.
        paused = not changes and other is None and client.is_open(run)
        since = 0
        if paused:
            found = client.run(run, to or "runs")
            since = 1 + max((event.number for event in found.so_far()), default=-1)
            client.unpause(run)
        else:
            say = partial(echo, err=True)
            found = client.go_on(run, changes, other, to, say)
        with _detachable(client, found):
            whence = "" if paused else f" from a checkpoint of {run}"
            row = {"run": found.id, "folder": str(found.folder)}
            answer(row, f"run {found.id} goes on{whence}", json=json)
            if detach:
                echo(_how_to_follow(client, found), err=True)
                return
            _follow(found, json=json, export=True, since=since)


def pause_run(run: str, broker: str | None, *, json: bool) -> None:
    """What `shoal pause RUN` does."""
    with _opened(run, broker, Path("runs")) as (client, _):
        state = client.pause(run)
        text = (
            f"run {run} stops between two of its next steps: `shoal watch {run}`; "
            f"`shoal resume {run}` goes on"
        )
        if state.reason.code == "paused":
            text = f"run {run}: {printable(state.reason.text)}"
        answer(state_row(state), text, json=json)


@app.command()
@verb
def export(
    run: RunId,
    path: Annotated[
        Path | None, typer.Argument(help="File, or for hf folder; default: the run's folder.")
    ] = None,
    format: Annotated[Format | None, typer.Option(help="Default: the job's.")] = None,
    broker: Broker = None,
    to: To = Path("runs"),
    json: Json = False,
) -> None:
    """Fetch the weights of a finished run. Example: shoal export r-3f2 model.safetensors"""
    with _opened(run, broker, to) as (_, found):
        target = _ended(found).export(path, format.value if format else "")
    row = {"run": run, "weights": str(target)}
    answer(row, f"weights of run {run}: {target}", json=json)


@app.command("eval")
@verb
def evaluate(
    run: RunId,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Held-out batches; default: the job's eval_batches.")
    ] = None,
    network: Annotated[
        bool, typer.Option(help="By the broker's peers, for a model that is too large for here.")
    ] = False,
    job: Annotated[
        Path | None,
        typer.Option(help="A job.toml that makes the model, for what others submitted."),
    ] = None,
    broker: Broker = None,
    to: To = Path("runs"),
    json: Json = False,
) -> None:
    """Compute the held-out loss of a finished run's weights here. Example: shoal eval r-3f2"""
    from ..job import Job

    own = None if job is None else Job.from_toml(job)
    with _opened(run, broker, to) as (_, found):
        ended = _ended(found)
        if network:
            numbers = ended.evaluate_there(batches)
        else:
            numbers = ended.evaluate(batches=batches, job=own)
    figures = " · ".join(f"{k} {v:.6g}" for k, v in numbers.items())
    answer({"run": run, **numbers}, f"held-out of run {run}: {figures}", json=json)


# ---------------------------------------------------------------- helpers


def _ended(run: Run) -> Run:
    """Raises RunFailed for a run that goes on: its weights are not there yet."""
    from ..client.errors import RunFailed
    from ..client.runs.broker_calls import ENDED

    state = run.state()
    if state.phase not in ENDED:
        done = f"run {run.id} has done {state.step} of {state.steps} steps"
        why = f" ({state.reason.text})" if state.reason.text else ""
        raise RunFailed(f"{done}{why}: it has no weights before its end; shoal watch {run.id}")
    return run


@contextmanager
def _opened(run: str, broker: str | None, to: Path) -> Iterator[tuple[Client, Run]]:
    from .. import client as clients

    with clients.connect(broker) as client:
        yield client, client.run(run, to)


def _how_to_follow(client: Client, run: Run) -> str:
    at = f"--broker {client.address}"
    return (
        f"run {run.id} goes on without you\n"
        f"  watch:  shoal watch {run.id} {at}\n"
        f"  cancel: shoal cancel {run.id} {at}"
    )


@contextmanager
def _detachable(client: Client, run: Run) -> Iterator[None]:
    """Ctrl-C in the block leaves the run alone and says how to come back to it; so does a disk that
    is full here, at the very end too: the broker has what could not be written."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if (fault := fault_of(error)) is None:
            raise
        complain(str(fault))
        at = f"{run.id} --broker {client.address}"
        echo(
            f"run {run.id} loses nothing by that, the broker has it: `shoal watch {at}` goes on "
            f"with it, and `shoal export {at} --to FOLDER` fetches its weights to another disk",
            err=True,
        )
        raise typer.Exit(WRONG) from None
    except KeyboardInterrupt:
        echo("\n" + _how_to_follow(client, run), err=True)
        raise typer.Exit(INTERRUPTED) from None


def _follow(run: Run, *, json: bool, export: bool, since: int = 0, verbose: bool = False) -> None:
    """Shows a run from an event on until it has ended, then exports."""
    from ..client.show.progress import follow

    state = run.checked(follow(run, json=json, since=since, verbose=verbose))
    target = run.export() if export else None
    half = _half(run, json=json) if export else None
    if json:
        found = {"state": state_row(state), "weights": target and str(target)}
        print_json(found if half is None else {**found, "half_model": half})
        return
    # Of clients a step is a round.
    done = count_of(state.step, "round" if state.step == state.round else "step")
    if target is not None:
        echo(f"run {run.id} is done: {done}, weights in {target}")
    else:
        echo(f"run {run.id} is done: {done}; weights: shoal export {run.id}")


def _half(run: Run, *, json: bool) -> dict[str, Any] | None:
    """What the model is without every second block, where microbatches left some out; where that
    cannot be had, people read why, and the run is done all the same."""
    found = run.half_or_reason()
    if isinstance(found, str):
        complain(f"the model without every second block was not evaluated: {found}")
        return None
    if found is not None and not json:
        echo(f"half the model: {found}")
    return None if found is None else asdict(found)
