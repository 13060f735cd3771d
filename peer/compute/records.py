"""What is in a snapshot of a torch device: named tensors, each with its own hash.

    param:NAME  buffer:NAME  slot:NAME:PART   of the stages; the strategy's state by parameter.
                                              What stays as the weights files have it is not here
    own/PEER/NAME:PART                        the same, of what the other holders have not alike
    codec/…/PEER                              of streams (`streams.py`), by the end that it is of
    round:VALUE:…                             of rounds between replicas (`peer/rounds/work.py`)
    scaler:scale  scaler:good_steps           of losses, where they are scaled; everybody's alike

Names are those of parameters, never of stages: another cut of the same graph can load them. The
file is safetensors; its metadata has the XXH3-128 of each tensor's bytes, so that a damaged one is
noticed by name. Large tensors may be coded losslessly; the file has the coded bytes in their place,
and the metadata what to decode them with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

import torch
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from ...compression.checks import FLOATING, dtype_name
from ...compression.interface import CodecError
from ...compression.plain.lossless import LosslessCodec
from ...dag.ir.graph import TensorSpec
from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Transfer
from ..blobs.weight_shards import WeightShard
from ..blobs.weights import (
    Lazy,
    ShapeDtype,
    Weights,
    WeightsFile,
    has_start,
    joined,
    serialize,
    spec_of,
)
from ..core.snapshots import SnapshotError
from .build import BuiltStages
from .frame_codecs.streams import stream_name, stream_of

__all__ = [
    "Records",
    "coded_specs",
    "decoded",
    "load_records",
    "take_records",
    "write_records",
]

_HASHES = "xxh3_128"
_SCALER = "scaler:"
_CODED = LosslessCodec.name
_LEAST_BYTES = 4096
"""A smaller tensor is written as it is: there is nothing to be gained."""
_MOST = 64
"""How many times larger than its coded bytes a tensor may be, so that a snapshot cannot unpack to
more than the reader's memory; one that would be, nearly all zeros, is written as it is."""


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading another peer's bytes raises."""


def take_records(work: BuiltStages, step: int) -> dict[str, Tensor]:
    """Copies, on the host, of all that `work` needs beside the run's weights files to go on when
    `step` updates are in it."""
    found: dict[str, Tensor] = {}
    still = work.unchanged
    for held in work.held.values():
        parameters, buffers = held.parameters(), held.executor.buffers
        found |= {f"param:{name}": t for name, t in parameters.items() if name not in still}
        found |= {f"buffer:{name}": t for name, t in buffers.items() if name not in still}
        found |= {f"slot:{name}": t for name, t in held.strategy.state_tensors().items()}
        own = _own(work.order.peer)
        found |= {f"{own}{name}": t for name, t in held.strategy.own_tensors().items()}
    found |= work.rounds.state() if work.rounds else {}
    if (scaler := work.exchange.scaler) is not None:
        found |= {f"{_SCALER}{name}": t for name, t in scaler.state_tensors().items()}
    states = work.streams.state_tensors(step - 1)
    found |= {_end_name(name, work.order.peer): tensor for name, tensor in states.items()}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def write_records(records: Mapping[str, Tensor], *, lossless: bool = False) -> memoryview:
    """The bytes of a snapshot; with `lossless`, floating point tensors coded by that codec where it
    makes them smaller."""
    whole = {name: tensor.contiguous() for name, tensor in records.items()}
    hashes = {name: _hash(tensor) for name, tensor in sorted(whole.items())}
    notes: dict[str, _Note] = {}
    for name, tensor in whole.items() if lossless else ():
        if tensor.nbytes >= _LEAST_BYTES and dtype_name(tensor) in FLOATING:
            coded = LosslessCodec().encode(tensor)
            if coded.size_bytes < tensor.nbytes <= _MOST * coded.size_bytes:
                notes[name] = coded.header.hex(), dtype_name(tensor), list(tensor.shape)
                whole[name] = torch.from_numpy(joined(coded.buffers))
    metadata = {_HASHES: json.dumps(hashes)} | ({_CODED: json.dumps(notes)} if notes else {})
    return serialize(whole, metadata)


