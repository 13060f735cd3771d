"""Parts and pieces of the vector of a run: a cover without gaps, the same for every cut."""

from __future__ import annotations

from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds import vector as of_rounds
from shoal.dag.rounds import wiring as of_wiring
from shoal.dag.rounds.vector import PIECE, Entry, RunVector, part_elements
from shoal.dag.rounds.wiring import (
    GATHER,
    GIVE,
    RESULT,
    Giver,
    Place,
    VectorSegment,
    kind_of,
    port_of,
    span_of,
    wiring,
)

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)
most = st.integers(1, 16)


def vector_of(sizes, integers=()):
    entries, start = [], 0
    for i, n in enumerate(sizes):
        whole = i in integers
        entries.append(Entry(f"param:p{i}", TensorSpec((n,), "float32"), start, i, whole))
        start += n
    return RunVector(entries)


def all_pieces(sizes, most):
    """The boring way: (value, start, stop) of every piece, by element of the vector."""
    found, start = {}, 0
    for i, n in enumerate(sizes):
        for at in range(0, n, most):
            found[start + at] = (f"param:p{i}", at, min(at + most, n))
        start += n
    return found


def pieces_of(vector, parts):
    return [(p.entry.value, p.start, p.stop) for part in parts for p in vector.pieces(part)]


@given(sizes, most, st.data())
def test_parts_of_segments_are_all_pieces_once_wherever_they_are_cut(sizes, most, data):
    vector = vector_of(sizes)
    cuts = data.draw(st.lists(st.integers(0, vector.elements), max_size=6))
    bounds = sorted({0, vector.elements, *cuts})
    with patch.object(of_rounds, "PIECE", most):
        each = [vector.parts(a, b) for a, b in pairwise(bounds)]
        parts = [part for some in each for part in some]
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1], "side by side"
        assert ends[-1] == vector.elements
        assert all(0 < stop - start <= most for start, stop in parts)
        assert pieces_of(vector, parts) == [*all_pieces(sizes, most).values()]


@given(sizes, most, st.data())
def test_a_part_has_whole_pieces(sizes, most, data):
    vector, known = vector_of(sizes), all_pieces(sizes, most)
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, vector.elements)] * 2)))
    with patch.object(of_rounds, "PIECE", most):
        for start, stop in vector.parts(a, b):
            at = start
            for piece in vector.pieces((start, stop)):
                assert known[at] == (piece.entry.value, piece.start, piece.stop)
                at += piece.elements
            assert at == stop


