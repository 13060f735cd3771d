"""What codecs may carry in the messages of a step, as both ends of a link see it."""

from __future__ import annotations

from dataclasses import dataclass

from ...compression.codec import RAW, AnyCodec, fitting, is_exact, parse
from ...dag.cost.program import FRAME_BYTES
from ...dag.ir.graph import TensorSpec
from ...dag.schedule.flow import Role, Transfer
from ..cost.structure import Structure
from .codec_table import typical_share

__all__ = ["CodedRow", "CodedTensor", "rows_of", "used"]


@dataclass(frozen=True, slots=True)
class CodedTensor:
    """What a codec may carry: `body`, and elements at the end that only an exact one gets."""

    whole: TensorSpec
    body: TensorSpec
    tail_bytes: int


@dataclass(frozen=True, slots=True)
class CodedRow:
    """One message of a row of the wiring: its tensors, and what all else in it takes."""

    rest_bytes: int
    tensors: tuple[CodedTensor, ...]
    lanes: tuple[int, ...]
    """Those whose codecs decide: its own; of a sum all that it goes out on, for it is encoded once,
    by the one of their codecs that makes the fewest bytes (`peer/compute/frame_codecs/`)."""


def rows_of(structure: Structure) -> list[CodedRow]:
    """By row of the wiring."""
    wiring = structure.wiring

    def tensor(transfer: Transfer) -> CodedTensor:
        if transfer.role is not Role.SYNC:
            # Wirings are shared: their values have the names of another structure.
            stage, port = wiring.port[transfer.value]
            spec = structure.stages[stage].sends[port].spec
            return CodedTensor(spec, spec, 0)
        whole, tail = structure.vectors.tensor(*wiring.hops[transfer])
        rest = TensorSpec((tail,), whole.dtype)
        return CodedTensor(
            whole, TensorSpec((whole.elements - tail,), whole.dtype), rest.size_bytes
        )

    lane_of = dict(zip(wiring.message_row, wiring.program.lane, strict=True))
    out: dict[tuple[str, str], list[int]] = {}
    for r, row in enumerate(wiring.rows):
        for t in wiring.shared.intersection(row):
            out.setdefault((t.source, t.port), []).append(lane_of[r])
    found = []
    for r, (row, size) in enumerate(zip(wiring.rows, structure.row_bytes, strict=True)):
        tensors = tuple(
            tensor(t) for t in row if t.role is not Role.SYNC or wiring.hops[t][0].coded
        )
        frames = FRAME_BYTES * len(row)
        dense = size - frames
        if len(tensors) < len(row):
            dense = sum(t.whole.size_bytes for t in tensors)
        sums = [out[t.source, t.port] for t in row if t in wiring.shared]
        lanes = tuple(sums[0]) if sums else (lane_of[r],)
        found.append(CodedRow(max(0, size - frames - dense) + frames, tensors, lanes))
    return found


def used(texts: tuple[str, ...], tensor: CodedTensor) -> tuple[str, AnyCodec, int]:
    """What really carries a tensor, as both of its ends decide, and its bytes; of an exact codec
    what is typical."""
    options = [(text, fitting(parse(text), tensor.body)) for text in texts]
    text, codec = min(options, key=lambda x: x[1].size_bytes(tensor.body), default=("", RAW))
    if codec is RAW:
        return text, codec, codec.size_bytes(tensor.whole)
    if is_exact(codec, tensor.body):
        size = tensor.whole.size_bytes
        return text, codec, round(typical_share(text, tensor.whole.dtype) * size)
    return text, codec, codec.size_bytes(tensor.body) + tensor.tail_bytes
