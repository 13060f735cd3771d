"""Gossip on devices alone: what two replicas come to, coordinate by coordinate."""

from __future__ import annotations

import pytest
import torch

from shoal.compression.sparse.masks import SharedMask
from shoal.tests.peer.rounds.conftest import Exchange, case_of_three, hand_out, same, train

KEEP = 0.25
SAPS = {"method": "saps", "options": {"keep": KEEP}, "seed": 5}
ROUND = 3


def pair(make_case, replica, *, gathers=False, round_=ROUND, **settings):
    """Two of three replicas, cut differently, behind their local steps of a round."""
    case = case_of_three(make_case)
    found = [replica(case, n, c, of=3, **settings) for n, c in zip("abc", (1, 3, 2), strict=True)]
    train(found, round_, 1, gathers=gathers)
    return case, found


def entries(replica):
    """By value, all of it that is in the replica's stages: tied ones once for each."""
    found = {}
    for device in replica.devices.values():
        for value, e in device._work.rounds.entries.items():
            found.setdefault(value, []).append(e)
    return found


def weights(replica):
    """As they stand in the stages; copies are equal."""
    found = {}
    for value, each in entries(replica).items():
        copies = [copy.detach().flatten().clone() for e in each for copy in e.copies]
        assert all(torch.equal(copies[0], copy) for copy in copies), value
        found[value] = copies[0]
    return found


def test_saps_keeps_the_mean_of_each_coordinate_and_sends_no_others(make_case, replica):
    _, (a, b, _) = pair(make_case, replica, **SAPS)
    before = weights(a), weights(b)
    exchange = Exchange([a, b], round=ROUND)
    exchange.run()
    after, mask = (weights(a), weights(b)), SharedMask(5, ROUND, KEEP)
    kept = 0
    for value, x in before[0].items():
        y = before[1][value]
        chosen = torch.zeros(x.numel(), dtype=torch.bool)
        buffer = value.startswith("buffer:")  # the mean of all of it
        chosen[slice(None) if buffer else mask.positions(f"{value}:0", x.numel())] = True
        kept += int(chosen.sum()) * (1 if x.is_floating_point() else 2)  # in elements of float32
        middle = ((x.double() + y.double()) / 2).to(x.dtype)  # rounds once
        for was, now in zip((x, y), (after[0][value], after[1][value]), strict=True):
            assert torch.equal(now[chosen], middle[chosen]), value
            assert torch.equal(now[~chosen], was[~chosen]), value
    assert 0.2 < kept / a.vector.elements < 0.4
    gives = [frame for key, frame in exchange.frames.items() if key.hop == 0]
    results = [frame for key, frame in exchange.frames.items() if key.hop == 1]
    assert sum(map(len, gives)) == 4 * kept  # each part goes to who adds it up, and comes back
    assert sum(map(len, results)) >= 4 * kept  # and to who has a copy of a tied one


@pytest.mark.parametrize("method", ["random-pairs", "ring"])
def test_a_pair_comes_to_one_version_of_equal_weight(make_case, replica, method):
    _, (a, b, _) = pair(make_case, replica, method=method)
    x, y = weights(a), weights(b)
    hashes = Exchange([a, b], round=ROUND).run()
    assert hashes[0] == hashes[1]
    for value, now in weights(a).items():
        middle = (x[value].double() + y[value].double()) / 2
        assert torch.equal(now, middle.to(now.dtype)), value
    assert same(weights(a), weights(b))


@pytest.mark.parametrize("method", ["saps", "random-pairs"])
def test_who_is_alone_stays_where_it_is(make_case, replica, method):
    _, (a, *_) = pair(make_case, replica, method=method)
    before = weights(a)
    Exchange([a], round=ROUND).run()
    assert same(before, weights(a))


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("method", ["noloco", "saps-outer"])
def test_noloco_steps_by_what_a_pair_moved_and_its_middle(make_case, replica, method, gathers):
    _, replicas = pair(make_case, replica, gathers=gathers, method=method, round_=0)
    met = replicas if gathers else replicas[:2]
    slow = {v: e[0].version.values for v, e in entries(met[0]).items()}
    momenta = [{v: torch.zeros_like(x) for v, x in slow.items()} for _ in met]
    slow = [dict(slow) for _ in met]
    for round_ in range(3):
        if round_:
            train(replicas, round_, 1, gathers=gathers)
        local = [weights(r) for r in met]
        Exchange(met, round=round_).run()
        for value in (v for v in slow[0] if not v.startswith("buffer:")):
            middle = torch.stack([s[value] for s in slow]).mean(0)
            moved = torch.stack([p[value] - s[value] for p, s in zip(local, slow, strict=True)])
            for i, (s, m) in enumerate(zip(slow, momenta, strict=True)):
                # Where all meet, each steps by itself, and then they take one mean.
                own = moved[i] if gathers else moved.mean(0) + middle - s[value]
                m[value] = 0.5 * m[value] + 0.7 * own
            for s, m in zip(slow, momenta, strict=True):
                s[value] = s[value] + m[value]
            if gathers:
                middle = torch.stack([s[value] for s in slow]).mean(0)
                slow = [s | {value: middle} for s in slow]
            for r, s in zip(met, slow, strict=True):
                torch.testing.assert_close(weights(r)[value], s[value], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", ["saps", "noloco", "ring"])
def test_where_all_meet_they_come_to_one_version(make_case, replica, method):
    _, replicas = pair(make_case, replica, gathers=True, method=method)
    before = [weights(r) for r in replicas]
    hashes = Exchange(replicas, round=ROUND).run()
    assert len({*hashes}) == 1
    if method != "noloco":
        for value, now in weights(replicas[0]).items():
            mean = torch.stack([x[value].double() for x in before]).mean(0)
            torch.testing.assert_close(now, mean.to(now.dtype), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("method", ["saps", "noloco"])
def test_a_pair_that_lost_a_member_is_one_alone(make_case, replica, method):
    """Whatever came of an attempt before: it is as if there had been none."""
    _, (a, b, _) = pair(make_case, replica, method=method)
    _, (alone, *_) = pair(make_case, replica, method=method)
    first = Exchange([a, b], round=ROUND)
    first.begin()
    first.give()
    first.apply()
    Exchange([a], round=ROUND, attempt=2).run()
    Exchange([alone], round=ROUND).run()
    assert same(weights(a), weights(alone))


def test_who_joins_takes_what_the_first_came_to_with_its_momentum(make_case, replica):
    case, (a, b, c) = pair(make_case, replica, method="noloco", round_=0)
    Exchange([b, c], round=0).run()
    Exchange([a], round=0).run()
    train([a, b, c], 1, 1)
    late = replica(case, "d", 2, of=3, method="noloco")
    hashes = Exchange([a, b], joiners=[late], round=1).run()
    assert hashes[2] == hashes[0]
    assert hashes[2] != hashes[1]
    for each in (a, late):
        each.begin(2, 2, 1, hand_out(0, 2, 1, 3))
    for value, [entry, *_] in entries(late).items():
        [was, *_] = entries(a)[value]
        assert torch.equal(entry.version.state["momentum"], was.version.state["momentum"])
