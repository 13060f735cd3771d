"""What makes a broker safe to reach: its authority, who was admitted, and the one port in front.

FOLDER/authority/          see net/identity/authority.py
FOLDER/admissions.sqlite   see broker/access/admission.py
FOLDER/sockets/            of the servers behind the port, while the broker runs
FOLDER/join-token          the token of the line that the broker prints, for its owner only
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Self

import grpc
import grpc.aio

from ...net.identity.authority import Authority, utc
from ...net.identity.credential import Credential, server_credentials, write_private
from ...net.identity.names import OWNER, Party, PartyRole
from ...net.identity.token import Token, TokenError
from ...net.temporary import SocketFolder
from ..access.admission import Admission, AdmissionLimits
from ..access.guard import Guard
from .door.front import MultiplexerLimits, PageSockets, PortMultiplexer
from .door.reach import Reach
from .door.relay import Relay

__all__ = ["Secured"]

_LASTS = timedelta(days=30)
"""The broker's own certificate, renewed in place."""
_PRINTED_USES, _PRINTED_LASTS = 1000, timedelta(days=7)
"""Of the token in the line that the broker prints; `shoal invite` gives others."""
_PRINTED_LEFT_S = 3600.0
"""A printed token with less time left is replaced at the next start."""


class Secured:
    """`async with Secured(folder) as secured:` opens authority and admissions; `listen` puts a
    server behind the port. `folder` None: everything is forgotten at the end.

    Raises AuthorityError (a ValueError) and OSError where the folder cannot be used.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        admission: AdmissionLimits | None = None,
        front: MultiplexerLimits | None = None,
    ) -> None:
        self._folder = folder
        self._limits, self._front_limits = admission, front
        self._front: PortMultiplexer | None = None

    async def __aenter__(self) -> Self:
        now = utc(time.time())
        if self._folder is None:
            self.authority = Authority.new(now)
        else:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.authority = Authority.open(self._folder / "authority", now)
        path = self._folder and self._folder / "admissions.sqlite"
        self.admission = Admission(self.authority, path, self._limits)
        self.guard = Guard(self.admission)
        self.relay = Relay()
        self._own = self._signed(PartyRole.BROKER, "broker")
        self.reach = Reach(self.credential)
        self._sockets = SocketFolder(self._folder)
        return self

    @property
    def sockets(self) -> Path:
        """The private folder in which the servers behind the port listen, as this process names
        it."""
        return self._sockets.path

    async def __aexit__(self, *error: object) -> None:
        await self.close_port()
        await asyncio.to_thread(self._sockets.close)
        self.admission.close()

    def _signed(self, role: PartyRole, subject: str, lasts: timedelta = _LASTS) -> Credential:
        return self.authority.credential(Party(role, subject), utc(time.time()), lasts)

    def credential(self) -> Credential:
        """The broker's own: what it shows, and dials peers with."""
        now = utc(time.time())
        if now >= self._own.renew_at() or now < self._own.begins:  # the clock was set back
            self._own = self._signed(PartyRole.BROKER, "broker")
        return self._own

    def operator(self) -> Credential:
        """For the person who runs the broker, on its own host, beside the authority's key: it can
        do everything, and lasts as long as the authority."""
        return self._signed(PartyRole.OPERATOR, OWNER, timedelta.max)

    def listen(self, server: grpc.aio.Server, door: grpc.aio.Server) -> None:
        """Puts two servers that were not started yet behind the port: one for whoever has a
        certificate, and one for who has none."""
        for name, asks, behind in (("main", True, server), ("door", False, door)):
            credentials = server_credentials(self.credential, asks=asks)
            behind.add_secure_port(f"unix:{self.sockets / name}", credentials)

    async def open_port(
        self, host: str, port: int, *, swarm: int = 0, page: PageSockets | None = None
    ) -> int:
        """Listens, with the server started; returns the port. `swarm`: where the node of the
        swarm's directory listens on loopback; 0: there is none. `page`: where the page is served;
        None: there is none. Raises OSError."""
        front = PortMultiplexer(
            host,
            port,
            main=self.sockets / "main",
            door=self.sockets / "door",
            authority=self.authority.pem,
            relay=self.relay,
            swarm=swarm,
            page=page,
            limits=self._front_limits,
        )
        await front.__aenter__()
        self._front = front
        return front.port

    async def close_port(self) -> None:
        if self._front is not None:
            await self._front.__aexit__(None, None, None)
            self._front = None

    @property
    def refused(self) -> Counter[str]:
        """Connections that the port has refused, by the reason."""
        return Counter() if self._front is None else self._front.refused

    def printed_token(self) -> Token:
        """The one of the line that a peer's owner pastes: the same at every start, as long as it
        admits anybody."""
        now_s = time.time()
        path = self._folder and self._folder / "join-token"
        if path is not None and path.exists():
            try:
                token = Token.parse(path.read_text())
            except (TokenError, UnicodeDecodeError):
                pass  # damaged: replaced
            else:
                if self.admission.open_for(token, now_s) > _PRINTED_LEFT_S:
                    return token
        token = self.admission.invite(
            PartyRole.PEER, _PRINTED_USES, _PRINTED_LASTS, "broker", now_s
        )
        if path is not None:
            write_private(path, str(token).encode())
        return token
