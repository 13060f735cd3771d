"""Every message between the peer's machine and its shell, on one page.

Events are facts that a shell reports; instructions are what the machine wants done. Both are small
frozen records; `instructions.py` has the latter. A shell gives `Started()` first, carries the
instructions of one `handle` out in order, and turns every result, failure and timeout into the next
event. `run` and `term` name the assignment that caused a record, so that a stale answer is
recognised and dropped.

    shell -> machine                          machine -> shell
    Started StopAsked OwnerLooked TimerFired  Connect Tell SetTimer ShowWaiting Exit
    SpeedsMeasured
    Attached Detached BrokerSaid              Dial ExpectPeer HangUp Allow
    LinkUp LinkDown                           Build Prefetch Compute Discard UploadWeights
    Built BuildFailed DataReady DataFailed    SendFrame Release
    Computed ComputeFailed FrameQueued        SendProbe BeginRound JoinExchange
    FrameArrived FrameGrows FrameRefused      HearMasks
    FrameAcknowledged                         ShowReceipts ShowAgain AddAgain
    ExportedWeights ExportFailed
    ReceiptsShown
    RoundReady SnapshotTaken SnapshotFailed   TakeSnapshot KeepSnapshot DropSnapshot
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...net.links.frame import immutable
from .instructions import *  # noqa: F403 (facts and orders are read as one, e.g. `e.Tell`)
from .instructions import OfStep, OfTerm

if TYPE_CHECKING:
    from datetime import datetime

    from ...dag.plan.plan import PeerId
    from ...dag.rounds.vector import RunVector
    from ...dag.schedule.flow import Flow, Role
    from ...dag.schedule.schedule import Action
    from ...net.links.frame import FrameKey
    from ...proto import broker_pb2, common_pb2


@immutable
class Started:
    """The process is up and its transport listens; the first event of every machine."""


@immutable
class StopAsked:
    """The owner wants this peer to end: after the step that it is in, or (now) at once."""

    now: bool = False


@immutable
class OwnerLooked:
    """What the owner's wishes depend on, every second or so: the host's wall clock, whether the
    owner has paused it, and what its peers have moved in this calendar month, bytes."""

    at: datetime
    paused: bool
    moved_bytes: int


@immutable
class SpeedsMeasured:
    """The device was measured anew, in the pool."""

    speeds: broker_pb2.Speeds


@immutable
class TimerFired:
    """The time of the last `SetTimer` with this name has come."""

    name: str


@immutable
class Attached:
    """A stream to the broker is open; nothing was said on it yet."""


@immutable
class Detached:
    """The stream to the broker ended, or `Connect` failed; `why` names the address."""

    why: str


@immutable
class BrokerSaid:
    """A message came on the stream."""

    message: broker_pb2.BrokerMessage


@immutable
class LinkUp:
    """Frames can flow to and from this peer. `again_bytes`: of those that the last connection did
    not bring there."""

    peer: PeerId
    again_bytes: int = 0


@immutable
class LinkDown:
    """The link broke or was refused; a transport that dials keeps trying."""

    peer: PeerId
    why: str


@immutable
class Built(OfTerm):
    """The stages of an assignment stand on the device with their parameters.

    `flow` says what every action takes and gives; `slots` the receive slots per (source, role) that
    the checker proved; `device_bytes` what parameters, gradients and optimizer take; `steps` the
    number of updates that the run wants; `eval_every` the steps between evaluations (0: none; with
    evaluation there is one after the last step too); `exports` the stages whose weights this peer
    uploads (it is their first holder); `partial` whether that leaves out what stays as the weights
    files have it; `vector` what replicas exchange in rounds, None where there are none.
    """

    flow: Flow
    slots: tuple[tuple[PeerId, Role, int], ...]
    device_bytes: int
    steps: int
    eval_every: int = 0
    exports: tuple[int, ...] = ()
    partial: bool = False
    vector: RunVector | None = None


@immutable
class BuildFailed(OfTerm):
    """The assignment cannot be built here; `code` is a word for programs ("memory", "host")."""

    why: str
    code: str = "build"


@immutable
class DataReady(OfStep):
    """The data that this peer's stages read in `step`, evaluation included, is on the host."""


@immutable
class DataFailed(OfStep):
    """The data of a step could not be fetched or read; `code` as of `BuildFailed`."""

    why: str
    code: str = "data"


