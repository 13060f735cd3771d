"""Everything that passes between the broker's machine and its shell, on one page.

Events are facts in the past, instructions are imperatives. A shell turns streams, calls, timers and
finished work into events, and carries the instructions of one `handle` out in their order.

    who            event                          usual answer
    -------------  -----------------------------  ---------------------------------------------
    peer stream    StreamOpened, PeerSaid,        Tell, CloseStream, SetTimer
                   StreamClosed, PeerKicked
    client call    RunSubmitted, RunAsked,        Answer or Reject, exactly one for each request
                   CohortAsked, DescribeAsked,
                   WatchAsked, PreviewAsked,
                   DataAsked
    planner        PlanReady, PlanFailed,         Tell(assign) to the holders, or a failed run
                   ReplicasFormed, PlanConsidered
    clock          TimerFired                     (whatever was due)
    clock          WasAway                        (leases and deadlines begin anew)
    shell          Started                        Persist, SetTimer
    person         DrainAsked, StopAsked          StopServing

What was decided about an event is one Persist, in front of everything that tells anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NewType

from ..dag.plan.plan import PeerId
from ..planner.requests.asked import *  # noqa: F403 (one page: read as `b.MakePlan` too)
from ..planner.requests.asked import (
    ConsiderPlan,
    FormReplicas,
    MakePlan,
    PlanConsidered,
    PlanFailed,
    PlanReady,
    PreviewWanted,
    ReplicasFormed,
)
from ..proto.broker_pb2 import (
    BrokerMessage,
    Cohort,
    DataAnswer,
    Description,
    PeerMessage,
    Recalled,
    RunEvent,
    RunSpec,
    RunState,
    Submitted,
)
from ..proto.journal_pb2 import Record

RunId = NewType("RunId", str)
StreamId = NewType("StreamId", str)
"""One Attach stream; never used again after it closed."""
RequestId = NewType("RequestId", str)
"""One client call; it gets exactly one Answer or Reject."""

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The broker begins to work, with what its journal holds. Once, before every other event."""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """`peer`: whom the certificate of the other end proves; None: nobody asked for one."""

    stream: StreamId
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True)
class PeerSaid:
    """`size_bytes`: of one that was too long to be read, so that its message is empty; else 0."""

    stream: StreamId
    message: PeerMessage
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StreamClosed:
    """The stream ended, by whichever side; also comes after a CloseStream."""

    stream: StreamId
    why: str


@dataclass(frozen=True, slots=True)
class PeerKicked:
    """An operator wants the peer out; it is refused wherever it asks already."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class WasAway:
    """The broker's own process stood still for so long (seconds): stopped, or out of memory."""

    seconds: float


@dataclass(frozen=True, slots=True)
class RunSubmitted:
    """`by`: whose run it is; empty where nobody has an identity. `free`: bytes that the disk of the
    journal has for submissions; None: the journal is on none."""

    request: RequestId
    spec: RunSpec
    by: str = ""
    free: int | None = None


@dataclass(frozen=True, slots=True)
class RunAsked:
    """What somebody wants of a run. `by`: who may so only with runs of their own; empty: any."""

    request: RequestId
    run: RunId
    wanted: Literal["cancel", "pause", "resume", "finish", "recall"]
    by: str = ""


@dataclass(frozen=True, slots=True)
class CohortAsked:
    """The submitter's rule has chosen the clients of a round. `by`: as in RunAsked."""

    request: RequestId
    run: RunId
    cohort: Cohort
    by: str = ""


@dataclass(frozen=True, slots=True)
class DescribeAsked:
    """`peer`: who asks, where that is a peer, which sees its own part; empty: a person."""

    request: RequestId
    peer: str = ""


@dataclass(frozen=True, slots=True)
class PreviewAsked:
    """Answered with PreviewWanted: what the planner needs, as it is now. `by`: who asks."""

    request: RequestId
    spec: RunSpec
    by: str = ""


@dataclass(frozen=True, slots=True)
class DataAsked:
    """Answered with a DataAnswer, once the peers that have the data have looked at it."""

    request: RequestId
    name: str
    options: str
    by: str = ""
    """Who asks, as their certificate says; empty where nobody has one."""


@dataclass(frozen=True, slots=True)
class WatchAsked:
    """Answered with the kept events from a number on; asked again after the next Publish. `by`: as
    in RunAsked."""

    request: RequestId
    run: RunId
    from_event: int
    by: str = ""


@dataclass(frozen=True, slots=True)
class TimerFired:
    name: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Start nothing new; StopServing comes as soon as no run is active."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Leave now: whatever still runs has failed."""


Event = (
    Started
    | StreamOpened
    | PeerSaid
    | StreamClosed
    | PeerKicked
    | RunSubmitted
    | RunAsked
    | CohortAsked
    | DescribeAsked
    | PreviewAsked
    | DataAsked
    | WatchAsked
    | PlanReady
    | ReplicasFormed
    | PlanFailed
    | PlanConsidered
    | TimerFired
    | WasAway
    | DrainAsked
    | StopAsked
)

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class Persist:
    """A barrier: nothing after it leaves, of this event or of later ones, before the record is on
    disk."""

    record: Record


@dataclass(frozen=True, slots=True)
class Tell:
    stream: StreamId
    message: BrokerMessage


@dataclass(frozen=True, slots=True)
class CloseStream:
    """End the stream after what was told on it so far."""

    stream: StreamId
    why: str


@dataclass(frozen=True, slots=True)
class Watched:
    """Kept events of a run from the asked number on, not always all; `over`: the run has ended, and
    none comes after these. `first` is greater than the number asked for when older ones are no
    longer kept. `numbered`: how many the run has had so far."""

    run: RunId
    first: int
    events: tuple[RunEvent, ...]
    over: bool
    numbered: int


@dataclass(frozen=True, slots=True)
class Answer:
    request: RequestId
    message: Submitted | RunState | Recalled | Description | Watched | PreviewWanted | DataAnswer


@dataclass(frozen=True, slots=True)
class Reject:
    """`code` is the name of a gRPC status, e.g. "NOT_FOUND"."""

    request: RequestId
    code: Literal[
        "NOT_FOUND",
        "INVALID_ARGUMENT",
        "UNAVAILABLE",
        "RESOURCE_EXHAUSTED",
        "PERMISSION_DENIED",
        "FAILED_PRECONDITION",
    ]
    reason: str


@dataclass(frozen=True, slots=True)
class Publish:
    """A new event of a run, already kept: whoever watches the run may ask for it."""

    run: RunId
    event: RunEvent


@dataclass(frozen=True, slots=True)
class SetTimer:
    """TimerFired(name) at time `at`; replaces a timer of the same name that has not fired."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Log:
    """One structured line: a stable event name and its fields."""

    name: str
    fields: tuple[tuple[str, str | int | float], ...] = ()
    level: Literal["info", "warning"] = "info"


def ignored(what: str, peer: PeerId, why: str) -> Log:
    """The line on a peer's message that has no effect."""
    return Log("message_ignored", (("message", what), ("peer", peer), ("why", why)))


@dataclass(frozen=True, slots=True)
class StopServing:
    """Nothing is left to do after a DrainAsked or StopAsked: the daemon may end."""

    why: str


Instruction = (
    Persist
    | Tell
    | CloseStream
    | Answer
    | Reject
    | Publish
    | MakePlan
    | FormReplicas
    | ConsiderPlan
    | SetTimer
    | Log
    | StopServing
)
