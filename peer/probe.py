"""Measuring links for the broker: probe frames to a peer that is no neighbour now.

Rules.

- A Probe opens a link of its own (one side dials, the other expects), which is hung up at its end,
  at the latest after `patience_s`. A link that an assignment uses is never touched: training
  traffic measures that one (`traffic.py`).
- One direction at a time, since an acknowledgement must not wait behind bytes that go the same way:
  the side that dials sends its frames, each after the acknowledgement of the one before, then an
  empty frame that says so; then the other side does the same.
- A frame takes R(n) = round trip + n / bandwidth from being queued to its acknowledgement. Sizes
  grow; a sender stops early when the bandwidth has become flat. One that a broken connection
  interrupted is not counted.
- A side that was told sizes reports once: what it measured, or the problem.
- An assignment ends every probe before anything else. While one is held, only probes of at most
  `MOST_IN_RUN_BYTES` begin.

Pure: no I/O, no clock; times are those of the events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median
from typing import NamedTuple

from ..dag.flow import Role
from ..dag.graph import TensorSpec
from ..dag.plan import PeerId
from ..net.frame import FrameKey, Payload
from ..proto import broker_pb2, common_pb2
from . import events as e

__all__ = ["MOST_IN_RUN_BYTES", "Fit", "Probes", "fit", "is_flat", "probe_payload"]

MOST_IN_RUN_BYTES = 64 * 1024
"""What a probe may send while this peer trains; the broker spaces such probes out."""
MOST_FRAME_BYTES = 16 << 20
"""What a frame may have, that is sent or that comes."""
MOST_BYTES = 64 << 20
"""What one direction of a probe may have."""
_MOST_FRAMES = 64
_MOST_PATIENCE_S = 120.0
_MOST_PROBES = 4
"""At once; the broker asks for one."""
_SLOTS = 2
_RUN = "probe"
"""Stands in a frame's identity for the run; ids of runs look otherwise."""
_FRAME, _END = "probe", "end"
_FLAT = 0.1
_BLOCK_BYTES = 1 << 20


class Fit(NamedTuple):
    """What a link carries: latency one way, s, and bytes/s."""

    latency_s: float
    bytes_per_s: float


def fit(times: Mapping[int, Sequence[float]]) -> Fit | None:
    """From seconds until the acknowledgement by size in bytes; None from fewer than two sizes.

        R(n) = a + n / bandwidth        a: round trip, and what each frame costs besides

    Medians of each size; least squares of the relative error, so that the largest size does not
    decide alone. The acknowledgement's way back is half of the least round trip, so the latency
    one way is a - RTT/2, and at least RTT/2. A line that does not rise (noise on a link faster than
    these sizes can show) gives the rate of the largest size as a lower bound.
    """
    sizes = sorted(n for n, seen in times.items() if seen)
    if len(sizes) < 2:
        return None
    ts = [max(median(times[n]), 1e-9) for n in sizes]
    # Weighted normal equations of t = a + b n with weights 1/t^2.
    w = [1 / t**2 for t in ts]
    s = sum(w)
    n_mean = sum(wi * n for wi, n in zip(w, sizes, strict=True)) / s
    t_mean = sum(wi * t for wi, t in zip(w, ts, strict=True)) / s
    over = sum(wi * (n - n_mean) ** 2 for wi, n in zip(w, sizes, strict=True))
    both = sum(wi * (n - n_mean) * (t - t_mean) for wi, n, t in zip(w, sizes, ts, strict=True))
    slope = both / over
    if not slope * sizes[-1] > 1e-3 * ts[-1]:
        slope = ts[-1] / sizes[-1]
    round_trip = max(0.0, min(times[sizes[0]]) - sizes[0] * slope)
    a = t_mean - slope * n_mean
    return Fit(max(round_trip / 2, a - round_trip / 2), 1 / slope)


def is_flat(times: Mapping[int, Sequence[float]]) -> bool:
    """Whether larger frames would tell nothing new: the last two steps in size show the same
    bandwidth within a tenth, and the bytes of the last take longer than the round trip."""
    sizes = sorted(n for n, seen in times.items() if seen)[-3:]
    if len(sizes) < 3:
        return False
    t = [median(times[n]) for n in sizes]
    if not t[0] < t[1] < t[2] or t[2] - t[0] < t[0]:
        return False
    before = (sizes[1] - sizes[0]) / (t[1] - t[0])
    now = (sizes[2] - sizes[1]) / (t[2] - t[1])
    return abs(now - before) <= _FLAT * max(now, before)


def probe_payload(size_bytes: int) -> Payload:
    """Bytes that do not compress, the same for each call."""
    whole, rest = divmod(size_bytes, _BLOCK_BYTES)
    block = _block()
    buffers = (block,) * whole + ((block[:rest],) if rest else ())
    return Payload("raw/1", b"", TensorSpec((size_bytes,), "uint8"), buffers)


