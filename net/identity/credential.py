"""A key with its certificate: on disk, for its owner only, and in gRPC's terms.

FOLDER/key.pem          the P-256 key; it never leaves this folder
FOLDER/certificate.pem  what the broker's authority signed for it
FOLDER/authority.pem    whom to believe
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from ..surroundings import naming
from .names import Party, party_of
from .token import fingerprint_of_pem

__all__ = [
    "Credential",
    "CredentialError",
    "end_of",
    "load_key",
    "new_key",
    "party_in",
    "request_of",
    "server_credentials",
    "shown_end",
    "write_private",
]


class CredentialError(ValueError):
    """What lies in a folder is no credential; the message says what to do."""


def new_key() -> EllipticCurvePrivateKey:
    return generate_private_key(SECP256R1())


def pem_of(key: EllipticCurvePrivateKey | Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def request_of(key: EllipticCurvePrivateKey) -> bytes:
    """A signing request in DER: proves that the key is held; the name in it means nothing."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def write_private(path: Path, data: bytes) -> None:
    """A file that only its owner may read, there at once and whole or not at all."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with naming(path), os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def load_key(folder: Path) -> EllipticCurvePrivateKey:
    """The key in the folder; made, if there is none. Raises CredentialError, OSError."""
    path = folder / "key.pem"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, pem_of(new_key()))
    data = path.read_bytes()
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):  # TypeError: one with a password
        raise CredentialError(
            f"{path} is no key, it is {_damage(data)}: restore it from a copy, or remove it, and "
            "certificate.pem beside it, to join again under a new id"
        ) from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise CredentialError(f"{path} is another kind of key: expected P-256; remove it")
    return key


def _check_certificate(path: Path, data: bytes) -> None:
    """Raises CredentialError for a file that is no certificate: emptied or cut off by a power loss,
    or something else."""
    try:
        x509.load_pem_x509_certificate(data)
    except ValueError:
        raise CredentialError(
            f"{path} is no certificate, it is {_damage(data)}: restore it from a copy, or remove "
            "it and join (a person: log in) again with a token; the key beside it keeps who you are"
        ) from None


def _damage(data: bytes) -> str:
    return f"damaged ({len(data)} bytes)" if data.strip(b"\0 \r\n") else "empty"


@dataclass(frozen=True)
class Credential:
    """All three in PEM. Raises CredentialError when asked for what the certificate does not say."""

    key: bytes
    certificate: bytes
    authority: bytes

    def __repr__(self) -> str:
        return f"<Credential of {self.party}>"  # without the key: it may land in a log

    @classmethod
    def load(cls, folder: Path) -> Credential | None:
        """The one in the folder, None when there is none. Raises CredentialError."""
        try:
            parts = [(folder / f"{n}.pem").read_bytes() for n in ("certificate", "authority")]
        except FileNotFoundError:
            return None
        if not (folder / "key.pem").exists():
            raise CredentialError(f"{folder} has a certificate, no key: remove it and join again")
        for name, part in zip(("certificate", "authority"), parts, strict=True):
            _check_certificate(folder / f"{name}.pem", part)
        found = cls(pem_of(load_key(folder)), *parts)
        key = serialization.load_pem_private_key(found.key, None).public_key()
        if found._leaf.public_key() != key:
            raise CredentialError(
                f"{folder / 'certificate.pem'} is for another key: remove it and join again"
            )
        return found

    def save(self, folder: Path) -> None:
        """Writes the three files, the certificate last: with it the credential is there."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(folder / "key.pem", self.key)
        write_private(folder / "authority.pem", self.authority)
        write_private(folder / "certificate.pem", self.certificate)

    @cached_property
    def _leaf(self) -> x509.Certificate:
        try:
            return x509.load_pem_x509_certificate(self.certificate)
        except ValueError as error:
            raise CredentialError(f"the certificate cannot be read: {error}") from None

    @cached_property
    def fingerprint(self) -> bytes:
        """The fingerprint of the authority, as in a token of its broker."""
        return fingerprint_of_pem(self.authority)

    @cached_property
    def party(self) -> Party:
        """In whose name it is."""
        return party_in(self._leaf)

    @property
    def begins(self) -> datetime:
        """Not valid before."""
        return self._leaf.not_valid_before_utc

    @property
    def ends(self) -> datetime:
        """Not valid any more from then on."""
        return self._leaf.not_valid_after_utc

    def renew_at(self) -> datetime:
        """When it is time for a new one: at the half of its life."""
        return self.begins + (self.ends - self.begins) / 2

    def holds(self, now: datetime) -> bool:
        """Whether it is valid by a clock."""
        return self.begins <= now < self.ends

    def for_channel(self) -> grpc.ChannelCredentials:
        """To dial with: shows the certificate, and believes the authority alone."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def for_server(self) -> grpc.ServerCertificateConfiguration:
        """To serve with; a server that asks for certificates believes the authority alone."""
        pair = (self.key, self.certificate)
        return grpc.ssl_server_certificate_configuration([pair], self.authority)


def party_in(certificate: x509.Certificate) -> Party:
    """Return in whose name a certificate is. Raises CredentialError."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    uris = [u.encode() for u in names.get_values_for_type(x509.UniformResourceIdentifier)]
    party = party_of({"peer_uri": uris})
    if party is None:
        raise CredentialError("the certificate names nobody: expected one of a broker of shoal")
    return party


@lru_cache(maxsize=4096)
def end_of(certificate: bytes) -> float:
    """When a certificate (PEM) ends, in seconds since 1970. Raises ValueError."""
    return x509.load_pem_x509_certificate(certificate).not_valid_after_utc.timestamp()


def shown_end(properties: Mapping[str, Iterable[bytes]]) -> float:
    """When the certificate in gRPC's `auth_context()` ends, in seconds since 1970; 0 when none was
    shown."""
    shown = next(iter(properties.get("x509_pem_cert", ())), b"")
    return end_of(shown) if shown else 0.0


def server_credentials(
    newest: Callable[[], Credential], *, asks: bool = True
) -> grpc.ServerCredentials:
    """For a server that shows the newest credential at each connection; `newest` is called on a
    thread of gRPC's. `asks`: it talks to nobody who has no certificate of the same authority."""
    shown = newest()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        if (now := newest()) is shown:
            return None
        shown = now
        return now.for_server()

    return grpc.dynamic_ssl_server_credentials(shown.for_server(), renewed, asks)
