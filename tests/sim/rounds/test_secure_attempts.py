"""Both halves of sums with masks, the members' and the broker's: whoever is lost at any moment, and
whenever the broker is started again, of a round there is one sum or none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.rounds.unmasking import Unmasking
from shoal.dag.plan.plan import PeerId
from shoal.tests.peer.secure.people import members_of

PART = (0, 3)
BROKER = -1


class _RestartedError(Exception):
    """The broker has forgotten all but its journal."""


class Play:
    """One round. faults: at which moments, by number, who is lost: a member by its number, or the
    broker, which comes back."""

    def __init__(self, count: int, faults: Sequence[tuple[int, int]] = ()) -> None:
        self.members = members_of(count)
        self.names = list(self.members)
        self.values = {
            m: torch.tensor([7**i, -(11**i), 2**62 + i]) for i, m in enumerate(self.names)
        }
        self.faults, self.moments = list(faults), 0
        self.dead = set[PeerId]()
        self.journal: tuple[int, list[PeerId], bool] = (0, [], False)
        self.totals: dict[PeerId, torch.Tensor] = {}
        """By member, the masked sum that it holds."""
        self.asked = dict[PeerId, set[int]]()
        """By member, the attempts in which it revealed."""
        self.broker: Unmasking | None = None

    def there(self, names: Sequence[PeerId]) -> list[PeerId]:
        return [m for m in names if m not in self.dead]

    def moment(self) -> None:
        self.moments += 1
        for _, who in [f for f in self.faults if f[0] == self.moments]:
            if who == BROKER:
                self.broker = None
                raise _RestartedError
            self.dead.add(self.names[who % len(self.names)])

    def play(self) -> tuple[list[PeerId], dict[PeerId, list[int]]] | None:
        """Return whose contributions are in the round, and what each that is left came to; None for
        a round that is lost."""
        while True:
            try:
                number, members, begun = self.journal
                if begun:
                    return self.unmask(number, members)
                if len(self.there(self.names)) < 3:
                    return None
                self.attempt(number + 1, self.there(self.names))
            except _RestartedError:
                continue

    def attempt(self, number: int, members: list[PeerId]) -> None:
        self.journal = number, members, False
        broker = self.broker = Unmasking(members)
        told = [self.members[m].key for m in members]
        for m in self.there(members):
            self.moment()
            dealt = self.members[m].deal(number, told)
            self.moment()
            if m not in self.dead:
                broker.dealt(m, dealt)
        given = {}
        for m in self.there(members):
            self.moment()
            given[m] = self.members[m].masked(PART, self.values[m])
        sealed = broker.sealed
        if sealed is None or not broker.goes_on(self.there(members)):
            return
        total = torch.stack([given[m] for m in members]).sum(0)
        for m in self.there(members):
            self.moment()
            self.members[m].hold(sealed[m])
            self.totals[m] = total
            self.moment()
            if m not in self.dead and broker.holds(m) and broker.goes_on(self.there(members)):
                self.journal = number, members, True
                broker.begun = True
                self.moment()

    def unmask(
        self, number: int, members: list[PeerId]
    ) -> tuple[list[PeerId], dict[PeerId, list[int]]] | None:
        broker = self.broker = self.broker or Unmasking(members, begun=True)
        for m in self.there(members):
            self.moment()
            if m not in self.dead:
                self.asked.setdefault(m, set()).add(number)
                broker.revealed(m, self.members[m].reveal(number))
        masks = broker.masks
        if masks is None:
            assert not broker.goes_on(self.there(members))
            return None
        found = {}
        for m in self.there(members):
            self.moment()
            self.members[m].open(masks)
            found[m] = self.members[m].unmasked(PART, self.totals[m]).tolist()
        return members, found

    def check(self) -> list[PeerId] | None:
        """Whoever is in the round, its sum is theirs. Returns them."""
        made = self.play()
        attempts = set[int]().union(*self.asked.values())
        assert len(attempts) <= 1, "two attempts of a round were unmasked"
        if made is None:
            return None
        members, found = made
        wanted = [sum(self.values[m][i].item() for m in members) for i in range(3)]
        wrapped = [(w + 2**63) % 2**64 - 2**63 for w in wanted]
        assert found, "nobody has the sum"
        assert all(sum_ == wrapped for sum_ in found.values())
        return members


def test_whoever_is_lost_at_any_moment_the_round_is_made_of_all_or_the_others() -> None:
    plain, with_it = Play(4), 0
    assert plain.check() == plain.names
    for moment in range(1, plain.moments + 1):
        play = Play(4, [(moment, 3 * (moment % 2))])
        members, lost = play.check(), play.names[3 * (moment % 2)]
        assert members is not None, f"one of four was lost at moment {moment}"
        assert set(play.names) - set(members) <= {lost}
        with_it += lost in members
    assert 0 < with_it < plain.moments, "it was never left out, or always"


def test_whenever_the_broker_is_started_again_nothing_is_lost() -> None:
    plain = Play(4)
    plain.check()
    for moment in range(1, plain.moments + 1):
        play = Play(4, [(moment, BROKER)])
        assert play.check() == play.names


@settings(max_examples=12, deadline=None)
@given(
    st.integers(3, 7),
    st.lists(st.tuples(st.integers(1, 60), st.integers(BROKER, 6)), max_size=6),
)
def test_of_a_round_there_is_one_sum_or_none(count: int, faults: list[tuple[int, int]]) -> None:
    play = Play(count, faults)
    if play.check() is None:
        left = len(play.there(play.names))
        assert left < 3 or left <= count // 2, f"{left} of {count} were left"


def test_it_begins_when_all_hold_and_gives_masks_when_enough_revealed() -> None:
    a, b, c, stranger = (PeerId(n) for n in ("a", "b", "c", "x"))
    found = Unmasking([c, a, b])
    found.dealt(a, {b: b"ab"})
    found.dealt(stranger, {})
    assert found.waited_for == [b, c], "who has not dealt"
    found.dealt(b, {})
    assert found.sealed is None
    found.dealt(c, {b: b"cb"})
    sealed = found.sealed
    assert sealed is not None
    assert sealed[b] == {a: b"ab", b: b"", c: b"cb"}
    assert not found.holds(a)
    assert not found.holds(stranger)
    assert not found.holds(b)
    assert found.waited_for == [c], "who does not hold"
    assert not found.goes_on([a, b])
    assert found.holds(c)
    with pytest.raises(AssertionError, match="before it is written down"):
        found.revealed(a, {})
    found.begun = True
    assert found.goes_on([a, b])
    assert not found.goes_on([a, stranger])
