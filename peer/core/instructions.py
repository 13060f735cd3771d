"""What the peer's machine wants done, in small frozen records: `events.py` says how they go with
facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...net.links.frame import immutable

if TYPE_CHECKING:
    from ...dag.plan.plan import PeerId
    from ...dag.rounds.wiring import RoundWiring
    from ...dag.schedule.flow import Role
    from ...dag.schedule.schedule import Action
    from ...net.links.frame import FrameKey
    from ...proto import broker_pb2
    from .snapshots import SnapshotId

__all__ = [
    "AddAgain",
    "Allow",
    "BeginRound",
    "Build",
    "Compute",
    "Connect",
    "Dial",
    "Discard",
    "DropSnapshot",
    "Exit",
    "ExpectPeer",
    "HangUp",
    "HearMasks",
    "Instruction",
    "JoinExchange",
    "KeepSnapshot",
    "OfLinks",
    "OfRounds",
    "OfStep",
    "OfTerm",
    "Prefetch",
    "PrefetchFrozen",
    "Release",
    "SendFrame",
    "SendProbe",
    "SetTimer",
    "ShowAgain",
    "ShowReceipts",
    "ShowWaiting",
    "TakeSnapshot",
    "Tell",
    "UploadSnapshot",
    "UploadWeights",
    "Work",
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


OfRounds = BeginRound | JoinExchange | HearMasks | ShowReceipts | ShowAgain | AddAgain
"""What is asked of the rounds of an assignment (`RoundWork.do`)."""

OfLinks = Dial | ExpectPeer | HangUp | Allow | SendProbe
"""What is asked of the links to other peers."""

Work = (
    Build
    | PrefetchFrozen
    | OfRounds
    | Prefetch
    | Compute
    | SendFrame
    | UploadWeights
    | TakeSnapshot
    | UploadSnapshot
    | KeepSnapshot
    | DropSnapshot
    | Discard
)
"""What is done with tensors, and with snapshots."""

Instruction = Connect | Tell | SetTimer | ShowWaiting | Exit | OfLinks | Work | Release
