"""The verb that tries it all on one machine."""

from __future__ import annotations

import json as json_module
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .base import (
    FAILED,
    WRONG,
    Broker,
    Changes,
    Json,
    app,
    complain,
    echo,
    few_collections,
    print_json,
    verb,
)

if TYPE_CHECKING:
    from ..proto.broker_pb2 import PreviewAnswer

__all__ = ["plan", "sim"]

# The verb that shows a plan without running it.


@app.command()
@verb
def plan(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="A job.toml.")],
    set: Changes = None,
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
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the planned step into a PNG, peer by time."),
    ] = None,
) -> None:
    """Show what would run where, and why, without running it. Example: shoal plan job.toml
    --cluster cluster.toml"""
    if cluster is not None and broker is not None:
        complain("plan over a file or over a broker's pool: expected one of --cluster, --broker")
        raise typer.Exit(WRONG)
    with few_collections():
        from ..client.show.preview import as_json, show

        name, answer = _previewed(job, set or (), cluster, broker)
        if json:
            print_json(as_json(answer))
        elif answer.HasField("plan"):
            show(answer, name)
        if picture is not None and answer.HasField("plan"):
            _draw(name, answer, picture)
    if not answer.HasField("plan"):
        complain(f"no plan: {answer.reason.text}")
        raise typer.Exit(WRONG if answer.reason.code == "spec" else FAILED)


def _draw(name: str, answer: PreviewAnswer, file: Path) -> None:
    """Writes the picture of the planned step. Raises OSError with the file's name."""
    from ..net.surroundings import naming
    from ..sim.report.pictures.planned_timeline import planned_timeline

    called = {p.peer: p.profile.name or p.peer for p in answer.peers}
    with naming(file):
        planned_timeline([(f"{name}, {answer.plan.schedule}", answer.step)], called).png(file)
    echo(f"the planned step is drawn in {file}", err=True)


def _previewed(
    job: Path, changes: Sequence[str], cluster: Path | None, broker: str | None
) -> tuple[str, PreviewAnswer]:
    """The job's name, and its plan over the peers of a file or of a broker."""
    from ..job import Job

    def say(line: str) -> None:
        echo(line, err=True)

    loaded = Job.from_toml(job).with_changes(changes)
    if cluster is None:
        from .. import client as clients

        with clients.connect(broker) as client:
            return loaded.name, client.preview(loaded, say)
    from ..sim.scenario.scenario import Scenario

    scenario = Scenario.from_toml(cluster, job=job)  # before the model, which takes longer
    from ..client.submission import draft
    from ..sim.simulate import preview_cluster

    loaded = scenario.adjusted(loaded)
    if scenario.left_out:
        say(scenario.left_out)
    return loaded.name, preview_cluster(scenario, *draft(loaded, say))


@app.command()
@verb
def sim(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A scenario.toml, or a name of --list.")
    ] = "",
    virtual: Annotated[
        bool, typer.Option("--virtual", help="Under a virtual clock, with real tensors.")
    ] = False,
    ghost: Annotated[
        bool, typer.Option("--ghost", help="The same with hashes for tensors: thousands of peers.")
    ] = False,
    real: Annotated[
        bool, typer.Option("--real", help="As real processes over shaped links.")
    ] = False,
    show: Annotated[bool, typer.Option("--list", help="Show the built-in scenarios.")] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write page, pictures, events.jsonl and summary.json to this folder."),
    ] = None,
    peers: Annotated[
        int | None, typer.Option(min=1, help="So many equal peers on loopback; no scenario.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps instead of the job's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed instead of the scenario's and the job's.")
    ] = None,
    job: Annotated[
        Path | None, typer.Option(help="A job.toml instead of the scenario's or built-in one.")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Change a key of its job; with several values (sync.method=saps,diloco) a run "
            "for each.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Run each with so many seeds, and compare them all.")
    ] = 1,
    json: Annotated[
        Path | None, typer.Option(help="Write the summary to this file; -: print it, as JSON.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also train the plain loop.")] = False,
    baselines: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Federated: also train so many clients alone, and one model on all samples.",
        ),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Real, shaped: measure the alternatives for a few steps."),
    ] = False,
    secure: Annotated[
        bool, typer.Option("--secure", help="Real: with identities and mutual TLS.")
    ] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep logs and state in this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the report only.")] = False,
) -> None:
    """Train on a network of peers that is simulated on this machine. Example: shoal sim
    slow-homes --virtual --report out"""
    if show:
        _list(json)
        return
    worlds = [w for w, asked in (("virtual", virtual), ("ghost", ghost), ("real", real)) if asked]
    if len(worlds) > 1:
        complain(f"{' and '.join(f'--{w}' for w in worlds)}: expected one of them")
        raise typer.Exit(WRONG)
    from ..client.front import SimulationFront
    from ..sim.grid import Sweep
    from ..sim.simulate import SimOptions, simulate

    options = SimOptions(
        scenario=scenario,
        world=worlds[0] if worlds else None,  # type: ignore[arg-type]  # one of the three
        peers=peers,
        steps=steps,
        seed=seed,
        job=job,
        json=json,
        report=report,
        verify=verify,
        baselines=baselines,
        compare=compare,
        secure=secure,
        keep=keep,
        quiet=quiet,
    )
    front = SimulationFront(lambda line: None if quiet else echo(line, err=True))
    try:
        grid = Sweep(options, set or [], seeds)
        raise typer.Exit(grid.run(front, echo) if grid.several else simulate(grid.only, front))
    finally:
        front.close()


def _list(json: Path | None) -> None:
    from ..sim.scenario.catalogue import catalogue

    entries = list(catalogue())
    if json is not None:
        rows = [{"name": e.name, "about": e.about, "world": e.mode} for e in entries]
        text = json_module.dumps(rows, indent=1)
        if str(json) == "-":
            echo(text)
        else:
            json.write_text(text + "\n")
        return
    width = max(len(e.name) for e in entries)
    for entry in entries:
        echo(f"{entry.name:<{width}}  {entry.mode:<7}  {entry.about}")
