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
    assert ledger.commit(1.0) is None
    other = LinkUse(source="b", destination="a", role="activation_grad", codec="raw/1", bytes=7)
    ledger.report("b", StepReport(step=0, links=[told(decode_s=0.125), other]))
    done = ledger.commit(2.0)
    assert done is not None
    both = told(bytes=10, dense_bytes=40, encode_s=0.25, decode_s=0.125, error=0.5)
    assert list(done.links) == [both, other]
