"""The verbs that show what the broker knows, and how this host's own peers stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..job.words import count_of
from .base import WRONG, Broker, Json, app, complain, echo, print_json, state_row, verb
from .owner import lent, standing

if TYPE_CHECKING:
    from ..client import Client
    from ..proto.broker_pb2 import LinkState, PeerShare, PublicAddress

__all__ = ["page", "peers", "public_line", "runs", "status"]

PEER_COLUMNS = (
    *("name", "peer", "device", "memory_bytes", "membership", "run", "dialled_at", "silent_s"),
)
OWNERS_COLUMNS = ("hours", "stays", "data", "closed")
"""What owners have set; shown where any has."""
LINK_COLUMNS = ("from", "to", "latency", "sustained", "burst", "age")
SHARE_COLUMNS = ("run", "name", "samples", "sent", "time")
RUN_COLUMNS = ("run", "name", "phase", "step", "steps", "reason")
ROUNDS_COLUMNS = ("round", "apart")
"""Of runs whose replicas train apart; shown where there is one."""
MOST_REPLICAS = 4
"""Named of a run; `--json` has all."""


@app.command()
@verb
def status(
    mine: Annotated[
        bool, typer.Option("--mine", help="As this host's peer: what it has given, and to whom.")
    ] = False,
    broker: Broker = None,
    json: Json = False,
) -> None:
    """Show this host's peers, and the broker's peers and runs. Example: shoal status --mine"""
    here = standing()
    if not json:
        _show_host(here)
    _describe(broker, json, peers=True, runs=True, mine=mine, more={"here": here})


@app.command()
@verb
def peers(
    links: Annotated[
        bool,
        typer.Option("--links", help="Also what each link was measured to carry."),
    ] = False,
    broker: Broker = None,
    json: Json = False,
) -> None:
    """Show who has joined and what they offer. Example: shoal peers --links"""
    _describe(broker, json, peers=True, runs=False, links=links)


@app.command()
@verb
def runs(broker: Broker = None, json: Json = False) -> None:
    """Show the runs that the broker knows. Example: shoal runs"""
    _describe(broker, json, peers=False, runs=True)


@app.command()
@verb
def page(
    lasts: Annotated[
        str, typer.Option("--for", help="How long the link opens it, e.g. 12h, 365d.")
    ] = "30d",
    broker: Broker = None,
    json: Json = False,
) -> None:
    """Print a link to the broker's page, for reading only. Example: shoal page --for 12h"""
    from ..job.units import Duration
    from ..net.local import is_loopback, split

    with _looking(broker) as client:
        made = client.page(float(Duration(lasts)))
        here = client.address
    link = f"https://{made.address}/#{made.key}"
    local = f"http://{here}/#{made.key}" if is_loopback(split(here)[0]) else ""
    if json:
        row = {"link": link, "local_link": local, "key": made.key, "ends_s": made.ends_s}
        print_json(row | {"fingerprint": made.fingerprint})
        return
    echo(local or link)
    if local:
        echo(f"from other hosts: {link}", err=True)
    if made.fingerprint:
        echo(
            "over https a browser warns once, as the broker made the certificate itself; the "
            f"right one has the SHA-256 {made.fingerprint}",
            err=True,
        )
    echo("who has the link can look, and change nothing; see docs/deploy.md", err=True)


def _show_host(here: Mapping[str, Any]) -> None:
    if here["paused_since"]:
        echo(f"this host is paused since {here['paused_since']}: shoal unpause ends it")
    for peer in here["peers"]:
        if peer["state"] == "ended":
            continue
        moved = f"{peer['moved_bytes'] / 1e9:.2f} GB moved in {peer['month']}"
        if peer["monthly_bytes"]:
            moved += f", all peers here may {peer['monthly_bytes'] / 1e9:.4g} GB"
        echo(f"here: {peer['name']} ({peer['peer']}) {peer['state']}; {moved}")


def _public_row(public: PublicAddress) -> dict[str, str]:
    keys = ("address", "confirmed_by", "tried_by", "problem")
    return {key: getattr(public, key) for key in keys}


def public_line(public: PublicAddress) -> str:
    """For people: whether the broker's public address is right."""
    from ..client.show.text import safe

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


def _looking(broker: str | None, mine: bool = False) -> Client:
    """A client with the user's right; with `mine`, or where there is none, with that of a peer of
    this host, which sees its own part."""
    from .. import client as clients

    if not mine:
        try:
            return clients.connect(broker)
        except clients.ClientError:
            if (found := lent(broker)) is None:
                raise
    elif (found := lent(broker)) is None:
        complain("no peer of this host has a certificate: expected `shoal join` before --mine")
        raise typer.Exit(WRONG)
    client = clients.connect(*found)
    echo(f"as {found[1].party.subject} of this host, which sees its own part", err=True)
    return client


