from shoal.proto import broker_pb2 as _broker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Record(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[Decision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[Decision, _Mapping]]] = ...) -> None: ...

class Decision(_message.Message):
    __slots__ = ("started", "added", "happened", "forgotten", "kept", "share", "past")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    HAPPENED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    started: BrokerStarted
    added: RunAdded
    happened: RunHappened
    forgotten: RunForgotten
    kept: RunKept
    share: _broker_pb2.PeerShare
    past: RunPast
    def __init__(self, started: _Optional[_Union[BrokerStarted, _Mapping]] = ..., added: _Optional[_Union[RunAdded, _Mapping]] = ..., happened: _Optional[_Union[RunHappened, _Mapping]] = ..., forgotten: _Optional[_Union[RunForgotten, _Mapping]] = ..., kept: _Optional[_Union[RunKept, _Mapping]] = ..., share: _Optional[_Union[_broker_pb2.PeerShare, _Mapping]] = ..., past: _Optional[_Union[RunPast, _Mapping]] = ...) -> None: ...

class BrokerStarted(_message.Message):
    __slots__ = ("number", "submitted", "at_s")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    number: int
    submitted: int
    at_s: float
    def __init__(self, number: _Optional[int] = ..., submitted: _Optional[int] = ..., at_s: _Optional[float] = ...) -> None: ...

class RunAdded(_message.Message):
    __slots__ = ("run", "number", "spec", "owner")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    spec: _broker_pb2.RunSpec
    owner: str
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ..., spec: _Optional[_Union[_broker_pb2.RunSpec, _Mapping]] = ..., owner: _Optional[str] = ...) -> None: ...

class RunHappened(_message.Message):
    __slots__ = ("run", "event")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    run: str
    event: _broker_pb2.RunEvent
    def __init__(self, run: _Optional[str] = ..., event: _Optional[_Union[_broker_pb2.RunEvent, _Mapping]] = ...) -> None: ...

class RunForgotten(_message.Message):
    __slots__ = ("run",)
    RUN_FIELD_NUMBER: _ClassVar[int]
    run: str
    def __init__(self, run: _Optional[str] = ...) -> None: ...

