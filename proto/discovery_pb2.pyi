from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Whereabouts(_message.Message):
    __slots__ = ("swarm", "address", "nodes", "boot", "issued_s", "ends_s")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    ISSUED_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_S_FIELD_NUMBER: _ClassVar[int]
    swarm: str
    address: str
    nodes: _containers.RepeatedScalarFieldContainer[str]
    boot: str
    issued_s: float
    ends_s: float
    def __init__(self, swarm: _Optional[str] = ..., address: _Optional[str] = ..., nodes: _Optional[_Iterable[str]] = ..., boot: _Optional[str] = ..., issued_s: _Optional[float] = ..., ends_s: _Optional[float] = ...) -> None: ...

class SignedWhereabouts(_message.Message):
    __slots__ = ("whereabouts", "authority", "signature")
    WHEREABOUTS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    whereabouts: bytes
    authority: bytes
    signature: bytes
    def __init__(self, whereabouts: _Optional[bytes] = ..., authority: _Optional[bytes] = ..., signature: _Optional[bytes] = ...) -> None: ...
