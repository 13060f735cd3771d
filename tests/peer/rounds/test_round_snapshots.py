"""Going on from a snapshot in a round equals never having stopped."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.peer.compute.order import OfferError, check_host_memory, check_memory
from shoal.peer.compute.records import load_records, write_records
from shoal.peer.core.assignment import STOP_AT
from shoal.peer.core.snapshots import SnapshotError, in_parts
from shoal.tests.peer.rounds.conftest import (
    Exchange,
    case_of_three,
    hand_out,
    trained,
)


def moved(case, replica, old, name, cuts, step, method="diloco"):
    """The same replica, made anew from its snapshots, with other stages."""
    states = tuple(device.snapshot(step)() for device in old.devices.values())
    return replica(case, name, cuts, of=3, method=method, resumed=states)


@pytest.mark.parametrize("method", ["diloco", "sparse-loco"])
@pytest.mark.parametrize("when", ["in the middle", "contributed", "applied", "committed"])
def test_going_on_from_a_snapshot_in_a_round_equals_never_having_stopped(
    make_case, replica, when, method
):
    case = case_of_three(make_case)
    found = []
    for stops in (False, True):
        replicas = trained(case, replica, cuts=(2, 2, 1), method=method)
        Exchange(replicas).run()
        for i, each in enumerate(replicas):
            each.begin(1, 1, 2, hand_out(i, 1, 2, 3))
            each.train(1, 2)
            if when != "in the middle":
                each.train(2, 3)
                each.contribute(1)
        if when in ("applied", "committed"):
            Exchange(replicas, round=1).run()
        if stops:
            step = 2 if when == "in the middle" else 3
            b = replicas[1]
            replicas[1] = moved(case, replica, b, "b", 3 if step == 3 else 2, step, method)
            if when != "committed":
                replicas[1].begin(1, 1, 2, hand_out(1, 1, 2, 3))
        if when == "in the middle":
            for each in replicas:
                each.train(2, 3)
        if when != "committed":
            for each in replicas:
                each.contribute(1)
            found.append(Exchange(replicas, round=1, attempt=2).run())
        for i, each in enumerate(replicas):
            each.begin(2, 3, 1, hand_out(i, 20, 1, 3))
        found.append([r.hashes for r in replicas[0].contribute(2).values()])
        for each in replicas:
            each.contribute(2)
        found.append(Exchange(replicas, round=2).run())
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert all(len({*hashes}) == 1 for hashes in (found[0], found[-1]))


def test_snapshots_without_what_rounds_began_with_are_named(make_case, replica):
    case = case_of_three(make_case)
    a, *_ = trained(case, replica)
    tensors = dict(load_records([a.devices["a.0"].snapshot(1)()]).tensors)
    del tensors["round:param:scale:base"]
    with pytest.raises(SnapshotError, match="began with of 'param:scale'"):
        replica(case, "a", of=3, resumed=(in_parts(write_records(tensors)),), method="diloco")


def test_the_owner_is_asked_for_what_rounds_keep(make_case, replica):
    case = case_of_three(make_case)
    plain = case.world(case.plan(1, ["a"]))
    for method, copies in (("average", 1), ("diloco", 2), ("sparse-loco", 2)):
        one = replica(case, "a", of=3, method=method)
        rounds = one.devices["a.0"]._work.rounds
        assert rounds.size_bytes == 4 * copies * one.vector.elements
        more = one.world.built["a.0"].device_bytes - plain.built["a"].device_bytes
        assert more == rounds.size_bytes
        assert one.world.built["a.0"].vector.entries == one.vector.entries


def test_an_offer_must_hold_what_rounds_keep(make_case, replica):
    case = case_of_three(make_case)
    work = replica(case, "a", of=3, method="diloco").devices["a.0"]._work
    elements = work.rounds.vector.elements

    def least(of_rounds):
        low, high = 1, 1 << 24
        while low < high:
            offer = (low + high) // 2
            try:
                check_memory(
                    replace(work.order, memory_bytes=offer), work.graph, work.flow, of_rounds
                )
                high = offer
            except OfferError:
                low = offer + 1
        return low

    # The version and its momentum; and what is given, comes back, and is made of it, and a third of
    # a sum, where a step keeps less than that beside it.
    more = (least(elements) - least(0)) * STOP_AT
    assert 20 * elements < more <= (8 + 4 + 4 + 8 + 2) * elements


def test_the_host_of_a_card_must_have_room_for_what_rounds_keep(make_case, replica):
    case = case_of_three(make_case)
    order = replica(case, "a", of=3, method="diloco").devices["a.0"]._work.order
    each = 8 + 4 + 4 + 8 + 2  # as above
    check_host_memory(order, 1000, each * 1000)
    with pytest.raises(OfferError, match=r"host's memory, beside the device, and .* are free"):
        check_host_memory(order, 1000, each * 1000 - 1)
