"""The verbs that keep running: the broker, a peer; and which broker."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..net.surroundings import fault_of, user_path
from .admission import Token, TokenFile, read_token
from .base import WRONG, Insecure, app, complain, echo, verb
from .output import say

__all__ = ["broker", "join", "login"]


SwarmName = Annotated[
    str,
    typer.Option(metavar="NAME", help="Find each other by this name, wherever the broker is."),
]
Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MULTIADDR",
        envvar="SHOAL_BOOTSTRAP",
        help="A way into the swarm, from the line of the broker; may be given several times.",
    ),
]


class Ops(Enum):
    """Operator sets of a peer."""

    FULL = "full"
    CORE = "core"


@app.command()
@verb
def broker(
    insecure: Insecure = False,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; default: all of this host's.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 7077,
    public: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where others reach it, for the line.")
    ] = "",
    state: Annotated[
        Path | None,
        typer.Option(help="Folder of identity, journal and blobs; default: one in your home."),
    ] = None,
    swarm: SwarmName = "",
    bootstrap: Bootstrap = None,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Serve its page and metrics on the port.")
    ] = True,
    page_certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="fullchain.pem and privkey.pem for the page; default: its own certificate.",
        ),
    ] = None,
) -> None:
    """Run the broker; prints the line that a peer pastes. Example: shoal broker"""
    import asyncio

    from ..broker.service.server import Broker, BrokerConfig, serve
    from ..client.access import remember
    from ..net.local import joined

    if host is None:
        host = "127.0.0.1" if insecure else "::"
    if state is None and not insecure:
        state = user_path("~/.local/share/shoal/broker")
    os.umask(0o077)  # weights, data and who was admitted are nobody else's
    config = BrokerConfig(
        host=host,
        port=port,
        public=public,
        insecure=insecure,
        state=state,
        swarm=swarm,
        bootstrap=tuple(bootstrap or ()),
        page=page,
        page_certificate=page_certificate,
    )

    def ready(broker: Broker) -> None:
        if broker.secured is not None:  # whoever runs a broker may use it, from this host
            try:
                for address in (joined("127.0.0.1", broker.port), broker.address):
                    remember(address, broker.secured.operator())
            except OSError as error:
                say(f"shoal: {fault_of(error) or error}: this user gets no credential", err=True)
        # The line goes to stdout by itself, so that a script can read it; logs go to stderr.
        if not say(broker.join_line()):
            why = "stdout cannot be written: nobody sees the line to join with (`shoal invite`)"
            say(f"shoal: {why}", err=True)

    asyncio.run(serve(config, ready=ready))


@app.command()
@verb
def join(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Where the broker is; with --swarm, where it was last."
        ),
    ] = "",
    token: Token = None,
    token_file: TokenFile = None,
    swarm: SwarmName = "",
    bootstrap: Bootstrap = None,
    swarm_port: Annotated[
        int,
        typer.Option(help="Port on which this host helps others to find the broker; 0: any."),
    ] = 0,
    insecure: Insecure = False,
    config: Annotated[
        Path | None,
        typer.Option(help="The owner's peer.toml; default: ~/.config/shoal/peer.toml, if there."),
    ] = None,
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
    up: Annotated[
        str | None, typer.Option(help="Most that each peer sends to others, e.g. 20Mbit.")
    ] = None,
    down: Annotated[str | None, typer.Option(help="Most that it receives.")] = None,
    monthly: Annotated[
        str | None,
        typer.Option(help="Most that all peers here send and receive in a month, e.g. 500GB."),
    ] = None,
    hours: Annotated[
        str, typer.Option(help="When they take part, by this host's clock, e.g. 22-08.")
    ] = "",
    stay: Annotated[
        str | None, typer.Option(help="How long they mean to stay, for plans, e.g. 4h.")
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads of one operator; default: torch's choice."),
    ] = None,
    ops: Annotated[Ops, typer.Option(help="Operators that it offers to run.")] = Ops.FULL,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port for other peers; 0: any free one.")
    ] = 0,
    public: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Where other peers reach it, or none; default: found out."
        ),
    ] = "",
    via: Annotated[
        Path | None,
        typer.Option(help="File of addresses to dial instead of others, for port forwards."),
    ] = None,
    stretch: Annotated[
        float, typer.Option(hidden=True, help="Compute takes so many times its CPU time.")
    ] = 1.0,
    state: Annotated[
        Path | None, typer.Option(help="Folder of the identity; default: by name, in your home.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what it did and when to this file, as JSON lines.")
    ] = None,
) -> None:
    """Join with one peer per device found here. Example: shoal join HOST:7077 --token shl1.…"""
    from ..job.settings import plain
    from ..job.units import ByteCount, Duration, Rate
    from ..peer.entry.supervisor import supervise
    from ..peer.host.addresses import read_addresses
    from ..peer.host.config import JoinConfig
    from ..peer.host.rights import read_rights

    rights = read_rights(config)
    try:
        settings = JoinConfig(
            broker=address,
            swarm=swarm,
            bootstrap=tuple(bootstrap or ()),
            swarm_port=swarm_port,
            insecure=insecure,
            token="" if insecure else read_token(token, token_file),
            name=name or rights.name,
            place=place or rights.place,
            owner=owner or rights.owner,
            devices=tuple(device or ()) or rights.device_names or "all",
            memory_bytes=rights.memory if memory is None else ByteCount(memory),
            up_bytes_per_s=rights.up if up is None else Rate(up),
            down_bytes_per_s=rights.down if down is None else Rate(down),
            monthly_bytes=rights.monthly if monthly is None else ByteCount(monthly),
            hours=hours or rights.hours,
            stay_s=rights.stay if stay is None else Duration(stay),
            data=plain(rights.data),
            web=rights.web,
            operator_set=ops.value,
            threads=threads,
            port=port,
            address=public,
            via={} if via is None else read_addresses(via),
            stretch=stretch,
            state=state,
            trace=trace,
        )
    except ValueError as error:  # each check of these settings is about the flags
        complain(str(error))
        raise typer.Exit(WRONG) from None
    os.umask(0o077)  # what a peer keeps is its owner's
    raise typer.Exit(supervise(settings))


@app.command()
@verb
def login(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where the broker is.")],
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Remember a broker, with a credential for it. Example: shoal login HOST:7077 --token shl1.…"""
    from .. import client
    from ..net.address import address_of

    path = client.login(address, read_token(token, token_file))
    echo(f"{path}: the broker is {address_of(address)}")
