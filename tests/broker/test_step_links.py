"""What both ends of a link tell of a step reaches its watchers as one."""

from __future__ import annotations

from shoal.broker.steps import StepLedger
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
