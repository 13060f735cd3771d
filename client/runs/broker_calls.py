"""What a client asks a broker, call by call. Every call raises BrokerUnreachable when the broker
does not answer, and Refused when it says no."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import grpc

from ...net.grpc_quirks import in_words
from ...net.identity.credential import Credential
from ...net.identity.enroll import BrokerAwayError
from ...net.interrupts import elsewhere
from ...net.printable import printable
from ...proto import admission_pb2, broker_pb2
from ...proto.admission_pb2_grpc import AdmissionStub
from ...proto.broker_pb2 import Cohort, Description, Recalled, RunEvent, RunSpec, RunState
from ...proto.broker_pb2_grpc import RunsStub
from ..access import AccessError, access_of_peer, access_to, named_in
from ..errors import BrokerUnreachable, ClientError, Refused

__all__ = ["ENDED", "BrokerCalls"]

A = TypeVar("A")

ENDED = (broker_pb2.DONE, broker_pb2.FAILED, broker_pb2.CANCELLED)
CALL_S = 30.0
"""Deadline of one short call."""
PATIENCE_S = 60.0
"""How long a stream that broke is dialled again before the broker counts as gone."""
SO_FAR_S = 120.0
"""Deadline of all events of a run: 50,000 of a few KiB."""
REFUSALS = (
    "FAILED_PRECONDITION",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAUTHENTICATED",
)
"""gRPC statuses by which a broker says no."""


class BrokerCalls:
    """A connection to one broker, and its calls."""

    def __init__(self, address: str, lent: Credential | None = None) -> None:
        self.address = address
        try:
            self.access = access_to(address) if lent is None else access_of_peer(address, lent)
        except AccessError as error:
            raise Refused(str(error)) from None
        except BrokerAwayError as error:
            raise BrokerUnreachable(str(error)) from None
        self.channel = self.access.channel(
            [
                ("grpc.max_receive_message_length", 64 * 2**20),
                ("grpc.initial_reconnect_backoff_ms", 200),
                ("grpc.max_reconnect_backoff_ms", 2000),
                # A broker that vanished without a word is noticed within 20 s: watching has no
                # deadline of its own.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ],
        )
        self._runs = RunsStub(self.channel)  # type: ignore[no-untyped-call]
        self._admission = AdmissionStub(self.channel)  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self.address}>"

    def close(self) -> None:
        self.channel.close()

    def describe(self) -> Description:
        """Peers and runs as they are now."""
        return self._asked(Description, self._runs.Describe, broker_pb2.DescribeRequest())

    def state(self, run: str) -> RunState:
        """A run as it is now. Raises Refused when the broker does not know it."""
        for state in self.describe().runs:
            if state.run == run:
                return state
        raise Refused(f'the broker at {self.address} knows no run "{run}": see shoal runs')

    def is_open(self, run: str) -> bool:
        """Whether it is a run of this broker that has not ended."""
        return any(s.run == run and s.phase not in ENDED for s in self.describe().runs)

    def names(self) -> dict[str, str]:
        """What people call the peers that have joined, by id."""
        return {p.peer: p.profile.name or p.peer for p in self.describe().peers}

    def submit_spec(self, spec: RunSpec) -> str:
        """Starts a run whose blobs lie with the broker; returns its id. Raises Refused."""
        return self._asked(broker_pb2.Submitted, self._runs.Submit, spec).run

    def watch(self, run: str, from_event: int, *, so_far: bool = False) -> Iterator[RunEvent]:
        """One stream of events; ends when the run or the stream ends. See `follow`. `so_far`: it
        ends with the newest event, within SO_FAR_S."""
        wanted = broker_pb2.WatchRequest(run=run, from_event=from_event, so_far=so_far)
        with self.translated():
            stream = self._runs.Watch(wanted, timeout=SO_FAR_S if so_far else None)
            yield from elsewhere(stream, stream.cancel)

    def follow(self, run: str, from_event: int = 0) -> Iterator[RunEvent]:
        """Every event from a number on, until the run has ended.

        A stream that breaks is opened again from the event after the last one, for PATIENCE_S
        without any event; then BrokerUnreachable is raised.
        """
        gone_since: float | None = None
        pause_s = 0.2
        while True:
            try:
                for event in self.watch(run, from_event):
                    from_event, gone_since, pause_s = event.number + 1, None, 0.2
                    yield event
                if self.state(run).phase in ENDED:  # the broker ends the stream of an ended run
                    return
            except BrokerUnreachable:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() - gone_since > PATIENCE_S:
                    raise
            time.sleep(pause_s)  # a client waits for people's sake, not for the protocol's
            pause_s = min(2.0, 2 * pause_s)

    def cancel(self, run: str) -> RunState:
        return self._asked(RunState, self._runs.Cancel, broker_pb2.RunRequest(run=run))

    def pause(self, run: str) -> RunState:
        """Have it stop between two steps and give its peers back. Raises Refused where it cannot be
        paused."""
        return self._asked(RunState, self._runs.Pause, broker_pb2.RunRequest(run=run))

    def unpause(self, run: str) -> RunState:
        """A paused run goes on. Raises Refused for one that is not."""
        return self._asked(RunState, self._runs.Resume, broker_pb2.RunRequest(run=run))

    def finish(self, run: str) -> RunState:
        """Have a run in rounds end early, in good order. Raises Refused as `Run.finish` does."""
        return self._asked(RunState, self._runs.Finish, broker_pb2.RunRequest(run=run))

    def choose(self, run: str, cohort: Cohort) -> RunState:
        """Have the next round that begins be of these clients. Raises Refused where it cannot be,
        or has begun."""
        wanted = broker_pb2.CohortChoice(run=run, cohort=cohort)
        return self._asked(RunState, self._runs.Choose, wanted)

    def recall(self, run: str) -> Recalled:
        """What was submitted, and the newest checkpoint that lies with the broker. Raises Refused
        for another's run."""
        return self._asked(Recalled, self._runs.Recall, broker_pb2.RunRequest(run=run))

    def invite(self, role: str, uses: int, lasts_s: float) -> admission_pb2.Invitation:
        """A new token for a "peer", "submitter" or "operator"; for operators. Raises Refused."""
        request = admission_pb2.InviteRequest(role=role, uses=uses, lasts_s=lasts_s)
        return self._asked(admission_pb2.Invitation, self._admission.Invite, request)

    def kick(self, subject: str) -> str:
        """Refuses a peer or person from now on, for good; returns what it was. For operators.
        Raises Refused."""
        request = admission_pb2.KickRequest(subject=subject)
        return self._asked(admission_pb2.Kicked, self._admission.Kick, request).role

    def page(self, lasts_s: float) -> admission_pb2.PageKey:
        """A key that opens the broker's page for reading, for so long. Raises Refused."""
        request = admission_pb2.PageRequest(lasts_s=lasts_s)
        return self._asked(admission_pb2.PageKey, self._admission.Page, request)

    def _asked(self, answer: type[A], call: Any, question: Any) -> A:
        """The answer to a short call."""
        with self.translated():
            found: A = call(question, timeout=CALL_S)
        return found

    @contextmanager
    def translated(self) -> Iterator[None]:
        """gRPC's errors as ours; the only place that knows its status codes."""
        from ...net.blobs.client import BlobTransferError

        try:
            yield
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
            detail = (error.details() if isinstance(error, grpc.Call) else None) or str(error)
            detail = printable(detail)
            if (translated := self._error(code, detail)) is None:
                raise
            raise translated from None
        except BlobTransferError as error:
            if (translated := self._error(error.code, error.reason)) is None:
                raise
            raise translated from None

    def _error(self, code: str, detail: str) -> ClientError | None:
        """What a gRPC status means to a client; None for what should not happen."""
        if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            if why := self.access.why_not():
                return BrokerUnreachable(f"no connection to the broker at {self.address}: {why}")
            return BrokerUnreachable(
                f"the broker at {self.address} does not answer ({in_words(detail)}): is it running "
                f"(`shoal broker`), and is the address right{named_in(self.address)}? Another one: "
                "--broker HOST:PORT, or SHOAL_BROKER"
            )
        if code == "UNIMPLEMENTED":
            return Refused(
                f"the broker at {self.address} knows no such call: it was started with --insecure "
                "and has no identities, or it is of another version of shoal"
            )
        if code in REFUSALS:
            return Refused(f"the broker at {self.address} refused: {detail}")
        return None
