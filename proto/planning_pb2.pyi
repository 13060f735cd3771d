from shoal.proto import broker_pb2 as _broker_pb2
from shoal.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanningAsked(_message.Message):
    __slots__ = ("wanted", "run", "spec", "graph", "offers", "links", "plan", "notes")
    class Wanted(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MAKE: _ClassVar[PlanningAsked.Wanted]
        CONSIDER: _ClassVar[PlanningAsked.Wanted]
        PREVIEW: _ClassVar[PlanningAsked.Wanted]
        FORM: _ClassVar[PlanningAsked.Wanted]
    MAKE: PlanningAsked.Wanted
    CONSIDER: PlanningAsked.Wanted
    PREVIEW: PlanningAsked.Wanted
    FORM: PlanningAsked.Wanted
    WANTED_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    wanted: PlanningAsked.Wanted
    run: str
    spec: _broker_pb2.RunSpec
    graph: bytes
    offers: _containers.RepeatedCompositeFieldContainer[Offered]
    links: PlanningLinks
    plan: _broker_pb2.Plan
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wanted: _Optional[_Union[PlanningAsked.Wanted, str]] = ..., run: _Optional[str] = ..., spec: _Optional[_Union[_broker_pb2.RunSpec, _Mapping]] = ..., graph: _Optional[bytes] = ..., offers: _Optional[_Iterable[_Union[Offered, _Mapping]]] = ..., links: _Optional[_Union[PlanningLinks, _Mapping]] = ..., plan: _Optional[_Union[_broker_pb2.Plan, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class Offered(_message.Message):
    __slots__ = ("peer", "name", "place", "device_memory_bytes", "host_memory_bytes", "flops_per_s", "operator_set", "reachable", "speeds", "learned", "host", "cores", "threads", "data", "accelerator")
    PEER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_SET_FIELD_NUMBER: _ClassVar[int]
    REACHABLE_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    LEARNED_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    CORES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ACCELERATOR_FIELD_NUMBER: _ClassVar[int]
    peer: str
    name: str
    place: str
    device_memory_bytes: int
    host_memory_bytes: int
    flops_per_s: float
    operator_set: str
    reachable: bool
    speeds: _broker_pb2.Speeds
    learned: float
    host: str
    cores: float
    threads: int
    data: _containers.RepeatedCompositeFieldContainer[OfferedData]
    accelerator: bool
    def __init__(self, peer: _Optional[str] = ..., name: _Optional[str] = ..., place: _Optional[str] = ..., device_memory_bytes: _Optional[int] = ..., host_memory_bytes: _Optional[int] = ..., flops_per_s: _Optional[float] = ..., operator_set: _Optional[str] = ..., reachable: _Optional[bool] = ..., speeds: _Optional[_Union[_broker_pb2.Speeds, _Mapping]] = ..., learned: _Optional[float] = ..., host: _Optional[str] = ..., cores: _Optional[float] = ..., threads: _Optional[int] = ..., data: _Optional[_Iterable[_Union[OfferedData, _Mapping]]] = ..., accelerator: _Optional[bool] = ...) -> None: ...

class OfferedData(_message.Message):
    __slots__ = ("manifest", "inputs", "blended")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    BLENDED_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    inputs: _containers.RepeatedScalarFieldContainer[str]
    blended: bool
    def __init__(self, manifest: _Optional[str] = ..., inputs: _Optional[_Iterable[str]] = ..., blended: _Optional[bool] = ...) -> None: ...

class PlanningLinks(_message.Message):
    __slots__ = ("latency_s", "bandwidth", "up", "down", "measured")
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    latency_s: bytes
    bandwidth: bytes
    up: bytes
    down: bytes
    measured: bytes
    def __init__(self, latency_s: _Optional[bytes] = ..., bandwidth: _Optional[bytes] = ..., up: _Optional[bytes] = ..., down: _Optional[bytes] = ..., measured: _Optional[bytes] = ...) -> None: ...

class PlanningAnswered(_message.Message):
    __slots__ = ("made", "refused", "considered", "preview", "formed")
    MADE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    PREVIEW_FIELD_NUMBER: _ClassVar[int]
    FORMED_FIELD_NUMBER: _ClassVar[int]
    made: PlanMade
    refused: PlanRefused
    considered: Considered
    preview: _broker_pb2.PreviewAnswer
    formed: PlansMade
    def __init__(self, made: _Optional[_Union[PlanMade, _Mapping]] = ..., refused: _Optional[_Union[PlanRefused, _Mapping]] = ..., considered: _Optional[_Union[Considered, _Mapping]] = ..., preview: _Optional[_Union[_broker_pb2.PreviewAnswer, _Mapping]] = ..., formed: _Optional[_Union[PlansMade, _Mapping]] = ...) -> None: ...

class PlanMade(_message.Message):
    __slots__ = ("plan", "pairs", "local", "report")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    plan: _broker_pb2.Plan
    pairs: _containers.RepeatedScalarFieldContainer[int]
    local: _containers.RepeatedScalarFieldContainer[str]
    report: _broker_pb2.PlanReport
    def __init__(self, plan: _Optional[_Union[_broker_pb2.Plan, _Mapping]] = ..., pairs: _Optional[_Iterable[int]] = ..., local: _Optional[_Iterable[str]] = ..., report: _Optional[_Union[_broker_pb2.PlanReport, _Mapping]] = ...) -> None: ...

class PlansMade(_message.Message):
    __slots__ = ("formation", "plans")
    FORMATION_FIELD_NUMBER: _ClassVar[int]
    PLANS_FIELD_NUMBER: _ClassVar[int]
    formation: _broker_pb2.Formation
    plans: _containers.RepeatedCompositeFieldContainer[PlanMade]
    def __init__(self, formation: _Optional[_Union[_broker_pb2.Formation, _Mapping]] = ..., plans: _Optional[_Iterable[_Union[PlanMade, _Mapping]]] = ...) -> None: ...

class PlanRefused(_message.Message):
    __slots__ = ("reason", "short_bytes")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SHORT_BYTES_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.Reason
    short_bytes: int
    def __init__(self, reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ..., short_bytes: _Optional[int] = ...) -> None: ...

class Considered(_message.Message):
    __slots__ = ("running_s", "candidate_s", "migration_s", "plan", "pairs", "report")
    RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_S_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_S_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    running_s: float
    candidate_s: float
    migration_s: float
    plan: _broker_pb2.Plan
    pairs: _containers.RepeatedScalarFieldContainer[int]
    report: _broker_pb2.PlanReport
    def __init__(self, running_s: _Optional[float] = ..., candidate_s: _Optional[float] = ..., migration_s: _Optional[float] = ..., plan: _Optional[_Union[_broker_pb2.Plan, _Mapping]] = ..., pairs: _Optional[_Iterable[int]] = ..., report: _Optional[_Union[_broker_pb2.PlanReport, _Mapping]] = ...) -> None: ...
