"""Which role may call what, who calls, and whether it is too much: the only place that asks, before
a byte of a call's message is read.

A method that stands in no line of `_MAY` can be called by nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ...net.identity.credential import end_of, shown_end
from ...net.identity.names import Party, PartyRole, party_of
from .admission import Admission, AdmissionError
from .limits import Shares

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = ["Guard"]

_PEOPLE = frozenset({PartyRole.SUBMITTER, PartyRole.OPERATOR})
_ALL = _PEOPLE | {PartyRole.PEER}
_JOIN = "Admission.Join"
"""Needs no certificate: that is how one is got."""
_MAY: dict[str, frozenset[PartyRole]] = {
    f"{service}.{method}": roles
    for service, methods, roles in (
        ("Admission", "Renew Page", _ALL),
        ("Admission", "Invite Kick", frozenset({PartyRole.OPERATOR})),
        ("Attach", "Attach", frozenset({PartyRole.PEER})),
        ("Runs", "Describe", _ALL),  # a peer its own part
        ("Runs", "Submit Watch Cancel Pause Resume Finish Choose Recall Preview Resolve", _PEOPLE),
        ("Blobs", "Store Fetch Have", _ALL),
    )
    for method in methods.split()
}


_MOST_TAKEN = 16
"""Each has at most one message (limits.MOST_MESSAGE_BYTES), for two seconds."""
_MOST_ENDS = 200_000
"""Subjects whose certificate's end is known: all that ever join (AdmissionLimits), and more."""


class Guard:
    """`admission` is None for a broker without identities, which listens on loopback only:
    everybody may do everything there. `clock`: seconds since 1970.

    A connection lives longer than the certificate that it began with, so each subject's newest end
    is known here: of what it shows, and of what it was given. Past it, its calls end.
    """

    def __init__(
        self,
        admission: Admission | None = None,
        shares: Shares | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._admission = admission
        self._clock = clock
        self._ends: dict[str, float] = {}
        self.shares = shares or Shares()
        self.refused: Counter[str] = Counter()
        """Calls that were refused, whatever for, by their status."""
        self.taking = asyncio.Semaphore(_MOST_TAKEN)
        """While the first message of a stream that is refused is taken."""

    def renewed(self, subject: str, certificate: bytes) -> None:
        """The subject was given a certificate (PEM), which it may show or not."""
        self._lasts(subject, end_of(certificate))

    def _lasts(self, subject: str, end_s: float) -> None:
        self._ends[subject] = max(end_s, self._ends.get(subject, end_s))
        if len(self._ends) > _MOST_ENDS:
            now_s = self._clock()
            self._ends = {s: end for s, end in self._ends.items() if end > now_s}

    def still(self, caller: Party | None) -> None:
        """Asked while a long call goes on. Raises AdmissionError when the caller was kicked, or its
        certificate has ended."""
        if self._admission is None or caller is None:
            return
        self._admission.check(caller)
        if self._ends.get(caller.subject, 0.0) <= self._clock():
            raise AdmissionError(
                "UNAUTHENTICATED",
                f"the certificate of {caller.subject} has ended: renew it, or join again",
            )

    @contextmanager
    def call(self, method: str, context: ServicerContext[Any, Any]) -> Iterator[Party | None]:
        """Yield the caller of SERVICE.METHOD for as long as the call lasts; None without
        identities. Raises AdmissionError when it may not, or not now."""
        caller = self._caller(method, context)
        with self.shares.taken(method, caller, time.monotonic()):
            yield caller

    def _caller(self, method: str, context: ServicerContext[Any, Any]) -> Party | None:
        if self._admission is None or method == _JOIN:
            return None
        shown = context.auth_context()
        party = party_of(shown)
        if party is None:
            raise AdmissionError(
                "UNAUTHENTICATED",
                "no certificate of this network was shown: join with a token first",
            )
        self._lasts(party.subject, shown_end(shown))
        self.still(party)
        allowed = _MAY.get(method, frozenset())
        if party.role not in allowed:
            roles = " or ".join(sorted(r.value for r in allowed)) or "nobody"
            raise AdmissionError(
                "PERMISSION_DENIED", f"{party} may not call {method}: only {roles} may"
            )
        return party
