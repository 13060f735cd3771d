"""Shaped paths as arithmetic: shares of links, when bytes leave, and slowing everything alike."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.sim.scenario.scenario import SCENARIOS, Scenario
from shoal.sim.shaped.pacing import AHEAD_S, Pacer
from shoal.sim.shaped.shaping import Flow, Shaping, fair_rates

INF = float("inf")
RATES = st.one_of(st.floats(1e3, 1e9), st.just(INF))


def shaping(n: int, **said: Any) -> Shaping:
    """N ends 10 ms apart at 1 MB/s, unless said otherwise; one number stands for a whole square."""
    for name in ("latency_s", "bandwidth"):
        if isinstance(said.get(name), float):
            said[name] = ((said[name],) * n,) * n
    fields: dict[str, Any] = {
        "names": tuple(f"p{i}" for i in range(n)),
        "latency_s": ((0.01,) * n,) * n,
        "bandwidth": ((1e6,) * n,) * n,
        "up": (INF,) * n,
        "down": (INF,) * n,
    }
    return Shaping(**(fields | said))


@st.composite
def networks(draw: st.DrawFn) -> Shaping:
    n = draw(st.integers(2, 4))
    row = st.lists(RATES, min_size=n, max_size=n).map(tuple)
    square = st.lists(row, min_size=n, max_size=n).map(tuple)
    return shaping(n, latency_s=0.1, bandwidth=draw(square), up=draw(row), down=draw(row))


# ---------------------------------------------------------------- shares


def limits(net: Shaping, flows: list[Flow]) -> list[tuple[float, list[Flow]]]:
    """(capacity, who is behind it) of every uplink, downlink and pair."""
    n = len(net.names)
    found = [(net.bandwidth[a][b], [(a, b)]) for a, b in flows]
    found += [(net.up[i], [f for f in flows if f[0] == i]) for i in range(n)]
    found += [(net.down[i], [f for f in flows if f[1] == i]) for i in range(n)]
    return [(capacity, fs) for capacity, fs in found if fs]


@given(networks(), st.data())
def test_rates_are_feasible_and_every_flow_has_a_bottleneck(
    net: Shaping, data: st.DataObject
) -> None:
    n = len(net.names)
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    flows = data.draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))
    rates = fair_rates(flows, net)
    assert rates.keys() == set(flows)
    # Max-min fair, by its definition: a full limit where nobody has more than this flow.
    for flow in flows:
        if rates[flow] == INF:
            continue
        assert any(
            flow in fs
            and sum(rates[f] for f in fs) >= capacity * (1 - 1e-9)
            and rates[flow] >= max(rates[f] for f in fs) * (1 - 1e-9)
            for capacity, fs in limits(net, flows)
        )
    for capacity, fs in limits(net, flows):
        assert sum(rates[f] for f in fs) <= capacity * (1 + 1e-9)


def test_an_uplink_is_shared_and_what_a_slow_pair_leaves_goes_to_the_other() -> None:
    net = shaping(3, bandwidth=8.0, up=(10.0, INF, INF))
    assert fair_rates([(0, 1), (0, 2)], net) == {(0, 1): 5.0, (0, 2): 5.0}
    assert fair_rates([(0, 1), (0, 2)], net, {(0, 1): 4.0}) == {(0, 1): 2.0, (0, 2): 8.0}
    assert fair_rates([], net) == {}


# ---------------------------------------------------------------- departures


@given(
    sizes=st.lists(st.integers(1, 10**6), min_size=1, max_size=20),
    gaps=st.lists(st.floats(0.0, 3.0), min_size=20, max_size=20),
    rate=st.floats(1e3, 1e9),
)
def test_what_never_runs_dry_leaves_at_the_rate_however_late_the_loop_comes(
    sizes: list[int], gaps: list[float], rate: float
) -> None:
    pacer, flow, now = Pacer(shaping(2, bandwidth=rate)), (0, 1), 50.0
    pacer.wait(flow, now)
    sent = 0
    for size, gap in zip(sizes, gaps, strict=False):
        now += gap
        pacer.wait(flow, now)  # it waits already: nothing changes
        sent += size
        assert pacer.leave(flow, size, now) == pytest.approx(50.0 + sent / rate)


def test_a_flow_that_ran_dry_starts_anew() -> None:
    pacer, flow = Pacer(shaping(2, bandwidth=100.0)), (0, 1)
    pacer.wait(flow, 0.0)
    assert pacer.leave(flow, 100, 0.0) == 1.0
    pacer.rest(flow)
    pacer.wait(flow, 0.5)  # the last piece is still leaving
    assert pacer.leave(flow, 100, 0.5) == 2.0
    pacer.rest(flow)
    pacer.wait(flow, 10.0)
    assert pacer.due(flow) == 10.0 - AHEAD_S
    assert pacer.leave(flow, 100, 10.0) == 11.0


def test_a_piece_that_is_leaving_takes_its_share_though_nothing_waits_behind_it() -> None:
    pacer = Pacer(shaping(3, bandwidth=INF, up=(100.0, INF, INF)))
    pacer.wait((0, 1), 0.0)
    assert pacer.leave((0, 1), 100, 0.0) == 1.0
    pacer.rest((0, 1))
    pacer.wait((0, 2), 0.0)
    assert pacer.rate((0, 2), 0.5) == 50.0
    assert pacer.rate((0, 2), 1.0) == 100.0


def test_a_slowed_pair_is_slow_until_it_is_restored() -> None:
    pacer, flow = Pacer(shaping(2, bandwidth=1000.0)), (0, 1)
    pacer.wait(flow, 0.0)
    pacer.slow(flow, 10.0)
    assert pacer.leave(flow, 100, 0.0) == pytest.approx(1.0)
    pacer.slow(flow, 1.0)
    assert pacer.leave(flow, 100, 0.0) == pytest.approx(1.1)


@given(st.floats(1e3, 1e12))
def test_pieces_are_short_in_time_within_what_is_worth_a_call(rate: float) -> None:
    pacer, flow = Pacer(shaping(2, bandwidth=rate)), (0, 1)
    pacer.wait(flow, 0.0)
    size = pacer.piece_bytes(flow, 0.0)
    assert 1448 <= size <= 256 * 1024
    assert size / rate <= AHEAD_S or size == 1448


def test_a_path_without_a_limit_takes_no_time() -> None:
    pacer, flow = Pacer(shaping(2, bandwidth=INF)), (0, 1)
    pacer.wait(flow, 3.0)
    assert pacer.leave(flow, 10**9, 3.0) == 3.0
    assert pacer.piece_bytes(flow, 3.0) == 256 * 1024


# ---------------------------------------------------------------- jitter and loss


def test_without_jitter_and_loss_every_piece_takes_the_latency() -> None:
    pacer = Pacer(shaping(2, latency_s=0.25))
    assert {pacer.delay_s((0, 1), size) for size in (1, 10**6)} == {0.25}


def test_jitter_is_drawn_once_for_what_goes_without_a_gap() -> None:
    jitter = ((0.2,) * 2,) * 2
    pacer, flow, drawn = Pacer(shaping(2, latency_s=0.1, jitter_s=jitter)), (0, 1), set()
    for message in range(200):
        pacer.wait(flow, 10.0 * message)
        delays = {pacer.delay_s(flow, 1000) for _ in range(3) if pacer.leave(flow, 1000, 0.0)}
        assert len(delays) == 1
        drawn |= delays
        pacer.rest(flow)
    # Evenly from -0.1 to 0.3 s, and never below 0: 1 in 4 is cut off there.
    assert len(drawn) > 100
    assert 0.0 == min(drawn) <= max(drawn) <= 0.3
    assert sum(drawn) / len(drawn) == pytest.approx(0.15, abs=0.02)


def test_lost_packets_come_a_round_trip_later_and_take_their_share_of_the_path() -> None:
    latency = ((0.0, 0.1), (0.3, 0.0))
    net = shaping(2, latency_s=latency, bandwidth=1000.0, loss=((0.0, 0.2), (0.0, 0.0)))
    pacer, flow = Pacer(net), (0, 1)
    pacer.wait(flow, 0.0)
    assert pacer.leave(flow, 1000, 0.0) == pytest.approx(1.0 / 0.8)
    rounds = [round((pacer.delay_s(flow, 1448) - 0.1) / 0.4, 9) for _ in range(4000)]
    assert set(rounds) <= set(range(12))
    # One packet: P(r rounds or more) = loss^r.
    for r in (1, 2):
        assert sum(n >= r for n in rounds) / len(rounds) == pytest.approx(0.2**r, abs=0.02)
    assert pacer.delay_s((1, 0), 10**6) == 0.3


# ---------------------------------------------------------------- the whole network


@given(networks(), st.floats(0.1, 100.0), st.integers(0, 10**9))
def test_a_slowed_network_takes_that_much_longer_for_everything(
    net: Shaping, factor: float, size: int
) -> None:
    slow = net.scaled(factor)
    flows = [(0, 1), (1, 0)]
    before, after = fair_rates(flows, net), fair_rates(flows, slow)
    assert slow.loss == net.loss
    for a, b in flows:
        alone = net.latency_s[a][b] + size / before[a, b]
        assert slow.latency_s[a][b] + size / after[a, b] == pytest.approx(factor * alone)
    assert net.scaled(1.0) == net


@given(networks())
def test_json_gives_the_same_back(net: Shaping) -> None:
    text = net.to_json()
    assert "\n" not in text
    assert Shaping.from_json(text) == net
    with pytest.raises(ValueError, match="expected a JSON object with names"):
        Shaping.from_json("{}")


def test_the_broker_has_paths_too() -> None:
    scenario = Scenario.from_toml(SCENARIOS / "testbed-8.toml")
    net, peers = Shaping.of_scenario(scenario), scenario.network()
    assert (net.jitter_s, net.loss) == ((), ())
    assert net.names == (*peers.peers, "broker")
    assert all(
        net.latency_s[i][j] == peers.latency_s[i, j]
        and net.bandwidth[i][j] == peers.bandwidth[i, j]
        for i in range(len(peers))
        for j in range(len(peers))
        if i != j
    )
    first, last = scenario.peers[0].name, scenario.peers[-1].name
    assert net.latency_s[net.number("broker")][net.number(last)] > 0
    # It is at the first peer's place, unless the scenario says where.
    assert math.isfinite(net.bandwidth[net.number(first)][net.number("broker")])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"names": ("a", "a")}, "each of them once"),
        ({"up": (1.0,)}, "up has 1 numbers: expected 2"),
        ({"bandwidth": ((1.0, 0.0), (1.0, 1.0))}, "bandwidth of p0 to p1 is 0.0"),
        ({"latency_s": ((0.0, 1.0), (INF, 0.0))}, "latency_s of p1 to p0 is inf"),
        ({"latency_s": ((0.0, 1.0),)}, "latency_s: expected 2 rows of 2 numbers"),
        ({"down": (1.0, float("nan"))}, "down of p1 is nan"),
        ({"loss": ((0.0, 1.0), (0.0, 0.0))}, "loss of p0 to p1 is 1.0"),
        ({"jitter_s": ((0.0, -1.0), (0.0, 0.0))}, "jitter_s of p0 to p1 is -1.0"),
    ],
)
def test_what_cannot_be_a_network_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        shaping(2, **fields)


def test_an_unknown_end_and_a_wrong_scale_are_refused() -> None:
    with pytest.raises(ValueError, match='no end is called "p9": expected one of p0, p1'):
        shaping(2).number("p9")
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="time_scale"):
            shaping(2).scaled(wrong)
