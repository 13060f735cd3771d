"""The verbs. This file only reads arguments, calls what does the work, and says what came of it.

Exit codes: 0 done, 1 the run failed (or a bug of ours), 2 wrong input, 3 broker not reachable,
4 refused. Nothing heavy is imported before a verb needs it: `shoal --help` stays fast.
"""

from __future__ import annotations

import functools
import json as json_module
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

if TYPE_CHECKING:
    from .client import Client, Run
    from .proto.broker_pb2 import RunState

__all__ = ["app", "main"]

P = ParamSpec("P")

DONE, FAILED, WRONG, UNREACHABLE, REFUSED = 0, 1, 2, 3, 4
INTERRUPTED = 130
"""What a shell expects of a program that Ctrl-C ended. A run that was submitted goes on."""


def _verb(function: Callable[P, None]) -> Callable[P, None]:
    """Turns whatever a verb raises into one line and an exit code; a termination and a closed
    terminal end it like Ctrl-C does, through every `finally`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _interruptible():
                function(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # sorted by whose fault it is; a bug of ours shows its traceback
            raise typer.Exit(_explain(error)) from None

    return run


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
    usual = (signal.SIG_DFL, signal.default_int_handler)
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


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Train one neural network on GPUs that nobody put in one room.",
)


class Format(Enum):
    """What `shoal export` writes."""

    SAFETENSORS = "safetensors"
    HF = "hf"


class Ops(Enum):
    """Operator sets of a peer."""

    FULL = "full"
    CORE = "core"


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
To = Annotated[Path, typer.Option("--to", help="The folder that holds the runs' folders.")]


# ---------------------------------------------------------------- whose fault it was


def _explain(error: Exception) -> int:
    """Prints what went wrong; returns the exit code."""
    # Only when something of the client was loaded can its errors have come.
    client = sys.modules.get("shoal.client")
    if client is not None and isinstance(error, client.ClientError):
        _complain(str(error))
        if isinstance(error, client.BrokerUnreachable):
            return UNREACHABLE
        return REFUSED if isinstance(error, client.Refused) else FAILED
    ours = type(error).__module__.startswith(("shoal.", f"{__package__}."))
    if isinstance(error, ValueError) and ours:  # each ValueError of ours is about the user's input
        _complain(str(error))
        return WRONG
    if isinstance(error, OSError) and error.filename is not None:  # a path that the user named
        _complain(f"{error.filename}: {error.strerror}")
        return WRONG
    traceback.print_exception(error)
    _complain("this is a bug in Shoal: please report it with the lines above")
    return FAILED


def _complain(line: str) -> None:
    typer.echo(f"shoal: {line}", err=True)


def _print_json(value: Any) -> None:
    typer.echo(json_module.dumps(value))


# ---------------------------------------------------------------- daemons


@app.command()
@_verb
def sim(
    peers: Annotated[int, typer.Option(min=1, help="How many peers.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps instead of the job's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed instead of the job's.")] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job.toml instead of the built-in one.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the summary to this file.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also train the plain loop.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and state in this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the report only.")] = False,
) -> None:
    """Train on a cluster of real processes on this machine. Example: shoal sim --peers 4"""
    from .client.front import SimulationFront
    from .sim.cluster import SimOptions, simulate

    options = SimOptions(
        peers=peers,
        steps=steps,
        json=json,
        verify=verify,
        job=job,
        seed=seed,
        quiet=quiet,
        keep=keep,
    )
    front = SimulationFront()
    try:
        raise typer.Exit(simulate(options, front))
    finally:
        front.close()


@app.command()
@_verb
def broker(
    insecure: Insecure = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 7077,
    state: Annotated[
        Path | None, typer.Option(help="Folder of blobs and identity; default: a temporary one.")
    ] = None,
) -> None:
    """Run the broker; prints the line that a peer pastes. Example: shoal broker --insecure"""
    import asyncio

    from .broker.server import BrokerConfig, join_line, serve

    config = BrokerConfig(host=host, port=port, insecure=insecure, state=state)
    # The line goes to stdout by itself, so that a script can read it; logs go to stderr.
    asyncio.run(serve(config, ready=lambda address: print(join_line(address), flush=True)))


@app.command()
@_verb
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the broker is.")],
    insecure: Insecure = False,
    name: Annotated[str, typer.Option(help="Name for people; default: the host's.")] = "",
    place: Annotated[str, typer.Option(help="Site, for plans; may stay empty.")] = "",
    owner: Annotated[str, typer.Option(help="Whose it is; may stay empty.")] = "",
    device: Annotated[
        list[str] | None,
        typer.Option(help="cpu or cuda:N, once per peer; default: every GPU, or the CPU."),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="What runs may use of each device, e.g. 10GiB.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of one operator; default: torch's choice."),
    ] = None,
    ops: Annotated[Ops, typer.Option(help="Operators that it offers to run.")] = Ops.FULL,
    state: Annotated[
        Path | None, typer.Option(help="Folder of the identity; default: by name, in your home.")
    ] = None,
) -> None:
    """Join with one peer per device found here. Example: shoal join 127.0.0.1:7077 --insecure"""
    from .job.units import ByteCount
    from .peer.config import JoinConfig
    from .peer.supervisor import supervise

    try:
        config = JoinConfig(
            broker=address,
            insecure=insecure,
            name=name,
            place=place,
            owner=owner,
            devices=tuple(device) if device else "all",
            memory_bytes=None if memory is None else ByteCount(memory),
            operator_set=ops.value,
            threads=threads,
            state=state,
        )
    except ValueError as error:  # each check of these settings is about the flags
        _complain(str(error))
        raise typer.Exit(WRONG) from None
    raise typer.Exit(supervise(config))


@app.command()
@_verb
def login(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the broker is.")],
) -> None:
    """Remember a broker for the verbs that need one. Example: shoal login 127.0.0.1:7077"""
    from . import client

    typer.echo(f"{client.login(address)}: the broker is {address}")


# ---------------------------------------------------------------- runs


@app.command()
@_verb
def train(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job.toml.")],
    broker: Broker = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit and leave.")] = False,
    json: Json = False,
) -> None:
    """Submit a job and follow it; Ctrl-C detaches. Example: shoal train examples/gpt_bytes.toml"""
    from .job import Job

    loaded = Job.from_toml(job)
    from . import client as clients

    with clients.connect(broker) as client:
        run = client.submit(loaded, say=lambda line: typer.echo(line, err=True))
        with _detachable(client, run):
            if json:
                _print_json({"run": run.id, "folder": str(run.folder)})
            else:
                typer.echo(f"run {run.id}: {loaded.name}")
            if detach:
                typer.echo(_how_to_follow(client, run), err=True)
                return
            _follow(run, json=json, export=True)


@app.command()
@_verb
def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job.toml.")],
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            metavar="FILE",
            help="Plan over the peers and links of a scenario file, without a broker.",
        ),
    ] = None,
    broker: Broker = None,
    json: Json = False,
) -> None:
    """Show what would run where, and why, without running it. Example: shoal plan job.toml
    --cluster cluster.toml"""
    from .client.preview import as_json, show
    from .job import Job

    def say(line: str) -> None:
        typer.echo(line, err=True)

    if cluster is not None and broker is not None:
        _complain("plan over a file or over a broker's pool: expected one of --cluster, --broker")
        raise typer.Exit(WRONG)
    loaded = Job.from_toml(job)
    if cluster is not None:
        from .sim.scenario import Scenario

        scenario = Scenario.from_toml(cluster, job=job)  # before the model, which takes longer
        from .client.submission import draft
        from .sim.preview import preview_cluster

        answer = preview_cluster(scenario, *draft(loaded, say))
    else:
        from . import client as clients

        with clients.connect(broker) as client:
            answer = client.preview(loaded, say)
    if json:
        _print_json(as_json(answer))
    elif answer.HasField("plan"):
        show(answer, loaded.name)
    if not answer.HasField("plan"):
        _complain(f"no plan: {answer.reason.text}")
        raise typer.Exit(WRONG if answer.reason.code == "spec" else FAILED)


@app.command()
@_verb
def watch(
    run: RunId,
    broker: Broker = None,
    to: To = Path("runs"),
    json: Json = False,
) -> None:
    """Follow a run until it has ended; Ctrl-C leaves it alone. Example: shoal watch r-3f2"""
    with _run(run, broker, to) as (client, found), _detachable(client, found):
        _follow(found, json=json, export=False)


@app.command()
@_verb
def cancel(run: RunId, broker: Broker = None, json: Json = False) -> None:
    """End a run and free its peers. Example: shoal cancel r-3f2"""
    with _run(run, broker, Path("runs")) as (_, found):
        state = found.cancel()
        if json:
            _print_json(_state(state))
        else:
            typer.echo(f"run {run} is {_phase(state)}")


@app.command()
@_verb
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
    with _run(run, broker, to) as (_, found):
        target = found.export(path, format.value if format else "")
    if json:
        _print_json({"run": run, "weights": str(target)})
    else:
        typer.echo(f"weights of run {run}: {target}")


@app.command("eval")
@_verb
def evaluate(
    run: RunId,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Held-out batches; default: the job's eval_batches.")
    ] = None,
    broker: Broker = None,
    to: To = Path("runs"),
    json: Json = False,
) -> None:
    """Compute the held-out loss of a finished run's weights here. Example: shoal eval r-3f2"""
    with _run(run, broker, to) as (_, found):
        numbers = found.evaluate(batches=batches)
    if json:
        _print_json({"run": run, **numbers})
    else:
        figures = " · ".join(f"{k} {v:.6g}" for k, v in numbers.items())
        typer.echo(f"held-out of run {run}: {figures}")