@immutable
class RoundResult:
    """What an action of a round came to. hashes: of the version by stage, parts: by segment of the
    plan, from an `APPLY`. drift: squared 2-norm, from a `CONTRIBUTE`. moved: mean square of what
    clients moved, from a `CONTRIBUTE`; squared 2-norm of the mean of all, from an `APPLY`.
    left_out: places of clients that count for nothing, lost: of those whose state is gone, losses:
    of those that count, in the order of their places, if they are told, skipped: steps of clients
    that overflowed, from a `CONTRIBUTE`. code, why: what is wrong. masks: what the broker is told
    of masks, where sums have some. said: what this peer has signed of the attempt, from an
    `APPLY`."""

    hashes: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    drift: float = 0.0
    moved: float = 0.0
    left_out: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
    skipped: int = 0
    code: str = ""
    why: str = ""
    masks: broker_pb2.MemberMasks | None = None
    said: broker_pb2.SignedStatement | None = None


@immutable
class Result:
    """What an action came to: seconds spent computing, peak device bytes so far (0: unknown), at
    the hub what the step or the evaluation came to, and from an update what frames took since the
    last one."""

    seconds: float = 0.0
    peak_bytes: int = 0
    outcome: broker_pb2.Outcome | None = None
    evaluation: broker_pb2.Evaluation | None = None
    links: tuple[broker_pb2.LinkUse, ...] = ()
    round: RoundResult | None = None
    """Of an action of a round."""


@immutable
class Computed(OfStep):
    """An action ran; the device's store holds what `flow.gives` names."""

    action: Action
    result: Result = Result()


@immutable
class RoundReady(OfTerm):
    """A `BeginRound` was carried out: the data of its first step may be read."""

    round: int


@immutable
class ReceiptsShown(OfTerm):
    """What `ShowReceipts` or `AddAgain` asked for."""

    answer: broker_pb2.RoundAnswer


@immutable
class ComputeFailed(OfStep):
    """An action raised; the device is usable again after a `Discard`. code: "data" where its
    samples ask for what the model does not have."""

    action: Action
    why: str
    code: str = "compute"


@immutable
class FrameQueued:
    """A `SendFrame` was encoded (size_bytes on the wire) and handed to the transport; or a
    `SendProbe` was handed to it."""

    key: FrameKey
    size_bytes: int


@immutable
class FrameAcknowledged:
    """The peer has the whole frame; told after its FrameQueued, once. `began_s`: when its first
    byte was handed to the link, by the clock of `handle`; None: not known, a connection broke."""

    key: FrameKey
    began_s: float | None = None


@immutable
class FrameArrived:
    """A whole frame came, fits its spec, and lies in the device's store. `size_bytes`: of a
    probe's, which nobody stores."""

    key: FrameKey
    size_bytes: int = 0


@immutable
class FrameGrows:
    """More of a round's frame came, on a line on which that takes long."""

    key: FrameKey


@immutable
class FrameRefused:
    """A whole frame came, or was to be sent, that does not fit: another spec, a codec error."""

    key: FrameKey
    why: str


@immutable
class ExportedWeights(OfStep):
    """This holder's weights after `step` updates are stored as `blob`."""

    blob: common_pb2.BlobRef


@immutable
class ExportFailed(OfStep):
    """The weights after `step` updates could not be written or stored."""

    why: str


@immutable
class SnapshotTaken:
    """Snapshot that lies on this host, in so many parts."""

    snapshot: broker_pb2.Snapshot
    parts: int


@immutable
class SnapshotFailed:
    """Snapshot that could not be taken, or not be kept: the disk is full, say."""

    snapshot: broker_pb2.Snapshot
    why: str


@immutable
class SnapshotSaved:
    """Snapshot that lies with the broker; or `blob` is None, and `why` says what stood in the
    way."""

    snapshot: broker_pb2.Snapshot
    blob: common_pb2.BlobRef | None
    why: str = ""


FrameEvent = FrameArrived | FrameQueued | FrameAcknowledged | FrameRefused
"""What becomes of a frame."""

Answer = (
    Built
    | BuildFailed
    | DataReady
    | DataFailed
    | Computed
    | RoundReady
    | ReceiptsShown
    | ComputeFailed
    | ExportedWeights
    | ExportFailed
)
"""Results of what the machine asked for in an assignment."""

Event = (
    Started
    | StopAsked
    | OwnerLooked
    | SpeedsMeasured
    | TimerFired
    | Attached
    | Detached
    | BrokerSaid
    | LinkUp
    | LinkDown
    | Answer
    | FrameEvent
    | FrameGrows
    | SnapshotTaken
    | SnapshotFailed
    | SnapshotSaved
)
