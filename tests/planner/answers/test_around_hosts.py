"""Who helps which host to train its client, by a rule of memory in place of a planner."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.cost.network import uniform
from shoal.dag.plan.plan import PeerId
from shoal.planner.answers.around_hosts import _Helped
from shoal.planner.answers.deeper import fewest_of
from shoal.planner.base.interface import NoPlan, PeerOffer

NEEDED, ENDS = 10, 3


class ByMemory(_Helped):
    """A host by itself has the room, or room for the ends and helpers for the rest."""

    def _planned(self, client: int, some: Sequence[int]) -> Any:
        rooms = [self.ask.peers[i].device_memory_bytes for i in some]
        if rooms[0] < ENDS or sum(rooms) < self.needed:
            raise NoPlan("too little", "memory", self.needed - sum(rooms))
        peers = tuple(self.ask.peers[i].peer for i in some)
        return SimpleNamespace(plan=SimpleNamespace(peers=peers))


def helped(rooms: Sequence[int]) -> _Helped:
    peers = tuple(
        PeerOffer(PeerId(f"p{i}"), device_memory_bytes=n, flops_per_s=1.0)
        for i, n in enumerate(rooms)
    )
    ask = cast(Any, SimpleNamespace(peers=peers, network=uniform([o.peer for o in peers], 0.1, 1)))
    nothing = cast(Any, None)
    return ByMemory(ask, nothing, nothing, nothing, None, NEEDED)


def can_be(hosts: Sequence[int], helpers: Sequence[int]) -> bool:
    """Whether some way to share helpers out gives each host the memory; looks at all of them."""
    if any(h < ENDS for h in hosts):
        return False
    for to in itertools.product(range(len(hosts) + 1), repeat=len(helpers)):
        sums = [*hosts, 0]
        for host, room in zip(to, helpers, strict=True):
            sums[host] += room
        if all(s >= NEEDED for s in sums[:-1]):
            return True
    return False


ROOMS = st.lists(st.integers(1, 12), min_size=1, max_size=3)


@given(ROOMS, st.lists(st.integers(1, 12), max_size=5), st.booleans())
def test_helpers_are_shared_among_the_hosts_that_need_them(
    hosts: list[int], helpers: list[int], near: bool
) -> None:
    rooms = [*hosts, *helpers]
    free = range(len(hosts), len(rooms))
    who = {c: c for c in range(len(hosts))}
    if not can_be(hosts, helpers):
        with pytest.raises(NoPlan, match="cannot train the client whose data it has") as error:
            helped(rooms).plans(who, free, near=near)
        assert error.value.code == "memory"
        return
    try:
        made = helped(rooms).plans(who, free, near=near)
    except NoPlan:  # hosts take what others would have needed
        assert len(hosts) > 1
        return
    used = [p for found in made.values() for p in found.plan.peers]
    assert len(used) == len({*used}), "a peer helps two hosts"
    for client, room in enumerate(hosts):
        first, *others = made[client].plan.peers
        assert first == f"p{client}"
        assert all(int(p[1:]) in free for p in others), "a host helps another"
        mine = [room, *(rooms[int(p[1:])] for p in others)]
        assert sum(mine) >= NEEDED > sum(mine[:-1]) or len(mine) == 1


@given(st.integers(1, 20), st.integers(0, 20), st.integers(1, 25))
def test_the_fewest_that_it_takes(least: int, more: int, wanted: int) -> None:
    most, tried = least + more, list[int]()

    def made(count: int) -> int:
        tried.append(count)
        if count < wanted:
            raise NoPlan(f"{count} are too few", "memory")
        return count

    if wanted > most:
        with pytest.raises(NoPlan, match=f"{most} are too few"):
            fewest_of(least, most, made)
    else:
        assert fewest_of(least, most, made) == max(least, wanted)
    assert len(tried) <= 2 + more.bit_length()
