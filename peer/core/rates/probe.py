"""Measuring links for the broker: probe frames to a peer that is no neighbour now.

Rules.

- A Probe opens a link of its own (one side dials, the other expects), which is hung up at its end,
  at the latest after `patience_s`. A link that an assignment uses is never touched: training
  traffic measures that one (`traffic.py`).
- One direction at a time, since an acknowledgement must not wait behind bytes that go the same way:
  the side that dials sends its load (`load.py`) until that has told the rate, then an empty frame
  that says so; then the other side does the same.
- A side that may send bytes reports once: what it measured, or the problem. What a broken
  connection or an assignment cut short is no measurement.
- An assignment ends every probe before anything else. While one is held, only probes of at most
  `MOST_IN_RUN_BYTES` begin.

Pure: no I/O, no clock; times are those of the events.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache

from ....dag.ir.graph import TensorSpec
from ....dag.plan.plan import PeerId
from ....dag.schedule.flow import Role
from ....net.links.frame import FrameKey, Payload
from ....proto import broker_pb2, common_pb2
from .. import events as e
from .load import ProbeLoad

__all__ = ["MOST_IN_RUN_BYTES", "Probes", "probe_payload"]

MOST_IN_RUN_BYTES = 64 * 1024
"""What a probe may send while this peer trains; the broker spaces such probes out."""
MOST_FRAME_BYTES = 1 << 20
"""What a frame may have, that is sent or that comes."""
MOST_BYTES = 64 << 20
"""What one direction of a probe may have."""
_MOST_PATIENCE_S = 120.0
_MOST_PROBES = 4
"""At once; the broker asks for one."""
_SLOTS = 32
"""Frames of a load on their way: a dozen, and those that were larger before the rate fell."""
_RUN = "probe"
"""Stands in a frame's identity for the run; ids of runs look otherwise."""
_FRAME, _END = "probe", "end"
_BLOCK_BYTES = 1 << 20


def probe_payload(size_bytes: int) -> Payload:
    """Bytes that do not compress, the same for each call."""
    whole, rest = divmod(size_bytes, _BLOCK_BYTES)
    block = _block()
    buffers = (block,) * whole + ((block[:rest],) if rest else ())
    return Payload("raw/1", b"", TensorSpec((size_bytes,), "uint8"), buffers)


@cache
def _block() -> memoryview:
    return memoryview(random.Random("probe").randbytes(_BLOCK_BYTES))


@dataclass(eq=False, slots=True)
class _Sent:
    """A frame. `queued_at`: None: not yet, or that time does not count."""

    size_bytes: int
    queued_at: float | None = None