@cache
def _block() -> memoryview:
    return memoryview(random.Random("probe").randbytes(_BLOCK_BYTES))


@dataclass(eq=False)
class _Probe:
    """One probe. `turn`: this side may send now. `flight`: its frame that is not acknowledged."""

    number: int
    other: PeerId
    sizes: tuple[int, ...]
    dials: bool
    until: float
    turn: bool = False
    up: bool = False
    position: int = 0
    flight: FrameKey | None = None
    sent_at: float | None = None  # None: not queued yet, or its time does not count
    times: dict[int, list[float]] = field(default_factory=dict)
    sent_bytes: int = 0
    came_bytes: int = 0
    said_end: bool = False
    heard_end: bool = False
    reported: bool = False
    why: str = "no connection came up"


class Probes:
    """All probes of one peer. Every method returns what is to be done, in order."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._active: dict[PeerId, _Probe] = {}  # by the other end

    def __len__(self) -> int:
        return len(self._active)

    # ------------------------------------------------------------ the broker's orders

    def begin(
        self, order: broker_pb2.Probe, in_use: Collection[PeerId] | None, now: float
    ) -> list[e.Instruction]:
        """`in_use`: the other holders of the run that this peer is in; None: it is in none."""
        other = PeerId(order.peer)
        before = self._active.get(other)
        if before is not None and before.number == order.number:
            return []  # said twice
        problem = self._problem(order, in_use)
        if problem:
            return [_problem_report(order.number, other, *problem)] if order.sizes else []
        out = self._end(before, "replaced", "a newer probe came") if before is not None else []
        dials = bool(order.address)
        self._active[other] = _Probe(
            number=order.number,
            other=other,
            sizes=tuple(order.sizes),
            dials=dials,
            until=now + order.patience_s,
            turn=dials,
        )
        reach = e.Dial(other, order.address, order.generation) if dials else e.Expect(other)
        timer = e.SetTimer(f"probe:{other}", now + order.patience_s)
        return [*out, reach, e.Allow(other, Role.PROBE, _SLOTS), timer]

    def _problem(
        self, order: broker_pb2.Probe, in_use: Collection[PeerId] | None
    ) -> tuple[str, str] | None:
        """(code, text) of why it cannot be done, or None."""
        total = sum(order.sizes)
        if order.peer in ("", self._me):
            return "peer", f"{self._me} was asked to measure the link to {order.peer or 'nobody'}"
        if not 0 < order.patience_s <= _MOST_PATIENCE_S:
            text = f"patience of {order.patience_s} s: expected more than 0 and {_MOST_PATIENCE_S}"
            return "order", f"{text} at most"
        if len(order.sizes) > _MOST_FRAMES or max(order.sizes, default=0) > MOST_FRAME_BYTES:
            text = f"{len(order.sizes)} frames of up to {max(order.sizes)} bytes"
            return "order", f"{text}: at most {_MOST_FRAMES} of {MOST_FRAME_BYTES} bytes"
        if total > MOST_BYTES:
            return "order", f"{total} bytes to send: at most {MOST_BYTES}"
        if in_use is not None and order.peer in in_use:
            return "assigned", "the link carries a run, whose frames measure it"
        if in_use is not None and total > MOST_IN_RUN_BYTES:
            text = f"{self._me} is in a run: {total} bytes, at most {MOST_IN_RUN_BYTES} now"
            return "assigned", text
        if len(self._active) >= _MOST_PROBES and order.peer not in self._active:
            return "busy", f"{len(self._active)} probes are under way, the limit"
        return None

    def end_all(self, code: str, text: str) -> list[e.Instruction]:
        """Every probe ends here and now, with what it measured so far."""
        return [i for probe in list(self._active.values()) for i in self._end(probe, code, text)]

    def timer(self, other: PeerId, now: float) -> list[e.Instruction]:
        probe = self._active.get(other)
        if probe is None:
            return []
        if now < probe.until - 1e-6:  # of an earlier probe of the same link
            return [e.SetTimer(f"probe:{other}", probe.until)]
        waited = probe.up and not probe.turn
        return self._end(
            probe, "patience", "the other side took all the time" if waited else probe.why
        )

    # ------------------------------------------------------------ the link

    def link(self, peer: PeerId, up: bool, why: str = "") -> list[e.Instruction]:
        probe = self._active.get(peer)
        if probe is None:
            return []
        probe.up = up
        if up:
            probe.why = "the link was too slow for two sizes"
            return self._go_on(probe)
        probe.why = f"the link is down: {why}"
        probe.sent_at = None  # what is under way goes on after a pause that is none of its own
        if probe.said_end and probe.heard_end:  # the other side was done first and hung up
            return self._end(probe)
        return []

    def queued(self, key: FrameKey, now: float) -> None:
        probe = self._active.get(PeerId(key.destination))
        if probe is not None and probe.flight == key and probe.up:
            probe.sent_at = now

    def acknowledged(self, key: FrameKey, now: float) -> list[e.Instruction]:
        probe = self._active.get(PeerId(key.destination))
        if probe is None or probe.flight != key:
            return []
        sent_at, probe.flight, probe.sent_at = probe.sent_at, None, None
        if key.port == _END:
            return self._end(probe) if probe.heard_end else []
        size = probe.sizes[probe.position]
        if sent_at is not None:
            probe.times.setdefault(size, []).append(now - sent_at)
        probe.sent_bytes += size
        probe.position += 1
        grows = probe.position < len(probe.sizes) and probe.sizes[probe.position] != size
        if grows and is_flat(probe.times):
            probe.position = len(probe.sizes)
        return self._go_on(probe)

    def most_bytes(self, key: FrameKey) -> int:
        """The most that a probe frame may have that the other end announces: what is left of its
        probe, if the broker ordered one with it; else nothing."""
        probe = self._active.get(PeerId(key.source))
        if probe is None or probe.number != key.term or key.port != _FRAME:
            return 0
        return min(MOST_FRAME_BYTES, MOST_BYTES - probe.came_bytes)

    def arrived(self, key: FrameKey, size_bytes: int = 0) -> list[e.Instruction]:
        """A probe frame came; its bytes are of no use to anyone."""
        out: list[e.Instruction] = [e.Release(key)]
        probe = self._active.get(PeerId(key.source))
        if probe is None or probe.number != key.term:
            return out
        probe.came_bytes += size_bytes
        if key.port != _END:
            return out
        probe.heard_end = probe.turn = True
        if probe.said_end:
            return out + self._end(probe)
        return out + self._go_on(probe)

    def refused(self, key: FrameKey, why: str) -> list[e.Instruction]:
        """A frame of ours could not be queued, or one that came is not usable."""
        other = key.destination if key.source == self._me else key.source
        probe = self._active.get(PeerId(other))
        out: list[e.Instruction] = [] if key.source == self._me else [e.Release(key)]
        return out if probe is None else out + self._end(probe, "frame", why)

    def _go_on(self, probe: _Probe) -> list[e.Instruction]:
        """The next frame, when it is this side's turn and nothing is under way."""
        if not probe.up or not probe.turn or probe.flight is not None or probe.said_end:
            return []
        sending = probe.position < len(probe.sizes)
        port, size = (_FRAME, probe.sizes[probe.position]) if sending else (_END, 0)
        probe.flight = FrameKey(
            run=_RUN,
            term=probe.number,
            step=probe.position,
            role=Role.PROBE,
            microbatch=0,
            hop=0,
            port=port,
            source=self._me,
            destination=probe.other,
        )
        probe.sent_at = None
        probe.said_end = not sending
        send = e.SendProbe(probe.flight, size)
        return [send] if sending else [*self._report(probe, "", ""), send]

    # ------------------------------------------------------------ the end

    def _end(self, probe: _Probe, code: str = "", text: str = "") -> list[e.Instruction]:
        del self._active[probe.other]
        return [*self._report(probe, code, text), e.HangUp(probe.other)]

    def _report(self, probe: _Probe, code: str, text: str) -> list[e.Instruction]:
        if probe.reported or not probe.sizes:
            return []
        probe.reported = True
        found = fit(probe.times)
        if found is None:
            code, text = code or "short", text or "fewer than two sizes were measured"
            return [_problem_report(probe.number, probe.other, code, text, probe.sent_bytes)]
        report = broker_pb2.LinkReport(
            peer=probe.other,
            probe=probe.number,
            latency_s=found.latency_s,
            bytes_per_s=found.bytes_per_s,
            size_bytes=probe.sent_bytes,
        )
        return [e.Tell(broker_pb2.PeerMessage(link=report))]

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        assert len(self._active) <= _MOST_PROBES
        for other, probe in self._active.items():
            assert other == probe.other != self._me
            assert math.isfinite(probe.until)
            assert probe.sent_at is None or probe.flight is not None
            assert not (probe.said_end and probe.sizes and not probe.reported)

    def __repr__(self) -> str:
        return f"<Probes {', '.join(self._active) or 'none'}>"


def _problem_report(
    number: int, other: PeerId, code: str, text: str, size_bytes: int = 0
) -> e.Instruction:
    problem = common_pb2.Reason(code=code, text=text[:500])
    report = broker_pb2.LinkReport(peer=other, probe=number, size_bytes=size_bytes, problem=problem)
    return e.Tell(broker_pb2.PeerMessage(link=report))
