"""The memory model: properties over intervals, and the executor's own accounting."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.capture.capture import Captured, capture
from shoal.dag.cost.cost import OperatorCost, cost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.ir.graph import Graph
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import PeerId
from shoal.examples.gpt import gpt
from shoal.planner.base.interface import PeerOffer, PlanRequest
from shoal.planner.cost.candidate import Candidate, StageShare, to_plan
from shoal.planner.cost.cost_model import CostModel

X = torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Known:
    """A model, what its operators cost, and how many there are."""

    captured: Captured
    graph: Graph
    costs: tuple[OperatorCost, ...]
    model: MemoryModel

    @property
    def count(self) -> int:
        return len(self.costs)


@cache
def known() -> Known:
    """Captured when the first test runs, not when tests are collected."""
    captured = capture(gpt(2, 32, 2, 32, 0.1), {"x": X, "y": X})
    graph = captured.graph.bind(4)
    costs = cost(graph)
    return Known(captured, graph, costs, MemoryModel(graph, costs))


intervals = st.deferred(
    lambda: st.tuples(st.integers(0, known().count - 1), st.integers(1, known().count))
).filter(lambda p: p[0] < p[1])


@given(intervals, st.booleans(), st.integers(1, 6), st.integers(0, 2))
def test_more_live_microbatches_and_slots_never_need_less(
    interval: tuple[int, int], recompute: bool, live: int, slots: int
) -> None:
    stage = known().model.stage(*interval, recompute)
    assert stage.peak(slots, live) <= stage.peak(slots, live + 1)
    assert stage.peak(slots, live) <= stage.peak(slots + 1, live)
    assert stage.peak(slots, live) <= stage.peak(slots, live, shared=True)
    assert min(stage.kept, stage.transient, stage.trainable, stage.update) >= 0
    assert stage.trainable <= stage.weights


@given(intervals, st.integers(1, 6), st.integers(4, 40))
def test_an_exchange_of_a_round_has_the_gradients_place(
    interval: tuple[int, int], live: int, meets: int
) -> None:
    """All that it takes is beside what stands, and no microbatch is kept then."""
    plain = known().model.stage(*interval)
    stage = MemoryModel(known().graph, known().costs, meets).stage(*interval)
    takes = meets * stage.numbers - stage.trainable + stage.update
    assert stage.standing(8) == plain.standing(8)
    assert stage.peak(8, live) == max(plain.peak(8, live), stage.standing(8) + takes)


@given(intervals, st.integers(1, 6))
def test_recomputation_keeps_no_more(interval: tuple[int, int], live: int) -> None:
    plain, again = (known().model.stage(*interval, r) for r in (False, True))
    assert again.kept <= plain.kept
    assert again.standing(2) == plain.standing(2)
    # In its backward stand the gradients that came and its whole saved set: what the forward and
    # the backward without recomputation have, but at once.
    start, stop = interval
    made = {v for op in known().graph.operators[start:stop] for v in op.values}
    later = {v for op in known().graph.operators[stop:] for v in op.reads} & made
    came = sum(known().graph.spec[v].size_bytes for v in later)
    assert again.peak(2, live) <= plain.peak(2, live) + 2 * came


@given(st.deferred(lambda: st.lists(st.integers(1, known().count - 1), unique=True, max_size=4)))
def test_what_stages_hold_adds_up(cuts: list[int]) -> None:
    whole = known().model.stage(0, known().count)
    parts = [
        known().model.stage(a, b) for a, b in itertools.pairwise([0, *sorted(cuts), known().count])
    ]
    assert sum(p.weights for p in parts) >= whole.weights
    assert sum(p.kept for p in parts) >= whole.kept


@pytest.mark.parametrize("twelfths", [[], [4], [3, 6, 9]])
@pytest.mark.parametrize("recompute", [False, True])
def test_kept_is_what_the_executor_keeps(twelfths: list[int], recompute: bool) -> None:
    bounds = list(
        itertools.pairwise([0, *(known().count * k // 12 for k in twelfths), known().count])
    )
    ports: dict[str, torch.Tensor] = {}
    data = {"x": X, "y": X}
    for stage in cut(known().graph, bounds):
        executor = StageExecutor(
            known().graph, stage, known().captured.tensors, recompute=recompute
        )
        held = {t.untyped_storage()._cdata for t in executor.parameters.values()}
        held |= {t.untyped_storage()._cdata for t in executor.buffers.values()}
        seen: dict[int, int] = {}

        def keep(t: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        taken = {p.value: ports[p.value].clone() for p in stage.receives}
        executor.forward(0, 1, taken, {n: data[n] for n in stage.inputs})  # counts by itself
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            made = executor.forward(0, 0, taken, {n: data[n] for n in stage.inputs})
        kept = executor._kept[0, 0]
        for t in (*kept.leaves.values(), *kept.roots.values(), *(kept.taken or {}).values()):
            keep(t)
        inputs = {data[n].untyped_storage()._cdata for n in stage.inputs}
        real = sum(size for storage, size in seen.items() if storage not in held | inputs)
        real += sum(known().graph.spec[f"in:{n}"].size_bytes for n in stage.inputs)
        said = known().model.stage(stage.start, stage.stop, recompute).kept
        # Constants of random operators, and scalars, stay with the executor.
        assert said == pytest.approx(real, rel=0.02, abs=2048)
        if stage.has_backward and not recompute:
            assert executor.saved_bytes == pytest.approx(real, rel=0.02, abs=2048)
        ports |= made.ports


def test_many_recomputing_stages_on_one_peer_hold_one_saved_set() -> None:
    request = PlanRequest(known().graph, (PeerOffer(PeerId("a")), PeerOffer(PeerId("b"))), 4, 4)
    judge = CostModel(request)

    def peak(parts: int) -> int:
        at = [known().count * k // parts for k in range(parts + 1)]
        shares = tuple(StageShare(k % 2, at[k], at[k + 1], True) for k in range(parts))
        return max(judge.device_bytes(Candidate((shares,), (4,), "interleaved")).values())

    assert peak(6) < peak(2)


@settings(max_examples=20)
@given(st.integers(1, 3), st.sampled_from(["gpipe", "1f1b"]), st.booleans())
def test_one_stage_of_a_peer_is_the_peer(parts: int, schedule: str, recompute: bool) -> None:
    offers = tuple(PeerOffer(PeerId(f"p{i}")) for i in range(3))
    judge = CostModel(PlanRequest(known().graph, offers, 4, 4, known_costs=known().costs))
    at = [known().count * k // parts for k in range(parts + 1)]
    shares = tuple(StageShare(k, at[k], at[k + 1], recompute) for k in range(parts))
    candidate = Candidate((shares,), (4,), "gpipe" if schedule == "gpipe" else "1f1b")
    to_plan(candidate, [o.peer for o in offers], 4).validate(known().count)
    live = judge.structure(candidate).peak_live
    for k, (peer, found) in enumerate(judge.device_bytes(candidate).items()):
        assert peer == k
        assert found == judge.stage_bytes(at[k], at[k + 1], live[k, k], 0, recompute)


@given(intervals)
def test_moments_in_8_bits_are_counted_by_parameter(interval: tuple[int, int]) -> None:
    """Of a small one as in 32 bits; of the others' updates more than two numbers an element."""
    graph = known().graph
    sizes = {f"param:{p.name}": p.spec.elements for p in graph.parameters}
    names = {v for op in graph.operators[slice(*interval)] for v in op.reads if v in sizes}
    counts = [sizes[name] for name in names]
    assert interval != (0, known().count) or min(counts) < 4096 <= max(counts)
    stage = MemoryModel(graph, known().costs, in_8_bits=True).stage(*interval)
    plain = known().model.stage(*interval)
    moments = sum(n + 4 * math.ceil(n / 256) if n >= 4096 else 4 * n for n in counts)
    assert stage.standing(2) - plain.standing(0) == 2 * moments
    assert stage.snapshot(2) - plain.snapshot(0) == 2 * moments
    assert stage.update == max((32 * n if n >= 4096 else 8 * n for n in counts), default=0)
