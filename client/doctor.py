"""What works between this host and a broker, what does not, and what to do: in the order in which
joining needs it. Nothing is changed, and no use of a token is taken."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from ..net.address import address_of
from ..net.grpc_quirks import in_words
from ..net.identity.authority import utc
from ..net.identity.credential import Credential, CredentialError
from ..net.identity.diagnosis import (
    VANISH,
    handshake_problem,
    packets_problem,
    why_no_tls,
)
from ..net.identity.enroll import (
    SKEW_S,
    BrokerAwayError,
    Shown,
    channel_options,
    shown_by,
    validity_problem,
)
from ..net.identity.token import Token, TokenError, fingerprint_of_pem
from ..net.local import local_address, split
from ..net.printable import printable
from ..net.web.proxy import ProxyError, ProxyRefusedError, dial, proxy_for
from ..peer.host.host import Host
from ..proto.broker_pb2 import BlobQuery
from ..proto.broker_pb2_grpc import BlobsStub
from ..proto.common_pb2 import BlobRef

__all__ = ["Finding", "examine"]

_PATIENCE_S = 5.0
_ASKED, _SIZE_S = 4096, 20.0
"""Blobs of the largest question, of 66 bytes each, and how long its answer may take."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    how: Literal["ok", "note", "wrong"]
    text: str
    """What was found, and for something wrong what to do."""


def examine(
    address: str, token: str, folders: list[Path], owned: Path | None = None
) -> Iterator[Finding]:
    """Looks at one thing after the other; ends early where nothing further can be seen. `folders`:
    of the credential that this user has for the broker, then of those of this host's peers;
    `owned`: where the owner of this host pauses it. Raises ValueError when the address is none."""
    address = address_of(address)
    host, port = split(address)
    if owned is not None:
        yield from _owner(Host(owned))
    try:
        proxy = proxy_for(address)
    except ProxyError as error:
        yield Finding("proxy", "wrong", str(error))
        return
    if proxy is not None:  # which also looks the name up
        text = f"{proxy} of the environment is the way to {host}; no_proxy would name exceptions"
        yield Finding("proxy", "note", text)
    else:
        name = _name(host, port)
        yield name
        if name.how == "wrong":
            return
    reached = _port(host, port)
    yield reached
    if reached.how == "wrong":
        return
    try:
        shown = shown_by(address)
    except BrokerAwayError as error:
        yield Finding("broker", "wrong", str(error))
        return
    fingerprint = fingerprint_of_pem(shown.authority)
    yield Finding("broker", "ok", f"authority {fingerprint.hex()[:16]}…")
    yield _clock(shown)
    yield _tls(address, shown)
    yield _packets(address)
    if token:
        yield _token(token, fingerprint, address)
    yield from _credentials(address, shown, folders, token)
    yield _reachable(host)


def _credentials(address: str, shown: Shown, folders: list[Path], token: str) -> Iterator[Finding]:
    """Look at the credentials for the broker with this authority; the first folder is of this very
    address."""
    found_any = False
    for i, folder in enumerate(folders):
        try:
            credential = Credential.load(folder)
        except CredentialError as error:
            found_any = True
            yield Finding("credential", "wrong", str(error))
            continue
        if credential is None:
            continue
        if credential.authority == shown.authority:
            found_any = True
            yield from _credential(credential, address, folder)
        elif i == 0:  # this user's for this very address
            found_any = True
            text = (
                f"{credential.party} in {folder} is of another authority than answers there: the "
                "broker was set up anew, or it is another one; log in again with a new token"
            )
            yield Finding("credential", "wrong", text)
    if not found_any and not token:
        text = "this host has none for the broker: join or log in with a token first"
        yield Finding("credential", "note", text)


def _owner(host: Host) -> Iterator[Finding]:
    """What its owner has set: peers that take part in nothing look as if something were wrong."""
    since = host.paused_since
    if since is not None:
        text = f"this host is paused since {since:%Y-%m-%d %H:%M}: `shoal unpause` ends it"
        yield Finding("owner", "note", text)
        return
    for one in host.standings():
        if one.closed and not one.ended:
            yield Finding("owner", "note", f"{one.name} is closed: {one.closed}")


