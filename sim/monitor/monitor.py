"""What a world must never do, checked while it runs: docs/architecture.md, "Invariants".

    monitor = Monitor(world, seed=7, losses=plain.losses)
    events = monitor.finish(run)                # as world.finish; raises Violation

It looks at every event before a machine handles it and at every instruction before it is carried
out, and at the machines and links themselves, and believes nothing that they say of themselves.

        who looks, and at what       what cannot be seen
I1, I2  `work.py`, `rounds.py`       weights between steps, and that a sum on a real device has each
                                     term once: the plain loop's losses say that, ghosts' to the bit
I3      `terms.py`                   a term's effect in a device that keeps values by another key
I4      `work.py`                    bytes that a library takes for itself
I5      `codecs.py`                  codecs of ghosts; what `delta` remembers
I6      (of two worlds: compare their logs, or the digests of their traces)
I7      (of the code: tests of what is allowed in a graph and on a wire)
I8      `links.py`                   queues of the kernel
I9      `work.py`, and `until` here  waits of the client
I10     `journal.py`                 what a disk loses
I11     `rounds.py`

From where a run says that it is not exact (a lost stage was made anew) no loss is compared; all
else holds. The machines' own rules (`validate`, their assertions) count as well, as "own".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...broker import events as b
from ...broker.validate import validate
from ...proto import broker_pb2
from ..virtual.clock import Observed, StalledError
from ..virtual.control import BROKER
from ..virtual.world import World
from .codecs import CodecCheck
from .journal import JournalCheck
from .links import LinkCheck
from .rounds import RoundCheck
from .terms import TermCheck
from .violation import EVENTS, Broken, Check, Violation
from .work import WorkCheck

__all__ = ["Monitor", "Violation"]

_EVERY, _FEW = 64, 12
"""The machines' own rules take long to check: that is done at each so manieth event, or as manieth
as there are peers, and with fewer peers than so many at every one, messages to the broker left
out."""


class Monitor:
    """Checks a world's invariants while it runs. `losses`, `norms`: by step, what the plain loop
    has, to a relative `tolerance`. `most_terms`: plans that a run may have; 1 where nobody is lost.
    Observes the world from now on, beside whoever does already."""

    def __init__(
        self,
        world: World,
        *,
        seed: int = 0,
        losses: Sequence[float] = (),
        norms: Sequence[float] = (),
        tolerance: float = 1e-5,
        most_terms: float = math.inf,
    ) -> None:
        self.seed = seed
        self.checks = 0
        """How many records were checked so far."""
        self._world = world
        work = WorkCheck(world, losses, norms, tolerance)
        work.most_terms = most_terms
        journal = JournalCheck(world)
        checks = TermCheck(world), work, RoundCheck(world), LinkCheck(world), CodecCheck(world)
        self._all = (*checks, journal)
        self._wanted: dict[type, tuple[tuple[Check, ...], bool]] = {}
        """By class of record: the checks that look at it, and whether it is an event."""
        self._events = 0
        self._last = Observed(0.0, BROKER, None)  # type: ignore[arg-type]  # nothing yet
        self._also = world.observe
        world.observe = self.observe

    def observe(self, seen: Observed) -> None:
        """Check an event against the invariants; raises Violation."""
        self.checks += 1
        try:
            checks, is_event = self._wanted.get(type(seen.record)) or self._who_wants(seen.record)
            for check in checks:
                check.observe(seen)
            if is_event:
                self._own_rules()  # after the event before this one
                self._last = seen
        except (Broken, AssertionError) as error:
            raise self.violation(error, seen) from error
        if self._also is not None:
            self._also(seen)

    def _who_wants(self, record: object) -> tuple[tuple[Check, ...], bool]:
        checks = tuple(check for check in self._all if isinstance(record, check.wants))
        found = self._wanted[type(record)] = checks, isinstance(record, EVENTS)
        return found

    def finish(self, run: str, limit_s: float = 24 * 3600.0) -> list[broker_pb2.RunEvent]:
        """Every event of a run, after its end. Raises Violation."""
        self.until(lambda: run in self._world.broker.ended, limit_s)
        try:
            for check in self._all:
                check.ended(run)
            self._broker_rules()
            for peer in self._world.peers.values():
                peer.machine.validate()
        except (Broken, AssertionError) as error:
            raise self.violation(error) from error
        return self._world.events(run)

    def until(self, done: Callable[[], bool], limit_s: float = 24 * 3600.0) -> None:
        """As World.until. Raises Violation."""
        try:
            self._world.until(done, limit_s)
        except StalledError as error:
            stalled = Broken("I9", f"it never comes to an end: {error}")
            raise self.violation(stalled) from error
        except (Broken, AssertionError) as error:
            raise self.violation(error) from error

    def violation(self, error: Exception, seen: Observed | None = None) -> Violation:
        """What an error is to whoever runs the world: of a check, or of a machine's own rules."""
        invariant = error.invariant if isinstance(error, Broken) else "own"
        return Violation(self.seed, self._world.now, seen or self._last, invariant, str(error))

    def _own_rules(self) -> None:
        """Check the machine that had the last event: it has handled it, or its process is gone."""
        self._events += 1
        who, world = self._last.who, self._world
        often = len(world.peers) < _FEW and not isinstance(self._last.record, b.PeerSaid)
        if not often and self._events % max(_EVERY, len(world.peers)):
            return
        if who == BROKER:
            self._broker_rules()
        elif who in world.peers:
            world.peers[who].machine.validate()

    def _broker_rules(self) -> None:
        """Check the broker's machine, unless its process died before it handled its first event:
        nothing is expected of such a machine yet. Raises AssertionError."""
        broker = self._world.broker
        if broker.begun:
            validate(broker.machine)
