"""Who may come in, who must go, and what stands in somebody's way."""

from __future__ import annotations

import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from ..job.encodings import decoded
from ..net.printable import printable
from ..net.surroundings import user_path
from .base import FAILED, REFUSED, UNREACHABLE, WRONG, Broker, Json, app, echo, print_json, verb

__all__ = ["Token", "TokenFile", "doctor", "invite", "kick", "read_token"]

# A token from the command line, from a file, from standard input, or from the environment.

Token = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="From the line of the broker; default: SHOAL_TOKEN."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token, or - for standard input: no list of processes has it."),
]


def read_token(token: str | None, file: Path | None) -> str:
    """The token that was given, in whichever way; empty when none was. It is taken out of the
    environment, so that no process that is started from here has it. Raises ValueError when two
    were given, or for a file without one, OSError for a file that cannot be read."""
    inherited = os.environ.pop("SHOAL_TOKEN", "")
    if token and file:
        raise ChoiceError("--token and --token-file: expected one of them")
    if file is None:
        return bare_token(token or inherited)
    try:
        data = sys.stdin.buffer.readline() if str(file) == "-" else file.read_bytes()
        found = bare_token(decoded(data))
    except ValueError as error:
        raise ChoiceError(f"{file} {error}") from None
    if not found:
        raise ChoiceError(f"{file} is empty: expected a token in it (`shoal invite`)")
    return found


def bare_token(text: str) -> str:
    """A token without what came along when it was copied: blanks, line ends, marks that cannot be
    seen, quotes, or the line or assignment that it stood in."""
    found = next((word for word in text.split() if "shl" in word.lower()), text)
    return found[max(0, found.lower().find("shl")) :].strip(_AROUND)


_AROUND = " \t\r\n\"'`\ufeff\u200b\u00a0\u2018\u2019\u201c\u201d\u00ab\u00bb"


class ChoiceError(ValueError):
    """Two were given where one is expected, or a file without a token."""


_MARKS = {"ok": "ok   ", "note": "     ", "wrong": "WRONG"}

_CODES = {
    **dict.fromkeys(("name", "proxy", "port", "broker", "tls", "packets", "size"), UNREACHABLE),
    "token": WRONG,
    "credential": REFUSED,
}
"""Exit codes by what is wrong."""


class As(Enum):
    """What a token admits as."""

    PEER = "peer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"


@app.command()
@verb
def invite(
    role: Annotated[As, typer.Option(help="What it admits as.")] = As.PEER,
    uses: Annotated[int, typer.Option(min=1, help="How many it admits.")] = 1,
    lasts: Annotated[
        str, typer.Option("--for", help="How long it may be used, e.g. 30min, 24h.")
    ] = "24h",
    broker: Broker = None,
    json: Json = False,
) -> None:
    """Make a token to give to somebody. Example: shoal invite --role submitter --for 24h"""
    from .. import client as clients
    from ..job.units import Duration

    with clients.connect(broker) as client:
        made = client.invite(role.value, uses, float(Duration(lasts)))
    if json:
        found = {"swarm": made.swarm, "ways": list(made.ways)} if made.swarm else {}
        row = {"token": made.token, "role": role.value, "uses": uses, "ends_s": made.ends_s}
        print_json(row | found)
        return
    how = "join" if role is As.PEER else "login"
    # On the broker's own host it is 127.0.0.1 to us, and something else to whom this is for.
    address = broker or made.address or client.address
    flags = [f"--swarm {made.swarm}"] if made.swarm and role is As.PEER else []
    flags += [f"--bootstrap {way}" for way in made.ways if flags]
    echo(" ".join([f"shoal {how} {address}", *flags, f"--token {made.token}"]))


@app.command()
@verb
def kick(
    subject: Annotated[str, typer.Argument(metavar="PEER", help="Its id, as in shoal peers.")],
    broker: Broker = None,
) -> None:
    """Refuse a peer or a person from now on, for good. Example: shoal kick home-1-gaydtlnz"""
    from .. import client as clients

    with clients.connect(broker) as client:
        role = client.kick(subject)
    echo(
        f"{subject} ({role}) is out; the tokens that it used or gave out are closed: others who "
        "were to join with them need a new one (`shoal invite`)"
    )


@app.command()
@verb
def doctor(
    address: Annotated[
        str | None, typer.Argument(metavar="HOST:PORT", help="Where the broker is, as --broker.")
    ] = None,
    broker: Broker = None,
    token: Token = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Show what works between this host and a broker. Example: shoal doctor HOST:7077"""
    from dataclasses import asdict

    from ..client.access import credential_folder, find_address
    from ..client.doctor import examine
    from ..peer.host.config import DEFAULT_STATE

    if address and broker:
        raise ChoiceError(f"{address} and --broker {broker}: expected one of them")
    address = find_address(address or broker)
    peers = sorted(p.parent for p in user_path(DEFAULT_STATE).glob("*/*/certificate.pem"))
    findings = []
    folders = [credential_folder(address), *peers]
    for found in examine(address, read_token(token, token_file), folders, user_path(DEFAULT_STATE)):
        findings.append(found)
        if not json:
            echo(f"{_MARKS[found.how]} {found.what:<11} {printable(found.text)}")
    if json:
        print_json([asdict(found) for found in findings])
    wrong = [found.what for found in findings if found.how == "wrong"]
    if wrong:
        raise typer.Exit(_CODES.get(wrong[0], FAILED))
