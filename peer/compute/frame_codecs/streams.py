"""The streams of one peer's frames: what the ends of each codec remember from step to step.

- A stream is one transfer of the plan, step after step: source, destination, role, microbatch, hop
  and port. Its sender and its receiver each have an end, with a state where the codec has one.
- A sum that goes to several peers is one stream at its sender. It is encoded once, all get the same
  bytes, and who sends it decodes them as well and uses that: so all holders of a stage end with the
  same bits, whatever the codec loses.
- A gradient on the support of its value (`compression/sparse/support.py`) has no stream: both ends
  keep where the value of this step was not 0.
- States advance when a tensor was encoded or decoded wholly. An absent gradient advances nothing.
  The state before the newest tensor is kept too: a neighbour can be one step ahead.

Safe to use from several threads; the tensors of one stream come in order.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from ....compression.codec import RAW, CodecError, Encoded, State, Stream, is_stateful
from ....compression.sparse.support import Support, positions
from ....dag.plan.plan import PeerId
from ....dag.schedule.flow import Role, Transfer
from ....net.links.frame import FrameKey
from ....proto import broker_pb2
from .codings import Codings, TransferCodec
from .uses import Uses

__all__ = ["Streams", "encoding_key", "stream_name", "stream_of"]

_EVERYONE = PeerId("*")
"""The destination of a stream whose tensors go to several peers."""


def encoding_key(seed: int, key: FrameKey) -> int:
    """64 bits for what is random in a codec: of the run's seed and the tensor's place in the step,
    never of who sends it."""
    text = f"{seed} {key.step} {key.microbatch} {key.role.value} {key.port}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(slots=True)
class _End:
    """A stream's end here."""

    stream: Stream
    lock: threading.Lock = field(default_factory=threading.Lock)
    step: int = -1
    """The step of the newest tensor; -1: none yet."""
    before: State = field(default_factory=dict)
    """The state before it."""
    shared: Encoded | None = None
    """For a sum: the newest tensor's bytes, while somebody still has to get them."""
    echo: Tensor | None = None
    """For a sum by a codec that loses something: what the newest tensor is at the destinations."""
    left: int = 0
    """Who still has to get `shared`: destinations, and this peer the echo."""


