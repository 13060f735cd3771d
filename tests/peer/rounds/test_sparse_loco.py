"""sparse-loco: what is not given now is given later, counts once, and all apply the same."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest
import torch

from shoal.compression.codec import CodecError, parse
from shoal.dag.rounds.wiring import GIVE, RESULT
from shoal.peer.rounds.coding import flat_spec
from shoal.tests.peer.rounds.conftest import (
    COUNTER,
    Exchange,
    case_of_three,
    hand_out,
    same,
    train,
    trained,
)

OPTIONS = {"density": 0.25, "chunk": 32, "decay": 0.75, "lr": 0.5}
SPARSE = {"method": "sparse-loco", "options": OPTIONS}
ALL = {"density": 1.0, "bits": 32, "decay": 0.0, "lr": 1.0}


def entries(replica):
    """Parameters of a replica's stages, where they belong."""
    works = [device._work.rounds for device in replica.devices.values()]
    found = {value: e for w in works for value, e in w.entries.items() if e.owned}
    return {value: e for value, e in found.items() if not e.entry.is_buffer}


def residuals(replica):
    return {value: e.version.own["residual"].clone() for value, e in entries(replica).items()}


def drift_of(replica):
    """What local steps moved, of each parameter."""
    return {v: e.algebra.began(e) - e.copies[0].flatten() for v, e in entries(replica).items()}


def begin(replicas, round_):
    for i, each in enumerate(replicas):
        each.begin(round_, round_, 1, hand_out(i, round_, 1, len(replicas)))


def test_what_was_given_and_what_is_left_is_all_there_was(make_case, replica):
    """Of each replica e_new + q is b·e + D, and the version moves by the mean of all q."""
    replicas = trained(case_of_three(make_case), replica, **SPARSE)
    weights, given_away = (2, 3, 7), 0
    for round_ in range(3):
        if round_:
            train(replicas, round_, 1)
        before = [residuals(r) for r in replicas]
        base = {v: e.version.values for v, e in entries(replicas[0]).items()}
        moved = [
            {v: e.algebra.began(e) - e.copies[0].flatten() for v, e in entries(r).items()}
            for r in replicas
        ]
        assert len({*Exchange(replicas, round=round_, weights=weights).run()}) == 1
        begin(replicas, round_ + 1)
        after = [residuals(r) for r in replicas]
        for value, entry in entries(replicas[0]).items():
            had = [0.75 * e[value] + d[value] for e, d in zip(before, moved, strict=True)]
            sent = [h - e[value] for h, e in zip(had, after, strict=True)]
            mean = sum(w * q for w, q in zip(weights, sent, strict=True)) / 12
            torch.testing.assert_close(entry.version.values, base[value] - 0.5 * mean)
            for q, h, left in zip(sent, had, after, strict=True):
                if q.numel() < 64:  # as it is
                    assert torch.equal(q, h)
                    continue
                apart = left[value] != h
                assert (apart.view(-1, 32).sum(1) == 8).all()
                least = h.view(-1, 32).abs().sort(1).values[:, -8]
                assert (h.abs() >= least.repeat_interleave(32))[apart].all()
                given_away += 1
    assert given_away == 3 * 3 * 3  # the matrices, of three replicas in three rounds


def test_all_numbers_at_once_are_the_plain_average(make_case, replica):
    found = []
    for method, options in (("average", {}), ("sparse-loco", ALL)):
        replicas = trained(case_of_three(make_case), replica, method=method, options=options)
        hashes = [Exchange(replicas, weights=(2, 3, 7)).run()]
        train(replicas, 1, 1)
        found.append([*hashes, Exchange(replicas, round=1, weights=(7, 2, 3)).run()])
    assert found[0] == found[1]


def test_what_does_not_come_back_stays_with_who_gave_it(make_case, replica):
    """A number that did not come back has not left anybody, and of those that did two levels keep
    the sum of magnitudes."""
    options = OPTIONS | {"result_density": 0.125, "decay": 1.0, "lr": 1.0}
    replicas = trained(case_of_three(make_case), replica, method="sparse-loco", options=options)
    weights = (2, 3, 7)
    base = {v: e.version.values for v, e in entries(replicas[0]).items()}
    moved = [
        {v: e.algebra.began(e) - e.copies[0].flatten() for v, e in entries(r).items()}
        for r in replicas
    ]
    assert len({*Exchange(replicas, weights=weights).run()}) == 1
    begin(replicas, 1)
    left = [residuals(r) for r in replicas]
    for value, entry in entries(replicas[0]).items():
        came = base[value] - entry.version.values
        sent = [m[value] - e[value] for m, e in zip(moved, left, strict=True)]
        if came.numel() < 64:  # as it is
            continue
        assert ((came != 0).view(-1, 32).sum(1) <= 4).all()
        for q in sent:
            assert not bool(q[came == 0].any())
            assert bool(q[came != 0].any())
        mean = sum(w * q for w, q in zip(weights, sent, strict=True)) / 12
        torch.testing.assert_close(
            mean.abs().view(-1, 32).sum(1), came.abs().view(-1, 32).sum(1), rtol=0.01, atol=1e-7
        )


