"""The page as the daemon has it: made of its parts, opened and closed with the broker."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from ....net.identity.authority import utc
from ....net.identity.names import Party
from ....net.surroundings import fault_of
from ...access.admission import Admission
from ..door.front import PageSockets
from ..shell import Shell
from .app import page_app
from .keys import PageKeys
from .metrics import Metrics
from .seen import Watcher
from .serving import Serving, fingerprint, own_certificate, owners_certificate

__all__ = ["Page", "PageError"]


class PageError(ValueError):
    """The page cannot be served; the message says why and what to do."""


class Page:
    """`async with Page(…) as page:` serves on `page.sockets` until the block ends.

    `folder`: of its own certificate. `sockets`: a private folder. `host`: under which others reach
    the broker. `certificate`: the owner's folder with one that browsers know; None: its own. Raises
    PageError where that cannot be used.
    """

    def __init__(
        self,
        shell: Shell,
        admission: Admission,
        refusals: Callable[[], Mapping[str, Counter[str]]],
        *,
        folder: Path,
        sockets: Path,
        host: str,
        certificate: Path | None,
    ) -> None:
        self._keys = PageKeys(admission)
        watcher = Watcher(shell)
        cookie = f"shoal_{admission.authority.fingerprint.hex()[:8]}"
        app = page_app(watcher, Metrics(watcher.totals, refusals), self._keys, cookie)
        try:
            pair = (
                own_certificate(folder, host, utc(time.time()))
                if certificate is None
                else owners_certificate(certificate)
            )
            self.fingerprint = fingerprint(pair[0]) if certificate is None else ""
        except OSError as error:
            raise PageError(str(fault_of(error) or error)) from None
        self._serving = Serving(app, sockets, pair)

    async def __aenter__(self) -> Page:
        try:
            await self._serving.__aenter__()
        except OSError as error:
            if (fault := fault_of(error)) is not None:
                raise PageError(str(fault)) from None
            raise PageError(
                f"the page's certificate cannot be used ({error}): expected fullchain.pem and "
                "privkey.pem in PEM, of one another, and readable by this user"
            ) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._serving.__aexit__(*exc)

    @property
    def sockets(self) -> PageSockets:
        return self._serving.sockets

    def key(self, party: Party, lasts_s: float) -> tuple[str, int]:
        """A key for somebody, and its end. Raises AdmissionError."""
        return self._keys.issue(party, lasts_s, time.time())