class Streams:
    """Keeps what the ends of each codec remember from step to step, for one peer's frames. `clock`
    gives seconds."""

    def __init__(
        self,
        peer: PeerId,
        codings: Codings,
        *,
        seed: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.codings = codings
        self._peer, self._seed, self._device = peer, seed, device
        self._ends: dict[Transfer, _End] = {}
        self._supports: dict[tuple[str, int, frozenset[PeerId]], Tensor] = {}
        """For each value and microbatch between two peers, where the newest was not 0."""
        self._lock = threading.Lock()
        self._uses = Uses(clock)

    def encode(self, key: FrameKey, transfer: Transfer, tensor: Tensor) -> Encoded:
        """The next tensor of a stream. Raises CodecError."""
        coding = self.codings.of(transfer)
        if coding.codec is RAW:
            with self._uses.encoding(transfer, coding.codec):
                encoded = RAW.encode(tensor)
        elif self.codings.flow.is_shared(transfer):
            encoded = self._share(key, transfer, tensor)[0]
        elif isinstance(coding.codec, Support):
            support = self._support(transfer)
            with self._uses.encoding(transfer, coding.codec):
                encoded = coding.codec.encode(tensor, support)[0]
            if self._uses.samples(key.step, transfer, coding.codec):
                data = memoryview(bytearray(b"".join(encoded.buffers)))
                there = coding.whole, encoded.header, data, support, self._device
                whole = coding.codec.decode(*there)[0]
                self._uses.sampled(transfer, coding.codec, tensor, whole)
        else:
            end = self._end(transfer)
            with end.lock:
                wanted = self.codings.answered_on_support(transfer)
                encoded, heard = self._encode(end, coding, key, transfer, tensor, echo=wanted)
            if wanted and heard is not None:
                self._supports[self._value(transfer)] = positions(heard)
        self._uses.sent(transfer, coding.codec, encoded.size_bytes, coding.whole.size_bytes)
        return encoded

    def echo(self, key: FrameKey, transfer: Transfer, tensor: Tensor) -> Tensor:
        """What the destinations of a sum have of it; for who sends it, once in a step."""
        if self.codings.of(transfer).exact:
            return tensor
        echo = self._share(key, transfer, tensor)[1]
        assert echo is not None, f"{transfer} loses something and was not decoded"
        return echo

    def decode(
        self, key: FrameKey, transfer: Transfer, header: bytes, data: memoryview
    ) -> Tensor | None:
        """The next tensor of a stream; None for one that a codec with state has had before. Raises
        CodecError, with nothing changed."""
        coding = self.codings.of(transfer)
        with self._uses.decoding(transfer, coding.codec):
            if coding.codec is RAW:
                return RAW.decode(coding.whole, header, data, self._device)
            if isinstance(coding.codec, Support):
                support = self._support(transfer)
                return coding.codec.decode(coding.whole, header, data, support, self._device)[0]
            end = self._end(transfer)
            with end.lock:
                if is_stateful(coding.codec) and key.step <= end.step:
                    return None
                before, tail = end.stream.state, None
                if coding.tail:
                    at = data.nbytes - coding.tail.size_bytes
                    if at < 0:
                        raise CodecError(
                            f"{key}: expected {coding.tail.size_bytes} bytes or more, got "
                            f"{data.nbytes} (truncated)"
                        )
                    tail = RAW.decode(coding.tail, b"", data[at:], self._device)
                    data = data[:at]
                tensor = end.stream.decode(coding.body, header, data, self._device)
                end.step, end.before = key.step, before
            if self.codings.answered_on_support(transfer):
                self._supports[self._value(transfer)] = positions(tensor)
        return tensor if tail is None else torch.cat([tensor, tail])

    def _support(self, gradient: Transfer) -> State:
        """Where the value of a gradient was not 0, in this step."""
        found = self._supports.get(self._value(gradient))
        return {} if found is None else {"positions": found}

    def _encode(
        self,
        end: _End,
        coding: TransferCodec,
        key: FrameKey,
        transfer: Transfer,
        tensor: Tensor,
        echo: bool = False,
    ) -> tuple[Encoded, Tensor | None]:
        """The bytes and, on demand, the echo. The end is locked."""
        before, tail = end.stream.state, None
        if coding.tail:
            body = tensor[: coding.body.elements]
            tail = tensor[coding.body.elements :]
        else:
            body = tensor
        with self._uses.encoding(transfer, coding.codec):
            encoded = end.stream.encode(body, encoding_key(self._seed, key))
        end.step, end.before = key.step, before
        sample = not coding.exact and self._uses.samples(key.step, transfer, coding.codec)
        heard = None
        if echo or sample:
            heard = end.stream.echo(before, coding.body, encoded, self._device)
            if sample:
                self._uses.sampled(transfer, coding.codec, body, heard)
        if tail is not None:
            encoded = Encoded(encoded.header, (*encoded.buffers, *RAW.encode(tail).buffers))
            heard = heard if heard is None else torch.cat([heard, tail])
        return encoded, heard

    def _share(
        self, key: FrameKey, transfer: Transfer, tensor: Tensor
    ) -> tuple[Encoded, Tensor | None]:
        """As `_encode`, for one of those who get a sum; the first one pays."""
        alike, coding = self.codings.alike(transfer), self.codings.of(transfer)
        end = self._end(alike[0]._replace(destination=_EVERYONE), coding)
        with end.lock:
            if end.shared is None or end.step != key.step:
                end.shared, end.echo = self._encode(
                    end, coding, key, transfer, tensor, echo=not coding.exact
                )
                end.left = len(alike) + (not coding.exact)
            found, heard = end.shared, end.echo
            end.left -= 1
            if end.left == 0:
                end.shared = end.echo = None
        return found, heard

    def _end(self, stream: Transfer, coding: TransferCodec | None = None) -> _End:
        with self._lock:
            found = self._ends.get(stream)
            if found is None:
                codec = (coding or self.codings.of(stream)).codec
                found = self._ends[stream] = _End(Stream(codec))
        return found

    # ------------------------------------------------------------ states and reports

    def state_tensors(self, step: int) -> dict[str, Tensor]:
        """The state of every end here as it was after `step`, the newest or the one before, as
        named tensors for a snapshot. Nobody may write to them."""
        with self._lock:
            ends = list(self._ends.items())
        found: dict[str, Tensor] = {}
        for stream, end in ends:
            with end.lock:
                state = end.stream.state if end.step <= step else end.before
            found |= {stream_name(stream, part): tensor for part, tensor in state.items()}
        return found

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from the states of a snapshot, in place of those here. Raises CodecError for a
        name that is no stream of this peer under this plan, and for a state that is of no tensor of
        it; nothing has changed then."""
        states: dict[Transfer, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            stream, part = stream_of(name)
            states.setdefault(stream, {})[part] = tensor
        ends: dict[Transfer, _End] = {}
        for stream, state in states.items():
            coding = self._stateful(stream)
            if coding is None:
                raise CodecError(
                    f"the plan has no stream with a state at {self._peer} for {stream}: the "
                    "snapshot is of another plan"
                )
            # A state of another tensor is found out now, and not by the frame that it would break.
            dtype = getattr(torch, coding.body.dtype)
            Stream(coding.codec, state).encode(torch.zeros(coding.body.sizes, dtype=dtype), 0)
            ends[stream] = _End(Stream(coding.codec, state))
        with self._lock:
            self._ends = ends

    def has(self, stream: Transfer) -> bool:
        """Whether it is a stream with a state here, under this plan."""
        return self._stateful(stream) is not None

    def _stateful(self, stream: Transfer) -> TransferCodec | None:
        """How a stream that has an end with a state here is written; None: there is none."""
        sends = stream.source == self._peer
        if not sends and stream.destination != self._peer:
            return None
        transfer = stream
        if stream.destination == _EVERYONE:
            flow = self.codings.flow
            gives = (t for t in flow.given_by if flow.is_shared(t) and not t.is_local)
            alike = (t for t in gives if t._replace(destination=_EVERYONE) == stream)
            transfer = next(alike, stream)
        if transfer not in self.codings.flow.taken_by:
            return None
        coding = self.codings.of(transfer)
        lasting = is_stateful(coding.codec) and not isinstance(coding.codec, Support)
        return coding if lasting else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all states, those before the newest tensors included."""
        with self._lock:
            ends = list(self._ends.values())
        tensors = {id(t): t for e in ends for s in (e.stream.state, e.before) for t in s.values()}
        tensors |= {id(t): t for t in tuple(self._supports.values())}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def unsent(self, transfer: Transfer) -> Tensor | None:
        """What the codec of this transfer, or of the sum that it carries, did not send yet; None
        where none keeps that. Nobody may write to it."""
        if self.codings.flow.is_shared(transfer):
            transfer = transfer._replace(destination=_EVERYONE)
        with self._lock:
            end = self._ends.get(transfer)
        if end is None:
            return None
        with end.lock:
            return end.stream.state.get("residual")

    def _value(self, transfer: Transfer) -> tuple[str, int, frozenset[PeerId]]:
        """What a value and its gradient have in common: the name where it is made, and the ends.
        (Several hops bring one value to one peer: the codec gives each the same positions.)"""
        there = transfer.role is Role.ACTIVATION
        name = self.codings.flow.made(transfer) if there else transfer.value
        return name, transfer.microbatch, frozenset((transfer.source, transfer.destination))

    def take_uses(self) -> tuple[broker_pb2.LinkUse, ...]:
        """What frames took since the last call."""
        return self._uses.take()


def stream_name(stream: Transfer, part: str) -> str:
    """The name of a part of a stream's state in a snapshot."""
    fields = (
        *(stream.source, stream.destination, stream.role.value),
        *(str(stream.microbatch), str(stream.hop), stream.port, part),
    )
    return "/".join(quote(text, safe="") for text in ("codec", *fields))


def stream_of(name: str) -> tuple[Transfer, str]:
    """The reverse of `stream_name`. Raises CodecError."""
    parts = [unquote(text) for text in name.split("/")]
    try:
        word, source, destination, role, microbatch, hop, port, part = parts
        if word != "codec":
            raise ValueError(word)
        place = int(microbatch), int(hop)
        return Transfer(Role(role), *place, port, PeerId(source), PeerId(destination)), part
    except ValueError:
        raise CodecError(f"{name!r} is no name of a codec's state") from None
