"""What the owner of a host may do there, without asking anybody."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..net.surroundings import user_path
from .base import WRONG, Broker, Json, app, complain, echo, print_json, verb
from .runs import pause_run

if TYPE_CHECKING:
    from ..net.identity.credential import Credential
    from ..peer.host.host import Host

__all__ = ["bench", "codecs", "lent", "pause", "standing", "unpause"]

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
    """Rest this host: its peers stay out of runs until shoal unpause; with RUN, put that run aside
    until shoal resume RUN. Example: shoal pause r-3f2"""
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
    echo(f"this host rests now, also after a restart: {now}; runs go on without it")
    echo("`shoal unpause` undoes it; to put a run aside in place of the host: `shoal pause RUN`")


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

    return Host(user_path(state or DEFAULT_STATE))


def lent(broker: str | None) -> tuple[str, Credential] | None:
    """Where a peer of this host has joined, and its credential there: at that broker, or else the
    one that was heard last. None: no peer here has one."""
    from ..net.identity.credential import Credential, CredentialError
    from ..peer.host.config import DEFAULT_STATE

    folder, found = user_path(DEFAULT_STATE), {}
    for path in sorted(folder.glob("*/*/certificate.pem")):
        with suppress(CredentialError, OSError):  # of a peer that joins just now
            if (credential := Credential.load(path.parent)) is not None:
                found[credential.party.subject] = credential
    here = sorted(_host(None).standings(), key=lambda s: s.ended)
    each = ((s.broker, found[s.peer]) for s in here if s.peer in found)
    return next((one for one in each if broker in (None, one[0])), None)


def standing(state: Path | None = None) -> dict[str, Any]:
    """How this host and its peers stand: what `shoal status` shows of them."""
    host = _host(state)
    since = host.paused_since
    # It looks at the pause once a second, and ends the step that it is in.
    open_ = "takes part" if since is None else "is about to rest: its owner has paused it"
    return {
        "paused_since": None if since is None else f"{since:%Y-%m-%d %H:%M}",
        "peers": [
            {
                "name": s.name,
                "peer": s.peer,
                "broker": s.broker,
                "state": "ended" if s.ended else s.closed or open_,
                "month": s.month,
                "moved_bytes": s.moved_bytes,
                "monthly_bytes": s.monthly_bytes,
            }
            for s in host.standings()
        ],
    }


# The verb that measures this machine.

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure this machine. Example: shoal bench codecs --elements 1000000",
)
app.add_typer(bench, name="bench")


@bench.callback()
def _measures() -> None:
    """Measure this machine. Example: shoal bench codecs --elements 1000000"""


@bench.command()
@verb
def codecs(
    elements: Annotated[
        int, typer.Option(min=1, max=2**28, help="Elements of the fp32 tensor, about.")
    ] = 1_000_000,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Such as topk:ratio=50; may repeat. Default: a list."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    json: Json = False,
) -> None:
    """Show bytes, speed and error of each codec on this machine, on Gaussian numbers. Example:
    shoal bench codecs --elements 10000000 --codec bf16 --codec topk:ratio=100"""
    from dataclasses import asdict

    import torch

    from ..client import bench as benches
    from ..compression.codec import CodecError, parse

    texts = list(dict.fromkeys(codec or benches.CODECS))
    for text in texts:
        parse(text)  # all of them before the first is measured
    count = torch.cuda.device_count()
    known = ["cpu", *(f"cuda:{i}" for i in range(count))]
    if device not in known:
        complain(f"--device {device} is not here: expected one of {', '.join(known)}")
        raise typer.Exit(WRONG)
    tensors = benches.gaussian(elements, device)
    rows = []
    for text in texts:
        try:
            rows.append(benches.measure(text, tensors))
        except CodecError as error:  # such as a rank that is more than so few elements have
            complain(f"{text} is left out: {error}")
    if not rows:
        raise typer.Exit(WRONG)
    about, shape = benches.machine(device), tuple(tensors[0].shape)
    if json:
        print_json({"machine": about, "shape": shape, "codecs": [asdict(r) for r in rows]})
        return
    echo(
        f"fp32{list(shape)}, standard normal, on {about['device']}: {about['threads']} threads of "
        f"{about['cores']} cores ({about['architecture']}), torch {about['torch']}"
    )
    for line in benches.table(rows):
        echo(line)
