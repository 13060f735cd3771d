"""What makes faults happen in a world, each once, and whether each did.

    faults = Faults(world, [kill("p1", at_step=3, phase="backward"), slow("p0", "p2", factor=10)])
    faults.start()                          # before anything else happens in the world
    …
    faults.missed()                         # a sentence for each that did not happen

A fault happens at a time of the world's clock, or in a step: as soon as one of the peers that it
names begins an action of its phase there. Where none of them holds a stage (a spare, the broker),
whoever begins one first. `for` undoes it so much later.

A fault that did not happen has tested nothing, so whoever runs a world asks for `missed()` at its
end. Faults of `churn` are a stream, which may have no end; they are counted only, and those that
find nothing to do (a peer that has ended since) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from ..job.settings import SettingsError
from ..peer import events as p
from .clock import Observed
from .naming import BROKER, select
from .sentences import (
    PHASES,
    Fault,
    check_built,
    corrupt,
    flap,
    join,
    kill,
    leave,
    partition,
    sentence,
    slow,
    stop,
)

if TYPE_CHECKING:
    from .peer_shell import PeerSpec
    from .scenario import Scenario
    from .tables import PeerTable
    from .world import World

__all__ = [
    "FLAP_S",
    "Fault",
    "Faults",
    "Fired",
    "corrupt",
    "faults_of",
    "flap",
    "join",
    "kill",
    "leave",
    "partition",
    "sentence",
    "slow",
    "stop",
]

FLAP_S = 1.0
"""How long a flapping link is down, and how long it is up in between."""

Select = Callable[[Sequence[str]], Sequence[str]]
"""Selectors -> names, as `Scenario.selected`; raises SettingsError for one that picks nobody."""


def faults_of(scenario: Scenario) -> tuple[Fault, ...]:
    """Those of the [[faults]] tables. Raises SettingsError, with the key, for one that needs what
    is not built yet."""
    for i, fault in enumerate(scenario.faults):
        try:
            check_built(fault)
        except SettingsError as error:
            raise error.inside(f"faults[{i}]") from None
    return scenario.faults


@dataclass(slots=True)
class Fired:
    """A fault and whether it happened."""

    fault: Fault
    at_s: float | None = None
    """When; None: not yet."""
    why_not: str = ""
    """It was its turn, and there was nothing to do."""


class _Peer(NamedTuple):
    """What selectors ask of a peer."""

    name: str
    place: str
    owner: str
    memory: int


class Faults:
    """See the module. `specs` are of peers that a fault or churn lets come and that the world does
    not have at first; `choose` resolves selectors, over the peers of both without it."""

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
        self._specs = {name: peer.spec for name, peer in world.peers.items()}
        self._specs |= {spec.name: spec for spec in specs}
        self._choose = choose or self._select
        self._fired = [Fired(fault) for fault in faults]
        self._churn = iter(churn)
        self.churned = 0
        """Faults of `churn` that happened so far."""
        self._holders: dict[str, None] = {}  # who has built a stage in this world
        self._waiting: list[tuple[Fired, frozenset[str]]] = []  # for a step, and whom they concern
        self._corrupted: list[tuple[tuple[str, str], Fired]] = []
        self._parted: Counter[tuple[str, str]] = Counter()  # by how many faults
        self._factor: dict[tuple[str, str], float] = {}
        self._do: Mapping[str, Callable[[Fault], str]] = {
            "kill": self._kill,
            "stop": self._stop,
            "leave": self._leave,
            "join": self._join,
            "partition": self._partition,
            "slow": self._slow,
            "flap": self._flap,
            "corrupt": self._corrupt,
        }

    def start(self) -> None:
        """Raises SettingsError for a fault on an unknown peer, or one that is not built yet."""
        world = self._world
        for fired in self._fired:
            fault = fired.fault
            check_built(fault)
            names = frozenset((*self._names(fault.who), *self._names(fault.with_)))
            if fault.do == "corrupt" and BROKER in names:
                raise SettingsError("who", "names the broker: its streams cannot be corrupted yet")
            if fault.at is not None:
                world.after(max(0.0, fault.at - world.now), partial(self._fire, fired))
            else:
                self._waiting.append((fired, names))
        before = world.observe
        if before is None:
            world.observe = self.observe
        else:
            also = before

            def both(seen: Observed) -> None:
                also(seen)
                self.observe(seen)

            world.observe = both
        self._next_of_churn()

    def observe(self, seen: Observed) -> None:
        """Lets those happen whose step and phase have come."""
        record = seen.record
        if isinstance(record, p.Built):
            self._holders[seen.who] = None
        if not self._waiting or not isinstance(record, p.Compute):
            return
        for entry in list(self._waiting):
            fired, names = entry
            fault = fired.fault
            here = fault.at_step == record.step and record.action.kind in PHASES[fault.phase]
            if here and (seen.who in names or not any(n in self._holders for n in names)):
                self._waiting.remove(entry)
                # In a turn of its own: it may end the very machine that is being observed.
                self._world.after(0.0, partial(self._fire, fired))

    # ------------------------------------------------------------ what happened

    def fired(self) -> tuple[Fired, ...]:
        """Every fault of the list, in its order."""
        return tuple(self._fired)

    def missed(self) -> tuple[str, ...]:
        """A sentence for each fault that has not happened, whatever the reason."""
        for pair, fired in self._corrupted:
            if self._world.network.corrupts(*pair):
                fired.at_s, fired.why_not = None, f"since no message came from {' to '.join(pair)}"
        return tuple(
            f"{sentence(f.fault)}: it did not happen, "
            + (f.why_not or "since the world ended before its time or its step came")
            for f in self._fired
            if f.at_s is None
        )

    # ------------------------------------------------------------ how

    def _fire(self, fired: Fired) -> None:
        fault = fired.fault
        fired.why_not = self._do[fault.do](fault)
        if not fired.why_not:
            fired.at_s = self._world.now
        if fault.do == "corrupt":
            self._corrupted += [(pair, fired) for pair in self._pairs(fault, both=False)]

    def _next_of_churn(self) -> None:
        """One at a time: the stream may have no end."""
        fault = next(self._churn, None)
        if fault is None:
            return
        assert fault.at is not None, f"{sentence(fault)}: churn happens at times"

        def fire() -> None:
            self.churned += not self._do[fault.do](fault)
            self._next_of_churn()

        self._world.after(max(0.0, fault.at - self._world.now), fire)

    def _kill(self, fault: Fault) -> str:
        return self._each(fault, self._is_here, self._world.kill, "is gone already")

    def _leave(self, fault: Fault) -> str:
        return self._each(fault, self._is_here, self._world.leave, "is gone already")

    def _stop(self, fault: Fault) -> str:
        why = self._each(fault, self._is_here, self._world.stop, "is gone already")
        if not why:
            self._later(fault, [partial(self._go_on, name) for name in self._names(fault.who)])
        return why

    def _go_on(self, name: str) -> None:
        if self._is_here(name):
            self._world.go_on(name)

    def _join(self, fault: Fault) -> str:
        def come(name: str) -> None:
            self._world.join(self._specs[name])

        return self._each(fault, self._is_gone, come, "is here already")

    def _partition(self, fault: Fault) -> str:
        pairs = [*self._pairs(fault, both=True)]
        for pair in pairs:
            self._part(*pair)
        self._later(fault, [partial(self._mend, *pair) for pair in pairs])
        return ""

    def _part(self, a: str, b: str) -> None:
        self._parted[a, b] += 1
        if self._parted[a, b] == 1:
            self._world.part(a, b)

    def _mend(self, a: str, b: str) -> None:
        self._parted[a, b] -= 1
        if self._parted[a, b] == 0:
            self._world.mend(a, b)

    def _slow(self, fault: Fault) -> str:
        pairs = [*self._pairs(fault, both=True)]
        for pair in pairs:
            self._slower(*pair, fault.factor)
        self._later(fault, [partial(self._slower, *pair, 1.0 / fault.factor) for pair in pairs])
        return ""

    def _slower(self, a: str, b: str, factor: float) -> None:
        """Several faults may slow one link."""
        self._factor[a, b] = self._factor.get((a, b), 1.0) * factor
        self._world.slow(a, b, self._factor[a, b])

    def _flap(self, fault: Fault) -> str:
        world, pairs = self._world, [*self._pairs(fault, both=True)]
        end = world.now + fault.for_s if fault.for_s else float("inf")

        def down() -> None:
            for pair in pairs:
                self._part(*pair)
                self._break(*pair)
            world.after(FLAP_S, up)

        def up() -> None:
            for pair in pairs:
                self._mend(*pair)
            if world.now + FLAP_S < end:
                world.after(FLAP_S, down)

        down()
        return ""

    def _break(self, a: str, b: str) -> None:
        if BROKER not in (a, b):
            self._world.network.break_link(a, b)
        elif a != BROKER and self._is_here(a):
            self._world.cut(a)

    def _corrupt(self, fault: Fault) -> str:
        for pair in self._pairs(fault, both=False):
            self._world.corrupt(*pair)
        return ""

    def _later(self, fault: Fault, undo: Iterable[Callable[[], None]]) -> None:
        if fault.for_s > 0:
            for call in undo:
                self._world.after(fault.for_s, call)

    def _each(
        self, fault: Fault, may: Callable[[str], bool], do: Callable[[str], None], not_so: str
    ) -> str:
        """Does it with everyone with whom it can be done; "", or why it was nobody."""
        names = self._names(fault.who)
        able = [name for name in names if may(name)]
        for name in able:
            do(name)
        return "" if able else f"since {', '.join(names)} {not_so}"

    def _is_here(self, name: str) -> bool:
        peer = self._world.peers.get(name)
        return peer is not None and peer.alive and peer.exit is None

    def _is_gone(self, name: str) -> bool:
        peer = self._world.peers.get(name)
        return peer is None or not peer.alive

    # ------------------------------------------------------------ who

    def _names(self, selectors: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._choose(selectors)) if selectors else ()

    def _pairs(self, fault: Fault, *, both: bool) -> Iterator[tuple[str, str]]:
        """Each of `who` with each of `with`, or with everyone else; each pair once, and the other
        direction too if `both`."""
        who = self._names(fault.who)
        others = self._names(fault.with_)
        if not others:
            everyone = (*self._specs, BROKER) if fault.do != "corrupt" else (*self._specs,)
            others = tuple(name for name in everyone if name not in who)
        pairs: dict[tuple[str, str], None] = {}
        for a in who:
            for b in others:
                if a != b and (b, a) not in pairs:
                    pairs[a, b] = None
        yield from pairs
        if both:
            yield from ((b, a) for a, b in pairs)

    def _select(self, selectors: Sequence[str]) -> Sequence[str]:
        peers = [_Peer(s.name, s.place, s.owner, s.memory_bytes) for s in self._specs.values()]
        return select(selectors, cast("list[PeerTable]", peers))