@given(sizes, most, st.integers(2, 16), st.data())
def test_numbers_that_go_as_they_are_are_in_one_part_each_of_nearly_equal_ones(
    sizes, most, long, data
):
    integers = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    sizes = [n - n % 2 if i in integers else n for i, n in enumerate(sizes)]
    vector = vector_of(sizes, integers)
    cuts = data.draw(st.lists(st.integers(0, vector.elements + 3), max_size=6))
    bounds = sorted({0, vector.elements, *cuts})
    with patch.object(of_rounds, "PIECE", most):
        each = [vector.parts(a, b, long) for a, b in pairwise(bounds)]
        parts = [part for some in each for part in some]
        ends = [0, *(stop for _, stop in parts)]
        assert [start for start, _ in parts] == ends[:-1], "side by side"
        assert ends[-1] == vector.elements
        lengths = [[b - a for a, b in some] for some in each if some]
        assert all(0 < n <= long for some in lengths for n in some)
        if not integers:
            of = zip(pairwise(bounds), each, strict=True)
            assert all(
                len(some) == -(-(min(b, ends[-1]) - a) // long) for (a, b), some in of if some
            )
        for e in vector.entries if integers else ():
            within = [at - e.start for at in ends if e.integer and e.start <= at <= e.stop]
            assert all(at % 2 == 0 for at in within), "an integer has two elements"
        for part in parts:
            for piece in vector.pieces(part):
                assert piece.start // most == (piece.stop - 1) // most
                assert piece.whole_start == piece.start // most * most
        found = [(v, i) for v, a, b in pieces_of(vector, parts) for i in range(a, b)]
        assert found == [(f"param:p{i}", at) for i, n in enumerate(sizes) for at in range(n)]


@given(st.integers(0, 1 << 34), st.integers(1, 600))
def test_a_pair_has_as_many_parts_as_a_link_has_frames_on_their_way_or_more_long_ones(
    elements, members
):
    part = part_elements(elements, members)
    share = elements / min(members, 16)
    assert (1 << 12) <= part <= PIECE
    if (1 << 12) < part < PIECE:
        assert 4 <= share / part <= 17
        assert part <= (1 << 16) or share / part >= 15
    assert part_elements(elements, members + 1) <= part


@given(sizes, st.data())
def test_stages_of_any_cut_cover_the_vector_in_order(sizes, data):
    vector = vector_of(sizes)
    cuts = data.draw(st.sets(st.integers(1, len(sizes)), max_size=4))
    spans = [vector.span(a, b) for a, b in pairwise(sorted({0, len(sizes), *cuts}))]
    assert spans[0][0] == 0
    assert spans[-1][1] == vector.elements
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    for entry in vector.entries:
        assert vector.of_value(entry.value) is entry
        assert sum(a <= entry.start and entry.stop <= b for a, b in spans) >= 1


@given(sizes, most, st.data())
def test_what_one_gives_another_adds(sizes, most, data):
    """Over all peers, each part is given by all givers, added up once, and taken by all takers;
    where each client's contribution comes by itself, in frames of some of them."""
    by_client, weights = data.draw(st.booleans()), {"a": 1, "b": 2, "c": 5}
    vector, peers = vector_of(sizes), ("a", "b", "c")
    some = st.lists(st.sampled_from(peers), unique=True)
    cuts = data.draw(st.lists(st.integers(0, vector.elements), max_size=3))
    segments = [
        VectorSegment(
            span,
            data.draw(st.sampled_from(peers)),
            tuple(Giver(p, weights[p]) for p in data.draw(some)),
            tuple(data.draw(some)),
            tuple((p, q) for p, q in data.draw(st.lists(st.tuples(*[st.sampled_from(peers)] * 2)))),
        )
        for span in pairwise(sorted({0, vector.elements, *cuts}))
    ]
    with patch.object(of_rounds, "PIECE", most), patch.object(of_wiring, "PIECE", most):
        each = {p: wiring(vector, segments, p, by_client=by_client) for p in peers}
        given = {(part, hop) for w in each.values() for part, hop in hops(w.gives, GIVE)}
        assert given == {(part, hop) for w in each.values() for part, hop in hops(w.takes, GIVE)}
        passed = {(part, hop) for w in each.values() for part, hop in hops(w.gives, RESULT)}
        taken = {(part, hop) for w in each.values() for part, hop in hops(w.takes, RESULT)}
        adds = {(part, hop.destination) for part, hop in given}
        assert passed == {(part, hop) for part, hop in taken if (part, hop.source) in adds}
        sent = sorted((s.part, p, s.peer) for p, w in each.items() for s in w.sends)
        assert sent == sorted((s.part, s.peer, p) for p, w in each.items() for s in w.gets)
        comes = {(hop, part, q, p, b) for p, w in each.items() for hop, part, q, b in w.comes}
        goes = {(hop, part, p, q, b) for p, w in each.items() for hop, part, q, b in w.goes}
        assert goes == {f for f in comes if f[0] != RESULT or f[1:3] in adds}
        for (start, stop), hop in given if by_client else ():
            blocks = each[hop.source].blocks((start, stop), hop)
            assert [i for rows in blocks for i in rows] == [*range(weights[hop.source])]
            assert all(len(rows) == 1 or len(rows) * (stop - start) <= most for rows in blocks)


def hops(of, kind):
    return [(part, hop) for (part, *_), some in of.items() for hop in some if kind_of(hop) == kind]


def test_several_may_add_up_one_segment_again_and_each_gets_all_of_it():
    """Be it who gathered a place at first, and is given what it gives itself."""
    vector, givers = vector_of([40]), tuple(Giver(p, 1) for p in "abcd")
    places = (Place("b", ("b", "c")),)
    order = [VectorSegment((0, 40), by, givers, places=places) for by in ("b", "c", "d")]
    each = {p: wiring(vector, order, p, again=True) for p in "abcd"}
    assert {p: {to for _, _, to, _ in w.goes} for p, w in each.items()} == {
        **{"a": {"b", "c", "d"}, "b": {"c", "d"}, "c": {"b", "d"}, "d": {"b", "c"}}
    }
    assert {p: {by for _, _, by, _ in w.comes} for p, w in each.items()} == {
        **{"a": set(), "b": {"a", "c", "d"}, "c": {"a", "b", "d"}, "d": {"a", "b", "c"}}
    }
    for p in "bcd":
        sums = {kind: [h.source for _, h in hops(each[p].takes, kind)] for kind in (GIVE, GATHER)}
        assert sums == {GIVE: ["a", "d", "b", "c"], GATHER: ["b"]}


blocks = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=1, max_size=12)


@given(blocks, most, st.data())
def test_fragments_have_each_piece_once_wherever_it_is_added_up(named, most, data):
    entries, start = [], 0
    for i, (block, n) in enumerate(named):
        name = f"param:h.{block}.w{i}" if block else f"param:w{i}"  # the first has none
        entries.append(Entry(name, TensorSpec((n,), "float32"), start, i))
        start += n
    count = data.draw(st.integers(1, 4))
    vector = RunVector(entries, count)
    cuts = data.draw(st.lists(st.integers(0, vector.elements), max_size=5))
    bounds = sorted({0, vector.elements, *cuts})
    segments = [VectorSegment(s, "a", (Giver("a", 1),), ("a",)) for s in pairwise(bounds)]
    with patch.object(of_rounds, "PIECE", most):
        found = []
        for fragment in range(1, count + 1):
            parts = [part for part, _ in hops(wiring(vector, segments, "a", fragment).gives, GIVE)]
            pieces = pieces_of(vector, parts)
            there = {value.split(".")[1] if "h." in value else "0" for value, *_ in pieces}
            assert {int(b) % count for b in there} <= {fragment - 1}
            found += pieces
        whole = pieces_of(vector, vector.parts(0, vector.elements))
        assert sorted(found) == sorted(whole)


@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_a_part_is_known_by_its_name(start, stop):
    assert span_of(port_of((start, stop))) == (start, stop)


@pytest.mark.parametrize("text", ["", ":", "1", "1:", ":2", "-1:2", "1:2:3", "a:b", f"1:{10**40}"])
def test_what_is_no_name_is_no_part(text):
    assert span_of(text) == (0, 0)
