"""The verb that shows a plan without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .base import (
    FAILED,
    WRONG,
    Broker,
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
    if cluster is not None and broker is not None:
        complain("plan over a file or over a broker's pool: expected one of --cluster, --broker")
        raise typer.Exit(WRONG)
    with few_collections():
        from ..client.show.preview import as_json, show

        name, answer = _previewed(job, cluster, broker)
        if json:
            print_json(as_json(answer))
        elif answer.HasField("plan"):
            show(answer, name)
    if not answer.HasField("plan"):
        complain(f"no plan: {answer.reason.text}")
        raise typer.Exit(WRONG if answer.reason.code == "spec" else FAILED)


def _previewed(job: Path, cluster: Path | None, broker: str | None) -> tuple[str, PreviewAnswer]:
    """The job's name, and its plan over the peers of a file or of a broker."""
    from ..job import Job

    def say(line: str) -> None:
        echo(line, err=True)

    loaded = Job.from_toml(job)
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
