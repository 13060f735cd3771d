"""What is broken, lost or no number spoils no version."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.compression.interface import CodecError
from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.plan.action import Action, Kind
from shoal.dag.rounds.sums import LargeContributionError
from shoal.dag.rounds.vector import PIECE
from shoal.dag.rounds.wiring import GIVE, RESULT, VERSION, port_of
from shoal.tests.peer.rounds.conftest import (
    Exchange,
    case_of_three,
    trained,
)


def test_no_number_is_named_and_goes_nowhere(make_case, replica):
    case = case_of_three(make_case)
    a, *_ = trained(case, replica, cuts=(2, 1, 1))
    a.begin(1, 1, 1, [(0, 4)])
    device = a.devices["a.1"]
    with torch.no_grad():
        device._work.held[1].executor.parameters["last.bias"][0] = float("nan")
    found = a.contribute(1)
    assert (found["a.0"].code, found["a.1"].code) == ("", "nonfinite")
    assert "last.bias" in found["a.1"].why


def test_who_moved_too_far_says_so_and_a_larger_grid_takes_it(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    tight = Exchange(replicas, exponent=-20)
    found = tight.begin()
    assert {r.code for r in found.values()} == {"overflow"}
    assert "expected less than 2^-20" in found["a.0"].why
    assert len({*Exchange(replicas, attempt=2, exponent=0).run()}) == 1


@pytest.mark.parametrize("what", ["large", "nan", "short", "long", "codec", "absent", "port"])
def test_a_broken_contribution_spoils_nothing(make_case, replica, what):
    """It is refused, and the sum is as if it had not come: the right one makes it whole."""
    case, held = case_of_three(make_case), []

    def broken(key, frame):
        if key.hop != GIVE or held:
            return frame
        held.append(frame)
        data = bytearray(frame.data)
        if what in ("large", "nan"):
            np.frombuffer(data, "<f4")[-1] = 1e30 if what == "large" else np.nan
        data = data[:-4] if what == "short" else data + b"\0" * 4 if what == "long" else data
        changed = replace(frame, data=memoryview(data), absent=what == "absent")
        if what == "codec":
            return replace(changed, codec="bf16/1")
        if what == "port":
            return replace(changed, key=key._replace(port=f"0{key.port}"))
        return changed

    wanted = Exchange(trained(case, replica)).run()
    exchange = Exchange(trained(case, replica), change=broken)
    exchange.begin()
    each = [(s, p) for s in exchange.segments for p in exchange.parts(s)]
    exchange.send([(GIVE, p, g.peer, s.aggregator) for s, p in each for g in s.givers])
    [error] = exchange.refused.values()
    expected = {"large": LargeContributionError, "nan": LargeContributionError}
    expected |= {"short": CodecError, "long": CodecError}
    assert isinstance(error, expected.get(what, TensorSpecError))
    [right] = held
    target = exchange.devices[right.key.destination]
    result = next(
        exchange.key(RESULT, p, s.aggregator, t)
        for s, p in each
        for t in s.takers
        if t != s.aggregator == right.key.destination and port_of(p) == right.key.port
    )
    with pytest.raises(KeyError, match="is not there to be sent"):
        target.payload(result)
    target.accept(replace(right, data=memoryview(bytearray(exchange.frames[right.key]))))
    exchange.send([(RESULT, p, s.aggregator, t) for s, p in each for t in s.takers])
    assert exchange.apply() == wanted


def test_a_frame_that_comes_twice_counts_once(make_case, replica):
    case = case_of_three(make_case)
    wanted = Exchange(trained(case, replica)).run()
    exchange = Exchange(trained(case, replica))

    def twice(key, frame):
        again = replace(frame, data=memoryview(bytearray(frame.data)))
        exchange.devices[key.destination].accept(again)
        return frame

    exchange.change = twice
    assert exchange.run() == wanted


def test_frames_of_other_attempts_are_refused(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    old = Exchange(replicas, attempt=1)
    old.begin()
    kept = []
    old.change = lambda key, frame: kept.append(frame)
    each = [(s, p) for s in old.segments for p in old.parts(s)]
    old.send([(GIVE, p, g.peer, s.aggregator) for s, p in each for g in s.givers])
    assert kept
    new = Exchange(replicas, attempt=2)
    new.begin()
    for frame in kept:
        device = new.devices[frame.key.destination]
        for term in (1, 3):  # one may still be on its way, and is no fault of the link
            assert device.most_bytes(frame.key._replace(term=term)) >= len(frame.data)
        assert device.most_bytes(frame.key._replace(term=2, port="1:2")) == 0
        with pytest.raises(ValueError, match="has none come"):
            device.accept(frame)
    new.give()
    assert len({*new.apply()}) == 1


def test_a_version_that_is_not_whole_is_not_applied(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    before = [r.weights() for r in replicas]
    lost = []

    def lose(key, frame):
        if key.hop == RESULT and not lost:
            lost.append(frame)
            return None
        return frame

    exchange = Exchange(replicas, change=lose)
    exchange.begin()
    exchange.give()
    peer = lost[0].key.destination
    [found] = [r.each(Kind.APPLY, 0)[peer] for r in replicas if peer in r.devices]
    assert found.code == "missing"
    mine = next(i for i, r in enumerate(replicas) if peer in r.devices)
    device = replicas[mine].devices[peer]
    for held in device._work.held.values():
        for name, tensor in held.executor.parameters.items():
            assert torch.equal(tensor, before[mine].get(name, tensor))
    device.accept(lost[0])
    assert not device.compute(0, Action(Kind.APPLY)).round.code


def test_what_comes_before_its_attempt_is_known_has_a_bound(make_case, replica):
    """Of each peer so many frames, of one part each; and none that nobody wants any more."""
    case = case_of_three(make_case)
    replicas = trained(case, replica)
    old = Exchange(replicas, attempt=1)
    old.begin()
    kept = []
    old.change = lambda key, frame: kept.append(frame)
    each = [(s, p) for s in old.segments for p in old.parts(s)]
    old.send([(GIVE, p, g.peer, s.aggregator) for s, p in each for g in s.givers])
    frame = kept[0]
    device = old.devices[frame.key.destination]
    work = device._work.rounds
    for hop in (GIVE, RESULT, VERSION, 7):
        for port in (f"0:{work.vector.elements}", "0:99999999999", "5:4", "1:2:3", ""):
            key = frame.key._replace(hop=hop, term=9, port=port)
            assert device.most_bytes(key) <= 2 * 4 * PIECE + (1 << 16), key
    many = [frame.key._replace(term=9 + i) for i in range(1000)]
    refused = 0
    for key in many:
        try:
            device.accept(replace(frame, key=key))
        except TensorSpecError:
            refused += 1
    assert refused >= 990
    for key in many:
        device.release(key)
    device.accept(replace(frame, key=many[-1]))  # there is room again
    device.accept(replace(frame, key=many[0]._replace(source="z")))  # of each peer so many
