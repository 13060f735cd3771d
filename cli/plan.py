"""The verb that shows a plan without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .base import FAILED, WRONG, Broker, Json, app, complain, echo, print_json, verb

__all__ = ["plan"]


@app.command()
@verb
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
    from ..client.preview import as_json, show
    from ..job import Job

    def say(line: str) -> None:
        echo(line, err=True)

    if cluster is not None and broker is not None:
        complain("plan over a file or over a broker's pool: expected one of --cluster, --broker")
        raise typer.Exit(WRONG)
    loaded = Job.from_toml(job)
    if cluster is not None:
        from ..sim.scenario.scenario import Scenario

        scenario = Scenario.from_toml(cluster, job=job)  # before the model, which takes longer
        from ..client.submission import draft
        from ..sim.preview import preview_cluster

        loaded = scenario.adjusted(loaded)
        if scenario.left_out:
            say(scenario.left_out)
        answer = preview_cluster(scenario, *draft(loaded, say))
    else:
        from .. import client as clients

        with clients.connect(broker) as client:
            answer = client.preview(loaded, say)
    if json:
        print_json(as_json(answer))
    elif answer.HasField("plan"):
        show(answer, loaded.name)
    if not answer.HasField("plan"):
        complain(f"no plan: {answer.reason.text}")
        raise typer.Exit(WRONG if answer.reason.code == "spec" else FAILED)
