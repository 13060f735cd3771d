"""Which numbers all clients of a round give, against a sort."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.sparse.masks import SharedMask
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds.vector import Entry, RunVector
from shoal.peer.rounds.coding import MultiplesCoding
from shoal.peer.secure.shared_positions import SharedPositions
from shoal.sim.plain.client_updates import shared_positions

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
SHARE = st.floats(0.01, 1.0)


def vector_of(sizes: list[int], buffer: int = 0) -> RunVector:
    entries, at = list[Entry](), 0
    for i, size in enumerate(sizes):
        entries.append(Entry(f"param:p{i}", TensorSpec((size,), "float32"), at, i))
        at += size
    if buffer:
        spec = TensorSpec((buffer,), "float32")
        entries.append(Entry("buffer:b", spec, at, len(sizes)))
    return RunVector(entries)


@settings(max_examples=60, deadline=None)
@given(SIZES, SHARE, SHARE, st.integers(0, 99), st.integers(0, 5), st.integers(0, 3))
def test_they_are_the_largest_of_the_last_move_and_some_by_lot(
    sizes: list[int], keep: float, explore: float, seed: int, round_: int, buffer: int
) -> None:
    """Of a few different sizes of move, so that many are equal, and many 0."""
    vector = vector_of(sizes, buffer)
    generator = torch.Generator().manual_seed(seed)
    last = {
        f"p{i}": (torch.randint(-2, 6, (n,), generator=generator).clamp(max=1) - 1).float()
        * (i + 1)
        for i, n in enumerate(sizes)
    }
    own = SharedPositions(vector, seed, keep, explore)
    for entry in vector.entries:
        if not entry.is_buffer:
            own.find(round_, entry, last[entry.name])
    lots = SharedMask(seed, round_, keep)
    wanted = shared_positions(
        last, keep, explore, lambda name, n, k: lots.drawn(name, n, k).tolist()
    )
    mask = torch.cat([*(wanted[f"p{i}"] for i in range(len(sizes))), torch.ones(buffer).bool()])
    whole = (0, vector.elements)
    assert own.of(whole).tolist() == mask.nonzero().view(-1).tolist()
    assert own.kept(whole) == int(mask.sum())
    assert MultiplesCoding(vector, own.kept).spec(whole).elements == 2 * int(mask.sum())
    values = torch.randn(vector.elements, generator=generator)
    assert torch.equal(own.whole(whole, values[own.of(whole)]), values * mask)
    at = 0
    for entry in vector.entries:  # however it is divided
        part = entry.start, entry.stop
        mine = own.of(whole)[at : at + own.kept(part)] - entry.start
        assert own.of(part).tolist() == mine.tolist()
        at += own.kept(part)


def test_who_has_never_moved_is_drawn_by_lot_and_each_comes_in_time() -> None:
    vector, seen = vector_of([50]), set[int]()
    own = SharedPositions(vector, 7, 0.2, 0.3)
    for round_ in range(40):
        own.find(round_, vector.entries[0], torch.zeros(50))
        found = own.of((0, 50)).tolist()
        assert len(found) == 10
        seen |= {*found}
    assert seen == set(range(50))
    assert found != list(range(10)), "nobody is first because of its place"


def test_a_number_that_moves_far_stays_and_one_that_was_left_out_may_come() -> None:
    vector, last = vector_of([50]), torch.zeros(50)
    last[[3, 17, 44]] = torch.tensor([5.0, -9.0, 7.0])
    own, came = SharedPositions(vector, 7, 0.1, 0.4), set[int]()  # 5, of which 2 by lot
    for round_ in range(60):
        own.find(round_, vector.entries[0], last)
        found = {*own.of((0, 50)).tolist()}
        assert found >= {3, 17, 44}
        came |= found
    assert len(came) > 40


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 200), SHARE, SHARE, st.integers(0, 99))
def test_where_sizes_differ_by_rounding_another_largest_one_changes_no_lot_but_one(
    n: int, keep: float, explore: float, seed: int
) -> None:
    """The last of the largest and the next one change places, as where two loops round sizes that
    are equal, those of a step of Adam."""
    generator, vector = torch.Generator().manual_seed(seed), vector_of([n])
    sizes = 0.01 + 1e-9 * torch.rand(n, generator=generator, dtype=torch.float64)
    own, found = SharedPositions(vector, seed, keep, explore), list[set[int]]()
    kept = own.kept((0, n))
    largest = max(1, kept - max(1, round(kept * explore)))
    edge = sizes.sort(descending=True).indices[largest - 1 : largest + 1]
    for _ in range(2):
        own.find(3, vector.entries[0], sizes)
        found.append({*own.of((0, n)).tolist()})
        sizes[edge] = sizes[edge.flip(0)]
    assert len(found[0] - found[1]) <= 1
