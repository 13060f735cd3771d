"""What the Python client raises, beside what is wrong with a job."""

from __future__ import annotations

__all__ = ["BrokerUnreachable", "ClientError", "RecordError", "Refused", "RunFailed"]


class ClientError(Exception):
    """What a client cannot change by trying again. The subclasses say whose doing it was."""


class BrokerUnreachable(ClientError, ConnectionError):  # noqa: N818 (says what happened)
    """Nobody answers at the address, or no longer."""


class Refused(ClientError):  # noqa: N818 (says what happened)
    """The broker understood and said no; the message is its reason."""


class RunFailed(ClientError):  # noqa: N818 (says what happened)
    """The run ended without its result; the message is the broker's reason."""


class RecordError(ValueError):
    """What this machine kept of a run is not there."""