@pytest.mark.parametrize("cuts", [(1, 1, 1), (3, 1, 2)])
def test_neither_cuts_nor_who_adds_up_change_a_bit(make_case, replica, cuts):
    case, found = case_of_three(make_case), []
    for each in (cuts, (1, 2, 3)):
        replicas = trained(case, replica, cuts=each, **SPARSE)
        hashes = Exchange(replicas).run()
        train(replicas, 1, 1)
        order = [replicas[i] for i in (2, 0, 1)]
        found.append([*hashes, *Exchange(order, round=1).run()])
        begin(replicas, 2)
        found[-1] += [e.double().sum() for r in replicas for _, e in sorted(residuals(r).items())]
    assert found[0] == found[1]


def test_who_is_left_out_has_given_nothing(make_case, replica):
    """Its contribution was in the first attempt's version, and is in none of the second's."""
    case = case_of_three(make_case)
    replicas = trained(case, replica, **SPARSE)
    Exchange(replicas).run()
    train(replicas, 1, 1)
    before = residuals(replicas[2])
    assert any(bool(e.any()) for e in before.values())
    Exchange(replicas, round=1).run()
    second = Exchange(replicas[:2], joiners=replicas[2:], round=1, attempt=2)
    assert len({*second.run()}) == 1
    begin(replicas, 2)
    assert same(residuals(replicas[2]), before)
    assert same(replicas[2].weights(), replicas[0].weights(), but={COUNTER})
    calm = trained(case, replica, **SPARSE)
    Exchange(calm).run()
    train(calm, 1, 1)
    Exchange(calm[:2], round=1).run()
    begin(calm[:2], 2)
    assert same(residuals(replicas[0]), residuals(calm[0]))


def test_who_comes_with_an_old_snapshot_gives_nothing_twice(make_case, replica):
    case = case_of_three(make_case)
    replicas = trained(case, replica, **SPARSE)
    Exchange(replicas).run()
    train(replicas, 1, 1)
    states = tuple(device.snapshot(2)() for device in replicas[2].devices.values())
    Exchange(replicas, round=1).run()
    train(replicas[:2], 2, 1)
    late = replica(case, "c", 2, of=3, resumed=states, **SPARSE)
    assert same(residuals(late), residuals(replicas[2]))
    hashes = Exchange(replicas[:2], joiners=[late], round=2).run()
    assert len({*hashes}) == 1
    late.begin(3, 3, 1, hand_out(2, 3, 1, 3))
    assert not any(bool(e.any()) for e in residuals(late).values())


def given_in(frame):
    """The weights and contributions of a result."""
    found, at = [], 0
    while at < len(frame):
        weight, size = struct.unpack_from("<QQ", frame, at)
        found.append((weight, frame[at + 16 : at + 16 + size]))
        at += 16 + size
    return found


def test_a_result_is_all_contributions_as_they_came(make_case, replica):
    exchange = Exchange(trained(case_of_three(make_case), replica, **SPARSE), weights=(2, 3, 7))
    assert len({*exchange.run()}) == 1
    results = 0
    for key, frame in exchange.frames.items():
        if key.hop != RESULT:
            continue
        results += 1
        found = given_in(frame)
        assert [weight for weight, _ in found] == [2, 3, 7]
        came = {
            f
            for k, f in exchange.frames.items()
            if (k.hop, k.port, k.destination) == (GIVE, key.port, key.source)
        }
        assert len(came - {data for _, data in found}) == 0
    assert results


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_they_are_smaller_than_their_mean(replicas):
    codec, n = parse("chunks"), 1 << 18
    heard, size = torch.zeros(n), 0
    for i in range(replicas):
        x = torch.randn(n, generator=torch.Generator().manual_seed(i))
        encoded = codec.encode(x)
        size += encoded.size_bytes + len(encoded.header)
        data = memoryview(bytearray(b"".join(encoded.buffers)))
        heard += codec.decode(flat_spec(n), encoded.header, data)
    assert size < parse("nonzero").encode(heard / replicas).size_bytes / 3


def another_weight(data):
    data[0] ^= 1
    return data


def one_less(data):
    weight_and_size = 16 + struct.unpack_from("<QQ", data)[1]
    return data[weight_and_size:]


def one_twice(data):
    return data + data[: 16 + struct.unpack_from("<QQ", data)[1]]


def cut_short(data):
    return data[:-1]


def of_no_length(data):
    data[8:16] = b"\xff" * 8
    return data


@pytest.mark.parametrize("spoil", [another_weight, one_less, one_twice, cut_short, of_no_length])
def test_a_result_that_is_not_of_all_is_refused(make_case, replica, spoil):
    spoilt = []

    def change(key, frame):
        if key.hop == RESULT and not spoilt:
            spoilt.append(frame)
            data = spoil(bytearray(frame.data))
            return replace(frame, data=memoryview(data))
        return frame

    exchange = Exchange(trained(case_of_three(make_case), replica, **SPARSE), change=change)
    exchange.begin()
    exchange.give()
    [error] = exchange.refused.values()
    assert isinstance(error, CodecError)
    peer = spoilt[0].key.destination
    exchange.devices[peer].accept(spoilt[0])
    assert len({*exchange.apply()}) == 1
