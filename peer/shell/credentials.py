"""A peer's certificate while it runs: got at the first start, renewed at the half of its life."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import grpc
import grpc.aio

from ...dag.plan.plan import PeerId
from ...net.identity.authority import utc
from ...net.identity.credential import Credential, server_credentials
from ...net.identity.enroll import (
    BrokerAwayError,
    EnrollError,
    NotAdmittedError,
    NotNowError,
    check_clock,
    enroll,
    renew,
    shown_by,
    validity_problem,
)
from ...net.identity.names import PartyRole
from ...net.identity.statements import CertifiedMember
from ...net.identity.token import Token
from ...net.local import joined
from ..host.addresses import to_dial
from ..host.config import PeerConfig
from ..logs import note
from ..secure.secure_member import SecureMember
from .attempt import finder_of
from .relayed import OWN

__all__ = ["Credentials", "NoCredentialError", "listen", "listen_within", "obtain"]

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LOOK_S = 3600.0
"""How often the clock is looked at: a host that slept has lost time that no timer counts."""


class NoCredentialError(ValueError):
    """There is neither a credential nor a token to get one with."""


async def obtain(config: PeerConfig) -> Credential:
    """The credential in the peer's folder, or a new one by its token. Waits for a broker that does
    not answer, or cannot admit anybody now, as long as the settings say, and looks it up again if
    that can be done. Raises NoCredentialError, CredentialError, EnrollError."""
    known = Credential.load(config.state)
    now = utc(time.time())
    if known is not None and known.holds(now) and _fits(known, config.token):
        return known
    if not config.token:
        whose = f"the certificate in {config.state}"
        problem = known and validity_problem(known.certificate, now, whose)
        if problem:
            with suppress(BrokerAwayError):  # it cannot be asked what time it is
                dialled = to_dial(config.via, config.broker)
                check_clock((await asyncio.to_thread(shown_by, dialled)).ahead_s)
        raise NoCredentialError(
            f"{problem or f'{config.state} has no certificate'}: join with the whole line that the "
            "broker printed, --token included"
        )
    token, broker = Token.parse(config.token), config.broker
    finder = finder_of(config, token.fingerprint)
    waits = [s for s in (config.first_s, config.give_up_s) if s is not None]
    began = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            dialled = to_dial(config.via, broker)
            return await asyncio.to_thread(
                enroll, broker, token, config.state, config.name, via=dialled
            )
        except BrokerAwayError as error:
            if isinstance(error, NotNowError):  # so it is reached
                waits = [] if config.give_up_s is None else [config.give_up_s]
            if waits and time.monotonic() + pause_s > began + min(waits):
                raise
            note(_log, logging.WARNING, "not joined yet", why=error, again_in_s=pause_s)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if finder is not None and (found := await finder.look()):
            broker = found


def _fits(known: Credential, token: str) -> bool:
    """Whether the token is of the authority that the credential has; the line of another network
    is not answered with the certificate of this one."""
    return not token or known.fingerprint == Token.parse(token).fingerprint


class Credentials:
    """The newest credential of a running peer. Raises NoCredentialError for one of another role."""

    def __init__(self, first: Credential, config: PeerConfig) -> None:
        if first.party.role is not PartyRole.PEER:
            raise NoCredentialError(
                f"{config.state} has the certificate of {first.party}: a peer needs a token of its "
                "own (`shoal invite --role peer`) and a folder of its own (--state)"
            )
        self.now = first
        self._config = config

    def member(self, peer: PeerId, run: str, round_: int) -> SecureMember:
        """Return the part of this peer in a round whose sums are masked."""
        return SecureMember(self.identity(peer), run, round_, secrets.token_bytes)

    def identity(self, peer: PeerId) -> CertifiedMember:
        """Return what this peer signs with."""
        identity = CertifiedMember(self.now, lambda: utc(time.time()))
        assert identity.member == peer, f"{peer} has the certificate of {identity.member}"
        return identity

    def _next(self, broker: str) -> Credential:
        """A new one: by the old one, or by the token when the host slept past its end."""
        config = self._config
        dialled = to_dial(config.via, broker)
        if self.now.holds(utc(time.time())):
            return renew(dialled, self.now, config.state)
        if not config.token:
            check_clock(shown_by(dialled).ahead_s)
            problem = validity_problem(self.now.certificate, utc(time.time()), "the certificate")
            if utc(time.time()) < self.now.begins:
                raise NotAdmittedError(problem)
            raise NoCredentialError(f"{problem}, by a token: nobody could renew it in time")
        token = Token.parse(config.token)
        return enroll(broker, token, config.state, config.name, via=dialled)

    async def keep(self, broker: Callable[[], str], renewed: Callable[[], None]) -> None:
        """Renews for as long as it is let, at the broker (HOST:PORT), and calls `renewed` each
        time; a broker that is away is asked again. Raises NoCredentialError when it is too late
        and there is no token."""
        pause_s = _FIRST_PAUSE_S
        while True:
            now = utc(time.time())
            wait_s = (self.now.renew_at() - now).total_seconds()
            if wait_s > 0 and now >= self.now.begins:
                await asyncio.sleep(min(wait_s, _LOOK_S))
                continue
            try:
                self.now = await asyncio.to_thread(self._next, broker())
            except (EnrollError, OSError) as error:
                note(_log, logging.WARNING, "not renewed", why=error, ends=self.now.ends)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_S)
            else:
                pause_s = _FIRST_PAUSE_S
                note(_log, logging.INFO, "renewed", ends=self.now.ends)
                renewed()


def listen_within(server: grpc.aio.Server, name: str, credentials: Credentials) -> str:
    """A way into the server for what the relay brings, which no stranger can fill up; what leads
    there is returned, empty where the system knows no such sockets."""
    if sys.platform != "linux":
        return ""
    shown = server_credentials(lambda: credentials.now)
    server.add_secure_port(OWN + name, shown)
    return OWN + name


def listen(server: grpc.aio.Server, host: str, port: int, credentials: Credentials | None) -> int:
    """The port on which a server that was not started yet will listen; with credentials it talks
    to nobody who has none of the same authority. Raises ValueError for a port that is taken."""
    address = joined(host, port)
    try:
        if credentials is None:
            return int(server.add_insecure_port(address))
        shown = server_credentials(lambda: credentials.now)
        return int(server.add_secure_port(address, shown))
    except RuntimeError as error:
        raise ValueError(
            f"port {port} of {host} cannot be had: {error}; is it taken? "
            "Leave --port out for any free one"
        ) from None
