"""Who may come in: invitations, the keys that used them, and who was shown the door.

All of it stands in one SQLite file (admissions_file.py), since it must outlive the broker: a token
that was used up stays used up, and who was kicked stays out. Time is an argument everywhere,
seconds since 1970.

Rules.

- An invitation admits so many keys until it ends. A key that was admitted may join again by the
  same invitation without using it once more: an answer can be lost on the way.
- A subject is the readable name and a part of its key's hash; it belongs to that key for good.
- Only a hash of each secret is kept.
- Who was kicked is refused in every call at once, its key never joins again, and the tokens that it
  used or gave out admit nobody any more.
- A key that comes with a newer token of the same role keeps its subject: its certificate ended.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import sqlite3
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from cryptography.hazmat.primitives import serialization

from ...net.identity.authority import Authority, AuthorityError, public_key_of, utc
from ...net.identity.names import Party, PartyRole
from ...net.identity.token import Token
from ...proto.admission_pb2 import Admitted, JoinRequest
from .admissions_file import AdmissionsFile

__all__ = [
    "JOINABLE",
    "PROTOCOL",
    "Admission",
    "AdmissionError",
    "AdmissionLimits",
    "CallRefusedError",
]

PROTOCOL = 1
"""The version of joining that this broker speaks."""
JOINABLE = (PartyRole.PEER, PartyRole.SUBMITTER, PartyRole.OPERATOR)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


class CallRefusedError(Exception):
    """A call that is refused; becomes a gRPC status. `code` is its name."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class AdmissionError(CallRefusedError):
    """A call of somebody who may not make it, or not now."""


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """How long things last, and how many there may be."""

    peer_lasts: timedelta = timedelta(hours=24)
    """A peer's certificate; it renews itself at the half."""
    person_lasts: timedelta = timedelta(days=30)
    """A submitter's or an operator's."""
    most_uses: int = 10_000
    longest: timedelta = timedelta(days=365)
    """Of an invitation."""
    most_invitations: int = 10_000
    """That have not ended; ended ones are forgotten."""
    most_parties: int = 100_000
    """Subjects that ever joined; about 300 bytes each."""


