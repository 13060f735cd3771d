"""The verbs that show what the broker knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .base import Broker, Json, app, print_json, state_row, verb

if TYPE_CHECKING:
    from ..proto.broker_pb2 import PublicAddress

__all__ = ["peers", "runs", "status"]

PEER_COLUMNS = (
    *("name", "peer", "device", "memory_bytes", "membership", "run", "dialled_at", "silent_s"),
)
RUN_COLUMNS = ("run", "name", "phase", "step", "steps", "reason")


@app.command()
@verb
def status(broker: Broker = None, json: Json = False) -> None:
    """Show the broker's peers and runs as they are now. Example: shoal status"""
    _describe(broker, json, peers=True, runs=True)


@app.command()
@verb
def peers(broker: Broker = None, json: Json = False) -> None:
    """Show who has joined and what they offer. Example: shoal peers --json"""
    _describe(broker, json, peers=True, runs=False)


@app.command()
@verb
def runs(broker: Broker = None, json: Json = False) -> None:
    """Show the runs that the broker knows. Example: shoal runs"""
    _describe(broker, json, peers=False, runs=True)


def _public_row(public: PublicAddress) -> dict[str, str]:
    return {
        "address": public.address,
        "confirmed_by": public.confirmed_by,
        "tried_by": public.tried_by,
        "problem": public.problem,
    }


def _public_line(public: PublicAddress) -> str:
    from ..client.text import safe

    if public.confirmed_by:
        return f"public address {public.address}: confirmed by {public.confirmed_by}"
    if public.problem:
        return (
            f"WARNING: nobody has reached the public address {public.address} so far; "
            f"{public.tried_by} could not: {safe(public.problem)}; is the port forwarded to the "
            "broker's host, and does its firewall let it in?"
        )
    return (
        f"public address {public.address}: not confirmed yet; the first peer that joins from "
        "another host tries it"
    )


def _describe(broker: str | None, json: bool, *, peers: bool, runs: bool) -> None:
    from .. import client as clients

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
            "dialled_at": p.address or "by relay",
            "silent_s": round(p.silent_s, 1),
            "software": p.profile.software,
        }
        for p in found.peers
    ]
    run_rows = [state_row(state) for state in found.runs]
    if json:
        parts = {"peers": peer_rows} if peers else {}
        public = {"public": _public_row(found.public)} if peers and found.HasField("public") else {}
        print_json({**parts, **({"runs": run_rows} if runs else {}), **public})
        return
    from ..client.progress import print_table

    if peers and runs and found.HasField("public"):
        typer.echo(_public_line(found.public))
    if peers:
        print_table(f"{len(peer_rows)} peers at {client.address}", PEER_COLUMNS, peer_rows)
    if runs:
        print_table(f"{len(run_rows)} runs at {client.address}", RUN_COLUMNS, run_rows)
