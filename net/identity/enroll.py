"""The first contact with a broker: from a token to a credential, and its renewal.

1. The authority's certificate is fetched in the clear; its SHA-256 must be the token's fingerprint.
   So whoever answers in the broker's place is found out before anything is said.
2. The clocks are compared, as certificates go by them.
3. Over TLS that believes this authority alone, the secret and a signing request are sent; the
   certificate that comes back is kept beside the key, which never leaves this host.

All calls block.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import NamedTuple

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from ...proto.admission_pb2 import Admitted, JoinRequest, RenewRequest
from ...proto.admission_pb2_grpc import AdmissionStub
from ..grpc_quirks import in_words
from ..local import split
from ..printable import printable
from ..web.proxy import ProxyRefusedError, dial, proxy_options
from .authority import utc
from .credential import Credential, load_key, pem_of, request_of
from .names import BROKER_NAME, DOOR_NAME
from .token import Token, fingerprint_of_pem

__all__ = [
    "BrokerAwayError",
    "EnrollError",
    "NotAdmittedError",
    "NotNowError",
    "Shown",
    "channel_options",
    "channel_to",
    "enroll",
    "renew",
    "shown_by",
]

PROTOCOL = 1
"""The version of joining that this shoal speaks."""
_CALL_S = 15.0
_LARGEST_CERTIFICATE = 16 * 1024
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Answers that are about the request itself, and so would be given again. The cause of any other
one lies at the broker or on the way, and may pass."""
SKEW_S = 300.0
"""Clocks may differ by so much."""


class EnrollError(Exception):
    """Joining did not work; the message says why and what to do."""


class BrokerAwayError(EnrollError):
    """Nobody answers there, or nobody who is a broker with identities. Worth another try."""


class NotNowError(BrokerAwayError):
    """The broker answers, and cannot admit anybody now: its disk is full, or too many call."""


class NotAdmittedError(EnrollError):
    """The broker, or this host's own check, says no. Trying again changes nothing."""


class Shown(NamedTuple):
    """What a broker shows to anybody."""

    authority: bytes
    """Its certificate, PEM."""
    ahead_s: float
    """By how much this host's clock is ahead of the broker's, seconds; exact to one."""


def channel_options(address: str, name: str = BROKER_NAME) -> list[tuple[str, int | str]]:
    """For a TLS channel to HOST:PORT: who answers proves its name, wherever it lives, and whatever
    proxy is in between. Raises ProxyError."""
    return [("grpc.ssl_target_name_override", name), *proxy_options(address)]


def channel_to(
    address: str,
    credential: Credential | None,
    options: Sequence[tuple[str, int]] = (),
    name: str = BROKER_NAME,
) -> grpc.aio.Channel:
    """A channel to HOST:PORT, where who answers proves its name; without a credential it is in
    plain text. Raises ProxyError."""
    if credential is None:
        return grpc.aio.insecure_channel(address, options=(*options, *proxy_options(address)))
    both = (*options, *channel_options(address, name))
    return grpc.aio.secure_channel(address, credential.for_channel(), options=both)


def shown_by(address: str, within_s: float = _CALL_S) -> Shown:
    """Asks the broker at HOST:PORT for its authority's certificate, which is not believed by that.
    Raises BrokerAwayError, ProxyError."""
    host, port = split(address)
    try:
        connection = dial(host, port, within_s)
    except OSError as error:
        raise BrokerAwayError(_unreachable(address, error)) from None
    asked = http.client.HTTPConnection(host, port)
    asked.sock = connection
    try:
        asked.request("GET", "/authority.pem")
        answer = asked.getresponse()
        if answer.status != 200:
            raise _no_broker(address, f"it answers {answer.status}")
        pem, date = answer.read(_LARGEST_CERTIFICATE), answer.headers["Date"]
        x509.load_pem_x509_certificate(pem)
        ahead_s = time.time() - parsedate_to_datetime(date).timestamp()
    except TimeoutError:
        raise BrokerAwayError(
            f"{address} lets itself be dialled, and no answer comes for {within_s:.0f} s: it is no "
            "broker, it stands still, or packets vanish on the way"
        ) from None
    except (http.client.HTTPException, OSError, ValueError, TypeError):
        raise _no_broker(address, "what answers there speaks otherwise") from None
    finally:
        asked.close()
    return Shown(pem, ahead_s)


def _no_broker(address: str, what: str) -> BrokerAwayError:
    return BrokerAwayError(
        f"no broker with identities at {address}: {what}; is the port right? A broker that was "
        "started with --insecure is joined with --insecure"
    )


