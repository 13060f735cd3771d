"""Which broker, and by what right: an address, and the credential that this user has for it.

~/.config/shoal/client.toml           the broker that `shoal login` remembered
~/.config/shoal/credentials/ADDRESS/  a key and its certificate for one broker

A broker on this machine may be one without identities; it is asked which. Any other is spoken to
with a credential or not at all.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from ..job.settings import Settings, read_toml
from ..net.address import USUAL_PORT, AddressError, address_of
from ..net.identity.authority import utc
from ..net.identity.credential import Credential, write_private
from ..net.identity.diagnosis import why_no_tls
from ..net.identity.enroll import (
    BrokerAwayError,
    EnrollError,
    NotAdmittedError,
    channel_options,
    channel_to,
    enroll,
    renew,
    shown_by,
    validity_problem,
)
from ..net.identity.names import OWNER, PartyRole
from ..net.identity.token import Token
from ..net.local import is_loopback, split
from ..net.surroundings import config_home
from ..net.web.proxy import proxy_options
from .files.records import replacing

__all__ = [
    "Access",
    "AccessError",
    "access_of_peer",
    "access_to",
    "credential_folder",
    "find_address",
    "login",
    "named_in",
    "remember",
]

LOCAL = f"127.0.0.1:{USUAL_PORT}"
"""Where `shoal broker` listens on this machine when no port is given."""


class AccessError(Exception):
    """This user has no right that the broker would accept; the message says how to get one."""


class Access:
    """A broker's address, and how to open a channel to it."""

    def __init__(self, address: str, credential: Credential | None) -> None:
        self.address = address
        self._credential = credential

    def channel(self, options: list[tuple[str, int]]) -> grpc.Channel:
        if self._credential is None:
            both = [*options, *proxy_options(self.address)]
            return grpc.insecure_channel(self.address, options=both)
        both = [*options, *channel_options(self.address)]
        return grpc.secure_channel(self.address, self._credential.for_channel(), options=both)

    def aio_channel(self) -> grpc.aio.Channel:
        return channel_to(self.address, self._credential)

    def why_not(self) -> str:
        """What keeps it from a connection, found out by small steps; empty: nothing is found."""
        return "" if self._credential is None else why_no_tls(self.address, self._credential)

    def __repr__(self) -> str:
        return f"<Access to {self.address} with {self._credential or 'no credential'}>"


def settings_path() -> Path:
    """Where `login` remembers the broker."""
    return config_home() / "shoal" / "client.toml"


def credential_folder(address: str) -> Path:
    """The folder of the credential for a broker; the names of this machine are one. Raises
    AddressError."""
    host, port = split(address_of(address))
    named = "localhost" if is_loopback(host) else host.replace(":", "_")
    return settings_path().parent / "credentials" / f"{named}_{port}"


def remember(address: str, credential: Credential) -> None:
    """Keeps a credential for the broker at an address, unless one of the same role that still holds
    is there for the same authority."""
    folder = credential_folder(address)
    try:
        known = Credential.load(folder)
    except ValueError:
        known = None  # damaged: replaced
    if (
        known is None
        or known.authority != credential.authority
        or known.party.role != credential.party.role
        or not known.holds(utc(time.time()))
    ):
        credential.save(folder)


def login(address: str, token: str = "", name: str = "") -> Path:
    """Remembers a broker for this user, and gets a credential for it when a token is given; returns
    the file. `name`: for people; the user's by default.

    Raises AddressError, TokenError, AccessError, and BrokerAwayError when nobody answers.
    """
    checked = address_of(address)
    if token:
        _enrol(checked, Token.parse(token), name or _user())
    path = settings_path()
    with replacing(path) as temporary:
        temporary.write_text(f'broker = "{checked}"\n', encoding="utf-8")
    return path


