"""What both ends of a link tell of a step reaches its watchers as one, and what its flows tell
corrects what was believed of it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.links.links import FAR, Caps, Links
from shoal.broker.records.steps import MOST_LINKS, StepLedger
from shoal.proto.broker_pb2 import LinkUse, StepReport


def told(**more: object) -> LinkUse:
    return LinkUse(source="a", destination="b", role="activation", codec="int8/1", **more)


def test_a_committed_step_has_each_link_role_and_codec_once() -> None:
    ledger = StepLedger(("a", "b"), 1, 4, 0.0)
    sent = told(bytes=10, dense_bytes=40, encode_s=0.25, error=0.5)
    ledger.report("a", StepReport(step=0, links=[sent]))
    assert ledger.due(1.0) is None
    other = LinkUse(source="b", destination="a", role="activation_grad", codec="raw/1", bytes=7)
    ledger.report("b", StepReport(step=0, links=[told(decode_s=0.125), other]))
    done = ledger.due(2.0)
    assert done is not None
    both = told(bytes=10, dense_bytes=40, encode_s=0.25, decode_s=0.125, error=0.5)
    assert list(done.links) == [both, other]


@pytest.mark.parametrize("holders", [3, 25, 40])
def test_a_step_with_very_many_links_tells_of_the_others_together(holders: int) -> None:
    """The oracle is the sum over all that was told, by role and codec."""
    rng = random.Random(holders)
    peers = [f"p{i}" for i in range(holders)]
    ledger, every = StepLedger(tuple(peers), 1, 4, 0.0), []
    for a in peers:
        uses = [
            LinkUse(source=a, destination=b, role=role, codec="int8/1", bytes=rng.randrange(9999),
                    dense_bytes=9999, encode_s=1.0)
            for b in peers for role in ("activation", "sync") if b != a
        ]  # fmt: skip
        every += uses
        ledger.report(a, StepReport(step=0, links=uses))
    done = ledger.due(1.0)
    assert done is not None
    named = [use for use in done.links if use.source]
    assert len(named) == min(len(every), MOST_LINKS)
    assert all(use in every for use in named)
    others = [use for use in every if use not in named]
    assert len(done.links) - len(named) == (2 if others else 0)
    least = min(use.bytes for use in named)
    assert all(use.bytes <= least for use in others)
    for field in ("bytes", "dense_bytes", "encode_s"):
        for role in ("activation", "sync"):
            told_of, all_of = (
                sum(getattr(use, field) for use in uses if use.role == role)
                for uses in (done.links, every)
            )
            assert told_of == all_of


def test_a_committed_step_has_bytes_sent_again_and_peaks_that_are_new() -> None:
    ledger, done = StepLedger(("a", "b"), 2, 4, 0.0), []
    for step, (a, b) in enumerate(((50, 70), (60, 70))):
        ledger.report("a", StepReport(step=step, peak_bytes=a, again_bytes=3))
        ledger.report("b", StepReport(step=step, peak_bytes=b, again_bytes=4 * step))
        done.append(ledger.due(1.0 + step))
        ledger.commit(done[-1], 1.0 + step)
    assert [d.again_bytes for d in done] == [3, 7]
    assert [[(p.peer, p.device_bytes) for p in d.peaks] for d in done] == [
        [("a", 50), ("b", 70)],
        [("a", 60)],
    ]


# ------------------------------------------------------------ what steps tell of links


def believed(*reports: tuple[float, str]) -> float:
    """Bytes/s of a link after reports of it, a second apart."""
    links = Links()
    for now, (rate, origin) in enumerate(reports):
        assert not links.report("a", "b", 0.01, rate, float(now), origin)
    found = links.get("a", "b", 100.0)
    assert found is not None
    return found.bytes_per_s


def test_flows_that_show_far_less_than_a_probe_correct_it_at_once() -> None:
    assert believed((150e6, "probe"), (6.2e6, "traffic")) == 6.2e6
    assert believed((150e6, "traffic"), (6.2e6, "traffic")) == 6.2e6


@given(st.floats(1.0, 1e9), st.floats(1.0, 1e9))
def test_other_flows_move_the_estimate_by_a_part_of_the_way(before: float, now: float) -> None:
    """So a burst that looks like a fast link is believed slowly, and a share hardly."""
    found = believed((before, "probe"), (now, "traffic"))
    if now * FAR < before:
        assert found == now
    else:
        assert found == pytest.approx(0.7 * before + 0.3 * now)


@pytest.mark.parametrize(
    ("reports", "up"),
    [
        ((("b", 5.1e5, True), ("c", 5.9e5, True), ("d", 4.4e5, True)), 5.1e5),
        ((("b", 5.1e5, True), ("c", 9.0e5, False)), 9.0e5),  # a line carries what one flow had
        ((("b", 5.1e5, False), ("c", 9.0e5, False)), math.inf),  # paths, and nobody knows of what
        ((("b", 5.1e5, False), ("c", 5.2e5, False)), 5.2e5),
    ],
)
def test_flows_that_shared_a_line_show_what_it_carries(
    reports: Sequence[tuple[str, float, bool]], up: float
) -> None:
    links = Links()
    for to, rate, shared in reports:
        assert not links.report("a", to, 0.01, rate, 1.0, "traffic", shared=shared)
        assert not links.report("a", to, 0.01, 0.0, 2.0, "traffic")  # a round trip tells of none
    found = links.network(("a", "b", "c", "d"), {}, 3.0)
    assert found.up[0] == up
    assert links.network(("a", "b"), {"a": Caps(up=1e5)}, 3.0).up[0] == 1e5
