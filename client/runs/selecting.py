"""A rule of the submitter's own for who is in a round, run beside whatever the process does.

    reader thread   events of the run  ->  the newest candidates
    rule thread     these  ->  the rule  ->  the broker

The broker waits for nobody: what comes when the round has begun is refused, and the round is of the
clients that its number says.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from queue import SimpleQueue

from ...broker.candidates import Candidates, Clients, Rule, chosen_by
from ...job import LIVE, Job, SettingsError
from ...proto.broker_pb2 import RunEvent
from ..errors import ClientError, Refused
from .broker_calls import BrokerCalls

__all__ = ["begin", "rule_of", "to_stderr"]

Say = Callable[[str], None]


def to_stderr(line: str) -> None:
    """Print a line for people."""
    print(line, file=sys.stderr, flush=True)


def rule_of(job: Job) -> Rule | None:
    """Return the function that `sync.select` names; None: it names none. Raises ModelError for one
    that cannot be imported, SettingsError for one that lives in another process."""
    from ..models.factories import function_of  # needs torch

    where = job.sync.select
    if where.startswith(LIVE):
        raise SettingsError(
            "sync.select",
            f'is "{where}", a function of the process that submitted it: expected '
            '"file.py:function", or client.submit(job, select=function)',
        )
    return function_of(where, job.folder, "sync.select") if where else None


def begin(client: BrokerCalls, run: str, rule: Rule, say: Say) -> None:
    """Have a rule choose the clients of each round to come until the run has ended, in threads of
    its own. Raises Refused for a run whose rounds no rule chooses."""
    try:
        clients = Clients(client.recall(run).spec)
    except ValueError as error:
        raise Refused(str(error)) from None
    newest: SimpleQueue[Candidates | None] = SimpleQueue()

    def read() -> None:
        number, last = 0, None
        try:
            for event in client.watch(run, 0, so_far=True):
                number, last = event.number + 1, clients.see(event) or last
            if last is not None:
                newest.put(last)
            _put(newest, clients, client.follow(run, number))
        except ClientError as error:
            say(f"run {run}: its rule is away, for the run is not heard of: {error}")
        except ValueError:  # its client was closed
            say(f"run {run}: its rule is away, for its client is closed")
        finally:
            newest.put(None)

    def choose() -> None:
        goes_on = True
        while goes_on and (found := newest.get()) is not None:
            while goes_on and not newest.empty():
                later = newest.get()
                goes_on, found = later is not None, later or found
            _choose(client, run, rule, found, say)

    for name, work in (("events", read), ("rule", choose)):
        threading.Thread(target=work, name=f"{name} of {run}", daemon=True).start()


def _put(
    newest: SimpleQueue[Candidates | None], clients: Clients, events: Iterable[RunEvent]
) -> None:
    for event in events:
        if (found := clients.see(event)) is not None:
            newest.put(found)


def _choose(client: BrokerCalls, run: str, rule: Rule, found: Candidates, say: Say) -> None:
    """Have the rule choose the clients of one round, and tell the broker; or say why not."""
    from ..models.factories import story

    try:
        cohort = chosen_by(rule, found)
    except Exception as error:  # whatever the user's code raises is the user's to see
        why = f"the rule raised {story(error)}"
    else:
        try:
            client.choose(run, cohort)
        except (ClientError, ValueError) as error:
            why = str(error)
        else:
            return
    say(f"round {found.round} is of the clients that its number says: {why}")
