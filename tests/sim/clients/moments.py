"""Runs in which something happens at a moment that a test counts off: a peer is lost, or the broker
is started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.broker.events import Persist
from shoal.peer.core.events import BeginRound
from shoal.proto.broker_pb2 import RunSpec
from shoal.sim.virtual.clock import Observed

__all__ = ["broker_again", "in_rounds", "losing"]


def losing(world: Any, spec: RunSpec, at: int, name: str = "p1") -> tuple[str, int]:
    """Play a run to its end, of which a peer is killed at a record from the first round on; 0: it
    is not. Return its id, and how many such records it had."""

    def lose(number: int) -> None:
        if number == at and world.peers[name].alive:
            world.kill(name)

    return in_rounds(world, spec, lose)


def in_rounds(world: Any, spec: RunSpec, do: Callable[[int], None]) -> tuple[str, int]:
    """As `losing`; `do` is called at each of these records, by number."""
    world.until(lambda: len(world.broker.machine.members.pool) == len(world.peers))
    return _play(world, spec, lambda seen, n: n > 0 or isinstance(seen.record, BeginRound), do)


def broker_again(world: Any, spec: RunSpec, at: int, away_s: float = 1.0) -> tuple[str, int]:
    """Play a run to its end, and start the broker again behind a record of its journal; 0: behind
    none. Return the run's id, and how many records it wrote."""

    def restart(number: int) -> None:
        if number == at:
            world.restart_broker(away_s)

    return _play(world, spec, lambda seen, n: isinstance(seen.record, Persist), restart)


def _play(
    world: Any,
    spec: RunSpec,
    counts: Callable[[Observed, int], bool],
    do: Callable[[int], None],
) -> tuple[str, int]:
    run, checks, count = world.submit(spec), world.observe, 0

    def observe(seen: Observed) -> None:
        nonlocal count
        checks(seen)
        if counts(seen, count):
            count += 1
            do(count)

    world.observe = observe
    world.finish(run)
    return run, count
