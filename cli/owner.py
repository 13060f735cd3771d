"""What the owner of a host may do there, without asking anybody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .base import Broker, Json, app, echo, verb
from .runs import pause_run

if TYPE_CHECKING:
    from ..peer.host.host import Host

__all__ = ["pause", "standing", "unpause"]

State = Annotated[
    Path | None,
    typer.Option(help="The folder given to shoal join, if any; default: the one in your home."),
]


@app.command()
@verb
def pause(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run, in place of this host.")
    ] = None,
    state: State = None,
    broker: Broker = None,
    json: Json = False,
) -> None:
    """Keep this host's peers out of runs until shoal unpause; with RUN, put that run aside until
    shoal resume RUN. Example: shoal pause r-3f2"""
    if run is not None:
        pause_run(run, broker, json=json)
        return
    host = _host(state)
    host.pause()
    running = [s.name for s in host.standings() if not s.ended]
    now = (
        f"{', '.join(running)} give up what they do after the step that they are in"
        if running
        else "no peer runs here now"
    )
    echo(f"this host is paused, also after a restart: {now}; `shoal unpause` ends it")


@app.command()
@verb
def unpause(state: State = None) -> None:
    """Let this host's peers take part again. Example: shoal unpause"""
    host = _host(state)
    was = host.paused
    host.unpause()
    echo("this host's peers take part again" if was else "this host was not paused")


def _host(state: Path | None) -> Host:
    from ..peer.host.config import DEFAULT_STATE
    from ..peer.host.host import Host

    return Host((state or DEFAULT_STATE).expanduser())


def standing(state: Path | None = None) -> dict[str, Any]:
    """How this host and its peers stand: what `shoal status` shows of them."""
    host = _host(state)
    since = host.paused_since
    return {
        "paused_since": None if since is None else f"{since:%Y-%m-%d %H:%M}",
        "peers": [
            {
                "name": s.name,
                "peer": s.peer,
                "broker": s.broker,
                "state": "ended" if s.ended else s.closed or "takes part",
                "month": s.month,
                "moved_bytes": s.moved_bytes,
                "monthly_bytes": s.monthly_bytes,
            }
            for s in host.standings()
        ],
    }
