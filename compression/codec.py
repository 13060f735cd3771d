"""Every codec by its word, and the text that names one.

    text    = [wrapper "+"]* word ["/" version] [":" key "=" value ("," key "=" value)*]
    e.g.      bf16 · lossless · topk:ratio=100,values=bf16 · ef+topk:ratio=100 · delta+int8

`parse` makes the codec; its `name` is the full text, with the version. Importing this imports
torch.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from .echo import echo
from .interface import Codec, CodecError, Encoded, Spec, State, StatefulCodec, typical_bytes
from .plain.block import int2, int4, int6, int8
from .plain.cast import bf16, fp16
from .plain.e3m0 import E3M0
from .plain.lossless import LosslessCodec
from .plain.raw import DTYPES, RAW, RawCodec
from .sparse.chunks import Chunks
from .sparse.nonzero import Nonzero
from .sparse.randomk import RandomK
from .sparse.support import Support
from .sparse.topk import TopK
from .stateful.delta import Delta
from .stateful.feedback import decayed_feedback, feedback
from .stateful.lowrank import LowRank

if TYPE_CHECKING:
    import torch

__all__ = [
    "RAW",
    "WORDS",
    "WRAPPERS",
    "AnyCodec",
    "Codec",
    "CodecError",
    "Encoded",
    "Spec",
    "State",
    "StatefulCodec",
    "Stream",
    "fitting",
    "is_exact",
    "is_stateful",
    "parse",
    "typical_bytes",
]

AnyCodec = Codec | StatefulCodec
LEAST_ELEMENTS = 64
"""A tensor with fewer is a count, a loss or a weight that much depends on, and its frame is no
quicker for a few bytes less."""

WORDS: Mapping[str, Callable[..., AnyCodec]] = {
    "raw": RawCodec,
    "lossless": LosslessCodec,
    "bf16": bf16,
    "fp16": fp16,
    "int8": int8,
    "int6": int6,
    "int4": int4,
    "int2": int2,
    "e3m0": E3M0,
    "topk": TopK,
    "chunks": Chunks,
    "nonzero": Nonzero,
    "support": Support,
    "randomk": RandomK,
    "lowrank": LowRank,
}
"""By word, what makes the codec; its keyword parameters (int, float or str) are those of the
text, and it raises CodecError for values that make no sense."""

WRAPPERS: Mapping[str, Callable[..., StatefulCodec]] = {
    "ef": feedback,
    "efd": decayed_feedback,
    "delta": Delta,
}
"""By word, what makes a stateful codec around another codec, its first argument."""


@lru_cache(maxsize=1024)
def parse(text: str) -> AnyCodec:
    """The codec that a text names. Raises CodecError with the words that there are."""
    head, _, rest = text.partition(":")
    *wrappers, word = head.split("+")
    codec: AnyCodec = _make(WORDS, "codec", word, rest, text)
    for wrapper in reversed(wrappers):
        codec = _make(WRAPPERS, "wrapper", wrapper, "", text, codec)
    return codec


def fitting(codec: AnyCodec, spec: Spec) -> AnyCodec:
    """The codec, or RAW where it does not pay or cannot work: for anything but floating point
    numbers, for fewer than LEAST_ELEMENTS, and where its `typical_bytes` are no fewer than those of
    the tensor. Both ends know it from the spec alone."""
    floating = spec.dtype in DTYPES and DTYPES[spec.dtype].is_floating_point
    large = floating and math.prod(spec.sizes) >= LEAST_ELEMENTS
    return codec if large and typical_bytes(codec, spec) < spec.size_bytes else RAW


def _make(
    table: Mapping[str, Callable[..., Any]], kind: str, word: str, rest: str, text: str, *inner: Any
) -> Any:
    word, _, version = word.partition("/")
    if word not in table or version not in ("", "1"):
        known = ", ".join(table) or "none is built"
        raise CodecError(f"{text!r} names no {kind} at {word!r}: expected one of {known}")
    make = table[word]
    kinds = {
        p.name: type(p.default)
        for p in inspect.signature(make).parameters.values()
        if p.default is not p.empty
    }
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in kinds or key in given:
            keys = ", ".join(kinds) or "no keys"
            raise CodecError(f"{text!r}: {word} has no {key!r} here: expected {keys}, each once")
        try:
            given[key] = kinds[key](value)
        except ValueError as error:
            raise CodecError(
                f"{text!r}: {key} is {value!r}: expected {kinds[key].__name__}"
            ) from error
    return make(*inner, **given)


# One end of a stream of tensors that a codec carries: the codec and its state so far.


def is_stateful(codec: AnyCodec) -> bool:
    return getattr(codec, "stateful", False)


def is_exact(codec: AnyCodec, spec: Spec) -> bool:
    """Whether every tensor of this spec comes out bit for bit as it went in."""
    return not is_stateful(codec) and codec.error_bound(spec) == 0


class Stream:
    """Encodes or decodes one tensor after the other; an end does one of the two.

    `state` may be read between calls, kept in a snapshot, and set to go on from there. A call that
    raises leaves it as it was.
    """

    def __init__(self, codec: AnyCodec, state: State | None = None) -> None:
        self.codec = codec
        self.state: State = state or {}

    def encode(self, tensor: torch.Tensor, key: int = 0) -> Encoded:
        """Encode a tensor; raises CodecError."""
        if not is_stateful(self.codec):
            return cast(Codec, self.codec).encode(tensor, key)
        encoded, self.state = cast(StatefulCodec, self.codec).encode(tensor, self.state, key)
        return encoded

    def decode(
        self, spec: Spec, header: bytes, data: memoryview, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """Decode buffers to a tensor; raises CodecError."""
        if not is_stateful(self.codec):
            return cast(Codec, self.codec).decode(spec, header, data, device)
        codec = cast(StatefulCodec, self.codec)
        tensor, self.state = codec.decode(spec, header, data, self.state, device)
        return tensor

    def echo(
        self, before: State, spec: Spec, encoded: Encoded, device: str | torch.device = "cpu"
    ) -> torch.Tensor:
        """What the other end makes of a tensor that this one encoded when its state was `before`.
        Changes nothing; costs what decoding costs."""
        known = before if getattr(self.codec, "both_know", False) else {}
        return echo(Stream(self.codec, known), spec, encoded, device)