_Note = tuple[str, str, list[int]]
"""What is noted of a coded tensor: the codec's header as hexadecimal digits, dtype and shape."""


@dataclass(frozen=True)
class Records:
    """What snapshots together have."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def over(self, starting: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Weights by the graph's names: those of the snapshots where they have some."""
        own = self._weights
        return _Over(own, starting) if own else starting

    @property
    def _weights(self) -> dict[str, Tensor]:
        kinds = ("param:", "buffer:")
        return {n.partition(":")[2]: t for n, t in self.tensors.items() if n.startswith(kinds)}

    def of(self, prefix: str) -> dict[str, Tensor]:
        """Tensors whose names begin so, by the rest of the name."""
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    def load(self, work: BuiltStages) -> None:
        """Puts optimizer and codecs where the snapshots left them; parameters are there already.
        States of streams that this plan does not have are left out: what they held back is lost.

        Raises SnapshotError for a parameter or buffer of a stage that no snapshot has, unless it is
        as at the start for ever, ValueError for a scale of losses that cannot be."""
        weights = self._weights
        for held in work.held.values():
            for name in (*held.executor.parameters, *held.executor.buffers):
                if not has_start(weights, name) and name not in work.unchanged:
                    raise SnapshotError(
                        f"the snapshots lack {name!r} of stage {held.stage.index}: expected those "
                        "of every peer that held a part of it"
                    )
        slots, own = self.of("slot:"), dict[PeerId, dict[str, Tensor]]()
        for name, tensor in self.of("own/").items():
            peer, rest = name.split("/", 1)
            own.setdefault(PeerId(unquote(peer)), {})[rest] = tensor
        for held in work.held.values():
            held.strategy.load_state_tensors(slots)
            held.strategy.load_own_tensors(own)
        self._load_rounds(work)
        if (scaler := work.exchange.scaler) is not None:
            scaler.load_state_tensors(self.of(_SCALER))
        states: dict[str, Tensor] = {}
        for name, tensor in self.tensors.items():
            if name.startswith("codec/"):  # the other end of a stream has another state
                state, peer = _end_of(name)
                if peer == work.order.peer and work.streams.has(stream_of(state)[0]):
                    states[state] = tensor
        work.streams.load_state_tensors(states)

    def _load_rounds(self, work: BuiltStages) -> None:
        """Have rounds go on. Raises SnapshotError."""
        if work.rounds is None:
            return
        of_rounds = {n: t for n, t in self.tensors.items() if n.startswith("round:")}
        lost = [v for v in work.rounds.entries if f"round:{v}:base" not in of_rounds]
        if of_rounds and lost:
            raise SnapshotError(f"the snapshots lack what rounds began with of {lost[0]!r}")
        work.rounds.load(of_rounds, anew=work.order.anew)

    def without_codecs(self) -> Records:
        """With the streams at their beginning."""
        return Records({n: t for n, t in self.tensors.items() if not n.startswith("codec/")})

    def renamed(self, names: Mapping[str, str]) -> Records:
        """With other peers at the ends of codecs."""
        if not names:
            return self

        def moved(name: str) -> str:
            if name.startswith("own/"):
                _, peer, rest = name.split("/", 2)
                return f"{_own(names.get(unquote(peer), unquote(peer)))}{rest}"
            if not name.startswith("codec/"):
                return name
            state, peer = _end_of(name)
            stream, part = stream_of(state)
            return _end_name(stream_name(_moved(stream, names), part), names.get(peer, peer))

        return Records({moved(n): t for n, t in self.tensors.items()})


