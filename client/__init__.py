"""The Python client: submit a job, follow it, take its weights home. See session.py.

Importing this needs no torch; what does is imported by the calls that need it.
"""

from .session import (
    BrokerUnreachable,
    Client,
    ClientError,
    Refused,
    Run,
    RunFailed,
    connect,
    login,
)

__all__ = [
    "BrokerUnreachable",
    "Client",
    "ClientError",
    "Refused",
    "Run",
    "RunFailed",
    "connect",
    "login",
]
