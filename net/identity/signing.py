"""Statements that a party signs with the key of its certificate, and who signed one.

A signature is ECDSA by the P-256 key over SHA-256. Whoever has the authority's certificate can
check it; the broker, whose authority that is, could make a certificate in anybody's name.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
)

from .credential import Credential, CredentialError, party_in
from .names import Party

__all__ = ["SignatureError", "sign", "signer_of"]


class SignatureError(ValueError):
    """A statement was not signed by whom it should have been; the message says what is wrong."""


def sign(credential: Credential, statement: bytes) -> bytes:
    """Return the signature (DER) under a statement, which begins with what it is about."""
    assert statement.startswith(b"shoal "), "what is signed could be something else"
    return _key(credential.key).sign(statement, ECDSA(hashes.SHA256()))


@lru_cache(maxsize=2)
def _key(pem: bytes) -> EllipticCurvePrivateKey:
    """Return a private key, read; a peer signs thousands of statements with one."""
    key = serialization.load_pem_private_key(pem, None)
    assert isinstance(key, EllipticCurvePrivateKey), "credentials have P-256 keys"
    return key


def signer_of(
    certificate: bytes, authority: bytes, statement: bytes, signature: bytes, now: datetime
) -> Party:
    """Return who signed a statement. `certificate`, `authority`: PEM; `now`: aware. Raises
    SignatureError for a certificate that this authority did not sign or that is not valid now,
    and for a signature of another key."""
    leaf = _issued(certificate, authority)
    if not leaf.not_valid_before_utc <= now < leaf.not_valid_after_utc:
        raise SignatureError(f"the certificate is not valid on {now:%Y-%m-%d %H:%M} UTC")
    key = leaf.public_key()
    if not isinstance(key, EllipticCurvePublicKey):
        raise SignatureError("the certificate has another kind of key: expected P-256")
    try:
        key.verify(signature, statement, ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise SignatureError("the signature is not by the key of the certificate") from None
    try:
        return party_in(leaf)
    except CredentialError as error:
        raise SignatureError(str(error)) from None


@lru_cache(maxsize=4096)
def _issued(certificate: bytes, authority: bytes) -> x509.Certificate:
    """Return a certificate that the authority has signed, read. Raises SignatureError."""
    try:
        leaf = x509.load_pem_x509_certificate(certificate)
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise SignatureError("the certificate is not one of this network's authority") from None
    return leaf
