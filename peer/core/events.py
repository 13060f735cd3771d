"""Every message between the peer's machine and its shell, on one page.

Events are facts that a shell reports; instructions are what the machine wants done. Both are small
frozen records. A shell gives `Started()` first, carries the instructions of one `handle` out in
order, and turns every result, failure and timeout into the next event. `run` and `term` name the
assignment that caused a record, so that a stale answer is recognised and dropped.

    shell -> machine                          machine -> shell
    Started StopAsked OwnerLooked TimerFired  Connect Tell SetTimer ShowWaiting Exit
    Attached Detached BrokerSaid              Dial ExpectPeer HangUp Allow
    LinkUp LinkDown                           Build Prefetch Compute Discard UploadWeights
    Built BuildFailed DataReady DataFailed    SendFrame Release
    Computed ComputeFailed FrameQueued        SendProbe BeginRound JoinExchange
    FrameArrived FrameRefused                 HearMasks
    FrameAcknowledged                         ShowReceipts ShowAgain AddAgain
    ExportedWeights ExportFailed
    ReceiptsShown
    RoundReady SnapshotTaken SnapshotFailed   TakeSnapshot KeepSnapshot DropSnapshot
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...net.links.frame import immutable

if TYPE_CHECKING:
    from datetime import datetime

    from ...dag.plan.plan import PeerId
    from ...dag.rounds.vector import RunVector
    from ...dag.rounds.wiring import RoundWiring
    from ...dag.schedule.flow import Flow, Role
    from ...dag.schedule.schedule import Action
    from ...net.links.frame import FrameKey
    from ...proto import broker_pb2, common_pb2
    from .snapshots import SnapshotId

__all__ = [
    "AddAgain",
    "Allow",
    "Attached",
    "BeginRound",
    "BrokerSaid",
    "Build",
    "BuildFailed",
    "Built",
    "Compute",
    "ComputeFailed",
    "Computed",
    "Connect",
    "DataFailed",
    "DataReady",
    "Detached",
    "Dial",
    "Discard",
    "DropSnapshot",
    "Event",
    "Exit",
    "ExpectPeer",
    "ExportFailed",
    "ExportedWeights",
    "FrameAcknowledged",
    "FrameArrived",
    "FrameQueued",
    "FrameRefused",
    "HangUp",
    "HearMasks",
    "Instruction",
    "JoinExchange",
    "KeepSnapshot",
    "LinkDown",
    "LinkUp",
    "OwnerLooked",
    "Prefetch",
    "ReceiptsShown",
    "Release",
    "Result",
    "RoundReady",
    "RoundResult",
    "SendFrame",
    "SendProbe",
    "SetTimer",
    "ShowAgain",
    "ShowReceipts",
    "ShowWaiting",
    "SnapshotFailed",
    "SnapshotSaved",
    "SnapshotTaken",
    "Started",
    "StopAsked",
    "TakeSnapshot",
    "Tell",
    "TimerFired",
    "UploadSnapshot",
    "UploadWeights",
]


@immutable
class OfTerm:
    """A record of one assignment."""

    run: str
    term: int


@immutable
class OfStep(OfTerm):
    """A record of one of its steps."""

    step: int


# ---------------------------------------------------------------- facts


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
    of those that count, in the order of their places, if they are told, from a `CONTRIBUTE`. code,
    why: what is wrong. masks: what the broker is told of masks, where sums have some. said: what
    this peer has signed of the attempt, from an `APPLY`."""

    hashes: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    drift: float = 0.0
    moved: float = 0.0
    left_out: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()
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


Event = (
    Started
    | StopAsked
    | OwnerLooked
    | TimerFired
    | Attached
    | Detached
    | BrokerSaid
    | LinkUp
    | LinkDown
    | Built
    | BuildFailed
    | DataReady
    | DataFailed
    | Computed
    | RoundReady
    | ReceiptsShown
    | ComputeFailed
    | FrameQueued
    | FrameAcknowledged
    | FrameArrived
    | FrameRefused
    | ExportedWeights
    | ExportFailed
    | SnapshotTaken
    | SnapshotFailed
    | SnapshotSaved
)

# ---------------------------------------------------------------- imperatives


@immutable
class Connect:
    """Open a stream to the broker, in place of an older one: answers `Attached` and, when that
    stream ends, `Detached`; or only `Detached`, when it cannot be opened."""


@immutable
class Tell:
    """Send this on the stream to the broker."""

    message: broker_pb2.PeerMessage


@immutable
class SetTimer:
    """Fire `name` at this time of the shell's clock; replaces an earlier one of the same name."""

    name: str
    at: float


@immutable
class ShowWaiting:
    """Tell the owner what the peer waits for before it leaves its run, at most for so long."""

    what: str
    within_s: float


@immutable
class Exit:
    """End the process with this exit code. What was told and sent may still leave, for a moment;
    then everything is freed."""

    code: int
    why: str


