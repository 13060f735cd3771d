"""What a broker says of its whereabouts, signed by its authority; which of several to believe.

A directory is a place where anybody may leave anything. So a record proves itself: it carries the
authority's certificate, whose SHA-256 stands in every token, and the authority's signature.

- A record of another authority, of another swarm, changed, cut, or past its end is none.
- Of those that are left, the one that was issued last counts: an old one that is put there again
  has no effect beside it, and ends LASTS_S after it was made.
- Each record is issued later than all that its broker has seen, whatever the clocks of hosts say,
  so a broker that moved to a host with a slow clock is believed.

Nothing here knows a clock: `now_s` is an argument, in seconds since 1970.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Protocol

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError

from ...proto.discovery_pb2 import SignedWhereabouts, Whereabouts
from ..identity.authority import Authority
from ..identity.token import fingerprint_of
from ..local import split

__all__ = [
    "LASTS_S",
    "MOST_BYTES",
    "MOST_NODES",
    "YOUNG_S",
    "Claim",
    "Directory",
    "DirectoryError",
    "DiscoveryRecordError",
    "check_multiaddr",
    "check_swarm",
    "endpoint_of",
    "multiaddr",
    "newest",
    "read",
    "sign",
]

LASTS_S = 3600.0
"""A record is good for so long: a swarm without its broker is forgotten within the hour."""
AHEAD_S = 600.0
"""Clocks may differ by so much (twice what joining allows: two hosts with the broker between)."""
YOUNG_S = 120.0
"""Of two brokers with one identity the one that has run for longer steps aside."""
MOST_NODES = 8
MOST_BYTES = 4096
"""A record has under 2 KiB; a DHT is erratic from 32 KiB on."""

_SWARM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_MULTIADDR = re.compile(
    r"/(ip4|ip6|dns|dns4|dns6)/([0-9A-Za-z.:-]{1,253})/tcp/(\d{1,5})/p2p/([1-9A-HJ-NP-Za-km-z]{32,64})",
    re.ASCII,
)
_STATEMENT = b"shoal whereabouts 1\n"


class DiscoveryRecordError(ValueError):
    """Bytes that say nothing of the broker that is looked for; the message says why."""


def check_swarm(name: str) -> str:
    """The name, when it is one. Raises ValueError."""
    if not _SWARM.fullmatch(name):
        raise ValueError(
            f'"{name}" is no name of a swarm: expected 1 to 64 letters, digits, "_", "." and "-", '
            "a letter or digit first"
        )
    return name


def check_multiaddr(text: str) -> str:
    """The text, when it says where a directory can be entered. Raises ValueError."""
    found = _MULTIADDR.fullmatch(text)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ValueError(
            f'"{text[:200]}" is no way into a swarm: expected what the broker printed, '
            "/ip4/ADDRESS/tcp/PORT/p2p/ID or /dns/NAME/tcp/PORT/p2p/ID"
        )
    return text


def endpoint_of(text: str) -> tuple[str, int]:
    """Host and port of a multiaddr. Raises ValueError."""
    found = _MULTIADDR.fullmatch(check_multiaddr(text))
    assert found is not None
    return found[2], int(found[3])


def multiaddr(host: str, port: int, node: str) -> str:
    """Where the node of this id is reached. Raises ValueError."""
    kind = "ip6" if ":" in host else "ip4" if re.fullmatch(r"[0-9.]+", host) else "dns"
    return check_multiaddr(f"/{kind}/{host}/tcp/{port}/p2p/{node}")


def sign(said: Whereabouts, authority: Authority) -> bytes:
    """The record, to be left in a directory. Raises ValueError when it is too large."""
    body = said.SerializeToString(deterministic=True)
    signature = authority.attest(_STATEMENT + body)
    made = SignedWhereabouts(whereabouts=body, authority=authority.der, signature=signature)
    data = made.SerializeToString(deterministic=True)
    if len(data) > MOST_BYTES:
        raise ValueError(f"the record has {len(data)} bytes: expected at most {MOST_BYTES}")
    return data


def read(data: bytes, swarm: str, fingerprint: bytes, now_s: float) -> Whereabouts:
    """What the authority of this fingerprint says of its broker in this swarm. Raises
    DiscoveryRecordError."""
    if len(data) > MOST_BYTES:
        raise DiscoveryRecordError(f"{len(data)} bytes: expected at most {MOST_BYTES}")
    signed, said = SignedWhereabouts(), Whereabouts()
    try:
        signed.ParseFromString(data)
        said.ParseFromString(signed.whereabouts)
    except DecodeError as error:
        raise DiscoveryRecordError(f"no record: {error}") from None
    if fingerprint_of(signed.authority) != fingerprint:
        raise DiscoveryRecordError("another authority's record")
    try:
        key = x509.load_der_x509_certificate(signed.authority).public_key()
        assert isinstance(key, Ed25519PublicKey), "authorities have no other keys"
        key.verify(signed.signature, _STATEMENT + signed.whereabouts)
    except InvalidSignature:
        raise DiscoveryRecordError("not signed by its authority") from None
    _check(said, swarm, now_s)
    return said


def _check(said: Whereabouts, swarm: str, now_s: float) -> None:
    """What even the authority may not say. Raises DiscoveryRecordError."""
    if said.swarm != swarm:
        raise DiscoveryRecordError(f"a record of swarm {said.swarm[:64]!r}")
    if not said.issued_s <= now_s + AHEAD_S:  # so that a NaN fails too
        raise DiscoveryRecordError("a record of the future")
    if not now_s < said.ends_s <= said.issued_s + LASTS_S:
        raise DiscoveryRecordError("a record that has ended")
    if len(said.nodes) > MOST_NODES:
        raise DiscoveryRecordError(f"{len(said.nodes)} nodes: expected at most {MOST_NODES}")
    try:
        split(said.address)
        for node in said.nodes:
            check_multiaddr(node)
    except ValueError as error:
        raise DiscoveryRecordError(str(error)) from None


def newest(
    candidates: Iterable[bytes], swarm: str, fingerprint: bytes, now_s: float
) -> Whereabouts | None:
    """What to believe of all that was found: the one that was issued last."""
    found = []
    for data in candidates:
        try:
            found.append(read(data, swarm, fingerprint, now_s))
        except DiscoveryRecordError:
            continue  # anybody may leave anything
    return max(found, key=lambda said: said.issued_s, default=None)


class Claim:
    """What one start of a broker says, one record after the other. `boot`: its random id.

    A record of another start that was issued later (a clock that was ahead, most likely, of a
    broker that is gone) is outbid, once. Only one that lives outbids again: then two brokers with
    one identity run, and the one that started first steps aside while the other's record holds.
    """

    def __init__(self, swarm: str, boot: str) -> None:
        self.swarm, self.boot = swarm, boot
        self.aside = False
        self._issued_s = float("-inf")
        self._met: dict[str, float] = {}  # other starts, and when their last record was issued

    def next(
        self,
        seen: Whereabouts | None,
        address: str,
        nodes: Sequence[str],
        *,
        now_s: float,
        age_s: float,
    ) -> Whereabouts | None:
        """The next record, issued later than what was seen and than its own last one; None while
        another broker has taken the name over. `age_s`: seconds since this broker started."""
        if seen is not None and seen.boot != self.boot and self._yields(seen, age_s):
            return None
        self.aside = False
        before_s = max(self._issued_s, seen.issued_s if seen is not None else float("-inf"))
        self._issued_s = max(now_s, before_s + 1e-3)
        return Whereabouts(
            swarm=self.swarm,
            address=address,
            nodes=nodes[:MOST_NODES],
            boot=self.boot,
            issued_s=self._issued_s,
            ends_s=self._issued_s + LASTS_S,
        )

    def _yields(self, seen: Whereabouts, age_s: float) -> bool:
        if self.aside:
            return True
        before_s = self._met.get(seen.boot)
        self._met[seen.boot] = seen.issued_s
        lives = before_s is not None and self._issued_s > before_s and seen.issued_s > before_s
        self.aside = lives and age_s > YOUNG_S
        return self.aside


# Where records are left and looked up. Whoever looks believes nothing that does not prove itself
# (`record.py`), so a directory need not be honest; it may only be forgetful.


class DirectoryError(Exception):
    """The directory cannot be used; the message says why and what to do."""


class Directory(Protocol):
    """Where the records of one swarm are left and looked up."""

    async def publish(self, record: bytes) -> None:
        """Leaves a record. Raises DirectoryError when it cannot be used."""

    async def find(self) -> list[bytes]:
        """What others have left, of whatever kind; empty when nothing was found. Raises
        DirectoryError when it cannot be used."""
