"""How much clients send: against a search through all numbers, with the bytes that the codec
makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.policies.uploads import (
    Links,
    Update,
    as_uploaded,
    lines_of,
    links_of,
    sending_to_all,
    shown_line,
    weights_of,
)
from shoal.compression.sparse.topk import TopK
from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.cohorts import WEIGHT_UNIT as UNIT
from shoal.job.clients.client_compression import ClientLinks
from shoal.proto.broker_pb2 import HostLine

ELEMENTS = 150
RATIOS = st.floats(0.005, 1.0)
LINKS = st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(10.0, 1e5)), min_size=1, max_size=8)


def encoded_bytes() -> list[int]:
    """Of each number of kept ones, from 0: what the codec makes of them, or all as they are."""
    numbers, found = torch.randn(ELEMENTS), [0]
    for kept in range(1, ELEMENTS + 1):
        encoded = TopK(ratio=ELEMENTS / kept, values="fp32").encode(numbers)
        found.append(min(sum(b.nbytes for b in encoded.buffers), 4 * ELEMENTS))
    return found


BYTES = encoded_bytes()


def ends(latency: float, rate: float, kept: int, whole: int) -> float:
    return latency + (whole + BYTES[kept]) / rate


@given(RATIOS, LINKS, st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_all_send_as_much_as_ends_with_the_slowest(
    ratio: float, links: list[tuple[float, float]], whole: int
) -> None:
    least, (latency, rate) = max(1, round(ratio * ELEMENTS)), zip(*links, strict=True)
    until = max(ends(a, b, least, whole) for a, b in links)
    update = Update(ELEMENTS, whole)
    kept = update.by_links(ratio, Links(np.array(latency), np.array(rate))).tolist()
    for k, (a, b) in zip(kept, links, strict=True):
        assert ends(a, b, k, whole) <= until, "nobody ends after the slowest"
        assert k == ELEMENTS or ends(a, b, k + 1, whole) > until, "one more does"
        assert k >= least
    slowest = max(range(len(links)), key=lambda i: ends(*links[i], least, whole))
    if BYTES[least + 1 :][:1] > [BYTES[least]]:
        assert kept[slowest] == least


@given(RATIOS, st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_equal_links_are_top_k(ratio: float, clients: int) -> None:
    update, links = Update(ELEMENTS), Links(np.full(clients, 0.1), np.full(clients, 333.3))
    kept = update.by_links(ratio, links)
    assert kept.tolist() == update.least(ratio, clients).tolist()
    assert weights_of(range(1, clients + 1), kept, 1.0) == [n * UNIT for n in range(1, clients + 1)]


def test_weights_follow_ratios() -> None:
    kept = np.array([10, 30, 20])
    assert weights_of([5, 5, 7], kept, 0.0) == [5 * UNIT, 5 * UNIT, 7 * UNIT]
    assert weights_of([4, 4, 8], kept, 1.0) == [2 * UNIT, 6 * UNIT, 8 * UNIT]
    assert weights_of([4], np.array([3]), 0.5) == [4 * UNIT]


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("3MB/s", 3e6, 0.0),
        ("uniform:1MB/s,5MB/s", 3e6, 4e6 / 12**0.5),
        ("normal:3MB/s,0.6MB/s", 3e6, 6e5),
    ],
)
def test_links_are_drawn_by_seed_and_client(text: str, mean: float, deviation: float) -> None:
    said = ClientLinks(up=text, latency="uniform:10ms,30ms", seed=4)
    links = links_of(said, range(4000))
    assert links.bytes_per_s.mean() == pytest.approx(mean, rel=0.02)
    assert links.bytes_per_s.std() == pytest.approx(deviation, rel=0.05)
    assert 0.01 <= links.latency_s.min() < 0.011
    assert abs(np.corrcoef(links.latency_s, links.bytes_per_s)[0, 1]) < 0.1 if deviation else True
    some = links_of(said, [17, 3999])
    assert some.bytes_per_s.tolist() == links.bytes_per_s[[17, 3999]].tolist()
    other = links_of(ClientLinks(up=text, latency="uniform:10ms,30ms", seed=5), range(4000))
    assert not (other.latency_s == links.latency_s).any()


def test_no_draw_is_below_a_tenth_of_its_mean() -> None:
    wild = links_of(ClientLinks(up="normal:1MB/s,5MB/s"), range(500))
    assert wild.bytes_per_s.min() == 1e5


@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_host_sends_all_but_its_own_part_by_its_line_and_each_part_by_its_pair(
    peers: int, seed: int, unlimited: bool
) -> None:
    rng = np.random.default_rng(seed)
    latency, bandwidth = rng.uniform(0.0, 0.3, (peers, peers)), rng.uniform(1e3, 1e6, (peers,) * 2)
    up = np.full(peers, np.inf) if unlimited else rng.uniform(1e3, 1e6, peers)
    network = Network(
        tuple(PeerId(f"p{i}") for i in range(peers)), latency, bandwidth, up, np.full(peers, np.inf)
    )
    lines, links, size = lines_of(network).tolist(), sending_to_all(network, [None] * peers), 1000.0
    for i in range(peers):
        others = [j for j in range(peers) if j != i]
        assert lines[i] == min(up[i], max(bandwidth[i, j] for j in others))
        adding = [line if 2 * line >= max(lines) else 0.0 for line in lines]
        parts = {j: size * adding[j] / sum(adding) for j in others}
        takes = max(sum(parts.values()) / lines[i], *(parts[j] / bandwidth[i, j] for j in others))
        assert size / links.bytes_per_s[i] == pytest.approx(takes, abs=1e-6)
        assert links.latency_s[i] == max(latency[i, j] for j in others)


@given(st.integers(2, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_uploads_of_rounds_gone_by_count_more_than_what_was_measured(peers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids, up = tuple(PeerId(f"p{i}") for i in range(peers)), rng.uniform(1e3, 1e6, peers)
    latency, bandwidth = rng.uniform(0.0, 0.3, (peers, peers)), np.full((peers, peers), 1e6)
    network = Network(ids, latency, bandwidth, up, np.full(peers, np.inf))
    shown = [
        HostLine(bytes_per_s=1e3 + i, update_bytes_per_s=2e3 + i, latency_s=0.01 * i)
        if rng.random() < 0.5
        else None
        for i in range(peers)
    ]
    lines, links = lines_of(as_uploaded(network, shown)), sending_to_all(network, shown)
    believed = [u if s is None else s.bytes_per_s for u, s in zip(up.tolist(), shown, strict=True)]
    assert lines.tolist() == believed
    told = Network(ids, latency, bandwidth, np.array(believed), np.full(peers, np.inf))
    others = sending_to_all(told, [None] * peers)
    for i, line in enumerate(shown):
        if line is None:
            assert links.bytes_per_s[i] == others.bytes_per_s[i]
            assert links.latency_s[i] == others.latency_s[i]
        else:
            assert (links.bytes_per_s[i], links.latency_s[i]) == (2e3 + i, 0.01 * i)
    assert (network.up == up).all(), "what was measured stays"


@given(st.floats(0.0, 0.5), st.integers(1, 10**9), st.floats(1e3, 1e8), st.floats(0.1, 2.0))
@settings(max_examples=60, deadline=None)
def test_an_upload_shows_the_line_that_it_went_by_if_it_took_long_enough(
    latency: float, whole: int, rate: float, share: float
) -> None:
    peers, pairs = (PeerId("a"), PeerId("b")), np.full((2, 2), 1e4)
    times = np.array([[9.0, latency], [0.3, 9.0]])
    network = Network(peers, times, pairs, pairs[0], pairs[0])
    sent, goes_s = int(share * whole), whole / rate
    shown = shown_line(network, 0, sent, whole, 2 * latency + goes_s)
    if 2 * latency + goes_s < 0.1 or goes_s < 6 * latency or not sent:
        assert shown is None, "that tells of its latency"
    else:
        assert shown is not None
        assert shown.update_bytes_per_s == pytest.approx(rate)
        assert shown.bytes_per_s == pytest.approx(rate * min(1.0, sent / whole))
        assert shown.latency_s == latency
