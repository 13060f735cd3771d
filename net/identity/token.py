"""The text that a peer's owner pastes: whom to trust, and the right to join once or several times.

    shl1.<fingerprint>.<id and secret>.<check>

fingerprint  SHA-256 of the authority's certificate, so that the first connection is pinned
id           8 bytes: which invitation it is; secret: 16 random bytes, of which the broker keeps
             only a hash
check        the first 3 bytes of SHA-256 over all that stands before it: finds a slip of the hand

Each part is base32 in small letters, without padding: it survives mail, chat and shells, and a
double click marks it as one word but for the dots.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from dataclasses import dataclass

__all__ = ["Token", "TokenError", "fingerprint_of", "fingerprint_of_pem"]

KIND = "shl1"
_FINGERPRINT_BYTES, _ID_BYTES, _SECRET_BYTES, _CHECK_BYTES = 32, 8, 16, 3


class TokenError(ValueError):
    """A text that is no token; the message says which part."""


def fingerprint_of(certificate_der: bytes) -> bytes:
    """32 bytes that stand for a certificate."""
    return hashlib.sha256(certificate_der).digest()


def fingerprint_of_pem(certificate: bytes) -> bytes:
    """The 32 bytes that stand for a certificate, which is given in PEM. Raises ValueError when it
    is none."""
    from cryptography import x509  # a token alone is read without it, and sooner
    from cryptography.hazmat.primitives import serialization

    found = x509.load_pem_x509_certificate(certificate)
    return fingerprint_of(found.public_bytes(serialization.Encoding.DER))


@dataclass(frozen=True)
class Token:
    """Make one with `Token.new`, read one with `Token.parse`, write it with `str`."""

    fingerprint: bytes
    id: bytes
    secret: bytes

    @classmethod
    def new(cls, fingerprint: bytes) -> Token:
        """With a fresh id and secret, for the authority of this fingerprint."""
        id_, secret = secrets.token_bytes(_ID_BYTES), secrets.token_bytes(_SECRET_BYTES)
        return cls(fingerprint, id_, secret)

    @property
    def name(self) -> str:
        """Which invitation it is, for logs: says nothing of the secret."""
        return self.id.hex()

    @property
    def proof(self) -> bytes:
        """What the broker keeps of the secret. The secret has 128 random bits, so a plain hash is
        as good as a slow one."""
        return hashlib.sha256(b"shoal token" + self.id + self.secret).digest()

    def __str__(self) -> str:
        body = f"{KIND}.{_text(self.fingerprint)}.{_text(self.id + self.secret)}"
        return f"{body}.{_text(_check(body))}"

    def __repr__(self) -> str:
        return f"<Token {self.name}>"  # without the secret: it may land in a log

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises TokenError, which names the part that is wrong."""
        parts = text.strip().lower().split(".")
        kind = parts[0]
        if not kind.startswith("shl"):
            raise TokenError(f"the token starts with {_shown(kind)}: expected {KIND}")
        if kind != KIND:
            raise TokenError(
                f"the token is of kind {_shown(kind)}, and this shoal reads {KIND}: install the "
                "version of shoal that the broker has"
            )
        if len(parts) != 4:
            raise TokenError(
                f"the token has {len(parts)} parts between its dots: expected 4; was it cut off?"
            )
        fingerprint = _bytes(parts[1], _FINGERPRINT_BYTES, "second", "the authority's fingerprint")
        both = _bytes(parts[2], _ID_BYTES + _SECRET_BYTES, "third", "the secret")
        _bytes(parts[3], _CHECK_BYTES, "last", "the check")
        if parts[3] != _text(_check(".".join(parts[:3]))):  # as text: base32 has spare bits
            raise TokenError(
                "the token's check does not fit: a character of it was changed; copy it again"
            )
        return cls(fingerprint, both[:_ID_BYTES], both[_ID_BYTES:])


def _check(body: str) -> bytes:
    return hashlib.sha256(body.encode()).digest()[:_CHECK_BYTES]


def _text(data: bytes) -> str:
    return base64.b32encode(data).decode().lower().rstrip("=")


def _bytes(text: str, size: int, which: str, what: str) -> bytes:
    expected = -(-size * 8 // 5)
    if len(text) != expected:
        raise TokenError(
            f"the token's {which} part, {what}, has {len(text)} characters: expected {expected}; "
            "was it cut off?"
        )
    try:
        return base64.b32decode(text.upper() + "=" * (-expected % 8))
    except ValueError:  # binascii.Error is one; it is another for what is not ASCII
        raise TokenError(
            f"the token's {which} part, {what}, has a character that cannot be: expected a to z "
            "and 2 to 7; copy it again"
        ) from None


def _shown(text: str) -> str:
    """The beginning of a wrong token, and no more of it: it may be another secret."""
    return repr(text[:4] + ("…" if len(text) > 4 else ""))
