"""Keys that open the page for reading, and nothing else.

    shp1.ENDS.ROLE.SUBJECT.SIGNATURE

A key is a statement by the authority: who asked for it, in which role, and until when (seconds
since 1970). So nothing is kept of it, it holds over restarts, it ends by itself, and at once when
its subject is kicked.
"""

from __future__ import annotations

import base64
import binascii

from ....net.identity.names import SUBJECT, Party, PartyRole
from ...access.admission import Admission, AdmissionError

__all__ = ["LONGEST_S", "PageKeys"]

LONGEST_S = 365 * 86400.0
"""A key's life: as long as an invitation's."""
LEAST_S = 60.0

_KIND = "shp1"
_MOST_CHARACTERS = 300
_LOOKERS = (PartyRole.PEER, PartyRole.SUBMITTER, PartyRole.OPERATOR)


class PageKeys:
    """Signs with the admission's authority, and refuses whom the admission has kicked. `now_s`:
    seconds since 1970."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def issue(self, party: Party, lasts_s: float, now_s: float) -> tuple[str, int]:
        """A key and its end. Raises AdmissionError for a time that cannot be, and a role that may
        not look."""
        if party.role not in _LOOKERS:
            raise AdmissionError("PERMISSION_DENIED", f"{party} may not look at the page")
        if not LEAST_S <= lasts_s <= LONGEST_S:
            raise AdmissionError(
                "INVALID_ARGUMENT",
                f"a key of {lasts_s:g} s: expected {LEAST_S:g} s to {LONGEST_S / 86400:g} days",
            )
        ends_s = int(now_s + lasts_s)
        text = f"{_KIND}.{ends_s}.{party.role.value}.{party.subject}"
        return f"{text}.{_coded(self._admission.authority.attest(_statement(text)))}", ends_s

    def check(self, key: str, now_s: float) -> tuple[Party, int] | None:
        """Return the owner of a key and when it ends; None for one that opens nothing."""
        if len(key) > _MOST_CHARACTERS or not key.isascii():
            return None
        text, _, signature = key.rpartition(".")
        parts = text.split(".", 3)
        if len(parts) != 4 or parts[0] != _KIND or not SUBJECT.fullmatch(parts[3]):
            return None
        if not parts[1].isdigit() or parts[2] not in {r.value for r in _LOOKERS}:
            return None
        try:
            signed = base64.b64decode(signature + "==", altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        if not self._admission.authority.attested(_statement(text), signed):
            return None
        party, ends_s = Party(PartyRole(parts[2]), parts[3]), int(parts[1])
        if ends_s <= now_s:
            return None
        try:
            self._admission.check(party)
        except AdmissionError:
            return None  # kicked
        return party, ends_s


def _statement(text: str) -> bytes:
    return b"shoal page key " + text.encode()


def _coded(signature: bytes) -> str:
    return base64.urlsafe_b64encode(signature).decode().rstrip("=")
