"""Which role may call what, and who calls: the only place that asks.

A method that stands in no line here can be called by nobody.

method                                            with which certificate
------------------------------------------------  -----------------------------
Admission.Join                                    none: that is how one is got
Admission.Renew                                   any
Admission.Invite  Kick                            operator
Admission.Page                                    submitter, operator
Attach.Attach                                     peer
Runs.Submit  Watch  Cancel  Describe  Preview     submitter, operator
Runs.Resolve  Pause  Resume  Recall               submitter, operator
Blobs.Store  Fetch  Have                          peer, submitter, operator
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from ..net.identity.names import Party, Role, party_of
from .admission import Admission, AdmissionError

if TYPE_CHECKING:
    from grpc.aio import ServicerContext

__all__ = ["Guard"]

_PEOPLE = frozenset({Role.SUBMITTER, Role.OPERATOR})
_ALL = _PEOPLE | {Role.PEER}
_JOIN = "Admission.Join"
_MAY: dict[str, frozenset[Role]] = {
    "Admission.Renew": _ALL,
    "Admission.Invite": frozenset({Role.OPERATOR}),
    "Admission.Kick": frozenset({Role.OPERATOR}),
    "Admission.Page": _PEOPLE,
    "Attach.Attach": frozenset({Role.PEER}),
    "Runs.Submit": _PEOPLE,
    "Runs.Watch": _PEOPLE,
    "Runs.Cancel": _PEOPLE,
    "Runs.Pause": _PEOPLE,
    "Runs.Resume": _PEOPLE,
    "Runs.Recall": _PEOPLE,
    "Runs.Describe": _PEOPLE,
    "Runs.Preview": _PEOPLE,
    "Runs.Resolve": _PEOPLE,
    "Blobs.Store": _ALL,
    "Blobs.Fetch": _ALL,
    "Blobs.Have": _ALL,
}


class Guard:
    """Asked at the beginning of every call. `admission` is None for a broker without identities,
    which listens on loopback only: everybody may do everything there."""

    def __init__(self, admission: Admission | None = None) -> None:
        self._admission = admission
        self.refused: Counter[str] = Counter()
        """Calls that were refused, whatever for, by their status."""

    def still(self, caller: Party | None) -> None:
        """Asked while a long call goes on. Raises AdmissionError when the caller was kicked."""
        if self._admission is not None and caller is not None:
            self._admission.check(caller)

    def caller(self, method: str, context: ServicerContext[Any, Any]) -> Party | None:
        """Who calls SERVICE.METHOD; None without identities. Raises AdmissionError when it may
        not."""
        if self._admission is None or method == _JOIN:
            return None
        party = party_of(context.auth_context())
        if party is None:
            raise AdmissionError(
                "UNAUTHENTICATED",
                "no certificate of this network was shown: join with a token first",
            )
        self._admission.check(party)
        allowed = _MAY.get(method, frozenset())
        if party.role not in allowed:
            roles = " or ".join(sorted(r.value for r in allowed)) or "nobody"
            raise AdmissionError(
                "PERMISSION_DENIED", f"{party} may not call {method}: only {roles} may"
            )
        return party