def _enrol(address: str, token: Token, name: str) -> None:
    """Puts the token's credential in the place of the one that is there, once it is known to be one
    for a person. Tried in a folder beside it, which stays only when an answer may have been lost:
    the next try then takes no other use of the token."""
    folder = credential_folder(address)
    trying = folder.with_name(folder.name + ".new")
    try:
        known = Credential.load(folder)
    except ValueError:
        known = None  # damaged: replaced
    if known is not None and known.party.subject != OWNER:  # the same person again
        trying.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(trying / "key.pem", known.key)
    try:
        credential = enroll(address, token, trying, name)
        if credential.party.role is PartyRole.PEER:
            raise NotAdmittedError(
                "the token is one for peers: it is for `shoal join`; ask the operator for one with "
                "`shoal invite --role submitter`"
            )
    except NotAdmittedError as error:
        shutil.rmtree(trying, ignore_errors=True)
        raise AccessError(str(error)) from None
    credential.save(folder)
    shutil.rmtree(trying)


def _user() -> str:
    try:
        found = getpass.getuser()
    except (OSError, KeyError):
        found = ""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", found).strip("-_.")[:64] or "someone"


def find_address(address: str | None = None) -> str:
    """The broker's HOST:PORT: the argument, else SHOAL_BROKER, else what `login` remembered, else
    where `shoal broker` listens on this machine when nothing else is said.

    Raises AddressError when it is no address, or client.toml is not what `login` wrote, OSError.
    """
    found = address or os.environ.get("SHOAL_BROKER")
    if found or not (path := settings_path()).is_file():
        return address_of(found or LOCAL)
    try:
        return address_of(read_toml(ClientSettings, path).broker)
    except ValueError as error:
        named = "" if str(path) in str(error) else f"{path}: "
        raise AddressError(
            f"{named}{error}; `shoal login HOST:PORT` writes that file anew"
        ) from None


def named_in(address: str) -> str:
    """Where an address comes from, for a message that asks whether it is right; empty where that is
    not client.toml."""
    with suppress(ValueError, OSError):
        if (
            "SHOAL_BROKER" not in os.environ
            and read_toml(ClientSettings, path := settings_path()).broker == address
        ):
            return f" ({path} has it if nothing else was named)"
    return ""


@dataclass(frozen=True, kw_only=True)
class ClientSettings(Settings):
    """What `shoal login` keeps in client.toml."""

    broker: str
    """HOST:PORT of the broker that verbs speak with when none is named."""


def access_of_peer(address: str, credential: Credential) -> Access:
    """The right of a peer of this host at its broker, which the peer itself keeps new: to look at
    its part. Raises AccessError."""
    whose = f"the certificate of {credential.party.subject}"
    if problem := validity_problem(credential.certificate, utc(time.time()), whose):
        raise AccessError(f"{problem}: `shoal join` gets a new one")
    return Access(address, credential)


def access_to(address: str) -> Access:
    """The right that this user has at a broker; a credential at its half is renewed. Raises
    AccessError, CredentialError, and BrokerAwayError where a broker with identities was before."""
    folder = credential_folder(address)
    credential = Credential.load(folder)
    if is_loopback(split(address)[0]):
        try:
            shown_by(address)
        except BrokerAwayError as error:
            if credential is None:
                return Access(address, None)  # one without identities, or none: dialling will tell
            # Whoever has taken the port in its place gets nothing in plain text.
            more = f"if the broker there has no identities any more, remove {folder}"
            raise BrokerAwayError(f"{error}; {more}") from None
    if credential is None:
        raise AccessError(
            f"this user has no credential for the broker at {address}: ask its operator for a "
            f"token (`shoal invite --role submitter`), then `shoal login {address} --token …`"
        )
    now = utc(time.time())
    whose = f"the credential for the broker at {address}"
    if problem := validity_problem(credential.certificate, now, whose):
        raise AccessError(
            f"{problem}: ask its operator for a token, then `shoal login {address} --token …`"
        )
    if now >= credential.renew_at():
        with suppress(EnrollError):  # it still holds; what is wrong shows when it is used
            credential = renew(address, credential, folder)
    return Access(address, credential)
