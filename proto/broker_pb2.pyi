from shoal.proto import common_pb2 as _common_pb2
from shoal.proto import graph_pb2 as _graph_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    WAITING: _ClassVar[Phase]
    BUILDING: _ClassVar[Phase]
    RUNNING: _ClassVar[Phase]
    EXPORTING: _ClassVar[Phase]
    DONE: _ClassVar[Phase]
    FAILED: _ClassVar[Phase]
    CANCELLED: _ClassVar[Phase]
PHASE_UNSPECIFIED: Phase
WAITING: Phase
BUILDING: Phase
RUNNING: Phase
EXPORTING: Phase
DONE: Phase
FAILED: Phase
CANCELLED: Phase

class PeerMessage(_message.Message):
    __slots__ = ("hello", "heartbeat", "ready", "step", "exported", "fault", "goodbye", "drained", "link", "snapshot", "confirmed", "way", "availability", "resolved", "saved", "link_status", "round", "round_answer", "measured")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPORTED_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    RESOLVED_FIELD_NUMBER: _ClassVar[int]
    SAVED_FIELD_NUMBER: _ClassVar[int]
    LINK_STATUS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ROUND_ANSWER_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    heartbeat: Heartbeat
    ready: Ready
    step: StepReport
    exported: Exported
    fault: Fault
    goodbye: Goodbye
    drained: Drained
    link: LinkReport
    snapshot: SnapshotReport
    confirmed: Confirmed
    way: Way
    availability: Availability
    resolved: Resolved
    saved: Saved
    link_status: LinkStatus
    round: RoundReport
    round_answer: RoundAnswer
    measured: Speeds
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., step: _Optional[_Union[StepReport, _Mapping]] = ..., exported: _Optional[_Union[Exported, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., drained: _Optional[_Union[Drained, _Mapping]] = ..., link: _Optional[_Union[LinkReport, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotReport, _Mapping]] = ..., confirmed: _Optional[_Union[Confirmed, _Mapping]] = ..., way: _Optional[_Union[Way, _Mapping]] = ..., availability: _Optional[_Union[Availability, _Mapping]] = ..., resolved: _Optional[_Union[Resolved, _Mapping]] = ..., saved: _Optional[_Union[Saved, _Mapping]] = ..., link_status: _Optional[_Union[LinkStatus, _Mapping]] = ..., round: _Optional[_Union[RoundReport, _Mapping]] = ..., round_answer: _Optional[_Union[RoundAnswer, _Mapping]] = ..., measured: _Optional[_Union[Speeds, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "peer", "boot", "counter", "profile", "address", "holding", "snapshots", "closed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    version: int
    peer: str
    boot: str
    counter: int
    profile: Profile
    address: str
    holding: Holding
    snapshots: _containers.RepeatedCompositeFieldContainer[Snapshot]
    closed: _common_pb2.Reason
    def __init__(self, version: _Optional[int] = ..., peer: _Optional[str] = ..., boot: _Optional[str] = ..., counter: _Optional[int] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., address: _Optional[str] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ..., snapshots: _Optional[_Iterable[_Union[Snapshot, _Mapping]]] = ..., closed: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Availability(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: _common_pb2.Reason
    def __init__(self, closed: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("name", "place", "owner", "device", "device_memory_bytes", "host_memory_bytes", "flops_per_s", "operator_set", "software", "speeds", "host", "cores", "threads", "up_bytes_per_s", "down_bytes_per_s", "stay_s", "hours", "monthly_bytes", "data", "web")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_SET_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    UP_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    STAY_S_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    MONTHLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    WEB_FIELD_NUMBER: _ClassVar[int]
    name: str
    place: str
    owner: str
    device: str
    device_memory_bytes: int
    host_memory_bytes: int
    flops_per_s: float
    operator_set: _graph_pb2.OperatorSet
    software: str
    speeds: Speeds
    host: str
    cores: int
    threads: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    stay_s: float
    hours: str
    monthly_bytes: int
    data: _containers.RepeatedCompositeFieldContainer[DataSet]
    web: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., place: _Optional[str] = ..., owner: _Optional[str] = ..., device: _Optional[str] = ..., device_memory_bytes: _Optional[int] = ..., host_memory_bytes: _Optional[int] = ..., flops_per_s: _Optional[float] = ..., operator_set: _Optional[_Union[_graph_pb2.OperatorSet, str]] = ..., software: _Optional[str] = ..., speeds: _Optional[_Union[Speeds, _Mapping]] = ..., host: _Optional[str] = ..., cores: _Optional[int] = ..., threads: _Optional[int] = ..., up_bytes_per_s: _Optional[float] = ..., down_bytes_per_s: _Optional[float] = ..., stay_s: _Optional[float] = ..., hours: _Optional[str] = ..., monthly_bytes: _Optional[int] = ..., data: _Optional[_Iterable[_Union[DataSet, _Mapping]]] = ..., web: _Optional[_Iterable[str]] = ...) -> None: ...

class DataSet(_message.Message):
    __slots__ = ("name", "users")
    NAME_FIELD_NUMBER: _ClassVar[int]
    USERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    users: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., users: _Optional[_Iterable[str]] = ...) -> None: ...

class Speeds(_message.Message):
    __slots__ = ("product_flops_per_s", "convolution_flops_per_s", "attention_flops_per_s", "memory_bytes_per_s", "special_bytes_per_s", "call_s", "error", "busy", "slowed")
    PRODUCT_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CONVOLUTION_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    CALL_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    SLOWED_FIELD_NUMBER: _ClassVar[int]
    product_flops_per_s: float
    convolution_flops_per_s: float
    attention_flops_per_s: float
    memory_bytes_per_s: float
    special_bytes_per_s: float
    call_s: float
    error: float
    busy: float
    slowed: float
    def __init__(self, product_flops_per_s: _Optional[float] = ..., convolution_flops_per_s: _Optional[float] = ..., attention_flops_per_s: _Optional[float] = ..., memory_bytes_per_s: _Optional[float] = ..., special_bytes_per_s: _Optional[float] = ..., call_s: _Optional[float] = ..., error: _Optional[float] = ..., busy: _Optional[float] = ..., slowed: _Optional[float] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("run", "term", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("run", "term", "step", "holder", "spans", "round")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    holder: str
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    round: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., holder: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., round: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("start", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class SnapshotReport(_message.Message):
    __slots__ = ("snapshot", "held", "reason")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    snapshot: Snapshot
    held: bool
    reason: _common_pb2.Reason
    def __init__(self, snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., held: _Optional[bool] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Saved(_message.Message):
    __slots__ = ("run", "term", "step", "blob", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    blob: _common_pb2.BlobRef
    reason: _common_pb2.Reason
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., blob: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("run", "term", "step", "files", "job", "graph", "data", "operators", "microbatch_size", "head_parts", "inexact_from", "swapped", "rounds", "routes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    HEAD_PARTS_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FROM_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    job: str
    graph: _common_pb2.BlobRef
    data: _common_pb2.BlobRef
    operators: int
    microbatch_size: int
    head_parts: int
    inexact_from: int
    swapped: _containers.RepeatedCompositeFieldContainer[Swap]
    rounds: RoundPosition
    routes: str
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., job: _Optional[str] = ..., graph: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., data: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., operators: _Optional[int] = ..., microbatch_size: _Optional[int] = ..., head_parts: _Optional[int] = ..., inexact_from: _Optional[int] = ..., swapped: _Optional[_Iterable[_Union[Swap, _Mapping]]] = ..., rounds: _Optional[_Union[RoundPosition, _Mapping]] = ..., routes: _Optional[str] = ...) -> None: ...

class RoundPosition(_message.Message):
    __slots__ = ("round", "committed", "next", "returned")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    round: int
    committed: int
    next: int
    returned: _containers.RepeatedCompositeFieldContainer[SampleRange]
    def __init__(self, round: _Optional[int] = ..., committed: _Optional[int] = ..., next: _Optional[int] = ..., returned: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ...) -> None: ...

class Swap(_message.Message):
    __slots__ = ("start", "middle", "stop")
    START_FIELD_NUMBER: _ClassVar[int]
    MIDDLE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    start: int
    middle: int
    stop: int
    def __init__(self, start: _Optional[int] = ..., middle: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("holder", "spans", "blob")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    holder: str
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    blob: _common_pb2.BlobRef
    def __init__(self, holder: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., blob: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sent_at_s", "run", "step")
    SENT_AT_S_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    sent_at_s: float
    run: str
    step: int
    def __init__(self, sent_at_s: _Optional[float] = ..., run: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("run", "term", "device_bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    device_bytes: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("run", "term", "round", "attempt", "hashes", "drift", "sent_bytes", "waited_s", "problem", "lacks", "evaluation", "clients_moved", "left_out", "lost", "more", "mean_moved", "losses", "local_s", "masks", "parts", "signed", "upload_s", "upload_bytes", "skipped", "came")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    MEAN_MOVED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_S_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_S_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    CAME_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    attempt: int
    hashes: _containers.RepeatedScalarFieldContainer[int]
    drift: float
    sent_bytes: int
    waited_s: float
    problem: _common_pb2.Reason
    lacks: _containers.RepeatedScalarFieldContainer[str]
    evaluation: Evaluation
    clients_moved: float
    left_out: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedScalarFieldContainer[int]
    more: int
    mean_moved: float
    losses: _containers.RepeatedScalarFieldContainer[float]
    local_s: float
    masks: MemberMasks
    parts: _containers.RepeatedScalarFieldContainer[int]
    signed: SignedStatement
    upload_s: float
    upload_bytes: int
    skipped: int
    came: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., hashes: _Optional[_Iterable[int]] = ..., drift: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ..., problem: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., lacks: _Optional[_Iterable[str]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., clients_moved: _Optional[float] = ..., left_out: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[int]] = ..., more: _Optional[int] = ..., mean_moved: _Optional[float] = ..., losses: _Optional[_Iterable[float]] = ..., local_s: _Optional[float] = ..., masks: _Optional[_Union[MemberMasks, _Mapping]] = ..., parts: _Optional[_Iterable[int]] = ..., signed: _Optional[_Union[SignedStatement, _Mapping]] = ..., upload_s: _Optional[float] = ..., upload_bytes: _Optional[int] = ..., skipped: _Optional[int] = ..., came: _Optional[int] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("run", "term", "step", "seconds", "compute_s", "sent_bytes", "peak_bytes", "outcome", "evaluation", "stages", "update_s", "links", "again_bytes")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    UPDATE_S_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    seconds: float
    compute_s: float
    sent_bytes: int
    peak_bytes: int
    outcome: Outcome
    evaluation: Evaluation
    stages: _containers.RepeatedCompositeFieldContainer[StageTime]
    update_s: float
    links: _containers.RepeatedCompositeFieldContainer[LinkUse]
    again_bytes: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., seconds: _Optional[float] = ..., compute_s: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., stages: _Optional[_Iterable[_Union[StageTime, _Mapping]]] = ..., update_s: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkUse, _Mapping]]] = ..., again_bytes: _Optional[int] = ...) -> None: ...

class LinkUse(_message.Message):
    __slots__ = ("source", "destination", "role", "codec", "bytes", "dense_bytes", "encode_s", "decode_s", "error")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DENSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    role: str
    codec: str
    bytes: int
    dense_bytes: int
    encode_s: float
    decode_s: float
    error: float
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., role: _Optional[str] = ..., codec: _Optional[str] = ..., bytes: _Optional[int] = ..., dense_bytes: _Optional[int] = ..., encode_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class StageTime(_message.Message):
    __slots__ = ("stage", "visits", "forward_s", "backward_s")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    stage: int
    visits: int
    forward_s: float
    backward_s: float
    def __init__(self, stage: _Optional[int] = ..., visits: _Optional[int] = ..., forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("peer", "probe", "latency_s", "bytes_per_s", "size_bytes", "problem", "burst_bytes_per_s", "burst_bytes", "shared")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BURST_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BURST_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    probe: int
    latency_s: float
    bytes_per_s: float
    size_bytes: int
    problem: _common_pb2.Reason
    burst_bytes_per_s: float
    burst_bytes: int
    shared: bool
    def __init__(self, peer: _Optional[str] = ..., probe: _Optional[int] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., size_bytes: _Optional[int] = ..., problem: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., burst_bytes_per_s: _Optional[float] = ..., burst_bytes: _Optional[int] = ..., shared: _Optional[bool] = ...) -> None: ...

class LinkStatus(_message.Message):
    __slots__ = ("run", "term", "peer", "up")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    peer: str
    up: bool
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., peer: _Optional[str] = ..., up: _Optional[bool] = ...) -> None: ...

class Confirmed(_message.Message):
    __slots__ = ("address", "reached", "inside", "problem")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    INSIDE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    address: str
    reached: bool
    inside: bool
    problem: str
    def __init__(self, address: _Optional[str] = ..., reached: _Optional[bool] = ..., inside: _Optional[bool] = ..., problem: _Optional[str] = ...) -> None: ...

class Way(_message.Message):
    __slots__ = ("multiaddr",)
    MULTIADDR_FIELD_NUMBER: _ClassVar[int]
    multiaddr: str
    def __init__(self, multiaddr: _Optional[str] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("loss", "weight", "grad_norm", "lr", "metrics", "loss_scale", "skipped")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    LR_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOSS_SCALE_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    loss: float
    weight: float
    grad_norm: float
    lr: float
    metrics: _containers.RepeatedCompositeFieldContainer[NamedNumber]
    loss_scale: float
    skipped: bool
    def __init__(self, loss: _Optional[float] = ..., weight: _Optional[float] = ..., grad_norm: _Optional[float] = ..., lr: _Optional[float] = ..., metrics: _Optional[_Iterable[_Union[NamedNumber, _Mapping]]] = ..., loss_scale: _Optional[float] = ..., skipped: _Optional[bool] = ...) -> None: ...

class NamedNumber(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class Evaluation(_message.Message):
    __slots__ = ("loss", "weight", "metrics", "clients")
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    loss: float
    weight: float
    metrics: _containers.RepeatedCompositeFieldContainer[NamedNumber]
    clients: _containers.RepeatedCompositeFieldContainer[ClientNumber]
    def __init__(self, loss: _Optional[float] = ..., weight: _Optional[float] = ..., metrics: _Optional[_Iterable[_Union[NamedNumber, _Mapping]]] = ..., clients: _Optional[_Iterable[_Union[ClientNumber, _Mapping]]] = ...) -> None: ...

class ClientNumber(_message.Message):
    __slots__ = ("name", "clients", "mean", "least", "median", "most")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    MEAN_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    name: str
    clients: int
    mean: float
    least: float
    median: float
    most: float
    def __init__(self, name: _Optional[str] = ..., clients: _Optional[int] = ..., mean: _Optional[float] = ..., least: _Optional[float] = ..., median: _Optional[float] = ..., most: _Optional[float] = ...) -> None: ...

class Exported(_message.Message):
    __slots__ = ("run", "term", "step", "weights", "partial")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    weights: _common_pb2.BlobRef
    partial: bool
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., weights: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., partial: _Optional[bool] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("run", "term", "step", "reason", "about")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ABOUT_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    reason: _common_pb2.Reason
    about: str
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., about: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.Reason
    def __init__(self, reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Drained(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class BrokerMessage(_message.Message):
    __slots__ = ("welcome", "refused", "assign", "start", "drain", "leave", "export", "probe", "committed", "relayed", "snapshot", "confirm", "resolve", "handover", "round_start", "round_plan", "round_masks", "round_question", "round_audit")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    EXPORT_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CONFIRM_FIELD_NUMBER: _ClassVar[int]
    RESOLVE_FIELD_NUMBER: _ClassVar[int]
    HANDOVER_FIELD_NUMBER: _ClassVar[int]
    ROUND_START_FIELD_NUMBER: _ClassVar[int]
    ROUND_PLAN_FIELD_NUMBER: _ClassVar[int]
    ROUND_MASKS_FIELD_NUMBER: _ClassVar[int]
    ROUND_QUESTION_FIELD_NUMBER: _ClassVar[int]
    ROUND_AUDIT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    assign: Assign
    start: Start
    drain: Drain
    leave: Leave
    export: Export
    probe: Probe
    committed: Committed
    relayed: Relayed
    snapshot: SnapshotOrder
    confirm: Confirm
    resolve: Resolve
    handover: HandoverReply
    round_start: RoundStart
    round_plan: RoundPlan
    round_masks: RoundMasks
    round_question: RoundQuestion
    round_audit: RoundAudit
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., assign: _Optional[_Union[Assign, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., export: _Optional[_Union[Export, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., relayed: _Optional[_Union[Relayed, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotOrder, _Mapping]] = ..., confirm: _Optional[_Union[Confirm, _Mapping]] = ..., resolve: _Optional[_Union[Resolve, _Mapping]] = ..., handover: _Optional[_Union[HandoverReply, _Mapping]] = ..., round_start: _Optional[_Union[RoundStart, _Mapping]] = ..., round_plan: _Optional[_Union[RoundPlan, _Mapping]] = ..., round_masks: _Optional[_Union[RoundMasks, _Mapping]] = ..., round_question: _Optional[_Union[RoundQuestion, _Mapping]] = ..., round_audit: _Optional[_Union[RoundAudit, _Mapping]] = ...) -> None: ...

class HandoverReply(_message.Message):
    __slots__ = ("run", "term", "within_s", "reason")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    WITHIN_S_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    within_s: float
    reason: _common_pb2.Reason
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., within_s: _Optional[float] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("broker", "lease_s", "heartbeat_s", "resumed")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    broker: str
    lease_s: float
    heartbeat_s: float
    resumed: Holding
    def __init__(self, broker: _Optional[str] = ..., lease_s: _Optional[float] = ..., heartbeat_s: _Optional[float] = ..., resumed: _Optional[_Union[Holding, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("reason", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.Reason
    again: bool
    def __init__(self, reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., again: _Optional[bool] = ...) -> None: ...

class Assign(_message.Message):
    __slots__ = ("run", "term", "slice", "graph", "full_graph", "weights", "data", "training", "dials", "first_step", "resume", "submitter", "local", "lossless_snapshots", "recipe", "round", "steps")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    FULL_GRAPH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    DIALS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_SNAPSHOTS_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    slice: PlanSlice
    graph: _common_pb2.BlobRef
    full_graph: _common_pb2.BlobRef
    weights: _containers.RepeatedCompositeFieldContainer[WeightFile]
    data: _common_pb2.BlobRef
    training: str
    dials: _containers.RepeatedCompositeFieldContainer[DialOrder]
    first_step: int
    resume: Resume
    submitter: str
    local: _containers.RepeatedScalarFieldContainer[str]
    lossless_snapshots: bool
    recipe: _common_pb2.BlobRef
    round: RoundStart
    steps: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., slice: _Optional[_Union[PlanSlice, _Mapping]] = ..., graph: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., full_graph: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., weights: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., data: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., training: _Optional[str] = ..., dials: _Optional[_Iterable[_Union[DialOrder, _Mapping]]] = ..., first_step: _Optional[int] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ..., submitter: _Optional[str] = ..., local: _Optional[_Iterable[str]] = ..., lossless_snapshots: _Optional[bool] = ..., recipe: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., round: _Optional[_Union[RoundStart, _Mapping]] = ..., steps: _Optional[int] = ...) -> None: ...

class RoundStart(_message.Message):
    __slots__ = ("run", "term", "round", "first_step", "steps", "samples", "start", "length", "evaluate", "ahead", "ahead_samples", "late", "fragment", "apart", "gathers", "cohort", "kept", "weights", "trained", "afresh", "more")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    AHEAD_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    APART_FIELD_NUMBER: _ClassVar[int]
    GATHERS_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    AFRESH_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    first_step: int
    steps: int
    samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    start: float
    length: float
    evaluate: bool
    ahead: int
    ahead_samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    late: int
    fragment: int
    apart: bool
    gathers: bool
    cohort: _containers.RepeatedCompositeFieldContainer[SampleRange]
    kept: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    trained: _containers.RepeatedScalarFieldContainer[int]
    afresh: bool
    more: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., first_step: _Optional[int] = ..., steps: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., start: _Optional[float] = ..., length: _Optional[float] = ..., evaluate: _Optional[bool] = ..., ahead: _Optional[int] = ..., ahead_samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., late: _Optional[int] = ..., fragment: _Optional[int] = ..., apart: _Optional[bool] = ..., gathers: _Optional[bool] = ..., cohort: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., kept: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ..., trained: _Optional[_Iterable[int]] = ..., afresh: _Optional[bool] = ..., more: _Optional[int] = ...) -> None: ...

class SampleRange(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class RoundPlan(_message.Message):
    __slots__ = ("run", "term", "round", "attempt", "weight", "exponent", "segments", "dials", "patience_s", "fragment", "final", "by_client", "together", "members", "part", "keys", "unclaimed", "scale", "share")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DIALS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    BY_CLIENT_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    UNCLAIMED_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    attempt: int
    weight: int
    exponent: int
    segments: _containers.RepeatedCompositeFieldContainer[RoundSegment]
    dials: _containers.RepeatedCompositeFieldContainer[DialOrder]
    patience_s: float
    fragment: int
    final: bool
    by_client: bool
    together: bool
    members: int
    part: int
    keys: _containers.RepeatedCompositeFieldContainer[SignedStatement]
    unclaimed: bool
    scale: float
    share: float
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., weight: _Optional[int] = ..., exponent: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[RoundSegment, _Mapping]]] = ..., dials: _Optional[_Iterable[_Union[DialOrder, _Mapping]]] = ..., patience_s: _Optional[float] = ..., fragment: _Optional[int] = ..., final: _Optional[bool] = ..., by_client: _Optional[bool] = ..., together: _Optional[bool] = ..., members: _Optional[int] = ..., part: _Optional[int] = ..., keys: _Optional[_Iterable[_Union[SignedStatement, _Mapping]]] = ..., unclaimed: _Optional[bool] = ..., scale: _Optional[float] = ..., share: _Optional[float] = ...) -> None: ...

class SignedStatement(_message.Message):
    __slots__ = ("statement", "signature", "certificate")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    statement: bytes
    signature: bytes
    certificate: bytes
    def __init__(self, statement: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., certificate: _Optional[bytes] = ...) -> None: ...

class RoundReceipt(_message.Message):
    __slots__ = ("run", "round", "attempt", "hop", "start", "stop", "block", "hash", "heard")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: int
    hop: int
    start: int
    stop: int
    block: int
    hash: bytes
    heard: bytes
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., hop: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., block: _Optional[int] = ..., hash: _Optional[bytes] = ..., heard: _Optional[bytes] = ...) -> None: ...

class AttemptStatement(_message.Message):
    __slots__ = ("run", "round", "attempt", "hashes", "gave", "heard", "got")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    GAVE_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    GOT_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    attempt: int
    hashes: _containers.RepeatedScalarFieldContainer[int]
    gave: _containers.RepeatedScalarFieldContainer[bytes]
    heard: _containers.RepeatedScalarFieldContainer[bytes]
    got: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., hashes: _Optional[_Iterable[int]] = ..., gave: _Optional[_Iterable[bytes]] = ..., heard: _Optional[_Iterable[bytes]] = ..., got: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RoundQuestion(_message.Message):
    __slots__ = ("run", "term", "round", "attempt", "hop", "start", "stop", "signer")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SIGNER_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    attempt: int
    hop: int
    start: int
    stop: int
    signer: str
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., hop: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., signer: _Optional[str] = ...) -> None: ...

class RoundAnswer(_message.Message):
    __slots__ = ("run", "term", "round", "attempt", "receipts", "certificate", "turn", "audits", "lacks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    AUDITS_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    attempt: int
    receipts: _containers.RepeatedCompositeFieldContainer[SignedStatement]
    certificate: bytes
    turn: int
    audits: _containers.RepeatedCompositeFieldContainer[SumAudit]
    lacks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., receipts: _Optional[_Iterable[_Union[SignedStatement, _Mapping]]] = ..., certificate: _Optional[bytes] = ..., turn: _Optional[int] = ..., audits: _Optional[_Iterable[_Union[SumAudit, _Mapping]]] = ..., lacks: _Optional[_Iterable[str]] = ...) -> None: ...

class RoundAudit(_message.Message):
    __slots__ = ("run", "term", "round", "attempt", "turn", "segments", "dials")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    DIALS_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    attempt: int
    turn: int
    segments: _containers.RepeatedCompositeFieldContainer[RoundSegment]
    dials: _containers.RepeatedCompositeFieldContainer[DialOrder]
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., turn: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[RoundSegment, _Mapping]]] = ..., dials: _Optional[_Iterable[_Union[DialOrder, _Mapping]]] = ...) -> None: ...

class SumAudit(_message.Message):
    __slots__ = ("start", "stop", "heard", "sum", "said")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    SAID_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    heard: _containers.RepeatedScalarFieldContainer[bytes]
    sum: SignedStatement
    said: SignedStatement
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., heard: _Optional[_Iterable[bytes]] = ..., sum: _Optional[_Union[SignedStatement, _Mapping]] = ..., said: _Optional[_Union[SignedStatement, _Mapping]] = ...) -> None: ...

class MaskKey(_message.Message):
    __slots__ = ("run", "round", "member", "exchange")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    run: str
    round: int
    member: str
    exchange: bytes
    def __init__(self, run: _Optional[str] = ..., round: _Optional[int] = ..., member: _Optional[str] = ..., exchange: _Optional[bytes] = ...) -> None: ...

class MemberMasks(_message.Message):
    __slots__ = ("key", "sealed", "holds", "revealed")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    REVEALED_FIELD_NUMBER: _ClassVar[int]
    key: SignedStatement
    sealed: _containers.RepeatedCompositeFieldContainer[MaskShare]
    holds: bool
    revealed: _containers.RepeatedCompositeFieldContainer[MaskShare]
    def __init__(self, key: _Optional[_Union[SignedStatement, _Mapping]] = ..., sealed: _Optional[_Iterable[_Union[MaskShare, _Mapping]]] = ..., holds: _Optional[bool] = ..., revealed: _Optional[_Iterable[_Union[MaskShare, _Mapping]]] = ...) -> None: ...

class MaskShare(_message.Message):
    __slots__ = ("member", "share")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    member: str
    share: bytes
    def __init__(self, member: _Optional[str] = ..., share: _Optional[bytes] = ...) -> None: ...

class RoundMasks(_message.Message):
    __slots__ = ("run", "term", "round", "attempt", "sealed", "reveal", "masks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEALED_FIELD_NUMBER: _ClassVar[int]
    REVEAL_FIELD_NUMBER: _ClassVar[int]
    MASKS_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    round: int
    attempt: int
    sealed: _containers.RepeatedCompositeFieldContainer[MaskShare]
    reveal: bool
    masks: _containers.RepeatedCompositeFieldContainer[MaskShare]
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., sealed: _Optional[_Iterable[_Union[MaskShare, _Mapping]]] = ..., reveal: _Optional[bool] = ..., masks: _Optional[_Iterable[_Union[MaskShare, _Mapping]]] = ...) -> None: ...

class RoundSegment(_message.Message):
    __slots__ = ("start", "stop", "aggregator", "givers", "takers", "versions", "places")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    AGGREGATOR_FIELD_NUMBER: _ClassVar[int]
    GIVERS_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    aggregator: str
    givers: _containers.RepeatedCompositeFieldContainer[RoundGiver]
    takers: _containers.RepeatedScalarFieldContainer[str]
    versions: _containers.RepeatedCompositeFieldContainer[RoundVersion]
    places: _containers.RepeatedCompositeFieldContainer[RoundPlace]
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., aggregator: _Optional[str] = ..., givers: _Optional[_Iterable[_Union[RoundGiver, _Mapping]]] = ..., takers: _Optional[_Iterable[str]] = ..., versions: _Optional[_Iterable[_Union[RoundVersion, _Mapping]]] = ..., places: _Optional[_Iterable[_Union[RoundPlace, _Mapping]]] = ...) -> None: ...

class RoundPlace(_message.Message):
    __slots__ = ("gatherer", "givers", "takers")
    GATHERER_FIELD_NUMBER: _ClassVar[int]
    GIVERS_FIELD_NUMBER: _ClassVar[int]
    TAKERS_FIELD_NUMBER: _ClassVar[int]
    gatherer: str
    givers: _containers.RepeatedScalarFieldContainer[str]
    takers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gatherer: _Optional[str] = ..., givers: _Optional[_Iterable[str]] = ..., takers: _Optional[_Iterable[str]] = ...) -> None: ...

class RoundGiver(_message.Message):
    __slots__ = ("peer", "weight")
    PEER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    peer: str
    weight: int
    def __init__(self, peer: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class RoundVersion(_message.Message):
    __slots__ = ("source", "destination")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("term", "holders", "transfers", "renamed", "files", "live", "rebuilt", "round")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    RENAMED_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    REBUILT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    term: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    transfers: _containers.RepeatedCompositeFieldContainer[SnapshotTransfer]
    renamed: _containers.RepeatedCompositeFieldContainer[Renamed]
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    live: bool
    rebuilt: _containers.RepeatedScalarFieldContainer[str]
    round: int
    def __init__(self, term: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ..., transfers: _Optional[_Iterable[_Union[SnapshotTransfer, _Mapping]]] = ..., renamed: _Optional[_Iterable[_Union[Renamed, _Mapping]]] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., live: _Optional[bool] = ..., rebuilt: _Optional[_Iterable[str]] = ..., round: _Optional[int] = ...) -> None: ...

class SnapshotTransfer(_message.Message):
    __slots__ = ("holder", "source", "destination", "spans")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    source: str
    destination: str
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, holder: _Optional[str] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Renamed(_message.Message):
    __slots__ = ("old", "to")
    OLD_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    old: str
    to: str
    def __init__(self, old: _Optional[str] = ..., to: _Optional[str] = ...) -> None: ...

class SnapshotOrder(_message.Message):
    __slots__ = ("run", "term", "step", "needed", "keeper", "upload", "hold", "round", "dial")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NEEDED_FIELD_NUMBER: _ClassVar[int]
    KEEPER_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIAL_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    needed: int
    keeper: str
    upload: bool
    hold: int
    round: int
    dial: DialOrder
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., needed: _Optional[int] = ..., keeper: _Optional[str] = ..., upload: _Optional[bool] = ..., hold: _Optional[int] = ..., round: _Optional[int] = ..., dial: _Optional[_Union[DialOrder, _Mapping]] = ...) -> None: ...

class WeightFile(_message.Message):
    __slots__ = ("blob", "sharded")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    blob: _common_pb2.BlobRef
    sharded: bool
    def __init__(self, blob: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., sharded: _Optional[bool] = ...) -> None: ...

class DialOrder(_message.Message):
    __slots__ = ("peer", "address", "generation")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    address: str
    generation: int
    def __init__(self, peer: _Optional[str] = ..., address: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("run", "term")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("run", "term", "step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.Reason
    def __init__(self, reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("run", "term", "reason", "goes_on")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    reason: _common_pb2.Reason
    goes_on: bool
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., goes_on: _Optional[bool] = ...) -> None: ...

class Export(_message.Message):
    __slots__ = ("run", "term")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("number", "peer", "address", "generation", "patience_s", "most_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    MOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    peer: str
    address: str
    generation: int
    patience_s: float
    most_bytes: int
    def __init__(self, number: _Optional[int] = ..., peer: _Optional[str] = ..., address: _Optional[str] = ..., generation: _Optional[int] = ..., patience_s: _Optional[float] = ..., most_bytes: _Optional[int] = ...) -> None: ...

class Resolve(_message.Message):
    __slots__ = ("number", "data", "options", "submitter")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTER_FIELD_NUMBER: _ClassVar[int]
    number: int
    data: str
    options: str
    submitter: str
    def __init__(self, number: _Optional[int] = ..., data: _Optional[str] = ..., options: _Optional[str] = ..., submitter: _Optional[str] = ...) -> None: ...

class Resolved(_message.Message):
    __slots__ = ("number", "manifest", "local", "problem", "blended")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BLENDED_FIELD_NUMBER: _ClassVar[int]
    number: int
    manifest: _common_pb2.BlobRef
    local: _containers.RepeatedScalarFieldContainer[str]
    problem: _common_pb2.Reason
    blended: bool
    def __init__(self, number: _Optional[int] = ..., manifest: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., local: _Optional[_Iterable[str]] = ..., problem: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., blended: _Optional[bool] = ...) -> None: ...

class Relayed(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    def __init__(self, ticket: _Optional[str] = ...) -> None: ...

class Confirm(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("stages", "routes", "microbatch_size", "codecs", "evaluation_routes", "head_parts", "keepers", "exchanges", "outline", "tied", "without_norm", "schedule", "visits", "evaluations", "route_of", "evaluation_route_of", "full")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ROUTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_PARTS_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGES_FIELD_NUMBER: _ClassVar[int]
    OUTLINE_FIELD_NUMBER: _ClassVar[int]
    TIED_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_NORM_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    ROUTE_OF_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_ROUTE_OF_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageSlot]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    microbatch_size: int
    codecs: _containers.RepeatedCompositeFieldContainer[CodecChoice]
    evaluation_routes: _containers.RepeatedCompositeFieldContainer[Route]
    head_parts: int
    keepers: _containers.RepeatedCompositeFieldContainer[Keeper]
    exchanges: _containers.RepeatedCompositeFieldContainer[StageExchange]
    outline: _containers.RepeatedCompositeFieldContainer[StageOutline]
    tied: _containers.RepeatedCompositeFieldContainer[TiedGroup]
    without_norm: bool
    schedule: str
    visits: VisitLists
    evaluations: VisitLists
    route_of: _containers.RepeatedScalarFieldContainer[int]
    evaluation_route_of: _containers.RepeatedScalarFieldContainer[int]
    full: FullSteps
    def __init__(self, stages: _Optional[_Iterable[_Union[StageSlot, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., microbatch_size: _Optional[int] = ..., codecs: _Optional[_Iterable[_Union[CodecChoice, _Mapping]]] = ..., evaluation_routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., head_parts: _Optional[int] = ..., keepers: _Optional[_Iterable[_Union[Keeper, _Mapping]]] = ..., exchanges: _Optional[_Iterable[_Union[StageExchange, _Mapping]]] = ..., outline: _Optional[_Iterable[_Union[StageOutline, _Mapping]]] = ..., tied: _Optional[_Iterable[_Union[TiedGroup, _Mapping]]] = ..., without_norm: _Optional[bool] = ..., schedule: _Optional[str] = ..., visits: _Optional[_Union[VisitLists, _Mapping]] = ..., evaluations: _Optional[_Union[VisitLists, _Mapping]] = ..., route_of: _Optional[_Iterable[int]] = ..., evaluation_route_of: _Optional[_Iterable[int]] = ..., full: _Optional[_Union[FullSteps, _Mapping]] = ...) -> None: ...

class FullSteps(_message.Message):
    __slots__ = ("before", "since", "routes", "route_of", "visits")
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    ROUTE_OF_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    before: int
    since: int
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    route_of: _containers.RepeatedScalarFieldContainer[int]
    visits: VisitLists
    def __init__(self, before: _Optional[int] = ..., since: _Optional[int] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., route_of: _Optional[_Iterable[int]] = ..., visits: _Optional[_Union[VisitLists, _Mapping]] = ...) -> None: ...

class VisitLists(_message.Message):
    __slots__ = ("lists", "list_of")
    LISTS_FIELD_NUMBER: _ClassVar[int]
    LIST_OF_FIELD_NUMBER: _ClassVar[int]
    lists: _containers.RepeatedCompositeFieldContainer[VisitList]
    list_of: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lists: _Optional[_Iterable[_Union[VisitList, _Mapping]]] = ..., list_of: _Optional[_Iterable[int]] = ...) -> None: ...

class VisitList(_message.Message):
    __slots__ = ("numbers",)
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class StageOutline(_message.Message):
    __slots__ = ("sends", "trainable", "statistics", "makes_loss", "has_backward", "elements")
    SENDS_FIELD_NUMBER: _ClassVar[int]
    TRAINABLE_FIELD_NUMBER: _ClassVar[int]
    STATISTICS_FIELD_NUMBER: _ClassVar[int]
    MAKES_LOSS_FIELD_NUMBER: _ClassVar[int]
    HAS_BACKWARD_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    sends: _containers.RepeatedCompositeFieldContainer[Crossed]
    trainable: bool
    statistics: bool
    makes_loss: bool
    has_backward: bool
    elements: int
    def __init__(self, sends: _Optional[_Iterable[_Union[Crossed, _Mapping]]] = ..., trainable: _Optional[bool] = ..., statistics: _Optional[bool] = ..., makes_loss: _Optional[bool] = ..., has_backward: _Optional[bool] = ..., elements: _Optional[int] = ...) -> None: ...

class Crossed(_message.Message):
    __slots__ = ("value", "targets", "grad_targets", "spec")
    VALUE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    GRAD_TARGETS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    value: str
    targets: _containers.RepeatedScalarFieldContainer[int]
    grad_targets: _containers.RepeatedScalarFieldContainer[int]
    spec: int
    def __init__(self, value: _Optional[str] = ..., targets: _Optional[_Iterable[int]] = ..., grad_targets: _Optional[_Iterable[int]] = ..., spec: _Optional[int] = ...) -> None: ...

class TiedGroup(_message.Message):
    __slots__ = ("parameter", "stages", "start", "elements")
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    parameter: str
    stages: _containers.RepeatedScalarFieldContainer[int]
    start: int
    elements: int
    def __init__(self, parameter: _Optional[str] = ..., stages: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., elements: _Optional[int] = ...) -> None: ...

class PlanSlice(_message.Message):
    __slots__ = ("plan", "visits", "evaluations", "slots", "place", "ring", "whole", "full")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    VISITS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    visits: _containers.RepeatedScalarFieldContainer[str]
    evaluations: _containers.RepeatedScalarFieldContainer[str]
    slots: _containers.RepeatedCompositeFieldContainer[Slots]
    place: int
    ring: _containers.RepeatedScalarFieldContainer[str]
    whole: _containers.RepeatedScalarFieldContainer[int]
    full: PlanSlice
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., visits: _Optional[_Iterable[str]] = ..., evaluations: _Optional[_Iterable[str]] = ..., slots: _Optional[_Iterable[_Union[Slots, _Mapping]]] = ..., place: _Optional[int] = ..., ring: _Optional[_Iterable[str]] = ..., whole: _Optional[_Iterable[int]] = ..., full: _Optional[_Union[PlanSlice, _Mapping]] = ...) -> None: ...

class Slots(_message.Message):
    __slots__ = ("source", "role", "count")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    source: str
    role: int
    count: int
    def __init__(self, source: _Optional[str] = ..., role: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class PlanReport(_message.Message):
    __slots__ = ("predicted", "reasons", "spares")
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    SPARES_FIELD_NUMBER: _ClassVar[int]
    predicted: Prediction
    reasons: _containers.RepeatedScalarFieldContainer[str]
    spares: _containers.RepeatedCompositeFieldContainer[Spare]
    def __init__(self, predicted: _Optional[_Union[Prediction, _Mapping]] = ..., reasons: _Optional[_Iterable[str]] = ..., spares: _Optional[_Iterable[_Union[Spare, _Mapping]]] = ...) -> None: ...

class Keeper(_message.Message):
    __slots__ = ("holder", "peer")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    holder: str
    peer: str
    def __init__(self, holder: _Optional[str] = ..., peer: _Optional[str] = ...) -> None: ...

class StageSlot(_message.Message):
    __slots__ = ("start", "stop", "holders", "recompute")
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    start: int
    stop: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    recompute: bool
    def __init__(self, start: _Optional[int] = ..., stop: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ..., recompute: _Optional[bool] = ...) -> None: ...

class StageExchange(_message.Message):
    __slots__ = ("stage", "collective", "groups", "weights", "chunks", "strategy")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    STRATEGY_FIELD_NUMBER: _ClassVar[int]
    stage: int
    collective: str
    groups: _containers.RepeatedCompositeFieldContainer[PeerGroup]
    weights: _containers.RepeatedScalarFieldContainer[int]
    chunks: int
    strategy: str
    def __init__(self, stage: _Optional[int] = ..., collective: _Optional[str] = ..., groups: _Optional[_Iterable[_Union[PeerGroup, _Mapping]]] = ..., weights: _Optional[_Iterable[int]] = ..., chunks: _Optional[int] = ..., strategy: _Optional[str] = ...) -> None: ...

class PeerGroup(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, peers: _Optional[_Iterable[str]] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("visits",)
    VISITS_FIELD_NUMBER: _ClassVar[int]
    visits: _containers.RepeatedCompositeFieldContainer[Visit]
    def __init__(self, visits: _Optional[_Iterable[_Union[Visit, _Mapping]]] = ...) -> None: ...

class Visit(_message.Message):
    __slots__ = ("stage", "peer")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    stage: int
    peer: str
    def __init__(self, stage: _Optional[int] = ..., peer: _Optional[str] = ...) -> None: ...

class CodecChoice(_message.Message):
    __slots__ = ("source", "destination", "role", "codec")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    role: int
    codec: str
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., role: _Optional[int] = ..., codec: _Optional[str] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("step_s", "peers", "links", "bottlenecks", "alternatives", "full_step_s")
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    BOTTLENECKS_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    FULL_STEP_S_FIELD_NUMBER: _ClassVar[int]
    step_s: float
    peers: _containers.RepeatedCompositeFieldContainer[PeerPrediction]
    links: _containers.RepeatedCompositeFieldContainer[LinkPrediction]
    bottlenecks: _containers.RepeatedScalarFieldContainer[str]
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    full_step_s: float
    def __init__(self, step_s: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[PeerPrediction, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkPrediction, _Mapping]]] = ..., bottlenecks: _Optional[_Iterable[str]] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., full_step_s: _Optional[float] = ...) -> None: ...

class LinkPrediction(_message.Message):
    __slots__ = ("source", "destination", "bytes", "busy_s", "codecs")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    bytes: int
    busy_s: float
    codecs: _containers.RepeatedCompositeFieldContainer[CodecUse]
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., bytes: _Optional[int] = ..., busy_s: _Optional[float] = ..., codecs: _Optional[_Iterable[_Union[CodecUse, _Mapping]]] = ...) -> None: ...

class CodecUse(_message.Message):
    __slots__ = ("role", "codec", "bytes", "dense_bytes", "saved_s", "encode_s", "error")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DENSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SAVED_S_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    role: str
    codec: str
    bytes: int
    dense_bytes: int
    saved_s: float
    encode_s: float
    error: float
    def __init__(self, role: _Optional[str] = ..., codec: _Optional[str] = ..., bytes: _Optional[int] = ..., dense_bytes: _Optional[int] = ..., saved_s: _Optional[float] = ..., encode_s: _Optional[float] = ..., error: _Optional[float] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("name", "step_s", "text")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    name: str
    step_s: float
    text: str
    def __init__(self, name: _Optional[str] = ..., step_s: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class PeerPrediction(_message.Message):
    __slots__ = ("peer", "compute_s", "device_bytes", "host_bytes", "bubble", "learned")
    PEER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    compute_s: float
    device_bytes: int
    host_bytes: int
    bubble: float
    learned: float
    def __init__(self, peer: _Optional[str] = ..., compute_s: _Optional[float] = ..., device_bytes: _Optional[int] = ..., host_bytes: _Optional[int] = ..., bubble: _Optional[float] = ..., learned: _Optional[float] = ...) -> None: ...

class Spare(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: str
    reason: str
    def __init__(self, peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RunSpec(_message.Message):
    __slots__ = ("version", "name", "job", "graph", "core_graph", "weights", "data", "microbatches", "microbatch_size", "steps", "plan", "microbatch_sizes", "local", "resumed", "recipe", "client_sizes", "client_data", "update_elements")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    CORE_GRAPH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    CLIENT_SIZES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_DATA_FIELD_NUMBER: _ClassVar[int]
    UPDATE_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    name: str
    job: str
    graph: _common_pb2.BlobRef
    core_graph: _common_pb2.BlobRef
    weights: _containers.RepeatedCompositeFieldContainer[WeightFile]
    data: _common_pb2.BlobRef
    microbatches: int
    microbatch_size: int
    steps: int
    plan: Plan
    microbatch_sizes: _containers.RepeatedScalarFieldContainer[int]
    local: _containers.RepeatedScalarFieldContainer[str]
    resumed: Checkpoint
    recipe: _common_pb2.BlobRef
    client_sizes: _containers.RepeatedScalarFieldContainer[int]
    client_data: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlobRef]
    update_elements: int
    def __init__(self, version: _Optional[int] = ..., name: _Optional[str] = ..., job: _Optional[str] = ..., graph: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., core_graph: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., weights: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., data: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., microbatches: _Optional[int] = ..., microbatch_size: _Optional[int] = ..., steps: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., microbatch_sizes: _Optional[_Iterable[int]] = ..., local: _Optional[_Iterable[str]] = ..., resumed: _Optional[_Union[Checkpoint, _Mapping]] = ..., recipe: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., client_sizes: _Optional[_Iterable[int]] = ..., client_data: _Optional[_Iterable[_Union[_common_pb2.BlobRef, _Mapping]]] = ..., update_elements: _Optional[int] = ...) -> None: ...

class DataRequest(_message.Message):
    __slots__ = ("name", "options")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    options: str
    def __init__(self, name: _Optional[str] = ..., options: _Optional[str] = ...) -> None: ...

class DataAnswer(_message.Message):
    __slots__ = ("manifest", "local", "peers", "all")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    manifest: _common_pb2.BlobRef
    local: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedScalarFieldContainer[str]
    all: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlobRef]
    def __init__(self, manifest: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., local: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[str]] = ..., all: _Optional[_Iterable[_Union[_common_pb2.BlobRef, _Mapping]]] = ...) -> None: ...

class PreviewAnswer(_message.Message):
    __slots__ = ("plan", "reason", "peers", "operators", "notes", "report", "formation", "step")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    OPERATORS_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    reason: _common_pb2.Reason
    peers: _containers.RepeatedCompositeFieldContainer[PeerState]
    operators: _containers.RepeatedCompositeFieldContainer[OperatorSpan]
    notes: _containers.RepeatedScalarFieldContainer[str]
    report: PlanReport
    formation: Formation
    step: _containers.RepeatedCompositeFieldContainer[PlannedRow]
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., peers: _Optional[_Iterable[_Union[PeerState, _Mapping]]] = ..., operators: _Optional[_Iterable[_Union[OperatorSpan, _Mapping]]] = ..., notes: _Optional[_Iterable[str]] = ..., report: _Optional[_Union[PlanReport, _Mapping]] = ..., formation: _Optional[_Union[Formation, _Mapping]] = ..., step: _Optional[_Iterable[_Union[PlannedRow, _Mapping]]] = ...) -> None: ...

class PlannedRow(_message.Message):
    __slots__ = ("peer", "actions", "start_s", "end_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    START_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    actions: _containers.RepeatedScalarFieldContainer[str]
    start_s: _containers.RepeatedScalarFieldContainer[float]
    end_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, peer: _Optional[str] = ..., actions: _Optional[_Iterable[str]] = ..., start_s: _Optional[_Iterable[float]] = ..., end_s: _Optional[_Iterable[float]] = ...) -> None: ...

class Formation(_message.Message):
    __slots__ = ("kind", "replicas", "every", "batch", "local_s", "exchange_s", "exposed_s", "contribution_bytes", "peers", "slowest_link", "hangs_on", "left_out", "alternatives", "reasons")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EVERY_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    LOCAL_S_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_LINK_FIELD_NUMBER: _ClassVar[int]
    HANGS_ON_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    replicas: _containers.RepeatedCompositeFieldContainer[FormedReplica]
    every: int
    batch: int
    local_s: float
    exchange_s: float
    exposed_s: float
    contribution_bytes: float
    peers: _containers.RepeatedCompositeFieldContainer[FormedPeer]
    slowest_link: float
    hangs_on: str
    left_out: _containers.RepeatedCompositeFieldContainer[Spare]
    alternatives: _containers.RepeatedCompositeFieldContainer[Alternative]
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[FormedReplica, _Mapping]]] = ..., every: _Optional[int] = ..., batch: _Optional[int] = ..., local_s: _Optional[float] = ..., exchange_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., contribution_bytes: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[FormedPeer, _Mapping]]] = ..., slowest_link: _Optional[float] = ..., hangs_on: _Optional[str] = ..., left_out: _Optional[_Iterable[_Union[Spare, _Mapping]]] = ..., alternatives: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class FormedReplica(_message.Message):
    __slots__ = ("peers", "stages", "step_s", "steps", "samples", "slowest_link", "client")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_LINK_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    stages: int
    step_s: float
    steps: int
    samples: int
    slowest_link: float
    client: int
    def __init__(self, peers: _Optional[_Iterable[str]] = ..., stages: _Optional[int] = ..., step_s: _Optional[float] = ..., steps: _Optional[int] = ..., samples: _Optional[int] = ..., slowest_link: _Optional[float] = ..., client: _Optional[int] = ...) -> None: ...

class FormedPeer(_message.Message):
    __slots__ = ("peer", "bytes", "kept_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    bytes: float
    kept_bytes: int
    def __init__(self, peer: _Optional[str] = ..., bytes: _Optional[float] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class OperatorSpan(_message.Message):
    __slots__ = ("first", "last", "modules", "share", "parameter_bytes")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    MODULES_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    first: str
    last: str
    modules: str
    share: float
    parameter_bytes: int
    def __init__(self, first: _Optional[str] = ..., last: _Optional[str] = ..., modules: _Optional[str] = ..., share: _Optional[float] = ..., parameter_bytes: _Optional[int] = ...) -> None: ...

class Submitted(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("run", "from_event", "so_far")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FROM_EVENT_FIELD_NUMBER: _ClassVar[int]
    SO_FAR_FIELD_NUMBER: _ClassVar[int]
    run: str
    from_event: int
    so_far: bool
    def __init__(self, run: _Optional[str] = ..., from_event: _Optional[int] = ..., so_far: _Optional[bool] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class Cohort(_message.Message):
    __slots__ = ("round", "clients")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    round: int
    clients: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., clients: _Optional[_Iterable[int]] = ...) -> None: ...

class CohortChoice(_message.Message):
    __slots__ = ("run", "cohort")
    RUN_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    run: str
    cohort: Cohort
    def __init__(self, run: _Optional[str] = ..., cohort: _Optional[_Union[Cohort, _Mapping]] = ...) -> None: ...

class Recalled(_message.Message):
    __slots__ = ("spec", "checkpoint")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    spec: RunSpec
    checkpoint: Checkpoint
    def __init__(self, spec: _Optional[_Union[RunSpec, _Mapping]] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ...) -> None: ...

class RunEvent(_message.Message):
    __slots__ = ("number", "at_s", "state", "step", "plan", "weights", "note", "checkpoint", "round_begun", "round_planned", "round_done", "evaluated", "unmasked", "finishing", "chosen", "lie", "formed", "term", "renamed", "replica", "report", "local", "keepers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    ROUND_BEGUN_FIELD_NUMBER: _ClassVar[int]
    ROUND_PLANNED_FIELD_NUMBER: _ClassVar[int]
    ROUND_DONE_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    UNMASKED_FIELD_NUMBER: _ClassVar[int]
    FINISHING_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    LIE_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    RENAMED_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    at_s: float
    state: RunState
    step: StepDone
    plan: Plan
    weights: Weights
    note: str
    checkpoint: Checkpoint
    round_begun: RoundBegun
    round_planned: RoundPlanned
    round_done: RoundDone
    evaluated: VersionEvaluated
    unmasked: RoundUnmasked
    finishing: RunFinishing
    chosen: Cohort
    lie: LieProved
    formed: Formation
    term: int
    renamed: _containers.RepeatedCompositeFieldContainer[Renamed]
    replica: int
    report: PlanReport
    local: _containers.RepeatedScalarFieldContainer[str]
    keepers: _containers.RepeatedCompositeFieldContainer[Keeper]
    def __init__(self, number: _Optional[int] = ..., at_s: _Optional[float] = ..., state: _Optional[_Union[RunState, _Mapping]] = ..., step: _Optional[_Union[StepDone, _Mapping]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., note: _Optional[str] = ..., checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., round_begun: _Optional[_Union[RoundBegun, _Mapping]] = ..., round_planned: _Optional[_Union[RoundPlanned, _Mapping]] = ..., round_done: _Optional[_Union[RoundDone, _Mapping]] = ..., evaluated: _Optional[_Union[VersionEvaluated, _Mapping]] = ..., unmasked: _Optional[_Union[RoundUnmasked, _Mapping]] = ..., finishing: _Optional[_Union[RunFinishing, _Mapping]] = ..., chosen: _Optional[_Union[Cohort, _Mapping]] = ..., lie: _Optional[_Union[LieProved, _Mapping]] = ..., formed: _Optional[_Union[Formation, _Mapping]] = ..., term: _Optional[int] = ..., renamed: _Optional[_Iterable[_Union[Renamed, _Mapping]]] = ..., replica: _Optional[int] = ..., report: _Optional[_Union[PlanReport, _Mapping]] = ..., local: _Optional[_Iterable[str]] = ..., keepers: _Optional[_Iterable[_Union[Keeper, _Mapping]]] = ...) -> None: ...

class RoundBegun(_message.Message):
    __slots__ = ("round", "work", "chosen", "reachable")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    round: int
    work: _containers.RepeatedCompositeFieldContainer[RoundWork]
    chosen: bool
    reachable: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., work: _Optional[_Iterable[_Union[RoundWork, _Mapping]]] = ..., chosen: _Optional[bool] = ..., reachable: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundWork(_message.Message):
    __slots__ = ("replica", "term", "first_step", "steps", "samples", "ahead", "ahead_samples", "late", "fragment", "final", "cohort", "kept", "left_out", "weights", "trained", "afresh", "lost", "more", "planned", "behind")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    AHEAD_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    COHORT_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    AFRESH_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    replica: int
    term: int
    first_step: int
    steps: int
    samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    ahead: int
    ahead_samples: _containers.RepeatedCompositeFieldContainer[SampleRange]
    late: int
    fragment: int
    final: bool
    cohort: _containers.RepeatedCompositeFieldContainer[SampleRange]
    kept: _containers.RepeatedScalarFieldContainer[int]
    left_out: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    trained: _containers.RepeatedScalarFieldContainer[int]
    afresh: bool
    lost: _containers.RepeatedScalarFieldContainer[int]
    more: int
    planned: int
    behind: int
    def __init__(self, replica: _Optional[int] = ..., term: _Optional[int] = ..., first_step: _Optional[int] = ..., steps: _Optional[int] = ..., samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., ahead: _Optional[int] = ..., ahead_samples: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., late: _Optional[int] = ..., fragment: _Optional[int] = ..., final: _Optional[bool] = ..., cohort: _Optional[_Iterable[_Union[SampleRange, _Mapping]]] = ..., kept: _Optional[_Iterable[int]] = ..., left_out: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ..., trained: _Optional[_Iterable[int]] = ..., afresh: _Optional[bool] = ..., lost: _Optional[_Iterable[int]] = ..., more: _Optional[int] = ..., planned: _Optional[int] = ..., behind: _Optional[int] = ...) -> None: ...

class RoundPlanned(_message.Message):
    __slots__ = ("round", "attempt", "members", "joiners", "exponent")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    members: _containers.RepeatedCompositeFieldContainer[RoundMember]
    joiners: _containers.RepeatedScalarFieldContainer[int]
    exponent: int
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., members: _Optional[_Iterable[_Union[RoundMember, _Mapping]]] = ..., joiners: _Optional[_Iterable[int]] = ..., exponent: _Optional[int] = ...) -> None: ...

class RoundUnmasked(_message.Message):
    __slots__ = ("round", "members")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class LieProved(_message.Message):
    __slots__ = ("round", "peer", "first", "second", "sums")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SECOND_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    round: int
    peer: str
    first: SignedStatement
    second: SignedStatement
    sums: _containers.RepeatedCompositeFieldContainer[SignedStatement]
    def __init__(self, round: _Optional[int] = ..., peer: _Optional[str] = ..., first: _Optional[_Union[SignedStatement, _Mapping]] = ..., second: _Optional[_Union[SignedStatement, _Mapping]] = ..., sums: _Optional[_Iterable[_Union[SignedStatement, _Mapping]]] = ...) -> None: ...

class RunFinishing(_message.Message):
    __slots__ = ("round", "step")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class RoundMember(_message.Message):
    __slots__ = ("replica", "weight", "unit", "term", "group", "attempt", "source", "behind")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BEHIND_FIELD_NUMBER: _ClassVar[int]
    replica: int
    weight: int
    unit: int
    term: int
    group: int
    attempt: int
    source: int
    behind: int
    def __init__(self, replica: _Optional[int] = ..., weight: _Optional[int] = ..., unit: _Optional[int] = ..., term: _Optional[int] = ..., group: _Optional[int] = ..., attempt: _Optional[int] = ..., source: _Optional[int] = ..., behind: _Optional[int] = ...) -> None: ...

class RoundDone(_message.Message):
    __slots__ = ("round", "attempt", "members", "hash", "drift", "sent_bytes", "waited_s", "seconds", "microbatches", "joined", "exchange_s", "clients_moved", "mean_moved", "sums", "uploads", "going", "clients", "skipped", "lines")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_S_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_MOVED_FIELD_NUMBER: _ClassVar[int]
    MEAN_MOVED_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_FIELD_NUMBER: _ClassVar[int]
    GOING_FIELD_NUMBER: _ClassVar[int]
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    members: _containers.RepeatedCompositeFieldContainer[RoundMember]
    hash: int
    drift: float
    sent_bytes: int
    waited_s: float
    seconds: float
    microbatches: int
    joined: _containers.RepeatedCompositeFieldContainer[RoundMember]
    exchange_s: float
    clients_moved: float
    mean_moved: float
    sums: int
    uploads: ClientUploads
    going: _containers.RepeatedScalarFieldContainer[int]
    clients: ClientReports
    skipped: int
    lines: _containers.RepeatedCompositeFieldContainer[HostLine]
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., members: _Optional[_Iterable[_Union[RoundMember, _Mapping]]] = ..., hash: _Optional[int] = ..., drift: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., waited_s: _Optional[float] = ..., seconds: _Optional[float] = ..., microbatches: _Optional[int] = ..., joined: _Optional[_Iterable[_Union[RoundMember, _Mapping]]] = ..., exchange_s: _Optional[float] = ..., clients_moved: _Optional[float] = ..., mean_moved: _Optional[float] = ..., sums: _Optional[int] = ..., uploads: _Optional[_Union[ClientUploads, _Mapping]] = ..., going: _Optional[_Iterable[int]] = ..., clients: _Optional[_Union[ClientReports, _Mapping]] = ..., skipped: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[HostLine, _Mapping]]] = ...) -> None: ...

class HostLine(_message.Message):
    __slots__ = ("replica", "term", "bytes_per_s", "update_bytes_per_s", "latency_s")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    UPDATE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    replica: int
    term: int
    bytes_per_s: float
    update_bytes_per_s: float
    latency_s: float
    def __init__(self, replica: _Optional[int] = ..., term: _Optional[int] = ..., bytes_per_s: _Optional[float] = ..., update_bytes_per_s: _Optional[float] = ..., latency_s: _Optional[float] = ...) -> None: ...

class ClientReports(_message.Message):
    __slots__ = ("clients", "losses", "seconds", "bytes")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    clients: _containers.RepeatedScalarFieldContainer[int]
    losses: _containers.RepeatedScalarFieldContainer[float]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, clients: _Optional[_Iterable[int]] = ..., losses: _Optional[_Iterable[float]] = ..., seconds: _Optional[_Iterable[float]] = ..., bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class ClientUploads(_message.Message):
    __slots__ = ("clients", "bytes", "least_ratio", "most_ratio", "seconds")
    CLIENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAST_RATIO_FIELD_NUMBER: _ClassVar[int]
    MOST_RATIO_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    clients: int
    bytes: int
    least_ratio: float
    most_ratio: float
    seconds: float
    def __init__(self, clients: _Optional[int] = ..., bytes: _Optional[int] = ..., least_ratio: _Optional[float] = ..., most_ratio: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class VersionEvaluated(_message.Message):
    __slots__ = ("round", "step", "evaluation", "replicas", "replica")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    round: int
    step: int
    evaluation: Evaluation
    replicas: int
    replica: int
    def __init__(self, round: _Optional[int] = ..., step: _Optional[int] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., replicas: _Optional[int] = ..., replica: _Optional[int] = ...) -> None: ...

class StepDone(_message.Message):
    __slots__ = ("step", "outcome", "evaluation", "seconds", "sent_bytes", "compute_s", "links", "again_bytes", "peaks")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    AGAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    step: int
    outcome: Outcome
    evaluation: Evaluation
    seconds: float
    sent_bytes: int
    compute_s: float
    links: _containers.RepeatedCompositeFieldContainer[LinkUse]
    again_bytes: int
    peaks: _containers.RepeatedCompositeFieldContainer[PeerPeak]
    def __init__(self, step: _Optional[int] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ..., evaluation: _Optional[_Union[Evaluation, _Mapping]] = ..., seconds: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., compute_s: _Optional[float] = ..., links: _Optional[_Iterable[_Union[LinkUse, _Mapping]]] = ..., again_bytes: _Optional[int] = ..., peaks: _Optional[_Iterable[_Union[PeerPeak, _Mapping]]] = ...) -> None: ...

class PeerPeak(_message.Message):
    __slots__ = ("peer", "device_bytes")
    PEER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer: str
    device_bytes: int
    def __init__(self, peer: _Optional[str] = ..., device_bytes: _Optional[int] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("step", "files", "starting", "graph", "recipe")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    step: int
    files: _containers.RepeatedCompositeFieldContainer[WeightFile]
    starting: _containers.RepeatedCompositeFieldContainer[WeightFile]
    graph: _common_pb2.BlobRef
    recipe: _common_pb2.BlobRef
    def __init__(self, step: _Optional[int] = ..., files: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., starting: _Optional[_Iterable[_Union[WeightFile, _Mapping]]] = ..., graph: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., recipe: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ...) -> None: ...

class RunState(_message.Message):
    __slots__ = ("run", "phase", "reason", "step", "steps", "name", "term", "inexact_from", "pausing", "round", "replicas", "stop_at_s", "left_s")
    RUN_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FROM_FIELD_NUMBER: _ClassVar[int]
    PAUSING_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    run: str
    phase: Phase
    reason: _common_pb2.Reason
    step: int
    steps: int
    name: str
    term: int
    inexact_from: int
    pausing: bool
    round: int
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaState]
    stop_at_s: float
    left_s: float
    def __init__(self, run: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., name: _Optional[str] = ..., term: _Optional[int] = ..., inexact_from: _Optional[int] = ..., pausing: _Optional[bool] = ..., round: _Optional[int] = ..., replicas: _Optional[_Iterable[_Union[ReplicaState, _Mapping]]] = ..., stop_at_s: _Optional[float] = ..., left_s: _Optional[float] = ...) -> None: ...

class ReplicaState(_message.Message):
    __slots__ = ("replica", "phase", "reason", "step", "term", "inexact_from", "pausing")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    INEXACT_FROM_FIELD_NUMBER: _ClassVar[int]
    PAUSING_FIELD_NUMBER: _ClassVar[int]
    replica: str
    phase: Phase
    reason: _common_pb2.Reason
    step: int
    term: int
    inexact_from: int
    pausing: bool
    def __init__(self, replica: _Optional[str] = ..., phase: _Optional[_Union[Phase, str]] = ..., reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., step: _Optional[int] = ..., term: _Optional[int] = ..., inexact_from: _Optional[int] = ..., pausing: _Optional[bool] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("broker", "peers", "runs", "links", "public", "shares")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    broker: str
    peers: _containers.RepeatedCompositeFieldContainer[PeerState]
    runs: _containers.RepeatedCompositeFieldContainer[RunState]
    links: _containers.RepeatedCompositeFieldContainer[LinkState]
    public: PublicAddress
    shares: _containers.RepeatedCompositeFieldContainer[PeerShare]
    def __init__(self, broker: _Optional[str] = ..., peers: _Optional[_Iterable[_Union[PeerState, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[RunState, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkState, _Mapping]]] = ..., public: _Optional[_Union[PublicAddress, _Mapping]] = ..., shares: _Optional[_Iterable[_Union[PeerShare, _Mapping]]] = ...) -> None: ...

class PeerShare(_message.Message):
    __slots__ = ("peer", "run", "name", "samples", "sent_bytes", "seconds", "first_s", "last_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_S_FIELD_NUMBER: _ClassVar[int]
    LAST_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    run: str
    name: str
    samples: int
    sent_bytes: int
    seconds: float
    first_s: float
    last_s: float
    def __init__(self, peer: _Optional[str] = ..., run: _Optional[str] = ..., name: _Optional[str] = ..., samples: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., first_s: _Optional[float] = ..., last_s: _Optional[float] = ...) -> None: ...

class PublicAddress(_message.Message):
    __slots__ = ("address", "confirmed_by", "problem", "tried_by")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_BY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    TRIED_BY_FIELD_NUMBER: _ClassVar[int]
    address: str
    confirmed_by: str
    problem: str
    tried_by: str
    def __init__(self, address: _Optional[str] = ..., confirmed_by: _Optional[str] = ..., problem: _Optional[str] = ..., tried_by: _Optional[str] = ...) -> None: ...

class LinkState(_message.Message):
    __slots__ = ("source", "destination", "latency_s", "bytes_per_s", "age_s", "burst_bytes_per_s", "burst_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    BURST_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BURST_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    destination: str
    latency_s: float
    bytes_per_s: float
    age_s: float
    burst_bytes_per_s: float
    burst_bytes: int
    def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., age_s: _Optional[float] = ..., burst_bytes_per_s: _Optional[float] = ..., burst_bytes: _Optional[int] = ...) -> None: ...

class PeerState(_message.Message):
    __slots__ = ("peer", "profile", "address", "run", "silent_s", "membership", "closed")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    peer: str
    profile: Profile
    address: str
    run: str
    silent_s: float
    membership: str
    closed: _common_pb2.Reason
    def __init__(self, peer: _Optional[str] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., address: _Optional[str] = ..., run: _Optional[str] = ..., silent_s: _Optional[float] = ..., membership: _Optional[str] = ..., closed: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...

class BlobPiece(_message.Message):
    __slots__ = ("ref", "offset", "data")
    REF_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.BlobRef
    offset: int
    data: bytes
    def __init__(self, ref: _Optional[_Union[_common_pb2.BlobRef, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class BlobRange(_message.Message):
    __slots__ = ("hash", "offset", "length")
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    hash: str
    offset: int
    length: int
    def __init__(self, hash: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class BlobQuery(_message.Message):
    __slots__ = ("blobs",)
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    blobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlobRef]
    def __init__(self, blobs: _Optional[_Iterable[_Union[_common_pb2.BlobRef, _Mapping]]] = ...) -> None: ...
