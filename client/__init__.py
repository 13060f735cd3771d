"""The Python client: submit a job, follow it, take its weights home. See client/runs/session.py and
client/runs/run.py.

Importing this needs no torch; what does is imported by the calls that need it.
"""

from .errors import BrokerUnreachable, ClientError, Refused, RunFailed
from .runs.callbacks import Callback
from .runs.history import History
from .runs.readable import Evaluated, Event, Note, Planned, Reached, Round, Step
from .runs.run import Run
from .runs.session import Client, connect, login

__all__ = [
    "BrokerUnreachable",
    "Callback",
    "Client",
    "ClientError",
    "Evaluated",
    "Event",
    "History",
    "Note",
    "Planned",
    "Reached",
    "Refused",
    "Round",
    "Run",
    "RunFailed",
    "Step",
    "connect",
    "login",
]
