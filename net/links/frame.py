"""One tensor on its way from a visit to another: its identity, its bytes, its header on the wire.

Everything that comes from a link is checked here before anything acts on it: lengths are bounded,
names are not empty, sizes agree with the spec. What does not hold raises FrameError, and nothing
else, whatever the bytes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar, dataclass_transform

from ...dag.ir.graph import ITEM_BYTES, TensorSpec
from ...dag.schedule.flow import Role
from ...proto import common_pb2, peer_pb2

__all__ = [
    "MAX_TENSOR_BYTES",
    "Arrived",
    "FrameError",
    "FrameHeader",
    "FrameKey",
    "Payload",
    "header_from_proto",
    "header_to_proto",
    "immutable",
    "role_from_proto",
]

# Small immutable records, of which a busy link makes thousands a second.
#
# A frozen dataclass sets each field by `object.__setattr__`, which takes three times as long as
# plain setting. Of an `immutable` one the type checker alone forbids to change a field.

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def immutable(cls: type[T]) -> type[T]:
    """As `dataclass(frozen=True, slots=True)`: with equality, a hash, and slots for its fields."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


MAX_NAME = 1024
"""Characters of an id, a port or a codec name."""
MAX_CODEC_HEADER = 16 * 1024
MAX_DIMS = 64
MAX_TENSOR_BYTES = 1 << 40
"""Bytes of a decoded tensor; a sanity bound, far above what a link lets through."""


class FrameError(ValueError):
    """A message of a link that breaks a rule of the protocol; says expected and got."""


class FrameKey(NamedTuple):
    """What makes a frame the one that it is; two frames with equal keys are duplicates.

    `hop` is the position of the receiving visit in the microbatch's route, `port` the name of the
    value or of the part of an exchange.
    """

    run: str
    term: int
    step: int
    role: Role
    microbatch: int
    hop: int
    port: str
    source: str
    destination: str

    def __str__(self) -> str:
        return (
            f"{self.role} {self.port!r} of run {self.run}, term {self.term}, step {self.step}, "
            f"microbatch {self.microbatch}, hop {self.hop}, {self.source} -> {self.destination}"
        )


@immutable
class Payload:
    """An encoded tensor to send. `buffers` are flat bytes, sent in order; they must stay unchanged
    until the frame is acknowledged. `absent`: no gradient came this way; no bytes, means zeros."""

    codec: str
    codec_header: bytes
    spec: TensorSpec
    buffers: tuple[memoryview, ...] = ()
    absent: bool = False

    @property
    def size_bytes(self) -> int:
        buffers = self.buffers
        return buffers[0].nbytes if len(buffers) == 1 else sum([b.nbytes for b in buffers])


@immutable
class Arrived:
    """A whole frame. `data` is flat and writable and belongs to whoever gets this."""

    key: FrameKey
    codec: str
    codec_header: bytes
    spec: TensorSpec
    data: memoryview
    absent: bool = False


@immutable
class FrameHeader:
    """Header of a frame, ahead of its bytes. `number`: from 1 within a session."""

    number: int
    key: FrameKey
    codec: str
    codec_header: bytes
    spec: TensorSpec
    size_bytes: int
    absent: bool = False


def role_from_proto(role: int) -> Role:
    """Raises FrameError for a number that is no role."""
    try:
        return Role[peer_pb2.Role.Name(role)]
    except (KeyError, ValueError):
        raise FrameError(f"role number {role}: expected one of {', '.join(Role)}") from None


def header_to_proto(header: FrameHeader) -> peer_pb2.FrameHeader:
    key = header.key
    return peer_pb2.FrameHeader(
        id=peer_pb2.FrameId(
            run=key.run,
            term=key.term,
            step=key.step,
            role=key.role.name,
            microbatch=key.microbatch,
            hop=key.hop,
            port=key.port,
            source=key.source,
            destination=key.destination,
        ),
        number=header.number,
        size_bytes=header.size_bytes,
        codec=header.codec,
        codec_header=header.codec_header,
        spec=common_pb2.TensorSpec(
            shape=[common_pb2.Size(plus=size) for size in header.spec.sizes],
            dtype=header.spec.dtype.upper(),
        ),
        absent=header.absent,
    )


def header_from_proto(message: peer_pb2.FrameHeader) -> FrameHeader:
    """The checked header. Raises FrameError when a field is missing, too long or too large, or when
    the sizes cannot belong together."""
    identity = message.id
    key = FrameKey(
        run=_name("run", identity.run),
        term=identity.term,
        step=identity.step,
        role=role_from_proto(identity.role),
        microbatch=identity.microbatch,
        hop=identity.hop,
        port=_name("port", identity.port),
        source=_name("source", identity.source),
        destination=_name("destination", identity.destination),
    )
    if message.number < 1:
        raise FrameError(f"frame number {message.number}: numbers count from 1")
    if len(message.codec_header) > MAX_CODEC_HEADER:
        raise FrameError(
            f"codec header of {len(message.codec_header)} bytes for {key}: "
            f"at most {MAX_CODEC_HEADER}"
        )
    spec = _spec(key, message.spec)
    if message.absent and message.size_bytes:
        raise FrameError(f"{key} is absent, but has {message.size_bytes} bytes: expected none")
    # No codec makes a tensor larger than this; what does is a lie about the spec or the size.
    most = spec.size_bytes + spec.size_bytes // 8 + 4096
    if message.size_bytes > most:
        raise FrameError(
            f"{message.size_bytes} bytes announced for {spec!r} of {spec.size_bytes} bytes "
            f"({key}): at most {most}"
        )
    return FrameHeader(
        number=message.number,
        key=key,
        codec=_name("codec", message.codec),
        codec_header=message.codec_header,
        spec=spec,
        size_bytes=message.size_bytes,
        absent=message.absent,
    )


def _name(field: str, text: str) -> str:
    if not 0 < len(text) <= MAX_NAME:
        raise FrameError(f"{field} has {len(text)} characters: expected 1 to {MAX_NAME}")
    return text


def _spec(key: FrameKey, message: common_pb2.TensorSpec) -> TensorSpec:
    if len(message.shape) > MAX_DIMS:
        raise FrameError(f"{len(message.shape)} dimensions for {key}: at most {MAX_DIMS}")
    if any(size.times or size.plus < 0 for size in message.shape):
        raise FrameError(f"the shape of {key} is not made of fixed sizes from 0")
    try:
        dtype = common_pb2.DType.Name(message.dtype).lower()
    except ValueError:
        dtype = f"number {message.dtype}"
    if dtype not in ITEM_BYTES:
        raise FrameError(f"dtype {dtype} for {key}: expected one of {', '.join(ITEM_BYTES)}")
    spec = TensorSpec(tuple(size.plus for size in message.shape), dtype)
    if spec.size_bytes > MAX_TENSOR_BYTES:
        raise FrameError(f"{spec!r} for {key} is {spec.size_bytes} bytes: over {MAX_TENSOR_BYTES}")
    return spec
