"""A worker's links to other peers: what leaves by them, and where what comes goes.

Parts of snapshots go to the disk, values of the present run to the device, and of everything else
the machine only hears. A frame that left is remembered until its receiver has it: a peer that ends
well waits for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...net.cap import Cap
from ...net.links import transport as net
from ...net.links.frame import Arrived, FrameKey, Payload
from ...net.links.switchboard import MAX_FRAME_BYTES
from ...net.transports.grpc_transport import GrpcTransport
from ..core import events as e
from ..core.machine import PeerMachine
from ..core.rates.probe import probe_payload
from ..host.addresses import to_dial
from ..host.identity import Incarnation
from ..logs import note
from .relayed import RELAY
from .spans import Spans
from .upstream import Upstream
from .workbench import DeviceRuntime, said_of

__all__ = ["PeerLinks"]

_log = logging.getLogger(__name__)
_LEAST_FRAME = 64 << 20
"""Bytes that a frame may have where the owner offers next to nothing."""


class PeerLinks:
    """Carries out what the machine wants of links, and gives what comes to device, disk and
    machine. `post` gets the events; `via`: what to dial in place of an address; `memory_bytes`:
    what runs may use here, so no value of one is larger. Used from the event loop; `transport` is
    for who opens and closes it."""

    def __init__(
        self,
        me: Incarnation,
        machine: PeerMachine,
        bench: DeviceRuntime,
        upstream: Upstream,
        spans: Spans,
        *,
        post: Callable[[e.Event], None],
        via: Mapping[str, str],
        up: Cap,
        down: Cap,
        memory_bytes: int,
    ) -> None:
        self._peer, self._machine, self._bench, self._spans = me.peer, machine, bench, spans
        self._post, self._via = post, via
        credentials = upstream.credentials
        # What the broker reaches need not be reached from here: then by relay.
        self._relay = "" if credentials is None else RELAY
        self.transport = GrpcTransport(
            me.peer,
            me.boot,
            self._on_transport,
            credential=None if credentials is None else lambda: credentials.now,
            resolve=lambda address: upstream.address if address == RELAY else address,
            up=up,
            down=down,
            max_frame_bytes=min(MAX_FRAME_BYTES, max(_LEAST_FRAME, memory_bytes)),
            allowed=self._most_bytes,
        )
        self._unacknowledged: set[FrameKey] = set()
        self._all_acknowledged = asyncio.Event()  # set whenever the last one was

    # ------------------------------------------------------------ what leaves

    def do(self, order: e.OfLinks) -> None:
        """Carries out an instruction."""
        match order:
            case e.SendProbe(key, size_bytes):
                try:
                    self.transport.send(key.destination, key, probe_payload(size_bytes))
                except net.LinkError as error:
                    self._post(e.FrameRefused(key, said_of(error)))
                else:
                    self._post(e.FrameQueued(key, size_bytes))
            case e.Dial(peer, address, generation):
                there = to_dial(self._via, address)
                self.transport.dial(peer, there, generation, self._relay)
            case e.ExpectPeer(peer):
                self.transport.expect(peer)
            case e.HangUp(peer):
                self.transport.hang_up(peer)
                self._forget_sent(peer)
            case e.Allow(peer, role, frames):
                self.transport.allow(peer, role, frames)

    def send(self, key: FrameKey, payload: Payload) -> None:
        """Sends a value that is encoded, or a part of a snapshot; the machine hears whether it is
        queued."""
        kept = key.role is Role.SNAPSHOT
        try:
            self.transport.send(key.destination, key, payload)
        except net.LinkError as error:
            if kept:  # it has hung up: the broker sees that the copy is missing
                note(_log, logging.INFO, "not given", frame=key, why=error)
            else:  # its queue is full: without the frame the run would hang
                self._post(e.FrameRefused(key, said_of(error)))
            return
        if not kept:
            self._spans.sent(key, payload)
            self._unacknowledged.add(key)
            self._all_acknowledged.clear()
        self._post(e.FrameQueued(key, payload.size_bytes))

    async def acknowledged(self, patience_s: float) -> None:
        """Waits until receivers have all frames that were sent, for so long at most."""
        if self._unacknowledged:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_acknowledged.wait(), patience_s)

    def _forget_sent(self, peer: str) -> None:
        self._spans.forget(peer)
        self._unacknowledged = {k for k in self._unacknowledged if k.destination != peer}
        self._note_acknowledged()

    def _note_acknowledged(self) -> None:
        if not self._unacknowledged:
            self._all_acknowledged.set()

    # ------------------------------------------------------------ what comes

    def release(self, key: FrameKey) -> None:
        """A frame was consumed: its sender may send the next."""
        if key.source != self._peer:
            self.transport.release(key.source, key)

    def _on_transport(self, event: net.TransportEvent) -> None:
        match event:
            case net.LinkUp(peer, again_bytes=again):
                self._post(e.LinkUp(PeerId(peer), again))
            case net.LinkDown(peer, why):
                self._post(e.LinkDown(PeerId(peer), why))
                if self._machine.exit is not None:  # it may have hung up: nobody waits for it now
                    self._forget_sent(peer)
            case net.LinkRefused(peer, why):
                # Anybody can claim to be `peer`: a link that this ended gets a LinkDown of its own.
                note(_log, logging.INFO, "link refused", peer=self._peer, of=peer, why=why)
                if self._machine.exit is not None:
                    self._forget_sent(peer)
            case net.FrameArrived(arrived):
                self._arrived(arrived)
            case net.FrameGrows(key=key):
                self._post(e.FrameGrows(key))
            case net.FrameAcknowledged(key=key, began_s=began_s):
                self._spans.acknowledged(key)
                self._unacknowledged.discard(key)
                self._note_acknowledged()
                self._post(e.FrameAcknowledged(key, began_s))

    def _arrived(self, arrived: Arrived) -> None:
        key = arrived.key
        if key.role is Role.SNAPSHOT and self._machine.keeping.expects(key):
            self._bench.keep(arrived)
        elif key.role is Role.PROBE or not self._bench.knows(key):
            # The device knows nothing of another term, nor of probes: only dropped.
            self._post(e.FrameArrived(key, len(arrived.data)))
        else:
            self._bench.accept(arrived)

    def _most_bytes(self, key: FrameKey) -> int | None:
        """The most that a frame may have; None: no more is known of it than that it is a frame."""
        if key.role is Role.PROBE:
            return self._machine.probes.most_bytes(key)
        return self._bench.most_bytes(key)
