"""Where faults happen to real processes: the same calls that the virtual world has (`World`), done
with signals and with the forwarding process.

    kill, stop, go_on, leave      signals to a peer's processes
    join, restart_broker          its processes, or the broker's, started anew
    part, mend, slow, corrupt     the forwarding process holds bytes back, or changes one
    after, now                    seconds since the simulation began; calls come in a thread here

Steps are seen only once they are committed, so a fault of step k comes as soon as step k - 1 is
done, and one of round k as the broker begins it; what lies within a step is not seen at all.
"""

from __future__ import annotations

import heapq
import itertools
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from ...dag.schedule.schedule import Action, Kind
from ...peer.core import events as p
from ...proto import broker_pb2
from ..processes import ClusterError, LocalCluster
from ..trace import Mark
from ..virtual.clock import Observe, Observed
from ..virtual.spec import PeerSpec
from .forwarder import Forwarder

__all__ = ["Surface"]

_Call = tuple[float, int, Callable[[], None]]
"""(when, in which order they were asked for, what)."""


@dataclass
class _Peer:
    """What faults ask of a peer."""

    spec: PeerSpec
    cluster: LocalCluster
    exit: object | None = None

    @property
    def alive(self) -> bool:
        return self.cluster.runs(self.spec.name)


class Surface:
    """`with Surface(…) as surface:` ends its thread at the end. `flags`: those of `shoal join`, by
    name. `told`: gets a Mark for everything that it does."""

    def __init__(
        self,
        cluster: LocalCluster,
        paths: Forwarder,
        flags: Mapping[str, list[str]],
        specs: Mapping[str, PeerSpec],
        told: Callable[[Mark], None],
    ) -> None:
        self._cluster, self._paths, self._flags, self._told = cluster, paths, flags, told
        self.peers = {name: _Peer(spec, cluster) for name, spec in specs.items()}
        self.network = self  # where links are broken
        self.observe: Observe | None = None
        self.error = ""
        """Why a call failed; the rest was not made."""
        # What an interrupt cannot leave locked (net/interrupts.py).
        self._asked: SimpleQueue[_Call | None] = SimpleQueue()  # None: it ends
        self._order = itertools.count()
        self._to_come: set[int] = set()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def __enter__(self) -> Surface:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._asked.put(None)
        self._thread.join()

    # ------------------------------------------------------------ time

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        order = next(self._order)
        self._to_come.add(order)
        self._asked.put((self.now + delay_s, order, callback))

    @property
    def pending(self) -> int:
        """Calls that are to come, such as those that undo a fault."""
        return len(self._to_come)

    def see(self, event: broker_pb2.RunEvent) -> None:
        """Takes in an event of the run: the step after a committed one has begun, or a round."""
        step, observe = -1, self.observe
        if event.HasField("round_begun") and observe is not None:
            start = broker_pb2.RoundStart(round=event.round_begun.round)
            observe(Observed(self.now, "", p.BeginRound("", 0, start)))
        if event.HasField("step"):
            step = event.step.step + 1
        elif event.HasField("state") and event.state.phase == broker_pb2.RUNNING:
            step = event.state.step
        if step >= 0 and observe is not None:
            begun = p.Compute(event.state.run, 0, step, Action(Kind.FORWARD, 0))
            observe(Observed(self.now, "", begun))

    def _run(self) -> None:
        heap: list[_Call] = []
        while True:
            try:
                asked = self._asked.get(timeout=max(0.0, heap[0][0] - self.now) if heap else None)
            except Empty:
                pass  # it is time for the first of them
            else:
                if asked is None:
                    return
                heapq.heappush(heap, asked)
                continue
            _, order, callback = heapq.heappop(heap)
            self._to_come.remove(order)
            try:
                callback()
            except (ClusterError, OSError) as error:
                self.error = str(error)
                return

    # ------------------------------------------------------------ what happens

    def kill(self, name: str) -> None:
        self._signal(name, "kill", signal.SIGKILL)

    def stop(self, name: str) -> None:
        self._signal(name, "stop", signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        self._signal(name, "go_on", signal.SIGCONT)

    def leave(self, name: str) -> None:
        self._signal(name, "leave", signal.SIGTERM)

    def join(self, spec: PeerSpec) -> None:
        self._tell(spec.name, "join")
        self._cluster.join(spec.name, self._flags[spec.name])

    def restart_broker(self) -> None:
        self._tell("broker", "broker_restart")
        self._cluster.restart_broker()

    def part(self, a: str, b: str) -> None:
        self._tell(a, "cut-off", f"from {b}")
        self._paths.part(a, b)

    def mend(self, a: str, b: str) -> None:
        self._tell(a, "mend", f"to {b}")
        self._paths.mend(a, b)

    def slow(self, a: str, b: str, factor: float) -> None:
        if factor == 1:
            self._tell(a, "mend", f"to {b}")
        else:
            self._tell(a, "slow", f"to {b}, {factor:g} times")
        self._paths.slow(a, b, factor)

    def corrupt(self, a: str, b: str) -> None:
        self._tell(a, "corrupt", f"to {b}")
        self._paths.corrupt(a, b)

    def corrupts(self, a: str, b: str) -> bool:
        """Whether a corruption has met no message yet."""
        return (a, b) in self._paths.carried().spared

    def break_link(self, a: str, b: str) -> None:
        """Parted for long enough a connection breaks by itself."""

    def cut(self, name: str) -> None:
        """Break a link, as `break_link` does."""

    def _signal(self, name: str, what: str, sign: signal.Signals) -> None:
        self._tell(name, what)
        self._cluster.send(name, sign)

    def _tell(self, who: str, what: str, text: str = "") -> None:
        self._told(Mark(at_s=self.now, who=who, what=what, text=text))