class RunKept(_message.Message):
    __slots__ = ("added", "replicas", "events", "numbered", "rounds", "stop")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NUMBERED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    added: RunAdded
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaKept]
    events: _containers.RepeatedCompositeFieldContainer[_broker_pb2.RunEvent]
    numbered: int
    rounds: RoundsKept
    stop: StopKept
    def __init__(self, added: _Optional[_Union[RunAdded, _Mapping]] = ..., replicas: _Optional[_Iterable[_Union[ReplicaKept, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[_broker_pb2.RunEvent, _Mapping]]] = ..., numbered: _Optional[int] = ..., rounds: _Optional[_Union[RoundsKept, _Mapping]] = ..., stop: _Optional[_Union[StopKept, _Mapping]] = ...) -> None: ...

class StopKept(_message.Message):
    __slots__ = ("began_s", "best", "worse", "why")
    BEGAN_S_FIELD_NUMBER: _ClassVar[int]
    BEST_FIELD_NUMBER: _ClassVar[int]
    WORSE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    began_s: float
    best: float
    worse: int
    why: str
    def __init__(self, began_s: _Optional[float] = ..., best: _Optional[float] = ..., worse: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class RoundsKept(_message.Message):
    __slots__ = ("round", "attempt", "committed", "work", "members", "joiners", "exponent", "next", "returned", "done_at_s", "holders", "before", "past", "lines", "met", "sums", "stateful", "homes", "trained", "states_lost", "unmasked", "finishing", "chosen", "liars", "total")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    JOINERS_FIELD_NUMBER: _ClassVar[int]
    EXPONENT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    DONE_AT_S_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    PAST_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    STATEFUL_FIELD_NUMBER: _ClassVar[int]
    HOMES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    STATES_LOST_FIELD_NUMBER: _ClassVar[int]
    UNMASKED_FIELD_NUMBER: _ClassVar[int]
    FINISHING_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    LIARS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    committed: int
    work: _containers.RepeatedCompositeFieldContainer[_broker_pb2.RoundWork]
    members: _containers.RepeatedCompositeFieldContainer[_broker_pb2.RoundMember]
    joiners: _containers.RepeatedScalarFieldContainer[int]
    exponent: int
    next: int
    returned: _containers.RepeatedCompositeFieldContainer[_broker_pb2.SampleRange]
    done_at_s: float
    holders: _containers.RepeatedCompositeFieldContainer[_broker_pb2.RoundMember]
    before: int
    past: _containers.RepeatedCompositeFieldContainer[_broker_pb2.RoundWork]
    lines: _containers.RepeatedCompositeFieldContainer[_broker_pb2.HostLine]
    met: _containers.RepeatedCompositeFieldContainer[MetPairs]
    sums: int
    stateful: _containers.RepeatedScalarFieldContainer[int]
    homes: _containers.RepeatedScalarFieldContainer[int]
    trained: _containers.RepeatedScalarFieldContainer[int]
    states_lost: bool
    unmasked: _containers.RepeatedScalarFieldContainer[str]
    finishing: bool
    chosen: _broker_pb2.Cohort
    liars: _containers.RepeatedScalarFieldContainer[str]
    total: int
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., committed: _Optional[int] = ..., work: _Optional[_Iterable[_Union[_broker_pb2.RoundWork, _Mapping]]] = ..., members: _Optional[_Iterable[_Union[_broker_pb2.RoundMember, _Mapping]]] = ..., joiners: _Optional[_Iterable[int]] = ..., exponent: _Optional[int] = ..., next: _Optional[int] = ..., returned: _Optional[_Iterable[_Union[_broker_pb2.SampleRange, _Mapping]]] = ..., done_at_s: _Optional[float] = ..., holders: _Optional[_Iterable[_Union[_broker_pb2.RoundMember, _Mapping]]] = ..., before: _Optional[int] = ..., past: _Optional[_Iterable[_Union[_broker_pb2.RoundWork, _Mapping]]] = ..., lines: _Optional[_Iterable[_Union[_broker_pb2.HostLine, _Mapping]]] = ..., met: _Optional[_Iterable[_Union[MetPairs, _Mapping]]] = ..., sums: _Optional[int] = ..., stateful: _Optional[_Iterable[int]] = ..., homes: _Optional[_Iterable[int]] = ..., trained: _Optional[_Iterable[int]] = ..., states_lost: _Optional[bool] = ..., unmasked: _Optional[_Iterable[str]] = ..., finishing: _Optional[bool] = ..., chosen: _Optional[_Union[_broker_pb2.Cohort, _Mapping]] = ..., liars: _Optional[_Iterable[str]] = ..., total: _Optional[int] = ...) -> None: ...

class MetPairs(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, replicas: _Optional[_Iterable[int]] = ...) -> None: ...

class ReplicaKept(_message.Message):
    __slots__ = ("state", "plan", "report", "peaks", "checkpoints", "renamed", "local", "interrupted", "holders", "client", "steps")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PEAKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    RENAMED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    INTERRUPTED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    state: _broker_pb2.ReplicaState
    plan: _broker_pb2.Plan
    report: _broker_pb2.PlanReport
    peaks: _containers.RepeatedCompositeFieldContainer[_broker_pb2.PeerPeak]
    checkpoints: _containers.RepeatedCompositeFieldContainer[_broker_pb2.Checkpoint]
    renamed: _containers.RepeatedCompositeFieldContainer[RenamedSince]
    local: _containers.RepeatedScalarFieldContainer[str]
    interrupted: int
    holders: _containers.RepeatedCompositeFieldContainer[HoldersOfTerm]
    client: int
    steps: int
    def __init__(self, state: _Optional[_Union[_broker_pb2.ReplicaState, _Mapping]] = ..., plan: _Optional[_Union[_broker_pb2.Plan, _Mapping]] = ..., report: _Optional[_Union[_broker_pb2.PlanReport, _Mapping]] = ..., peaks: _Optional[_Iterable[_Union[_broker_pb2.PeerPeak, _Mapping]]] = ..., checkpoints: _Optional[_Iterable[_Union[_broker_pb2.Checkpoint, _Mapping]]] = ..., renamed: _Optional[_Iterable[_Union[RenamedSince, _Mapping]]] = ..., local: _Optional[_Iterable[str]] = ..., interrupted: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[HoldersOfTerm, _Mapping]]] = ..., client: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class HoldersOfTerm(_message.Message):
    __slots__ = ("term", "holders")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    term: int
    holders: _containers.RepeatedCompositeFieldContainer[HolderKept]
    def __init__(self, term: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[HolderKept, _Mapping]]] = ...) -> None: ...

class HolderKept(_message.Message):
    __slots__ = ("holder", "spans", "keepers")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    KEEPERS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    spans: _containers.RepeatedCompositeFieldContainer[_broker_pb2.Span]
    keepers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, holder: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_broker_pb2.Span, _Mapping]]] = ..., keepers: _Optional[_Iterable[str]] = ...) -> None: ...

class RenamedSince(_message.Message):
    __slots__ = ("term", "holders")
    TERM_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    term: int
    holders: _containers.RepeatedCompositeFieldContainer[_broker_pb2.Renamed]
    def __init__(self, term: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[_broker_pb2.Renamed, _Mapping]]] = ...) -> None: ...

class RunPast(_message.Message):
    __slots__ = ("run", "first", "packed")
    RUN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    run: str
    first: int
    packed: bytes
    def __init__(self, run: _Optional[str] = ..., first: _Optional[int] = ..., packed: _Optional[bytes] = ...) -> None: ...