@immutable
class Dial:
    """Open a link to this peer and keep it up until `HangUp`."""

    peer: PeerId
    address: str
    generation: int


@immutable
class ExpectPeer:
    """This peer may dial us."""

    peer: PeerId


@immutable
class HangUp:
    """Forget the link to this peer and its queues."""

    peer: PeerId


@immutable
class Allow:
    """Give this peer so many receive slots for frames of a role."""

    peer: PeerId
    role: Role
    frames: int


@immutable
class Build(OfTerm):
    """Fetch and build the assignment: answers `Built` or `BuildFailed`."""

    assign: broker_pb2.Assign
    snapshots: tuple[SnapshotId, ...] = ()
    """Those to go on from; empty: the starting weights."""
    memory_bytes: int = 0
    """That the owner offers on the device; 0: whatever there is."""


@immutable
class PrefetchFrozen:
    """Fetch ahead what is frozen in the stages whose snapshots this peer keeps: no answer. A newer
    one, a Build and a Discard end it."""

    assign: broker_pb2.Assign
    memory_bytes: int = 0
    """That the owner offers on the device; 0: whatever there is."""


@immutable
class BeginRound(OfTerm):
    """What was applied last is the version from here on, and the next steps are of this round; in
    order with `Compute`: answers `RoundReady`."""

    start: broker_pb2.RoundStart


@immutable
class JoinExchange(OfTerm):
    """The exchange that the next actions of a round are about, in place of an earlier attempt; in
    order with `Compute`, without an answer. wiring: what this peer does, by the plan."""

    plan: broker_pb2.RoundPlan
    wiring: RoundWiring


@immutable
class HearMasks(OfTerm):
    """What the broker told of the masks of an exchange, which the next action of a round is about;
    in order with `Compute`, without an answer."""

    told: broker_pb2.RoundMasks


@immutable
class ShowReceipts(OfTerm):
    """Receipts that the broker asks for are wanted; in order with `Compute`: answers
    `ReceiptsShown`."""

    asked: broker_pb2.RoundQuestion


@immutable
class ShowAgain(OfTerm):
    """Sums of the exchange are added up again here; in order with `Compute`, without an answer.
    wiring: what this peer does for that."""

    wiring: RoundWiring


@immutable
class AddAgain(OfTerm):
    """What came of sums that are added up again here is wanted, as all contributions came; in order
    with `Compute`: answers `ReceiptsShown`."""

    order: broker_pb2.RoundAudit


@immutable
class Prefetch(OfStep):
    """Get the data of a step: answers `DataReady` or `DataFailed`; runs beside the compute."""


@immutable
class Compute(OfStep):
    """Run this action on the device: answers `Computed` or `ComputeFailed`. One at a time. An
    action of a round has its number as `step`."""

    action: Action


@immutable
class SendFrame:
    """Encode this value from the device's store and send it: answers `FrameQueued`."""

    key: FrameKey


@immutable
class SendProbe:
    """Send so many bytes that do not compress to the key's destination: answers `FrameQueued`, or
    `FrameRefused` when there is no link."""

    key: FrameKey
    size_bytes: int


@immutable
class Release:
    """The value was consumed (or is not wanted): free its tensor and, if remote, its slot. taken:
    the device has it in a sum, or will, once it has done what it was told before: only its slot."""

    key: FrameKey
    taken: bool = False


@immutable
class UploadWeights(OfStep):
    """Copy the weights as they are before the next `Compute`, store them as a blob of the broker:
    answers `ExportedWeights` or `ExportFailed`."""


@immutable
class TakeSnapshot(OfTerm):
    """Copy what the stages need to go on, as it is before the next `Compute`, and keep it: answers
    `SnapshotTaken` or `SnapshotFailed`."""

    snapshot: broker_pb2.Snapshot


@immutable
class UploadSnapshot:
    """Bring an own one, which lies here, to the broker: answers `SnapshotSaved`."""

    snapshot: broker_pb2.Snapshot


@immutable
class KeepSnapshot:
    """All parts of this copy have come: let it outlive the process."""

    snapshot: broker_pb2.Snapshot
    parts: int


@immutable
class DropSnapshot:
    """Nobody needs it any more."""

    snapshot: SnapshotId


@immutable
class Discard(OfTerm):
    """Forget everything of this assignment, on device and host."""


Instruction = (
    Connect
    | Tell
    | SetTimer
    | ShowWaiting
    | Exit
    | Dial
    | ExpectPeer
    | HangUp
    | Allow
    | Build
    | PrefetchFrozen
    | BeginRound
    | JoinExchange
    | HearMasks
    | ShowReceipts
    | ShowAgain
    | AddAgain
    | Prefetch
    | Compute
    | SendFrame
    | SendProbe
    | Release
    | UploadWeights
    | TakeSnapshot
    | UploadSnapshot
    | KeepSnapshot
    | DropSnapshot
    | Discard
)