@dataclass(eq=False)
class _Probe:
    """One probe. `turn`: this side may send now. `flight`: its frames that are not acknowledged."""

    number: int
    other: PeerId
    load: ProbeLoad
    until: float
    turn: bool = False
    up: bool = False
    frames: int = 0
    flight: dict[FrameKey, _Sent] = field(default_factory=dict)
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
            return [_problem_report(order.number, other, *problem)] if order.most_bytes else []
        out = self._end(before, "replaced", "a newer probe came") if before is not None else []
        dials = bool(order.address)
        self._active[other] = _Probe(
            number=order.number,
            other=other,
            load=ProbeLoad(order.most_bytes),
            until=now + order.patience_s,
            turn=dials,
        )
        reach = e.Dial(other, order.address, order.generation) if dials else e.ExpectPeer(other)
        timer = e.SetTimer(f"probe:{other}", now + order.patience_s)
        return [*out, reach, e.Allow(other, Role.PROBE, _SLOTS), timer]

    def _problem(
        self, order: broker_pb2.Probe, in_use: Collection[PeerId] | None
    ) -> tuple[str, str] | None:
        """(code, text) of why it cannot be done, or None."""
        total = order.most_bytes
        if order.peer in ("", self._me):
            return "peer", f"{self._me} was asked to measure the link to {order.peer or 'nobody'}"
        if not 0 < order.patience_s <= _MOST_PATIENCE_S:
            text = f"patience of {order.patience_s} s: expected more than 0 and {_MOST_PATIENCE_S}"
            return "order", f"{text} at most"
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

    def end_all(self, text: str) -> list[e.Instruction]:
        """This peer was assigned: every probe ends here and now, with what it measured so far."""
        probes = list(self._active.values())
        return [i for probe in probes for i in self._end(probe, "assigned", text)]

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

    def link(self, peer: PeerId, up: bool, now: float, why: str = "") -> list[e.Instruction]:
        probe = self._active.get(peer)
        if probe is None:
            return []
        probe.up = up
        if up:
            probe.why = "the link was too slow to tell its rate"
            return self._go_on(probe, now)
        probe.why = f"the link is down: {why}"
        probe.load.broke()  # what is under way goes on after a pause that is none of its own
        for sent in probe.flight.values():
            sent.queued_at = None
        if probe.said_end and probe.heard_end:  # the other side was done first and hung up
            return self._end(probe)
        return []

    def frame(self, event: e.FrameEvent, key: FrameKey, now: float) -> list[e.Instruction]:
        """Take what became of a frame of a probe."""
        match event:
            case e.FrameQueued():
                self.queued(key, now)
                return []
            case e.FrameAcknowledged():
                return self.acknowledged(key, now)
            case e.FrameArrived(size_bytes=size_bytes):
                return self.arrived(key, now, size_bytes)
            case e.FrameRefused(why=why):
                return self.refused(key, why)

    def queued(self, key: FrameKey, now: float) -> None:
        probe = self._active.get(PeerId(key.destination))
        if probe is not None and key in probe.flight and probe.up:
            probe.flight[key].queued_at = now

    def acknowledged(self, key: FrameKey, now: float) -> list[e.Instruction]:
        probe = self._active.get(PeerId(key.destination))
        if probe is None or key not in probe.flight:
            return []
        sent = probe.flight.pop(key)
        if key.port == _END:
            return self._end(probe) if probe.heard_end else []
        probe.load.acknowledged(sent.size_bytes, sent.queued_at, now)
        return self._go_on(probe, now)

    def most_bytes(self, key: FrameKey) -> int:
        """The most that a probe frame may have that the other end announces: what is left of its
        probe, if the broker ordered one with it; else nothing."""
        probe = self._active.get(PeerId(key.source))
        if probe is None or probe.number != key.term or key.port != _FRAME:
            return 0
        return min(MOST_FRAME_BYTES, MOST_BYTES - probe.came_bytes)

    def arrived(self, key: FrameKey, now: float, size_bytes: int = 0) -> list[e.Instruction]:
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
        return out + self._go_on(probe, now)

    def refused(self, key: FrameKey, why: str) -> list[e.Instruction]:
        """A frame of ours could not be queued, or one that came is not usable."""
        other = key.destination if key.source == self._me else key.source
        probe = self._active.get(PeerId(other))
        out: list[e.Instruction] = [] if key.source == self._me else [e.Release(key)]
        return out if probe is None else out + self._end(probe, "frame", why)

    def _go_on(self, probe: _Probe, now: float) -> list[e.Instruction]:
        """The next frames, when it is this side's turn."""
        if not probe.up or not probe.turn or probe.said_end:
            return []
        out: list[e.Instruction] = []
        while len(probe.flight) < _SLOTS and (size := probe.load.next_bytes(now)):
            out.append(self._frame(probe, _FRAME, size))
        if probe.load.over:
            probe.said_end = True
            out += [*self._report(probe, "", ""), self._frame(probe, _END, 0)]
        return out

    def _frame(self, probe: _Probe, port: str, size_bytes: int) -> e.Instruction:
        key = FrameKey(
            run=_RUN,
            term=probe.number,
            step=probe.frames,
            role=Role.PROBE,
            microbatch=0,
            hop=0,
            port=port,
            source=self._me,
            destination=probe.other,
        )
        probe.frames += 1
        probe.flight[key] = _Sent(size_bytes)
        return e.SendProbe(key, size_bytes)

    # ------------------------------------------------------------ the end

    def _end(self, probe: _Probe, code: str = "", text: str = "") -> list[e.Instruction]:
        del self._active[probe.other]
        return [*self._report(probe, code, text), e.HangUp(probe.other)]

    def _report(self, probe: _Probe, code: str, text: str) -> list[e.Instruction]:
        load = probe.load
        if probe.reported or not load.most_bytes:
            return []
        probe.reported = True
        found = load.found()
        if found is None or (code and not found.bytes_per_s):
            code, text = code or "short", text or "too few bytes came through to tell anything"
            return [_problem_report(probe.number, probe.other, code, text, load.sent_bytes)]
        report = broker_pb2.LinkReport(
            peer=probe.other,
            probe=probe.number,
            latency_s=found.latency_s,
            bytes_per_s=found.bytes_per_s,
            size_bytes=load.sent_bytes,
        )
        if found.burst is not None:
            report.burst_bytes_per_s, report.burst_bytes = found.burst
        return [e.Tell(broker_pb2.PeerMessage(link=report))]

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        assert len(self._active) <= _MOST_PROBES
        for other, probe in self._active.items():
            assert other == probe.other != self._me
            assert math.isfinite(probe.until)
            assert len(probe.flight) <= _SLOTS + 1, "more frames than the other side takes"
            assert not (probe.said_end and probe.load.most_bytes and not probe.reported)

    def __repr__(self) -> str:
        return f"<Probes {', '.join(self._active) or 'none'}>"


def _problem_report(
    number: int, other: PeerId, code: str, text: str, size_bytes: int = 0
) -> e.Instruction:
    problem = common_pb2.Reason(code=code, text=text[:500])
    report = broker_pb2.LinkReport(peer=other, probe=number, size_bytes=size_bytes, problem=problem)
    return e.Tell(broker_pb2.PeerMessage(link=report))
