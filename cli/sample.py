"""The verb that lets a model speak."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .base import Broker, Json, To, app, echo, few_collections, print_json, verb

if TYPE_CHECKING:
    from ..client import Run

__all__ = ["sample"]


@app.command()
@verb
def sample(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="Id of a run, its folder, a folder of runs (the newest), or one of Hugging Face.",
        ),
    ],
    prompt: Annotated[str, typer.Option(help="What is said to it; text that goes on.")],
    system: Annotated[str, typer.Option(help="Of chats: a system message before it.")] = "",
    tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 60,
    before: Annotated[
        bool, typer.Option("--before", help="Also by the weights that the run began with.")
    ] = False,
    broker: Broker = None,
    to: To = Path("runs"),
    json: Json = False,
) -> None:
    """Let the newest weights say a few words, on this machine. Example: shoal sample r-3f2
    --prompt "Where is the fuel dock?\""""
    from contextlib import ExitStack

    with ExitStack() as open_until_then, few_collections():
        echo("loading the model", err=True)
        from ..client.errors import BrokerUnreachable
        from ..client.runs.sample import speaker, speaker_before

        def opened(name: str) -> Run:
            from .. import client as clients

            return open_until_then.enter_context(clients.connect(broker)).run(name, to)

        found = {}
        for key, make in (("before", speaker_before), ("text", speaker)):
            if key == "text" or before:
                try:
                    one = make(run, opened)
                except BrokerUnreachable as error:
                    if not (to / run / "run.json").is_file():
                        raise
                    here = f"what is here of it speaks without one: shoal sample {to / run}"
                    raise BrokerUnreachable(f"{error}; {here}") from None
                echo(f"loaded {one.weights}; it answers", err=True)
                found[key] = one.says(prompt, tokens, system)
                label = {"before": "before: ", "text": "after:  "}[key] if before else ""
                if not json:
                    echo(f"{label}{found[key]}")
    if json:
        print_json({"prompt": prompt, "weights": one.weights, **found})
