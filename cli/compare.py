"""The verb that holds runs against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .base import Broker, Json, To, answer, app, echo, verb

__all__ = ["compare"]


@app.command()
@verb
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="A B …",
            help="Ids of runs, folders of runs, or reports of shoal sim; those whose names end in "
            "-seed-N stand together.",
        ),
    ],
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw the loss over steps, samples, bytes and time into a PNG."
        ),
    ] = None,
    broker: Broker = None,
    to: To = Path("runs"),
    json: Json = False,
) -> None:
    """Hold runs against each other: what each came to and took, and how their jobs differ.
    Example: shoal compare runs/r-3f2 runs/r-9ab --picture both.png"""
    from ..sim.comparing import compare as compared

    found = compared(*runs, broker=broker, to=to)
    answer(found.table(), found.text(), json=json)
    if picture is not None:
        found.draw(picture)
        echo(f"the losses are drawn in {picture}", err=True)
