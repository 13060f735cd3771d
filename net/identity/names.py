"""How subjects and roles are written into certificates, and read from a connection.

A certificate names its subject twice: as `shoal:ROLE:SUBJECT` (a URI, for who reads it) and as a
DNS name made from the subject's hash (for TLS, which compares host names without regard to case and
knows no `_`). Who dials a peer demands that name of the other end, so nobody can answer in
another's place, whatever the address leads to.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

__all__ = [
    "BROKER_NAME",
    "DOOR_NAME",
    "OWNER",
    "SUBJECT",
    "Party",
    "PartyRole",
    "dns_name",
    "party_of",
    "uri_of",
]

BROKER_NAME = "broker.shoal"
"""What a broker proves to be, whatever its address is."""
DOOR_NAME = "door.shoal"
"""The same broker where it asks for no certificate: only joining is possible there."""
OWNER = "local"
"""The operator who runs the broker, on its own host; whoever joins gets a longer subject."""
SUBJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
"""A peer's id or a person's name."""
_MOST_URIS = 8


class PartyRole(StrEnum):
    """What a certificate allows."""

    BROKER = "broker"
    PEER = "peer"
    SUBMITTER = "submitter"
    OPERATOR = "operator"


class Party(NamedTuple):
    """Party at the other end of a connection, proven by its certificate."""

    role: PartyRole
    subject: str

    def __str__(self) -> str:
        return f"{self.role.value} {self.subject}"


def dns_name(role: PartyRole, subject: str) -> str:
    """The host name that a party's certificate proves."""
    if role is PartyRole.BROKER:
        return BROKER_NAME
    digest = hashlib.sha256(f"{role.value}:{subject}".encode()).digest()
    return f"{base64.b32encode(digest[:20]).decode().lower()}.{role.value}.shoal"


def uri_of(party: Party) -> str:
    return f"shoal:{party.role.value}:{party.subject}"


def party_of(properties: Mapping[str, Iterable[bytes]]) -> Party | None:
    """The party in gRPC's `auth_context()`; None when it showed no certificate, or one without a
    subject of ours. gRPC has checked the certificate against the authority by then."""
    found = [u for u, _ in zip(properties.get("peer_uri", ()), range(_MOST_URIS), strict=False)]
    if len(found) != 1:
        return None
    scheme, _, rest = found[0].decode("utf-8", "replace").partition(":")
    role, _, subject = rest.partition(":")
    if scheme != "shoal" or role not in set(PartyRole) or not SUBJECT.fullmatch(subject):
        return None
    return Party(PartyRole(role), subject)
