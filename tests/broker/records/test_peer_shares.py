"""Shares of peers: as a sum over events by hand says, bounded, and the same after a restart."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.broker.records import peer_shares
from shoal.broker.records.peer_shares import PeerShares
from shoal.dag.plan.plan import PeerId
from shoal.proto.broker_pb2 import LinkUse, PeerShare, RoundDone, StepDone

PEERS = st.sets(st.sampled_from("abc"), min_size=1)
USES = st.lists(st.tuples(st.sampled_from("abcx"), st.integers(0, 9)), max_size=4)
STEPS = st.tuples(st.sampled_from(["r1", "r2", "r3", "r4"]), PEERS, st.integers(0, 9), USES)


def stepped(
    shares: PeerShares, run: str, peers, samples: int, uses, seconds: float = 0.5, at_s: float = 9.0
) -> None:
    links = [LinkUse(source=who, destination="z", bytes=n) for who, n in uses]
    done = StepDone(seconds=seconds, links=links)
    shares.stepped(run, f"job {run}", map(PeerId, sorted(peers)), samples, done, at_s)


def restarted(shares: PeerShares) -> PeerShares:
    found = PeerShares()
    for share in shares.kept():
        found.restore(PeerShare.FromString(share.SerializeToString()))
    return found


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=20), st.integers(0, 20))
def test_a_share_is_the_sum_of_what_was_committed(steps, restart_at: int) -> None:
    shares = PeerShares()
    wanted: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for number, (run, peers, samples, uses) in enumerate(steps):
        if number == restart_at:
            shares = restarted(shares)
        stepped(shares, run, peers, samples, uses)
        for peer in peers:
            sums = wanted[peer, run]
            sums[0] += samples
            sums[1] += sum(n for who, n in uses if who == peer)
            sums[2] += 0.5
    for shown in (shares, restarted(shares)):
        found = {
            (s.peer, s.run): [s.samples, s.sent_bytes, s.seconds]
            for peer in "abcx"
            for s in shown.of(peer)
        }
        assert found == wanted


def test_a_round_counts_the_same_for_each_whom_it_took_bytes() -> None:
    shares = PeerShares()
    shares.met("r1", "job", map(PeerId, "aab"), RoundDone(sent_bytes=10), 3.0)
    assert [(s.sent_bytes, s.samples) for p in "abc" for s in shares.of(p)] == [(5, 0), (5, 0)]


def test_of_many_runs_the_oldest_share_a_row_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_shares, "MOST_RUNS", 2)
    monkeypatch.setattr(peer_shares, "MOST_PEERS", 2)
    shares = PeerShares()
    for number in range(5):
        stepped(shares, f"r{number}", "a", 10**number, [("a", 1)])
        shares = restarted(shares)
    assert [(s.run, s.samples, s.sent_bytes) for s in shares.of("a")] == [
        ("", 111, 3),
        ("r3", 1000, 1),
        ("r4", 10000, 1),
    ]
    for peer in "bc":
        stepped(shares, "r4", peer, 1, [])
    assert not shares.of("a"), "of too many peers the one goes that was new to a run first"
    assert shares.of("b")
    assert shares.of("c")


def test_a_share_says_from_when_until_when_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_shares, "MOST_RUNS", 1)
    shares = PeerShares()
    stepped(shares, "r1", "a", 1, [], seconds=2.0, at_s=10.0)
    stepped(shares, "r1", "a", 1, [], seconds=2.0, at_s=15.0)
    shares.met("r1", "job", map(PeerId, "a"), RoundDone(), 17.0)
    shares = restarted(shares)
    stepped(shares, "r2", "a", 1, [], seconds=1.0, at_s=30.0)
    stepped(shares, "r3", "a", 1, [], seconds=0.5, at_s=40.0)
    found = [(s.run, s.first_s, s.last_s) for s in shares.of("a")]
    assert found == [("", 8.0, 30.0), ("r3", 39.5, 40.0)]
