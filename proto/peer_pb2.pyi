from shoal.proto import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ACTIVATION: _ClassVar[Role]
    ACTIVATION_GRAD: _ClassVar[Role]
    SYNC: _ClassVar[Role]
    SNAPSHOT: _ClassVar[Role]
    PROBE: _ClassVar[Role]
    ROUND: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ACTIVATION: Role
ACTIVATION_GRAD: Role
SYNC: Role
SNAPSHOT: Role
PROBE: Role
ROUND: Role

class Piece(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FrameId(_message.Message):
    __slots__ = ("run", "term", "step", "role", "microbatch", "hop", "port", "source", "destination")
    RUN_FIELD_NUMBER: _ClassVar[int]
    TERM_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MICROBATCH_FIELD_NUMBER: _ClassVar[int]
    HOP_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    run: str
    term: int
    step: int
    role: Role
    microbatch: int
    hop: int
    port: str
    source: str
    destination: str
    def __init__(self, run: _Optional[str] = ..., term: _Optional[int] = ..., step: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., microbatch: _Optional[int] = ..., hop: _Optional[int] = ..., port: _Optional[str] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ...) -> None: ...

class FrameHeader(_message.Message):
    __slots__ = ("id", "number", "size_bytes", "codec", "codec_header", "spec", "absent")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_HEADER_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    id: FrameId
    number: int
    size_bytes: int
    codec: str
    codec_header: bytes
    spec: _common_pb2.TensorSpec
    absent: bool
    def __init__(self, id: _Optional[_Union[FrameId, _Mapping]] = ..., number: _Optional[int] = ..., size_bytes: _Optional[int] = ..., codec: _Optional[str] = ..., codec_header: _Optional[bytes] = ..., spec: _Optional[_Union[_common_pb2.TensorSpec, _Mapping]] = ..., absent: _Optional[bool] = ...) -> None: ...

class LinkMessage(_message.Message):
    __slots__ = ("hello", "frame", "ack", "credit", "error", "partial")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    hello: LinkHello
    frame: FrameHeader
    ack: FrameAck
    credit: Credit
    error: LinkError
    partial: Partial
    def __init__(self, hello: _Optional[_Union[LinkHello, _Mapping]] = ..., frame: _Optional[_Union[FrameHeader, _Mapping]] = ..., ack: _Optional[_Union[FrameAck, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., error: _Optional[_Union[LinkError, _Mapping]] = ..., partial: _Optional[_Union[Partial, _Mapping]] = ...) -> None: ...

class LinkHello(_message.Message):
    __slots__ = ("version", "source", "destination", "generation", "attempt", "session", "knows", "announced", "partial", "credits")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KNOWS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    version: int
    source: str
    destination: str
    generation: int
    attempt: int
    session: str
    knows: str
    announced: int
    partial: _containers.RepeatedCompositeFieldContainer[Partial]
    credits: _containers.RepeatedCompositeFieldContainer[Credit]
    def __init__(self, version: _Optional[int] = ..., source: _Optional[str] = ..., destination: _Optional[str] = ..., generation: _Optional[int] = ..., attempt: _Optional[int] = ..., session: _Optional[str] = ..., knows: _Optional[str] = ..., announced: _Optional[int] = ..., partial: _Optional[_Iterable[_Union[Partial, _Mapping]]] = ..., credits: _Optional[_Iterable[_Union[Credit, _Mapping]]] = ...) -> None: ...

class Partial(_message.Message):
    __slots__ = ("number", "size_bytes")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    number: int
    size_bytes: int
    def __init__(self, number: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FrameAck(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("role", "frames")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    role: Role
    frames: int
    def __init__(self, role: _Optional[_Union[Role, str]] = ..., frames: _Optional[int] = ...) -> None: ...

class LinkError(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: _common_pb2.Reason
    def __init__(self, reason: _Optional[_Union[_common_pb2.Reason, _Mapping]] = ...) -> None: ...
