"""What makes faults happen in a world, each once, and whether each did.

    faults = Faults(world, [kill("p1", at_step=3, phase="backward"), slow("p0", "p2", factor=10)])
    faults.start()                          # before anything else happens in the world
    …
    faults.missed()                         # a sentence for each that did not happen

A fault happens at a time of the world's clock, or in a step: as soon as one of the peers that it
names begins an action of its phase there; or in a round, as soon as one of them begins it, for
peers that train clients side by side make no step. Where none of them holds a stage (a spare, the
broker), whoever begins one first. `for` undoes it so much later.

A fault that did not happen has tested nothing, so whoever runs a world asks for `missed()` at its
end. Faults of `churn` are a stream, which may have no end; they are counted only, and those that
find nothing to do (a peer that has ended since) are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ...job.settings import SettingsError
from ...peer.core import events as p
from ..scenario.naming import BROKER
from ..scenario.sentences import PHASES, Fault, sentence
from ..virtual.clock import Observed, beside
from .damage import Damage, Select

if TYPE_CHECKING:
    from ..report.summary import Summary
    from ..virtual.spec import PeerSpec
    from ..virtual.world import World

__all__ = ["Faults", "Fired"]


@dataclass(slots=True)
class Fired:
    """A fault and whether it happened."""

    fault: Fault
    at_s: float | None = None
    """When; None: not yet."""
    why_not: str = ""
    """It was its turn, and there was nothing to do."""


def _comes(fault: Fault, begins: p.Compute | p.BeginRound) -> bool:
    """Return whether what a peer begins is what a fault waits for."""
    if isinstance(begins, p.BeginRound):
        return fault.at_round == begins.start.round
    return fault.at_step == begins.step and PHASES[fault.phase](begins.action)


class Faults:
    """Makes faults happen in a world, each once, and tells whether each did. `specs` are of peers
    that a fault or churn lets come and that the world does not have at first; `choose` resolves
    selectors, over the peers of both without it."""

    def __init__(
        self,
        world: World,
        faults: Iterable[Fault],
        choose: Select | None = None,
        *,
        specs: Iterable[PeerSpec] = (),
        churn: Iterable[Fault] = (),
    ) -> None:
        self._world = world
        self._damage = Damage(world, choose, specs)
        self.fired = [Fired(fault) for fault in faults]
        """Every fault of the list, in its order."""
        self._churn = iter(churn)
        self.churned = 0
        """Faults of `churn` that happened so far."""
        self._holders: dict[str, None] = {}  # who has built a stage in this world
        self._waiting: list[tuple[Fired, frozenset[str]]] = []  # for a step, and whom they concern
        self._corrupted: list[tuple[Fired, tuple[tuple[str, str], ...]]] = []
        """Each with the pairs of which one at least must get a damaged message."""

    def start(self) -> None:
        """Raises SettingsError for a fault on an unknown peer."""
        world = self._world
        for fired in self.fired:
            fault = fired.fault
            names = frozenset((*self._damage.names(fault.who), *self._damage.names(fault.with_)))
            if fault.do == "corrupt" and BROKER in names:
                raise SettingsError("who", "names the broker: its streams cannot be corrupted yet")
            if fault.at is not None:
                world.after(max(0.0, fault.at - world.now), partial(self._fire, fired))
            else:
                self._waiting.append((fired, names))
        if self._waiting:
            world.observe = beside(world.observe, self.observe)
        self._next_of_churn()

    def observe(self, seen: Observed) -> None:
        """Lets those happen whose step and phase, or whose round, have come."""
        record = seen.record
        if isinstance(record, p.Built):
            self._holders[seen.who] = None
        if not self._waiting or not isinstance(record, p.Compute | p.BeginRound):
            return
        for entry in list(self._waiting):
            fired, names = entry
            concerns = seen.who in names or not any(n in self._holders for n in names)
            if concerns and _comes(fired.fault, record):
                self._waiting.remove(entry)
                # In a turn of its own: it may end the very machine that is being observed.
                self._world.after(0.0, partial(self._fire, fired))

    # ------------------------------------------------------------ what happened

    def fill(self, summary: Summary) -> None:
        """Counts what went wrong; a run in which something did not that should have, has failed."""
        missed = self.missed()
        if self.fired or self.churned:
            summary.faults_injected = len(self.fired) + self.churned
            summary.faults_fired = sum(f.at_s is not None for f in self.fired) + self.churned
        if missed and not summary.exit:
            summary.exit, summary.error = 1, "; ".join(missed)

    def missed(self) -> tuple[str, ...]:
        """A sentence for each fault that has not happened, whatever the reason."""
        for fired, pairs in self._corrupted:
            if all(self._world.corrupts(*pair) for pair in pairs):
                ways = ", nor ".join(" to ".join(pair) for pair in pairs)
                fired.at_s, fired.why_not = None, f"since no message came from {ways}"
        return tuple(
            f"{sentence(f.fault)}: it did not happen, "
            + (f.why_not or "since the world ended before its time, its step or its round came")
            for f in self.fired
            if f.at_s is None
        )

    def _fire(self, fired: Fired) -> None:
        fault = fired.fault
        fired.why_not = self._damage.do(fault)
        if not fired.why_not:
            fired.at_s = self._world.now
        if fault.do == "corrupt":
            self._corrupted.append((fired, tuple(self._damage.pairs(fault, both=False))))

    def _next_of_churn(self) -> None:
        """One at a time: the stream may have no end."""
        fault = next(self._churn, None)
        if fault is None:
            return
        assert fault.at is not None, f"{sentence(fault)}: churn happens at times"

        def fire() -> None:
            self.churned += not self._damage.do(fault)
            self._next_of_churn()

        self._world.after(max(0.0, fault.at - self._world.now), fire)
