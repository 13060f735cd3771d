from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("version", "invitation", "secret", "request", "name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    version: int
    invitation: bytes
    secret: bytes
    request: bytes
    name: str
    def __init__(self, version: _Optional[int] = ..., invitation: _Optional[bytes] = ..., secret: _Optional[bytes] = ..., request: _Optional[bytes] = ..., name: _Optional[str] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("request",)
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    def __init__(self, request: _Optional[bytes] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("subject", "certificate", "now_s")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    subject: str
    certificate: bytes
    now_s: float
    def __init__(self, subject: _Optional[str] = ..., certificate: _Optional[bytes] = ..., now_s: _Optional[float] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("role", "uses", "lasts_s")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    LASTS_S_FIELD_NUMBER: _ClassVar[int]
    role: str
    uses: int
    lasts_s: float
    def __init__(self, role: _Optional[str] = ..., uses: _Optional[int] = ..., lasts_s: _Optional[float] = ...) -> None: ...

class Invitation(_message.Message):
    __slots__ = ("token", "ends_s", "address", "swarm", "ways")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    ENDS_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SWARM_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    token: str
    ends_s: float
    address: str
    swarm: str
    ways: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, token: _Optional[str] = ..., ends_s: _Optional[float] = ..., address: _Optional[str] = ..., swarm: _Optional[str] = ..., ways: _Optional[_Iterable[str]] = ...) -> None: ...

class KickRequest(_message.Message):
    __slots__ = ("subject",)
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    subject: str
    def __init__(self, subject: _Optional[str] = ...) -> None: ...

class Kicked(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class PageRequest(_message.Message):
    __slots__ = ("lasts_s",)
    LASTS_S_FIELD_NUMBER: _ClassVar[int]
    lasts_s: float
    def __init__(self, lasts_s: _Optional[float] = ...) -> None: ...

class PageKey(_message.Message):
    __slots__ = ("key", "ends_s", "address", "fingerprint")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENDS_S_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    key: str
    ends_s: float
    address: str
    fingerprint: str
    def __init__(self, key: _Optional[str] = ..., ends_s: _Optional[float] = ..., address: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...