class Admission:
    """`path`: the SQLite file; None: in memory, forgotten at the end. Raises OSError where the file
    cannot be had. Used from one thread."""

    def __init__(
        self, authority: Authority, path: Path | None, limits: AdmissionLimits | None = None
    ) -> None:
        self.authority = authority
        self.limits = limits or AdmissionLimits()
        self._file = AdmissionsFile(path)
        self._db = self._file.db
        rows = self._db.execute("SELECT subject FROM parties WHERE kicked_s IS NOT NULL")
        self._kicked = {subject for (subject,) in rows}

    def close(self) -> None:
        """Closes the file; nothing can be asked afterwards."""
        self._file.close()

    # ------------------------------------------------------------ invitations

    def invite(self, role: PartyRole, uses: int, lasts: timedelta, by: str, now_s: float) -> Token:
        """A fresh token; whoever has it can join so many times. Raises AdmissionError for a role,
        number or time that cannot be."""
        limits = self.limits
        if role not in JOINABLE:
            raise AdmissionError(
                "INVALID_ARGUMENT",
                f'nobody joins as "{role}": expected {", ".join(r.value for r in JOINABLE)}',
            )
        if not 1 <= uses <= limits.most_uses:
            raise AdmissionError(
                "INVALID_ARGUMENT", f"{uses} uses: expected 1 to {limits.most_uses}"
            )
        if not timedelta(0) < lasts <= limits.longest:
            raise AdmissionError(
                "INVALID_ARGUMENT",
                f"it would last {lasts}: expected more than nothing and at most {limits.longest}",
            )
        with self._file.changing():
            self._db.execute("DELETE FROM invitations WHERE ends_s <= ?", (now_s,))
            self._db.execute(
                "DELETE FROM uses WHERE invitation NOT IN (SELECT id FROM invitations)"
            )
        (count,) = self._db.execute("SELECT count(*) FROM invitations").fetchone()
        if count >= limits.most_invitations:
            raise AdmissionError(
                "RESOURCE_EXHAUSTED", f"{count} invitations are open: wait until some have ended"
            )
        token = self.authority.token()
        ends_s = now_s + lasts.total_seconds()
        with self._file.changing():
            self._db.execute(
                "INSERT INTO invitations (id, proof, role, uses, ends_s, by) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (token.name, token.proof, role.value, uses, ends_s, by),
            )
        return token

    def open_for(self, token: Token, now_s: float) -> float:
        """Seconds for which the token still admits somebody; 0 for one that does not."""
        row = self._invitation(token)
        return max(0.0, row[3] - now_s) if row is not None and row[2] < row[1] else 0.0

    def _invitation(self, token: Token) -> tuple[str, int, int, float] | None:
        """(role, uses, used, end) when the secret is the right one."""
        row = self._db.execute(
            "SELECT proof, role, uses, used, ends_s FROM invitations WHERE id = ?", (token.name,)
        ).fetchone()
        if row is None or not hmac.compare_digest(row[0], token.proof):
            return None
        return row[1], row[2], row[3], row[4]

    # ------------------------------------------------------------ joining

    def join(self, request: JoinRequest, now_s: float) -> Admitted:
        """A certificate for the key of the request. Raises AdmissionError."""
        if request.version != PROTOCOL:
            raise AdmissionError(
                "FAILED_PRECONDITION",
                f"this broker speaks version {PROTOCOL} of joining, the other side "
                f"{request.version}: install the shoal of the broker",
            )
        if (len(request.invitation), len(request.secret)) != (8, 16):
            raise AdmissionError("UNAUTHENTICATED", "that is no token: copy the whole line again")
        if not _NAME.fullmatch(request.name):
            raise AdmissionError(
                "INVALID_ARGUMENT",
                f'"{_printable(request.name)}" is no name: expected 1 to 64 letters, digits, "_", '
                '"." and "-", a letter or digit first',
            )
        key = self._key(request.request)
        token = Token(self.authority.fingerprint, request.invitation, request.secret)
        invitation = self._invitation(token)
        if invitation is None:
            raise AdmissionError(
                "UNAUTHENTICATED",
                "the broker knows no such token: it ended long ago, or was never given out here; "
                "ask its operator for another (`shoal invite`)",
            )
        role, uses, used, ends_s = invitation
        known = self._db.execute(
            "SELECT subject, role, kicked_s FROM parties WHERE key = ?", (key,)
        ).fetchone()
        if known is not None and known[2] is not None:
            raise AdmissionError("PERMISSION_DENIED", f"{known[0]} was kicked out of this network")
        if ends_s <= now_s:
            raise AdmissionError(
                "UNAUTHENTICATED",
                f"the token ended {_ago(now_s - ends_s)} ago: ask for another (`shoal invite`)",
            )
        if known is not None and known[1] == role and self._has_used(known[0], token.name):
            return self._admitted(Party(PartyRole(role), known[0]), request.request, now_s)
        if known is not None and known[1] != role:
            raise AdmissionError(
                "ALREADY_EXISTS",
                f"this key joined as {known[1]} {known[0]}, and the token is for a {role}: each "
                "role needs a key of its own, in a folder of its own",
            )
        if used >= uses:
            raise AdmissionError(
                "UNAUTHENTICATED",
                f"the token admits nobody any more: all of its uses ({uses}) are taken, or a kick "
                "closed it: ask for another (`shoal invite`)",
            )
        if known is not None:  # its certificate ended, or it was given a newer token
            with self._file.changing():
                self._count_use(known[0], token.name)
            return self._admitted(Party(PartyRole(role), known[0]), request.request, now_s)
        subject = f"{request.name}-{base64.b32encode(key).decode().lower()[:8]}"
        self._write_party(subject, role, key, token.name, now_s)
        return self._admitted(Party(PartyRole(role), subject), request.request, now_s)

    def _write_party(
        self, subject: str, role: str, key: bytes, invitation: str, now_s: float
    ) -> None:
        (count,) = self._db.execute("SELECT count(*) FROM parties").fetchone()
        if count >= self.limits.most_parties:
            raise AdmissionError(
                "FAILED_PRECONDITION", f"{count} parties have joined, the limit of this broker"
            )
        try:
            with self._file.changing():
                self._db.execute(
                    "INSERT INTO parties (subject, role, key, invitation, joined_s) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (subject, role, key, invitation, now_s),
                )
                self._count_use(subject, invitation)
        except sqlite3.IntegrityError:
            raise AdmissionError(
                "ALREADY_EXISTS", f"{subject} is another key's: join with another name"
            ) from None

    def _has_used(self, subject: str, invitation: str) -> bool:
        found = self._db.execute(
            "SELECT 1 FROM uses WHERE subject = ? AND invitation = ?", (subject, invitation)
        )
        return found.fetchone() is not None

    def _count_use(self, subject: str, invitation: str) -> None:
        # All tokens that somebody used are remembered: each could admit it again, by a new key.
        self._db.execute("INSERT OR IGNORE INTO uses VALUES (?, ?)", (subject, invitation))
        self._db.execute("UPDATE invitations SET used = used + 1 WHERE id = ?", (invitation,))

    def renew(self, party: Party, request: bytes, now_s: float) -> Admitted:
        """A new certificate for the key that the party joined with. Raises AdmissionError."""
        self.check(party)
        row = self._db.execute(
            "SELECT key FROM parties WHERE subject = ? AND role = ?", (party.subject, party.role)
        ).fetchone()
        if row is None:
            raise AdmissionError("PERMISSION_DENIED", f"this broker never admitted {party}")
        if row[0] != self._key(request):
            raise AdmissionError(
                "PERMISSION_DENIED", f"{party.subject} joined with another key: join again"
            )
        return self._admitted(party, request, now_s)

    def _key(self, request: bytes) -> bytes:
        try:
            key = public_key_of(request)
        except AuthorityError as error:
            raise AdmissionError("INVALID_ARGUMENT", str(error)) from None
        encoded = key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return hashlib.sha256(encoded).digest()

    def _admitted(self, party: Party, request: bytes, now_s: float) -> Admitted:
        limits = self.limits
        lasts = limits.peer_lasts if party.role is PartyRole.PEER else limits.person_lasts
        certificate = self.authority.sign(request, party, utc(now_s), lasts)
        return Admitted(subject=party.subject, certificate=certificate, now_s=now_s)

    # ------------------------------------------------------------ the door

    def check(self, party: Party) -> None:
        """Raises AdmissionError when the party was kicked."""
        if party.subject in self._kicked:
            raise AdmissionError("PERMISSION_DENIED", f"{party.subject} was kicked")

    def kick(self, subject: str, now_s: float) -> PartyRole:
        """Refuses a subject from now on, and closes the tokens that it used or gave out; returns
        what it was. Raises AdmissionError for one that never joined."""
        row = self._db.execute("SELECT role FROM parties WHERE subject = ?", (subject,)).fetchone()
        if row is None:
            raise AdmissionError(
                "NOT_FOUND",
                f'nobody ever joined as "{_printable(subject)}": expected an id as `shoal peers` '
                "shows it",
            )
        with self._file.changing():
            self._db.execute("UPDATE parties SET kicked_s = ? WHERE subject = ?", (now_s, subject))
            # Or it would come back with a new key.
            self._db.execute(
                "UPDATE invitations SET uses = used WHERE by = ? OR id IN "
                "(SELECT invitation FROM uses WHERE subject = ?)",
                (subject, subject),
            )
        self._kicked.add(subject)
        return PartyRole(row[0])

    def __repr__(self) -> str:
        return f"<Admission of {self.authority!r}, {len(self._kicked)} kicked>"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() and c != '"' else "?" for c in text[:80])


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"
