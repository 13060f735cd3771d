"""What the page proves itself with: the owner's certificate, or one of its own.

A browser believes neither the broker's authority nor, most of them, an Ed25519 signature: so the
page has a self-signed P-256 certificate, which browsers warn about once; `shoal page` prints its
fingerprint to compare. An owner who has one that browsers know names its folder.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ....net.identity.authority import SLACK
from ....net.identity.credential import new_key, pem_of, write_private

__all__ = ["fingerprint", "own_certificate", "owners_certificate"]

_LASTS = timedelta(days=3650)
_LEAST_LEFT = timedelta(days=30)
_LOCAL = ("localhost", "127.0.0.1", "::1")


def owners_certificate(folder: Path) -> tuple[Path, Path]:
    """Chain and key under the names that certbot gives them. Raises FileNotFoundError."""
    pair = folder / "fullchain.pem", folder / "privkey.pem"
    for path in pair:
        if not path.is_file():
            raise FileNotFoundError(2, "expected the page's certificate here", str(path))
    return pair


def own_certificate(folder: Path, host: str, now: datetime) -> tuple[Path, Path]:
    """The page's own in the folder, for `host` and this machine; made where there is none that
    still holds. Raises OSError."""
    pair = folder / "certificate.pem", folder / "key.pem"
    names = [host, *(n for n in _LOCAL if n != host)]
    if not _holds(pair, names, now):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = new_key()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal page")])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - SLACK)
            .not_valid_after(now + _LASTS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(list(map(_name, names))), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_private(pair[1], pem_of(key))
        write_private(pair[0], made.public_bytes(serialization.Encoding.PEM))
    return pair


def _holds(pair: tuple[Path, Path], names: Sequence[str], now: datetime) -> bool:
    try:
        found = x509.load_pem_x509_certificate(pair[0].read_bytes())
        key = serialization.load_pem_private_key(pair[1].read_bytes(), None)
        of = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return False
    return (
        found.public_key() == key.public_key()
        and list(of) == list(map(_name, names))
        and found.not_valid_after_utc - now > _LEAST_LEFT
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def fingerprint(certificate: Path) -> str:
    """SHA-256 of the first certificate in the file, as browsers show it."""
    digest = x509.load_pem_x509_certificate(certificate.read_bytes()).fingerprint(hashes.SHA256())
    return digest.hex(":").upper()