def _share_row(share: PeerShare) -> dict[str, Any]:
    return {
        "peer": share.peer,
        "run": share.run or "all before",
        "name": share.name,
        "samples": share.samples,
        "sent_bytes": share.sent_bytes,
        "hours": share.seconds / 3600,
    }


def _describe(
    broker: str | None,
    json: bool,
    *,
    peers: bool,
    runs: bool,
    links: bool = False,
    mine: bool = False,
    more: Mapping[str, Any] | None = None,
) -> None:
    with _looking(broker, mine) as client:
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
            "hours": p.profile.hours,
            "stay_s": p.profile.stay_s,
            "stays": f"{p.profile.stay_s / 3600:.3g} h" if p.profile.stay_s else "",
            "monthly_bytes": p.profile.monthly_bytes,
            "data": " ".join(d.name for d in p.profile.data),
            "closed": p.closed.text,
        }
        for p in found.peers
    ]
    run_rows = [state_row(state) for state in found.runs]
    share_rows = [_share_row(share) for share in found.shares]
    link_rows = [_link_row(link) for link in found.links] if links else []
    if json:
        parts = {"peers": peer_rows} if peers else {}
        rows = {"runs": run_rows} if runs else {}
        public = {"public": _public_row(found.public)} if peers and found.HasField("public") else {}
        carried = {"links": link_rows} if links else {}
        given = {"shares": share_rows} if share_rows or mine else {}
        print_json({**(more or {}), **parts, **rows, **carried, **given, **public})
        return
    from ..client.show.progress import print_table

    if peers and runs and found.HasField("public"):
        echo(public_line(found.public))
    if peers:
        title = f"{count_of(len(peer_rows), 'peer')} at {client.address}"
        print_table(title, (*PEER_COLUMNS, *_used(peer_rows)), peer_rows)
    if links:
        shown = [_shown_link(row) for row in link_rows]
        print_table(count_of(len(shown), "measured link"), LINK_COLUMNS, shown)
    if runs:
        shown_runs = [row | _apart(row) | _left(row) for row in run_rows]
        columns = list(RUN_COLUMNS)
        if any(row["apart"] for row in shown_runs):
            columns[5:5] = ROUNDS_COLUMNS
        if any(row["left"] for row in shown_runs):
            columns[-1:-1] = ["left"]
        title = f"{count_of(len(run_rows), 'run')} at {client.address}"
        print_table(title, columns, shown_runs)
    if share_rows:
        from ..client.show.text import size_text, time_text

        given_rows = [
            row | {"sent": size_text(row["sent_bytes"]), "time": time_text(3600 * row["hours"])}
            for row in share_rows
        ]
        print_table(f"what {share_rows[0]['peer']} has given", SHARE_COLUMNS, given_rows)


def _apart(row: Mapping[str, Any]) -> dict[str, str]:
    """For people: its round, and how its replicas stand; "": it has but one."""
    replicas = row["replicas"]
    if len(replicas) < 2:
        return {"round": "", "apart": ""}
    stand = [f"{r['phase']} at its step {r['step']}" for r in replicas]
    named = "; ".join(f"replica {i} {text}" for i, text in enumerate(stand[:MOST_REPLICAS]))
    more = len(replicas) - MOST_REPLICAS
    return {"round": str(row["round"]), "apart": f"{named}; and {more} more" if more > 0 else named}


def _left(row: Mapping[str, Any]) -> dict[str, str]:
    """For people: how long it is about to go on; "": not known."""
    from ..client.show.plan_lines import long_time_text

    return {"left": long_time_text(row["left_s"]) if row["left_s"] else ""}


def _link_row(link: LinkState) -> dict[str, Any]:
    """What a link was measured to carry; a burst of zeros: it lets nothing through faster."""
    keys = ("source", "destination", "latency_s", "bytes_per_s", "burst_bytes_per_s", "burst_bytes")
    return {**{key: getattr(link, key) for key in keys}, "age_s": round(link.age_s, 1)}


def _shown_link(row: Mapping[str, Any]) -> dict[str, str]:
    """Return a link's rate for people; "": not measured, or none."""
    from ..client.show.text import safe, size_text, time_text

    sustained, burst = row["bytes_per_s"], row["burst_bytes_per_s"]
    fast = f"{size_text(row['burst_bytes'])} at {size_text(burst)}/s"
    return {
        "from": safe(row["source"]),
        "to": safe(row["destination"]),
        "latency": time_text(row["latency_s"]),
        "sustained": f"{size_text(sustained)}/s" if sustained else "",
        "burst": fast if burst else "",
        "age": time_text(row["age_s"]),
    }


def _used(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [column for column in OWNERS_COLUMNS if any(row[column] for row in rows)]
