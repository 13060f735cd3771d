"""What broker, aggregators and members that tell them all they know can make of it: everything that
lies in the memory of these objects is taken, and every mask lifted that can be.

So much comes out: the sum of all others, which the round tells anyway, and of no fewer. Each test
hands the attack what it must not have, too, and then it works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, permutations
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from torch import Tensor

from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.secret_sharing import joined
from shoal.peer.secure.pair_masks import derived, with_masks
from shoal.peer.secure.round_keys import roster_of
from shoal.peer.secure.secure_member import SecureMember, _Attempt, _commitment

from .people import Aggregator, Passing, deal, give, hold, identity, members_of, reveal

PART = (0, 6)


def memory(root: Any) -> Iterator[Any]:
    """All that can be reached from an object, whatever it is called."""
    stack, seen = [root], set[int]()
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        if isinstance(found, Mapping):
            stack += [*found.keys(), *found.values()]
        elif isinstance(found, list | tuple | set | frozenset):
            stack += found
        elif isinstance(found, Tensor | bytes | str | type) or callable(found):
            continue
        else:
            slots = [s for c in type(found).__mro__ for s in getattr(c, "__slots__", ())]
            stack += [getattr(found, s) for s in slots if hasattr(found, s)]
            stack += getattr(found, "__dict__", {}).values()


class Attack:
    """Secrets that lie in what somebody holds, and what is left of contributions without them. It
    is told what members committed to, by `hint`, so that it knows whose mask it has."""

    def __init__(
        self,
        held: Sequence[Any],
        passing: Passing,
        hint: _Attempt,
        run: str = "run",
        round_: int = 3,
    ) -> None:
        roster = roster_of(passing.told, identity("p0"), run, round_, passing.attempt)
        self._keys, self._digest = roster.members, roster.digest
        found = list(memory(held))
        secrets = {s for s in found if isinstance(s, bytes) and len(s) == 32}
        secrets |= self._joined(found)
        exchange = [k for k in found if isinstance(k, X25519PrivateKey)]
        by_public = {k.public_key().public_bytes_raw(): k for k in exchange}
        self._own = {
            m: s for m, c in hint._commitments.items() for s in secrets if _commitment(s) == c
        }
        self._exchange = {m: by_public[k] for m, k in roster.members.items() if k in by_public}

    def _joined(self, found: Sequence[Any]) -> set[bytes]:
        """Secrets of which there are enough shares: 33 bytes by the member whose mask it is, in a
        dictionary of who has them. Whose that is it tries out."""
        sets = [d for d in found if isinstance(d, dict) and set(d) == set(self._keys)]
        sets = [d for d in sets if all(isinstance(v, bytes) and len(v) == 33 for v in d.values())]
        unique = list({tuple(sorted(d.items())): d for d in sets}.values())
        made, names = set[bytes](), list(self._keys)
        threshold, places = len(names) // 2 + 1, {m: i for i, m in enumerate(names, 1)}
        for some in permutations(unique, threshold):
            for owners in combinations(names, threshold):
                with suppress(ValueError):
                    held = dict(zip(owners, some, strict=True))
                    made |= set(joined(held, places, threshold).values())
        return made

    def left(self, member: PeerId, given: Tensor, part: tuple[int, int]) -> Tensor:
        """What is left of a masked contribution."""
        adds, subtracts = [], []
        if member in self._own:
            adds.append(derived(self._own[member], "own mask", self._digest))
        for other, key_of_other in self._keys.items():
            pair = None
            if member in self._exchange and other != member:
                public = X25519PublicKey.from_public_bytes(key_of_other)
                pair = self._exchange[member].exchange(public)
            elif other in self._exchange and other != member:
                public = X25519PublicKey.from_public_bytes(self._keys[member])
                pair = self._exchange[other].exchange(public)
            if pair is not None:
                key = derived(pair, "pair mask", self._digest)
                (adds if member < other else subtracts).append(key)
        words = given.numpy().view("uint64")
        return torch.from_numpy(with_masks(words, part, subtracts, adds).view("int64"))


def known_sets(
    attack: Attack, adder: Aggregator, values: Mapping[PeerId, Tensor], honest: Sequence[PeerId]
) -> list[tuple[PeerId, ...]]:
    """Sets of members the sum of whose contributions came out."""
    left = {m: attack.left(m, adder.given[m], adder.part) for m in honest}
    return [
        some
        for size in range(1, len(honest) + 1)
        for some in combinations(honest, size)
        if torch.equal(sum(left[m] for m in some), sum(values[m] for m in some))
    ]


def played(
    count: int = 5,
) -> tuple[dict[PeerId, SecureMember], Passing, Aggregator, dict[PeerId, Tensor]]:
    """An attempt up to where all hold their shares."""
    members = members_of(count)
    generator = torch.Generator().manual_seed(5)
    values = {m: torch.randint(-(2**50), 2**50, (6,), generator=generator) for m in members}
    passing = deal(members, 1)
    [adder] = give(members, [PART], values)
    hold(members, passing)
    return members, passing, adder, values


def test_behind_a_round_broker_and_aggregators_know_its_sum_and_nothing_else() -> None:
    members, passing, adder, values = played()
    names, hint = list(members), members[PeerId("p0")]._now
    reveal(members, passing)
    everybody = tuple(names)
    assert known_sets(Attack([passing, adder], passing, hint), adder, values, names) == [everybody]
    taken = Attack([passing, adder, members[names[2]]], passing, hint)  # an aggregator is a member
    assert known_sets(taken, adder, values, names)[0] == (names[2],)
    others = [n for n in names if n != names[2]]
    assert known_sets(taken, adder, values, others) == [tuple(others)]
    for two in combinations(names, 2):
        honest = [n for n in names if n not in two]
        taken = Attack([passing, adder, *(members[n] for n in two)], passing, hint)
        assert known_sets(taken, adder, values, honest) == [tuple(honest)]
    robbed = Attack([passing, adder, members[names[0]]._mine.exchange], passing, hint)
    assert (names[0],) in known_sets(robbed, adder, values, names), "the attack does not work"


def test_before_it_is_revealed_not_even_the_sum_is_known() -> None:
    members, passing, adder, values = played()
    names, hint = list(members), members[PeerId("p0")]._now
    assert known_sets(Attack([passing, adder], passing, hint), adder, values, names) == []
    for two in combinations(names, 2):  # fewer than the threshold of three
        honest = [n for n in names if n not in two]
        taken = Attack([passing, adder, *(members[n] for n in two)], passing, hint)
        assert known_sets(taken, adder, values, honest) == []
    three = Attack([passing, adder, *(members[n] for n in names[:3])], passing, hint)
    assert known_sets(three, adder, values, names[3:]) == [tuple(names[3:])], "enough may reveal"


def test_two_attempts_of_a_round_tell_no_difference() -> None:
    members, first, adder, values = played()
    names, lost = list(members), PeerId("p4")
    assert torch.equal(adder.total, torch.stack([adder.given[n] for n in names]).sum(0))
    kept = {n: m._now for n, m in members.items()}
    others = {n: m for n, m in members.items() if n != lost}
    second = deal(others, 2)
    [again] = give(others, [PART], {n: values[n] for n in others})
    hold(others, second)
    reveal(others, second)
    held = [first, adder, second, again, members[names[0]]]
    honest = names[1:4]
    assert known_sets(Attack(held, second, members[names[0]]._now), again, values, honest) == [
        tuple(honest)
    ]
    before = Attack(held, first, kept[names[0]])
    assert known_sets(before, adder, values, [*honest, lost]) == []
    assert known_sets(before, adder, values, names) == []
    broken = Attack([*held, *(kept[n].shares for n in names[:3])], first, kept[names[0]])
    told = known_sets(broken, adder, values, [*honest, lost])
    assert told == [(*honest, lost)], "who reveals in both tells the difference: the lost one's"
