"""What a trace says, against worlds whose answer is known beforehand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.sim.report.measures.critical import critical_path, shares
from shoal.sim.report.measures.measure import measure, overlap
from shoal.sim.report.measures.verdict import judge
from shoal.sim.trace import Mark, Span, Trace

PARTS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda p: tuple(sorted(p))))


@given(parts=PARTS, ends=st.tuples(st.integers(0, 40), st.integers(0, 40)))
def test_overlap_counts_every_second_once(
    parts: list[tuple[int, int]], ends: tuple[int, int]
) -> None:
    start, end = sorted(ends)
    wanted = sum(any(a <= t < b for a, b in parts) for t in range(start, end))
    assert overlap([(float(a), float(b)) for a, b in parts], start, end) == wanted


def act(peer: str, kind: str, start_s: float, end_s: float, step: int = 0, m: int = 0) -> Span:
    return Span(
        start_s=start_s, end_s=end_s, peer=peer, kind=kind, step=step, microbatch=m, stage=0
    )


def send(
    a: str,
    b: str,
    start_s: float,
    end_s: float,
    step: int = 0,
    m: int = 0,
    role: str = "activation",
) -> Span:
    return Span(
        start_s=start_s,
        end_s=end_s,
        peer=a,
        kind="send",
        to=b,
        step=step,
        microbatch=m,
        role=role,
        size_bytes=1000,
    )


TELLS_S = 1e-6


def relay(*, compute: tuple[float, float], link: float, latency: float, steps: int) -> Trace:
    """a computes, sends to b, which computes and tells a; then the next step."""
    trace, now = Trace(), 0.0
    for step in range(steps):
        ready = now + compute[0]
        left = ready + link
        begin = left + latency
        trace.add(act("a", "forward", now, ready, step))
        trace.add(send("a", "b", ready, left, step))
        trace.add(act("b", "forward", begin, begin + compute[1], step))
        now = begin + compute[1]
        trace.add(send("b", "a", now, now + TELLS_S, step, role="sync"))
        now += TELLS_S
        trace.add(Span(start_s=now, end_s=now, peer="a", kind="update", step=step))
    return trace


def network(rate: float, latency_s: float = 0.0) -> Network:
    ends = np.full(2, np.inf)
    return Network(
        (PeerId("a"), PeerId("b")), np.full((2, 2), latency_s), np.full((2, 2), rate), ends, ends
    )


@settings(deadline=None, max_examples=40)
@given(
    compute=st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)),
    link=st.floats(0.1, 5),
    latency=st.floats(0.0, 2),
)
def test_a_relay_hangs_on_each_as_long_as_it_takes(
    compute: tuple[float, float], link: float, latency: float
) -> None:
    trace = relay(compute=compute, link=link, latency=latency, steps=1)
    path = critical_path(trace.spans, 0.0, trace.end_s - TELLS_S / 2, {("a", "b"): latency})
    found = dict(shares(path))
    total = sum(compute) + link + latency
    assert found["a"] == pytest.approx(compute[0] / total, rel=1e-4)
    assert found["b"] == pytest.approx(compute[1] / total, rel=1e-4)
    assert found["a", "b"] == pytest.approx((link + latency) / total, rel=1e-4)
    assert path[0].start_s == pytest.approx(0.0)
    for one, other in pairwise(path):
        assert one.end_s == pytest.approx(other.start_s)


def test_what_was_there_in_time_is_no_cause() -> None:
    # b was busy until 5 and went on at 5.5 by itself; the frame had come at 2.
    spans = [
        act("a", "forward", 0, 1),
        send("a", "b", 1, 2),
        act("b", "backward", 0, 5),
        act("b", "forward", 5.5, 6),
    ]
    path = critical_path(spans, 0, 6)
    assert [p.on for p in path] == ["b", None, "b"]
    assert shares(path) == [("b", pytest.approx(5.5 / 6))]


def test_the_last_frame_that_is_needed_is_the_cause() -> None:
    spans = [
        act("a", "forward", 0, 1),
        act("c", "forward", 0, 3),
        send("a", "b", 1, 2),
        send("c", "b", 3, 4),
        send("c", "b", 3, 4.5, m=1),  # of another microbatch
        act("b", "forward", 4, 5),
    ]
    path = critical_path(spans, 0, 5)
    assert [p.on for p in path] == ["c", ("c", "b"), "b"]


@pytest.mark.parametrize(
    ("compute", "link", "latency", "wanted"),
    [
        ((9.0, 1.0), 0.1, 0.0, "a"),
        ((1.0, 9.0), 0.1, 0.0, "b"),
        ((1.0, 1.0), 9.0, 0.0, ("a", "b")),
        ((1.0, 1.0), 0.1, 9.0, ("a", "b")),
    ],
)
def test_the_verdict_names_what_takes_longest(
    compute: tuple[float, float], link: float, latency: float, wanted: object
) -> None:
    trace = relay(compute=compute, link=link, latency=latency, steps=6)
    verdict = judge(trace, measure(trace, network(1e4, latency)))
    assert verdict.on == wanted
    assert verdict.share > 0.5
    assert ("delays" in verdict.text) == (latency > 1)


def test_alike_peers_are_not_blamed() -> None:
    trace = relay(compute=(5.0, 5.0), link=0.1, latency=0.0, steps=6)
    verdict = judge(trace, measure(trace))
    assert verdict.on is None
    assert verdict.text.startswith("No peer or link")


def test_who_trains_alone_is_said_to() -> None:
    trace = Trace()
    for step in range(5):
        trace.add(act("a", "forward", step, step + 0.5, step))
        trace.add(send("b", "a", step, step + 0.1, step, role="probe"))
    verdict = judge(trace, measure(trace))
    assert verdict.text == "a trains alone; it computes 57% of the time"  # 4 * 0.5 of 3.5 s
    assert verdict.on == "a"


def test_shares_and_use_are_of_the_typical_steps() -> None:
    trace = relay(compute=(2.0, 1.0), link=1.0, latency=0.0, steps=6)
    found = measure(trace, network(2000.0))
    assert [s.number for s in found.typical] == [1, 2, 3, 4, 5]
    assert found.step_s == pytest.approx(4.0, rel=1e-5)
    assert found.share(found.peers["a"].compute_s) == pytest.approx(0.5, rel=1e-5)
    assert found.share(found.peers["b"].compute_s) == pytest.approx(0.25, rel=1e-5)
    assert found.bubble == pytest.approx(1 - 0.375, rel=1e-5)
    link = found.links["a", "b"]
    assert found.share(link.busy_s) == pytest.approx(0.25, rel=1e-5)
    assert found.use(link) == pytest.approx(1000 / (2000.0 * 4.0), rel=1e-5)


def test_steps_with_marks_are_not_typical() -> None:
    trace = relay(compute=(2.0, 1.0), link=1.0, latency=0.0, steps=8)
    trace.add(Mark(at_s=9.0, who="b", what="slow"))  # within step 2
    assert [s.number for s in measure(trace).typical] == [3, 4, 5, 6, 7]


def test_goodput_leaves_out_what_was_done_again() -> None:
    trace = relay(compute=(2.0, 1.0), link=1.0, latency=0.0, steps=3)
    assert measure(trace).goodput == pytest.approx(1.0, rel=1e-5)
    again = Trace()
    for span in trace.spans:
        again.add(span)
    for span in trace.spans:  # b was lost after step 2 and 3 s later all begins anew from step 1
        if span.step >= 1:
            moved = {name: getattr(span, name) for name in span.__slots__}
            moved["start_s"] += 11.0
            moved["end_s"] += 11.0
            again.add(Span(**moved))
    # 4 s of step 0, and 8 s of steps 1 and 2 the second time, of 23 s.
    assert measure(again).goodput == pytest.approx(12 / 23, rel=1e-5)
    assert len(measure(again).steps) == 3


def test_goodput_leaves_out_what_was_waited_for() -> None:
    """Six steps of a second; within the fourth the line is dead for 25 s."""
    trace, at = Trace(), 0.0
    for step in range(6):
        stands_s = 25.0 if step == 3 else 0.0
        trace.add(act("a", "forward", at, at + 0.5, step))
        trace.add(act("a", "update", at + 0.5 + stands_s, at + 1.0 + stands_s, step))
        at += 1.0 + stands_s
    assert measure(trace).goodput == pytest.approx(1.0, rel=1e-5), "a long step, and no fault"
    trace.add(Mark(at_s=3.6, who="a", what="part"))
    assert measure(trace).goodput == pytest.approx(6 / 31, rel=1e-5)


def test_nothing_is_measured_of_nothing() -> None:
    found = measure(Trace())
    assert (found.steps, found.typical, found.bubble, found.goodput) == ((), (), None, None)
    assert judge(Trace(), found).text == ""