class _Over(Lazy):
    """Tensors of `own`, else of `rest`, which are read on demand."""

    def __init__(self, own: Mapping[str, Tensor], rest: Mapping[str, Tensor]) -> None:
        self._own, self._rest = own, rest

    def __getitem__(self, name: str) -> Tensor:
        return self._own[name] if name in self._own else self._rest[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._rest

    def spec(self, name: str) -> ShapeDtype:
        return spec_of(self._own if name in self._own else self._rest, name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name in self._own or not isinstance(self._rest, Lazy):
            return self[name][start:stop]
        return self._rest.rows(name, start, stop)

    def shards(self, name: str) -> tuple[WeightShard, ...]:
        if has_start(self._own, name) or not isinstance(self._rest, Lazy):
            return ()
        return self._rest.shards(name)

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys((*self._own, *self._rest))

    def __len__(self) -> int:
        return len(dict.fromkeys((*self._own, *self._rest)))


def load_records(snapshots: Iterable[Sequence[memoryview]]) -> Records:
    """Reads the records of several snapshots, each given in its parts. Raises SnapshotError for one
    that is damaged."""
    found: dict[str, Tensor] = {}
    for parts in snapshots:
        size = sum(len(part) for part in parts)
        try:
            tensors, metadata = _read(joined(parts).data)
            hashes: dict[str, str] = {**json.loads(metadata[_HASHES])}
            tensors |= {n: _decoded(n, tensors[n], note) for n, note in _notes(metadata).items()}
        except _UNREADABLE as error:
            raise SnapshotError(f"a snapshot of {size} bytes cannot be read: {error}") from None
        for name in sorted(hashes.keys() - tensors.keys()):
            raise SnapshotError(f"a snapshot is damaged: it lacks {name!r}")
        for name, tensor in tensors.items():
            if hashes.get(name) != _hash(tensor):
                raise SnapshotError(f"a snapshot is damaged: {name!r} has another hash")
        found |= tensors
    return Records(found)


def coded_specs(weights: Weights) -> dict[str, ShapeDtype]:
    """What the coded tensors of a snapshot's file are when they are decoded. Raises
    SnapshotError."""
    try:
        return {
            str(name): ShapeDtype(tuple(int(n) for n in sizes), getattr(torch, str(dtype)))
            for name, (_, dtype, sizes) in _notes(weights.metadata).items()
        }
    except _UNREADABLE as error:
        raise SnapshotError(f"the notes of a snapshot cannot be read: {error}") from None


def decoded(weights: Weights, name: str) -> Tensor:
    """One coded tensor of a snapshot's file. Raises SnapshotError."""
    try:
        return _decoded(name, weights[name], _notes(weights.metadata)[name])
    except _UNREADABLE as error:
        raise SnapshotError(f"{name!r} of a snapshot cannot be decoded: {error}") from None


def _read(data: memoryview) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """Tensors and metadata of a file. Raises ValueError, KeyError."""
    weights = Weights(
        [WeightsFile("", len(data))], lambda _, offset, length: data[offset : offset + length]
    )
    tensors = dict(weights)  # which has checked the header
    return tensors, weights.metadata


def _notes(metadata: Mapping[str, str]) -> dict[str, _Note]:
    """Return what is noted of coded tensors, by name."""
    found: dict[str, _Note] = json.loads(metadata.get(_CODED, "{}"))
    return found


def _decoded(name: str, coded: Tensor, note: _Note) -> Tensor:
    """A coded tensor as it was. Raises ValueError (CodecError), TypeError."""
    header, dtype, sizes = note
    if coded.dtype is not torch.uint8:
        raise CodecError(f"{name!r} is coded, and of {coded.dtype}: expected torch.uint8")
    spec = TensorSpec(tuple(int(size) for size in sizes), str(dtype))
    if not spec.size_bytes <= _MOST * coded.numel():
        raise CodecError(
            f"{name!r} is {spec!r} in {coded.numel()} bytes: at most {_MOST} times more"
        )
    view = memoryview(coded.numpy().data).cast("B")
    return LosslessCodec().decode(spec, bytes.fromhex(header), view)


def _hash(tensor: Tensor) -> str:
    flat = tensor.contiguous().flatten()
    return xxh3_128_hexdigest(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def _own(peer: str) -> str:
    """What the names of a holder's own state begin with."""
    return f"own/{quote(peer, safe='')}/"


def _end_name(state: str, peer: str) -> str:
    return f"{state}/{quote(peer, safe='')}"


def _end_of(name: str) -> tuple[str, str]:
    """The name of a stream's state, and the peer at whose end it was."""
    state, _, peer = name.rpartition("/")
    return state, unquote(peer)


def _moved(stream: Transfer, names: Mapping[str, str]) -> Transfer:
    source, destination = stream.source, stream.destination
    return stream._replace(
        source=PeerId(names.get(source, source)),
        destination=PeerId(names.get(destination, destination)),
    )
