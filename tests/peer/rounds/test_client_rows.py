"""Contributions of clients, each by itself: what an attempt takes of whom, and makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.dag.execute.execute import TensorSpecError
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.rounds import wiring as of_wiring
from shoal.dag.rounds.sums import LargeContributionError
from shoal.dag.rounds.vector import Entry, RunVector
from shoal.dag.rounds.wiring import GIVE, RESULT, port_of, wiring
from shoal.dag.schedule.flow import Role
from shoal.job.clients.client_options import Cohorts
from shoal.job.clients.partitioning import Partitioning
from shoal.job.rounds import RoundSettings
from shoal.net.links.frame import FrameKey, Payload
from shoal.peer.core.rounds.round_exchange import segments_of
from shoal.peer.rounds.attempt import RoundAttempt
from shoal.peer.rounds.client_tensors import ClientTensors
from shoal.peer.rounds.round_frames import most_of_any
from shoal.proto import broker_pb2 as pb
from shoal.tests.peer.conftest import arrived

VECTOR = RunVector(
    [
        Entry("param:w", TensorSpec((6,), "float32"), 0, 0),
        Entry("buffer:seen", TensorSpec((4,), "float32"), 6, 0, integer=True),
        Entry("param:b", TensorSpec((3,), "float32"), 10, 1),
    ]
)
WHOLE = (0, 13)
WEIGHTS = {"a": 2, "b": 3}
COUNTS = torch.tensor([[4, 9], [-(2**62), 7], [3, 2**40], [2**62, 8], [5, 5]])
"""Of the buffer, of each client of a and b; some have the bits of no float."""


def attempts(aggregate="median"):
    """Those of a, which combines, and of b; with the rows of both."""
    cohorts = Cohorts(
        partition=Partitioning(kind="iid", clients=9), labels="", clients=9, per_round=5,
        weight="equal", aggregate=aggregate, byzantine=1,
    )  # fmt: skip
    settings = RoundSettings(method="fedavg", cohorts=cohorts)
    segment = pb.RoundSegment(start=0, stop=13, aggregator="a", takers=["a", "b"])
    for peer, weight in WEIGHTS.items():
        segment.givers.add(peer=peer, weight=weight)
    plan = pb.RoundPlan(
        run="r.0", term=1, attempt=1, weight=5, members=2, exponent=10, segments=[segment],
        by_client=True,
    )  # fmt: skip
    found = []
    for peer in WEIGHTS:
        wired = wiring(VECTOR, segments_of(plan), peer, by_client=True)
        found.append(RoundAttempt(plan, wired, peer, ClientTensors(VECTOR, settings, "r.0")))
    rows = torch.randn(5, 13, generator=torch.Generator().manual_seed(3))
    rows[:, 6:10] = COUNTS.view(torch.float32)
    return (*found, rows)


def give(attempt, rows, block=0):
    mine = [(p, rows[:, p.entry.start : p.entry.stop]) for p in VECTOR.pieces(WHOLE)]
    [hop] = {hop for _, hop, _ in attempt.gifts()}
    return attempt.give(WHOLE, hop, block, mine)


def frame(attempt, rows, block=0, **changes):
    """One of b's to a; `rows`: of b."""
    key = FrameKey("r", 1, 0, Role.ROUND, block, GIVE, port_of(WHOLE), "b", "a")
    coding = attempt.coding(key, WHOLE)
    given = give(attempt, rows, block).buffers
    made = arrived(key, Payload(coding.name, b"", coding.spec(WHOLE), given))
    return replace(made, **changes)


@pytest.mark.parametrize("frames", [1, 3])
def test_of_each_element_the_middle_one_of_all_clients(monkeypatch, frames):
    if frames > 1:
        monkeypatch.setattr(of_wiring, "PIECE", 13)
    a, b, rows = attempts()
    assert len([*b.gifts()]) == frames
    for block in reversed(range(frames)):
        came = frame(b, rows[2:], block)
        assert a.comes(came.key) == WHOLE
        assert came.data.nbytes <= a.coding(came.key, WHOLE).most_bytes(WHOLE)
        a.take(WHOLE, came)
        a.take(WHOLE, came)  # a second one has no effect
    assert a.made(WHOLE) is None, "its own are not there yet"
    for _, _, block in a.gifts():
        give(a, rows[:2], block)
    result = a.made(WHOLE).values
    numbers = [i for i in range(13) if not 6 <= i < 10]
    assert torch.equal(result[numbers], rows[:, numbers].sort(0).values[2])
    assert result[6:10].view(torch.int64).tolist() == [4, 8]


def test_krum_gives_all_of_one_client_by_what_are_numbers():
    a, b, rows = attempts("krum")
    rows[4, :6] = 90.0
    a.take(WHOLE, frame(b, rows[2:]))
    give(a, rows[:2])
    numbers = [i for i in range(13) if not 6 <= i < 10]
    apart = torch.cdist(rows[:, numbers].double(), rows[:, numbers].double()).square()
    best = apart.sort(1).values[:, 1:3].sum(1).argmin()
    assert torch.equal(a.made(WHOLE).values[numbers], rows[best, numbers])


def test_a_giver_has_as_many_rows_as_the_plan_says_it_has_clients():
    a, b, rows = attempts()
    key = FrameKey("r", 1, 0, Role.ROUND, 1, GIVE, port_of(WHOLE), "b", "a")
    assert a.comes(key) is None, "all of b's fit into one frame"
    came = frame(b, rows[2:])
    more = torch.cat([rows[2:], rows[:1]])
    spec = TensorSpec((4 * 13,), "float32")
    data = memoryview(bytearray(more.numpy().tobytes()))
    with pytest.raises(TensorSpecError, match="expected"):
        a.take(WHOLE, replace(came, spec=spec, data=data))
    with pytest.raises(TensorSpecError, match="not trained here"):
        give(b, rows[:2])
    assert a.coding(came.key, WHOLE).most_bytes(WHOLE) == 3 * 13 * 4


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1024.0])
def test_what_is_no_number_or_too_large_counts_nothing(wrong):
    a, b, rows = attempts()
    sent = frame(b, rows[2:])
    bad = rows[2:].clone()
    bad[1, 12] = wrong
    with pytest.raises(LargeContributionError):
        give(b, bad)
    with pytest.raises(LargeContributionError, match="a client of b"):
        a.take(WHOLE, replace(sent, data=memoryview(bytearray(bad.numpy().tobytes()))))
    give(a, rows[:2])
    assert a.made(WHOLE) is None
    a.take(WHOLE, sent)
    assert a.made(WHOLE) is not None


def test_an_early_frame_is_as_large_as_all_rows_of_a_round_or_one_part():
    a, _, _ = attempts()
    key = FrameKey("r", 9, 0, Role.ROUND, 0, GIVE, port_of(WHOLE), "b", "a")
    codings = a.codings
    assert most_of_any(key, VECTOR, codings, 5) == 5 * 13 * 4
    assert most_of_any(key, VECTOR, codings, 1_000_000) <= 4 << 20
    large = RunVector([Entry("param:w", TensorSpec((1 << 21,), "float32"), 0, 0)])
    key = key._replace(port=port_of((0, 1 << 20)))
    assert most_of_any(key, large, codings, 100) == 4 << 20
    assert most_of_any(key._replace(hop=RESULT), VECTOR, codings, 5) == 0