def _name(host: str, port: int) -> Finding:
    try:
        found = {a[4][0] for a in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        text = f"{host} is not known ({error}): is it spelled right, is the network up?"
        return Finding("name", "wrong", text)
    return Finding("name", "ok", f"{host} is {', '.join(sorted(map(str, found)))}")


def _port(host: str, port: int) -> Finding:
    """By the way that everything takes later, through the proxy if there is one."""
    began = time.monotonic()
    try:
        with dial(host, port, _PATIENCE_S):
            took_ms = 1e3 * (time.monotonic() - began)
        return Finding("port", "ok", f"{port} answers within {took_ms:.0f} ms")
    except ProxyRefusedError as error:
        return Finding("proxy", "wrong", str(error))
    except OSError as error:
        why = "a firewall may be in between" if isinstance(error, TimeoutError) else str(error)
        text = f"{port} does not answer ({why}): is `shoal broker` running, is the port forwarded?"
        return Finding("port", "wrong", text)


def _clock(shown: Shown) -> Finding:
    ahead_s = shown.ahead_s
    text = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the broker's"
    if abs(ahead_s) < 2:  # the broker's answer knows whole seconds
        text = "agrees with the broker's"
    if abs(ahead_s) <= SKEW_S:
        return Finding("clock", "ok", text)
    more = f"at most {SKEW_S:.0f} s are taken: set the wrong one (`timedatectl set-ntp true`)"
    return Finding("clock", "wrong", f"{text}; {more}")


def _tls(address: str, shown: Shown) -> Finding:
    """By a handshake, in which the broker proves to be who its authority says."""
    problem = validity_problem(shown.authority, utc(time.time()), "the broker's authority")
    if problem := problem or handshake_problem(address, shown.authority):
        return Finding("tls", "wrong", problem)
    return Finding("tls", "ok", "a handshake is whole, and it is the broker")


def _packets(address: str) -> Finding:
    problem = packets_problem(address)
    text = problem or "full packets pass, there and back"
    return Finding("packets", "wrong" if problem else "ok", text)


def _token(text: str, fingerprint: bytes, address: str) -> Finding:
    try:
        token = Token.parse(text)
    except TokenError as error:
        return Finding("token", "wrong", str(error))
    if token.fingerprint != fingerprint:
        more = f"{address} did not give it out: check the address, or ask for a new line"
        return Finding("token", "wrong", more)
    return Finding("token", "ok", "whole, and of this broker; its uses are not seen")


def _credential(credential: Credential, address: str, folder: Path) -> Iterator[Finding]:
    """Also whether the broker takes it, and whether a message of full size comes through, in both
    directions."""
    who = f"{credential.party} in {folder}"
    if problem := validity_problem(credential.certificate, utc(time.time()), who):
        yield Finding("credential", "wrong", problem)
        return
    options = channel_options(address)
    with grpc.secure_channel(address, credential.for_channel(), options=options) as channel:
        stub = BlobsStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            grpc.channel_ready_future(channel).result(_PATIENCE_S)
            stub.Have(BlobQuery(), timeout=_PATIENCE_S)  # asks for nothing
        except grpc.FutureTimeoutError:
            why = why_no_tls(address, credential) or "does a proxy break it up?"
            text = f"{who}: no TLS connection within {_PATIENCE_S:.0f} s; {why}"
            yield Finding("credential", "wrong", text)
            return
        except grpc.RpcError as error:
            yield Finding("credential", "wrong", f"{who} is refused: {_said(error)}")
            return
        text = f"{who}, until {credential.ends:%Y-%m-%d %H:%M} UTC"
        yield Finding("credential", "ok", text)
        yield _size(stub)


def _size(stub: BlobsStub) -> Finding:
    """Whether many full packets pass, there and back: the question comes back in the answer."""
    asked = BlobQuery(blobs=[BlobRef(hash=f"{i:064x}") for i in range(_ASKED)])
    try:
        stub.Have(asked, timeout=_SIZE_S)
    except grpc.RpcError as error:
        late = f"{asked.ByteSize()} bytes do not come through within {_SIZE_S:.0f} s"
        return Finding("size", "wrong", f"{late} ({_said(error)}): {VANISH}")
    return Finding("size", "ok", f"{asked.ByteSize()} bytes pass, there and back")


def _said(error: grpc.RpcError) -> str:
    """What an answer says, for people."""
    return in_words(printable((isinstance(error, grpc.Call) and error.details()) or str(error)))


def _reachable(host: str) -> Finding:
    mine = local_address(host)
    text = (
        f"packets leave from {mine}; whether other peers can dial that, the broker tries when a "
        "peer joins (`shoal peers` shows it); who cannot be dialled is reached by relay"
    )
    return Finding("address", "note", text)
