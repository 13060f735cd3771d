"""The broker's certificate authority: a key that signs, and certificates with an end.

FOLDER/authority.key   the Ed25519 key, for its owner only
FOLDER/authority.crt   its own certificate; its fingerprint stands in every token

Who has the key can admit anybody: it never leaves the folder. A copy of the folder is a copy of the
broker's identity.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .credential import Credential, new_key, pem_of, write_private
from .names import DOOR_NAME, Party, PartyRole, dns_name, uri_of
from .token import Token, fingerprint_of

__all__ = ["Authority", "AuthorityError"]

_YEARS = timedelta(days=3650)
_WRITTEN = datetime(2026, 1, 1, tzinfo=UTC)
"""No clock that is right says less: this was written later."""
SLACK = timedelta(minutes=10)
"""A certificate is valid from so long before it was made: clocks differ."""
MOST_REQUEST_BYTES = 4096


class AuthorityError(ValueError):
    """A folder without a usable authority, or a request that cannot be signed; the message says
    what to do."""


class Authority:
    """`Authority.open(folder, now)` loads or makes it. `now`: an aware datetime."""

    def __init__(self, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
        self._key = key
        self._certificate = certificate
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        """Its own certificate: what everybody checks others against."""
        self.der = certificate.public_bytes(serialization.Encoding.DER)
        self.fingerprint = fingerprint_of(self.der)

    @classmethod
    def open(cls, folder: Path, now: datetime) -> Authority:
        """The one in the folder; made, if there is none. Raises AuthorityError, OSError."""
        key_file, certificate_file = folder / "authority.key", folder / "authority.crt"
        if not key_file.exists() and not certificate_file.exists():
            if now < _WRITTEN:
                raise AuthorityError(
                    f"this host's clock says {now:%Y-%m-%d}, which is long ago: set it first (most "
                    "systems: `timedatectl set-ntp true`), as certificates go by the clock"
                )
            made = cls.new(now)
            # Both at once, so that one without the other is always a loss, never a crash here.
            new = folder.with_name(f"{folder.name}.new")
            new.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(new / certificate_file.name, made.pem)
            write_private(new / key_file.name, pem_of(made._key))
            new.replace(folder)
            return made
        path = key_file
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            path = certificate_file
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (ValueError, FileNotFoundError) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else "is empty or damaged"
            raise AuthorityError(
                f"{path} {what}, so there is no usable authority: restore the two files of that "
                "folder from a backup; or remove both to make a new one, by which every peer and "
                "person must then join again"
            ) from None
        if not isinstance(key, Ed25519PrivateKey) or certificate.public_key() != key.public_key():
            raise AuthorityError(
                f"{key_file} is not the key of {certificate_file}: restore both from one backup"
            )
        if now < certificate.not_valid_before_utc:
            raise AuthorityError(
                f"{certificate_file} is of the future: it is valid from "
                f"{certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC, and this host's clock "
                f"says {now:%Y-%m-%d %H:%M}. If the clock is wrong, set it. If it is right, it was "
                "ahead when the file was made: remove both files; every peer must then join again"
            )
        if certificate.not_valid_after_utc <= now:
            raise AuthorityError(
                f"{certificate_file} ended on {certificate.not_valid_after_utc:%Y-%m-%d}, and "
                f"this host's clock says {now:%Y-%m-%d}. If the clock is right, remove both "
                "files; every peer must then join again"
            )
        return cls(key, certificate)

    @classmethod
    def new(cls, now: datetime) -> Authority:
        """With a fresh key."""
        key = Ed25519PrivateKey.generate()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal authority")])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(now + _YEARS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(_key_id(key), critical=False)
            .sign(key, None)
        )
        return cls(key, certificate)

    def attest(self, statement: bytes) -> bytes:
        """Return the authority's Ed25519 signature (64 bytes) under a statement that begins with
        what it is about; no certificate begins so."""
        assert statement.startswith(b"shoal "), "what is signed could be a certificate"
        return self._key.sign(statement)

    def attested(self, statement: bytes, signature: bytes) -> bool:
        """Whether it signed that statement."""
        try:
            self._key.public_key().verify(signature, statement)
        except InvalidSignature:
            return False
        return True

    def token(self) -> Token:
        """A fresh one that pins this authority. Who may use it is the admission's to say."""
        return Token.new(self.fingerprint)

    def sign(self, request_der: bytes, party: Party, now: datetime, lasts: timedelta) -> bytes:
        """A certificate in PEM for the key in a signing request (DER), in the name of `party`; what
        else the request says is ignored. Raises AuthorityError when it is none, not signed by its
        own key, or of another kind of key."""
        return self._leaf(public_key_of(request_der), party, now, lasts)

    def credential(self, party: Party, now: datetime, lasts: timedelta) -> Credential:
        """A key with its certificate, made here: for the broker itself, and its first operator."""
        key = new_key()
        return Credential(pem_of(key), self._leaf(key.public_key(), party, now, lasts), self.pem)

    def _leaf(
        self, key: EllipticCurvePublicKey, party: Party, now: datetime, lasts: timedelta
    ) -> bytes:
        names: list[x509.GeneralName] = [x509.DNSName(dns_name(*party))]
        if party.role is PartyRole.BROKER:
            names.append(x509.DNSName(DOOR_NAME))
        names.append(x509.UniformResourceIdentifier(uri_of(party)))
        uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if party.role in (PartyRole.BROKER, PartyRole.PEER):
            uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, party.subject[:64])])
        longest = self._certificate.not_valid_after_utc
        end = now + lasts if lasts < longest - now else longest
        leaf = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_issuer(self._key), critical=False)
            .sign(self._key, None)
        )
        return leaf.public_bytes(serialization.Encoding.PEM)

    def __repr__(self) -> str:
        return f"<Authority {self.fingerprint.hex()[:16]}>"


def public_key_of(request_der: bytes) -> EllipticCurvePublicKey:
    """The key that a signing request (DER) proves to hold. Raises AuthorityError."""
    if len(request_der) > MOST_REQUEST_BYTES:
        raise AuthorityError(
            f"the signing request has {len(request_der)} bytes: expected at most "
            f"{MOST_REQUEST_BYTES}"
        )
    try:
        request = x509.load_der_x509_csr(request_der)
        key = request.public_key()
        if not isinstance(key, EllipticCurvePublicKey) or not isinstance(key.curve, SECP256R1):
            raise AuthorityError("the signing request is for another kind of key: expected P-256")
        if not request.is_signature_valid:
            raise AuthorityError("the signing request is not signed by its own key")
    except AuthorityError:
        raise
    except (ValueError, TypeError, InvalidSignature) as error:
        raise AuthorityError(f"the signing request cannot be read: {error}") from None
    return key


def _key_id(key: Ed25519PrivateKey) -> x509.SubjectKeyIdentifier:
    return x509.SubjectKeyIdentifier.from_public_key(key.public_key())


def _issuer(key: Ed25519PrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def utc(seconds: float) -> datetime:
    """Seconds since 1970 as the aware datetime that certificates want."""
    return datetime.fromtimestamp(seconds, UTC)
