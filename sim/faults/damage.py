"""What each kind of fault does to a world, and how it is undone.

Several faults may part or slow one link: it is mended when the last of them is over, and as slow as
all of them say together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from ..scenario.naming import BROKER, select
from ..scenario.sentences import Fault

if TYPE_CHECKING:
    from ..scenario.tables import PeerTable
    from ..virtual.spec import PeerSpec
    from ..virtual.world import World

__all__ = ["FLAP_S", "Damage", "Select"]

FLAP_S = 1.0
"""How long a flapping link is down, and how long it is up in between."""

Select = Callable[[Sequence[str]], Sequence[str]]
"""Selectors -> names, as `Scenario.selected`; raises SettingsError for one that picks nobody."""


class _Peer(NamedTuple):
    """What selectors ask of a peer."""

    name: str
    place: str
    owner: str
    memory: int


class Damage:
    """Does to a world what each kind of fault does, and undoes it. `specs`: of peers that may come
    and that the world does not have at first."""

    def __init__(self, world: World, choose: Select | None, specs: Iterable[PeerSpec]) -> None:
        self._world = world
        self._specs = {name: peer.spec for name, peer in world.peers.items()}
        self._specs |= {spec.name: spec for spec in specs}
        self._choose = choose or self._select
        self._parted: Counter[tuple[str, str]] = Counter()  # by how many faults
        self._factor: dict[tuple[str, str], float] = {}
        self._do: Mapping[str, Callable[[Fault], str]] = {
            "kill": partial(self._end, world.kill),
            "stop": self._stop,
            "leave": partial(self._end, world.leave),
            "join": self._join,
            "cut-off": self._cut_off,
            "slow": self._slow,
            "flap": self._flap,
            "corrupt": self._corrupt,
            "broker_restart": self._restart_broker,
        }

    def do(self, fault: Fault) -> str:
        """Does it now, and undoes it when its `for` is over. "", or why there was nothing to do."""
        return self._do[fault.do](fault)

    def _end(self, do: Callable[[str], None], fault: Fault) -> str:
        return self._each(fault, self._is_here, do, "is gone already")

    def _stop(self, fault: Fault) -> str:
        why = self._end(self._world.stop, fault)
        if not why:
            self._later(fault, [partial(self._go_on, name) for name in self.names(fault.who)])
        return why

    def _go_on(self, name: str) -> None:
        if self._is_here(name):
            self._world.go_on(name)

    def _join(self, fault: Fault) -> str:
        def come(name: str) -> None:
            self._world.join(self._specs[name])

        return self._each(fault, self._is_gone, come, "is here already")

    def _cut_off(self, fault: Fault) -> str:
        pairs = [*self.pairs(fault, both=fault.both)]
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
        pairs = [*self.pairs(fault, both=fault.both)]
        for pair in pairs:
            self._slower(*pair, fault.factor)
        self._later(fault, [partial(self._slower, *pair, 1.0 / fault.factor) for pair in pairs])
        return ""

    def _slower(self, a: str, b: str, factor: float) -> None:
        """Several faults may slow one link."""
        self._factor[a, b] = round(self._factor.get((a, b), 1.0) * factor, 12)
        self._world.slow(a, b, self._factor[a, b])

    def _flap(self, fault: Fault) -> str:
        world, pairs = self._world, [*self.pairs(fault, both=True)]
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
        for pair in self.pairs(fault, both=False):
            self._world.corrupt(*pair)
        return ""

    def _restart_broker(self, fault: Fault) -> str:
        self._world.restart_broker()
        return ""

    def _later(self, fault: Fault, undo: Iterable[Callable[[], None]]) -> None:
        if fault.for_s > 0:
            for call in undo:
                self._world.after(fault.for_s, call)

    def _each(
        self, fault: Fault, may: Callable[[str], bool], do: Callable[[str], None], not_so: str
    ) -> str:
        """Does it with everyone with whom it can be done; "", or why it was nobody."""
        names = self.names(fault.who)
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

    def names(self, selectors: Sequence[str]) -> tuple[str, ...]:
        return tuple(self._choose(selectors)) if selectors else ()

    def pairs(self, fault: Fault, *, both: bool) -> Iterator[tuple[str, str]]:
        """Each of `who` with each of `with`, or with everyone else; each pair once, and the other
        direction too if `both`."""
        who = self.names(fault.who)
        others = self.names(fault.with_)
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
