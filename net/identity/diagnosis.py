"""Why there is no TLS connection to a broker: found out by small steps, each with its own words.

gRPC says of all of them that the handshake failed, or nothing in time. So whoever has failed asks
here: another authority, a clock that is wrong, a certificate that does not hold yet or any more,
and packets that vanish when they are large. All calls block.
"""

from __future__ import annotations

import http.client
import ssl
import time
from datetime import datetime

from ..local import split
from ..web.proxy import ProxyError, dial
from .authority import utc
from .credential import Credential
from .enroll import SKEW_S, BrokerAwayError, clock_text, shown_by, validity_problem
from .names import BROKER_NAME
from .token import fingerprint_of_pem

__all__ = ["VANISH", "handshake_problem", "packets_problem", "why_no_tls"]

_PATIENCE_S = 5.0
VANISH = (
    "small packets pass and large ones vanish on the way, as behind a tunnel whose MTU is smaller "
    "than it says: lower the MTU of the interface (`ip link set dev IF mtu 1280`), or clamp the MSS"
)
_PADDING_BYTES = 12_000
_NOT_YET, _ENDED = 9, 10
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED of OpenSSL."""


def why_no_tls(address: str, credential: Credential, now: datetime | None = None) -> str:
    """What keeps this credential from a TLS connection to the broker at HOST:PORT, and what to do;
    empty where nothing is found, or nobody answers at all. `now`: this host's clock."""
    now = now or utc(time.time())
    try:
        shown = shown_by(address, _PATIENCE_S)
    except (BrokerAwayError, ProxyError):
        return ""
    there, here = fingerprint_of_pem(shown.authority), credential.fingerprint
    if there != here:
        return (
            f"another authority answers at {address} ({there.hex()[:16]}…, expected "
            f"{here.hex()[:16]}…): it is another broker, or it was set up anew; check the address, "
            "and ask its operator for a new line"
        )
    if abs(shown.ahead_s) > SKEW_S:
        return clock_text(shown.ahead_s)
    return (
        validity_problem(shown.authority, now, "the certificate of the broker's authority")
        or validity_problem(credential.certificate, now, f"the certificate of {credential.party}")
        or handshake_problem(address, shown.authority)
        or packets_problem(address)
    )


def packets_problem(address: str) -> str:
    """Why full packets do not pass between here and the broker at HOST:PORT, either way; empty:
    they do."""
    try:
        connection = dial(*split(address), _PATIENCE_S)
    except OSError as error:
        return f"{address} cannot be reached any more: {error}"
    asked = http.client.HTTPConnection(*split(address))
    asked.sock = connection
    try:
        asked.request("GET", "/full-size", headers={"X-Padding": "." * _PADDING_BYTES})
        asked.getresponse().read()
    except TimeoutError:
        return f"full packets do not come through within {_PATIENCE_S:.0f} s: {VANISH}"
    except (http.client.HTTPException, OSError) as error:
        return f"the connection breaks off when full packets are sent: {error}"
    finally:
        asked.close()
    return ""


def handshake_problem(address: str, authority: bytes, name: str = BROKER_NAME) -> str:
    """Why a TLS handshake with whom a broker's authority (PEM) has signed for, under a name, fails
    at HOST:PORT; empty: it does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=authority.decode())
    context.set_alpn_protocols(["h2"])
    try:
        connection = dial(*split(address), _PATIENCE_S)
    except OSError as error:
        return f"{address} cannot be reached any more: {error}"
    try:
        with connection, context.wrap_socket(connection, server_hostname=name):
            return ""
    except TimeoutError:
        return f"{address} begins TLS and its certificate does not come: {VANISH}"
    except ssl.SSLCertVerificationError as error:
        when = {_NOT_YET: "is not valid yet", _ENDED: "is not valid any more"}
        what = when.get(error.verify_code, f"is not believed ({error.verify_message})")
        return (
            f"the certificate that the broker at {address} shows {what}: its clock may have been "
            "wrong when it was made; start it again"
        )
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error.strerror or "the other end hangs up"
        return (
            f"TLS with {address} breaks off ({reason}): its log says why if it is the broker that "
            "does; else a proxy or a firewall in between takes part in it"
        )