@app.command()
@_verb
def status(broker: Broker = None, json: Json = False) -> None:
    """Show the broker's peers and runs as they are now. Example: shoal status"""
    _describe(broker, json, peers=True, runs=True)


@app.command()
@_verb
def peers(broker: Broker = None, json: Json = False) -> None:
    """Show who has joined and what they offer. Example: shoal peers --json"""
    _describe(broker, json, peers=True, runs=False)


@app.command()
@_verb
def runs(broker: Broker = None, json: Json = False) -> None:
    """Show the runs that the broker knows. Example: shoal runs"""
    _describe(broker, json, peers=False, runs=True)


# ---------------------------------------------------------------- helpers


@contextmanager
def _run(run: str, broker: str | None, to: Path) -> Iterator[tuple[Client, Run]]:
    from . import client as clients

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
    """Ctrl-C in the block leaves the run alone and says how to come back to it."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("\n" + _how_to_follow(client, run), err=True)
        raise typer.Exit(INTERRUPTED) from None


def _follow(run: Run, *, json: bool, export: bool) -> None:
    """Shows a run until it has ended, then exports."""
    from .client.progress import follow

    state = run.checked(follow(run, json=json))
    target = run.export() if export else None
    if json:
        _print_json({"state": _state(state), "weights": target and str(target)})
    elif target is not None:
        typer.echo(f"run {run.id} is done: {state.step} steps, weights in {target}")
    else:
        typer.echo(f"run {run.id} is done: {state.step} steps; weights: shoal export {run.id}")


def _phase(state: RunState) -> str:
    from .proto.broker_pb2 import Phase

    return Phase.Name(state.phase).lower()


def _state(state: RunState) -> dict[str, Any]:
    return {
        "run": state.run,
        "name": state.name,
        "phase": _phase(state),
        "reason": state.reason.text,
        "step": state.step,
        "steps": state.steps,
        "term": state.term,
    }


def _describe(broker: str | None, json: bool, *, peers: bool, runs: bool) -> None:
    from . import client as clients

    with clients.connect(broker) as client:
        found = client.describe()
    peer_rows = [
        {
            "peer": p.peer,
            "name": p.profile.name,
            "place": p.profile.place,
            "device": p.profile.device,
            "memory_bytes": p.profile.device_memory_bytes,
            "membership": p.membership,
            "run": p.run,
            "address": p.address,
            "silent_s": round(p.silent_s, 1),
            "software": p.profile.software,
        }
        for p in found.peers
    ]
    run_rows = [_state(state) for state in found.runs]
    if json:
        parts = {"peers": peer_rows} if peers else {}
        _print_json({**parts, **({"runs": run_rows} if runs else {})})
        return
    from .client.progress import print_table

    if peers:
        print_table(f"{len(peer_rows)} peers at {client.address}", PEER_COLUMNS, peer_rows)
    if runs:
        print_table(f"{len(run_rows)} runs at {client.address}", RUN_COLUMNS, run_rows)


PEER_COLUMNS = ("name", "peer", "device", "memory_bytes", "membership", "run", "silent_s")
RUN_COLUMNS = ("run", "name", "phase", "step", "steps", "reason")


def main() -> None:
    """The `shoal` command."""
    # gRPC's core reports to stderr what comes back as a status too, and is said there in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app()


if __name__ == "__main__":
    main()