def _unreachable(address: str, reason: OSError) -> str:
    if isinstance(reason, ProxyRefusedError):
        return str(reason)
    if isinstance(reason, socket.gaierror):
        return f"the name in {address} is not known: is it spelled right, is the network up?"
    if isinstance(reason, ConnectionRefusedError):
        return f"nobody listens at {address}: is `shoal broker` running there, on that port?"
    if isinstance(reason, TimeoutError):
        return f"{address} does not answer: a firewall may be in between, or the host is off"
    return f"{address} cannot be reached: {reason}"


def check_clock(ahead_s: float) -> None:
    """Raises NotAdmittedError when this host's clock is not the broker's."""
    if abs(ahead_s) > SKEW_S:
        raise NotAdmittedError(clock_text(ahead_s))


def clock_text(ahead_s: float) -> str:
    """What a difference of clocks means, for people."""
    return (
        f"this host's clock is {_span(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} the "
        "broker's, and certificates go by the clock: set the wrong one (most systems: "
        "`timedatectl set-ntp true`)"
    )


def validity_problem(certificate: bytes, now: datetime, whose: str) -> str:
    """Why a certificate (PEM) does not hold at a time, and what to do; empty: it does. `whose`:
    what it is, for people."""
    found = x509.load_pem_x509_certificate(certificate)
    if now < found.not_valid_before_utc:
        return (
            f"{whose} is not valid before {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and it "
            f"is {now:%Y-%m-%d %H:%M} by this host's clock: if that is right, it was made by a "
            "clock that was ahead, and has to be made anew"
        )
    if now >= found.not_valid_after_utc:
        return (
            f"{whose} ended on {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and it is "
            f"{now:%Y-%m-%d %H:%M} by this host's clock: if that is right, a new one is needed"
        )
    return ""


def enroll(address: str, token: Token, folder: Path, name: str, *, via: str = "") -> Credential:
    """Joins with a token; the credential is in the folder afterwards. `via` is dialled in the place
    of the address. Raises BrokerAwayError, NotAdmittedError, CredentialError, OSError."""
    dialled = via or address
    shown = shown_by(dialled)
    if fingerprint_of_pem(shown.authority) != token.fingerprint:
        raise NotAdmittedError(
            f"{address} is not the broker that gave out this token: its authority is another one; "
            "check the address, and ask the operator for a new line if the broker was set up anew"
        )
    check_clock(shown.ahead_s)
    whose = f"the certificate of the authority at {address}"
    if problem := validity_problem(shown.authority, utc(time.time()), whose):
        raise NotAdmittedError(f"{problem} by its operator (authority.crt in the broker's folder)")
    key = load_key(folder)
    request = JoinRequest(
        version=PROTOCOL,
        invitation=token.id,
        secret=token.secret,
        request=request_of(key),
        name=name,
    )
    credentials = grpc.ssl_channel_credentials(shown.authority)
    admitted = _call(dialled, credentials, DOOR_NAME, "Join", request)
    credential = Credential(pem_of(key), admitted.certificate, shown.authority)
    if credential.party.subject != admitted.subject:
        raise NotAdmittedError(f"{address} sent the certificate of {credential.party}")
    credential.save(folder)
    return credential


def renew(address: str, credential: Credential, folder: Path | None = None) -> Credential:
    """Return the identity with a later end, in the folder afterwards. Raises as `enroll`."""
    key = serialization.load_pem_private_key(credential.key, None)
    request = RenewRequest(request=request_of(key))  # type: ignore[arg-type]  # load_key checked it
    admitted = _call(address, credential.for_channel(), BROKER_NAME, "Renew", request)
    renewed = Credential(credential.key, admitted.certificate, credential.authority)
    if renewed.party != credential.party:
        raise NotAdmittedError(f"{address} renewed {credential.party} as {renewed.party}")
    if folder is not None:
        renewed.save(folder)
    return renewed


def _call(
    address: str,
    credentials: grpc.ChannelCredentials,
    name: str,
    method: str,
    request: JoinRequest | RenewRequest,
) -> Admitted:
    options: Sequence[tuple[str, int | str]] = channel_options(address, name)
    with grpc.secure_channel(address, credentials, options=options) as channel:
        stub = AdmissionStub(channel)  # type: ignore[no-untyped-call]  # generated
        try:
            admitted: Admitted = getattr(stub, method)(request, timeout=_CALL_S)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
            why = printable((error.details() if isinstance(error, grpc.Call) else "") or str(error))
            if code in _AWAY:
                away = f"the broker at {address} did not answer: {in_words(why)}"
                raise BrokerAwayError(away) from None
            if code not in FINAL:
                raise NotNowError(f"the broker at {address} admits nobody now: {why}") from None
            raise NotAdmittedError(f"the broker at {address} refused: {why}") from None
    return admitted


def _span(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.0f} s"
