"""The simulated world: the broker's and the peers' own machines under a virtual clock.

One process, one heap of (time, order, callback). The shells (`broker_shell.py`, `peer_shell.py`)
carry the machines' instructions out against a modelled network and turn results into events.
Nothing waits and nothing reads a clock: a minute of WAN takes as long as its tensors. The same
arguments give the same events, byte for byte (I6).

What is modelled: the network (`wan.py`, or one function of each message), and computing time (the
cost model's seconds of an action at the peer's speeds). What is real: both machines, the link
protocol, codecs, and with the usual device every tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...broker import events as b
from ...broker.options import BrokerOptions
from ...dag.rounds.noise import known_key
from ...net.links.frame import Arrived
from ...net.transports.carrier import Carrier, Timed
from ...net.transports.memory import Carry, MemoryNetwork, steady
from ...peer.compute.device import TorchDevice
from ...peer.core.options import PeerOptions
from ...peer.core.snapshots import SnapshotStore
from ...proto import broker_pb2
from ..trace import Mark, Trace
from .broker_shell import BrokerShell
from .clock import Observe, Observed, StalledError, VirtualClock
from .control import BROKER, Control
from .identities import NamedMember, known_member
from .orders import Orders
from .peer_shell import PeerShell
from .spec import PeerDevice, PeerSpec
from .wan import Wan

__all__ = [
    "BROKER",
    "RESTART_S",
    "Observe",
    "Observed",
    "PeerDevice",
    "PeerSpec",
    "StalledError",
    "World",
]

RESTART_S = 1.0
"""How long a broker that is started again at once is away: Python and its imports."""


class World(VirtualClock):
    """A broker and peers. `blobs` is what clients uploaded, by SHA-256; exports are added to it.
    Data shards are written into `folder`, once, as the peers' caches would.

    The network: `wan`, or `carry` between peers (see net/transports/carrier.py) with
    `control_latency_s` one way between each peer and the broker. `device` makes what a peer
    computes with. `observe` is called for every event that a machine is about to handle and every
    instruction that is about to be carried out; it may use the faults below. With `log=False`,
    `self.log` stays empty. signs: whether peers sign what they give in rounds, and the broker
    checks that, as with certificates; a device of one's own is to do so.
    """

    def __init__(
        self,
        peers: Sequence[PeerSpec],
        *,
        blobs: Mapping[str, bytes],
        folder: Path,
        carry: Carry | None = None,
        control_latency_s: float = 0.02,
        broker_options: BrokerOptions | None = None,
        peer_options: PeerOptions | None = None,
        wan: Wan | None = None,
        trace: Trace | None = None,
        device: Callable[[PeerSpec], PeerDevice] | None = None,
        observe: Observe | None = None,
        seed: int = 0,
        log: bool = True,
        signs: bool = False,
    ) -> None:
        super().__init__()
        self.signs = signs
        self.blobs = dict(blobs)
        self.folder = folder
        self.trace, self.observe = trace, observe
        self.log: list[str] = []
        """What happened, one line each, for people and for comparing two worlds."""
        self.logs, self.seed = log, seed
        self._peer_options = peer_options
        self._device = device or (signing_device if signs else torch_device)
        self.carrier: Carrier
        if wan is not None:
            wan.attach(self)
            self.carrier = wan
        else:
            between = carry or steady(0.005, 1e8)
            to_broker = steady(control_latency_s)

            def carried(a: str, b: str, size_bytes: int) -> tuple[float, float]:
                return (to_broker if a == BROKER or b == BROKER else between)(a, b, size_bytes)

            self.carrier = Timed(self.after, carried)
        self.network = MemoryNetwork(self, self.carrier)
        self.broker = BrokerShell(self, broker_options)
        self.broker.start()
        self.orders = Orders()
        self.disks: dict[str, SnapshotStore] = {}
        """What of a peer outlives its processes: snapshots, by name."""
        self.saved: dict[str, tuple[memoryview, ...]] = {}
        """Snapshots that peers have brought to the broker, by the hash that their blobs have."""
        self.peers: dict[str, PeerShell] = {}
        """The newest process of each peer that has come so far, dead ones too."""
        self._controls = 0
        self._corruptions = 0
        self._restarts = 0
        for spec in peers:
            if spec.joins_s > 0:
                self.after(spec.joins_s, lambda spec=spec: self.join(spec))  # type: ignore[misc]
            else:
                self.join(spec)

    # ------------------------------------------------------------ runs

    def submit(self, spec: broker_pb2.RunSpec) -> str:
        """Submits a run as soon as every peer that has come by now is a member; returns its id.
        Raises ValueError with the broker's reason when it refuses."""
        here = [name for name, peer in self.peers.items() if peer.alive]

        def all_are_members() -> bool:
            members = self.broker.machine.members.members
            return self.broker.alive and all(name in members for name in here)

        self.until(all_are_members)
        answer = self.broker.ask(lambda request: b.RunSubmitted(request, spec))
        if isinstance(answer, b.Reject):
            raise ValueError(answer.reason)
        assert isinstance(answer.message, broker_pb2.Submitted)
        return answer.message.run

    def finish(self, run: str, limit_s: float = 24 * 3600.0) -> list[broker_pb2.RunEvent]:
        """Every event of a run, after its end."""
        self.until(lambda: run in self.broker.ended, limit_s)
        return self.events(run)

    def events(self, run: str) -> list[broker_pb2.RunEvent]:
        return self.broker.published.get(run, [])

    # ------------------------------------------------------------ faults

    def join(self, spec: PeerSpec) -> None:
        """A peer comes. One of its name that was there before must have ended; this is its next
        process then. Raises ValueError otherwise."""
        before, count = self.peers.get(spec.name), 0
        if before is not None:
            if before.alive:
                raise ValueError(f"{spec.name} is here already: expected a name that is free")
            count = before.incarnation + 1
        peer = PeerShell(self, spec, self._peer_options, self._device(spec), count)
        self.peers[spec.name] = peer
        self.mark(spec.name, "join")
        self.after(0.0, peer.start)
        if spec.stays_s is not None:
            self.after(spec.stays_s, peer.stop)

    def kill(self, name: str) -> None:
        """The process of a peer is gone from now on, without a word."""
        self.mark(name, "kill")
        self.peers[name].die()

    def cut(self, name: str) -> None:
        """The control stream of a peer breaks; it attaches again."""
        self.mark(name, "cut")
        if (control := self.peers[name].control) is not None:
            control.cut("the connection was cut")

    def stop(self, name: str) -> None:
        """The process of a peer stands still: it takes, says and computes nothing until `go_on`."""
        self.mark(name, "stop")
        self.peers[name].freeze()
        self._watch(name)

    def go_on(self, name: str) -> None:
        self.mark(name, "go_on")
        self.peers[name].thaw()
        self._watch(name)

    def leave(self, name: str) -> None:
        """The owner's Ctrl-C: the peer drains and ends."""
        self.mark(name, "leave")
        self.peers[name].stop()

    def part(self, a: str, b: str) -> None:
        """Nothing leaves from a to b any more, peers or "broker", until `mend`; the way back stays
        as it is. Streams break after a while, as the other end's answers cannot come either."""
        self.mark(a, "cut-off", f"from {b}")
        self.network.part(a, b)
        self._watch(a if b == BROKER else b)

    def mend(self, a: str, b: str) -> None:
        self.mark(a, "mend", f"to {b}")
        self.network.mend(a, b)
        self._watch(a if b == BROKER else b)

    def slow(self, a: str, b: str, factor: float) -> None:
        """Bytes from a to b take so many times longer than alone on the network; 1: as at first."""
        if factor == 1:
            self.mark(a, "mend", f"to {b}")
        else:
            self.mark(a, "slow", f"to {b}, {factor:g} times")
        self.carrier.slow(a, b, factor)

    def stretch(self, name: str, factor: float) -> None:
        """Actions of a peer that begin from now on take so many times longer; 1: as at first."""
        self.mark(name, "stretch", f"{factor:g} times")
        self.peers[name].work.stretch = factor

    def corrupt(self, a: str, b: str) -> None:
        """The next message from peer a to peer b arrives with one byte changed, of the seed's
        choice."""
        self.mark(a, "corrupt", f"to {b}")
        self._corruptions += 1
        rng = random.Random(f"{self.seed} corrupt {self._corruptions}")
        self.network.medium.corrupt(a, b, rng.random())

    def corrupts(self, a: str, b: str) -> bool:
        """Whether a corruption has met no message yet."""
        return self.network.medium.corrupts(a, b)

    def restart_broker(self, away_s: float = RESTART_S) -> None:
        """The broker's process is gone from now on, without a word, also one that was about to
        begin; another one begins so much later, with its journal alone."""
        self.mark(BROKER, "broker_restart")
        self.broker.die()
        self._restarts += 1
        number = self._restarts

        def start() -> None:
            if number == self._restarts:
                self.broker.start()

        self.after(away_s, start)

    # ------------------------------------------------------------ for the shells

    def note(self, who: str, *what: object) -> None:
        if self.logs:
            self.log.append(" ".join((f"{self.now:.9f}", who, *map(str, what))))

    def mark(self, who: str, what: str, text: str = "") -> None:
        if self.trace is not None:
            self.trace.add(Mark(at_s=self.now, who=who, what=what, text=text))

    def dial_broker(self, peer: PeerShell) -> Control:
        self._controls += 1
        control = Control(self, peer, self._controls)
        control.watch()
        return control

    def hear_each_other(self, a: str, b: str) -> bool:
        return self.network.medium.hear_each_other(a, b)

    def arrived(self, frame: Arrived) -> None:
        """A frame is at its destination."""
        sender = self.peers.get(frame.key.source)
        if sender is not None:
            sender.sent(frame, self.network.medium.left_s)

    def _watch(self, name: str) -> None:
        peer = self.peers.get(name)
        if peer is not None and peer.control is not None:
            peer.control.watch()

    def state(self) -> str:
        machines = [repr(peer.machine) for peer in self.peers.values()]
        return "\n".join([repr(self.broker.machine), *machines, *self.log[-10:]])


def torch_device(spec: PeerSpec, **more: Any) -> PeerDevice:
    """Real tensors on the CPU."""
    # This process's seconds are none of the world's: reports are the same in every run; and so is
    # noise, of which a plain loop must have the same, and what masks are made of.
    return TorchDevice(
        "cpu", clock=lambda: 0.0, noise_key=known_key, member_of=known_member, **more
    )


def signing_device(spec: PeerSpec) -> PeerDevice:
    """Return the device of a peer that signs what it gives in rounds."""
    return torch_device(spec, identity_of=NamedMember)
