"""Codecs of links: rule A, the shortest step within a budget, and bytes as the wire has them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest

from shoal.compression import codec
from shoal.compression.codec import RAW, WORDS, parse
from shoal.dag.cost.network import uniform
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId
from shoal.dag.plan.report import PlanWithReport
from shoal.dag.schedule.convert_plan import plan_from_proto, plan_to_proto
from shoal.dag.schedule.flow import Flow
from shoal.peer.compute.exchange import TransferSpecs
from shoal.peer.compute.frame_codecs.codings import Codings
from shoal.planner.base.interface import CODED_ROLES, CodecOptions, PeerOffer, PlanRequest
from shoal.planner.codecs import carried as carried_module
from shoal.planner.codecs import codec_table as costs
from shoal.planner.codecs import codecs
from shoal.planner.codecs.adatopk import support_text, topk_text
from shoal.planner.codecs.carried import CodedStepCost
from shoal.planner.codecs.codec_table import COSTS, Rung, cost_of, typical_error
from shoal.planner.codecs.codecs import choose, codec_of, ladder
from shoal.planner.cost.candidate import Candidate, StageShare
from shoal.planner.cost.cost_model import CostModel
from shoal.planner.schedulers import coded
from shoal.planner.schedulers.coded import with_codecs
from shoal.tests.planner.cases import random_case, random_graph

FAST = (Rung("bf16", 0.002), Rung("int8:block=256", 0.007))
SLOW = (*FAST, Rung("int4:block=64", 0.11), Rung("topk:ratio=100,values=bf16", 0.96))
SEEDS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 31, 32)
"""Cases with few enough assignments to try all."""


@pytest.fixture(autouse=True)
def small_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of our own: the committed one changes with what is learned."""
    known = {role: {"fast": FAST, "slow": SLOW} for role in CODED_ROLES}
    monkeypatch.setattr(codecs, "table", lambda: known)
    monkeypatch.setattr(coded, "table", lambda: known)


def random_plan(seed: int, operators: int = 6) -> tuple[CostModel, PlanWithReport, random.Random]:
    """A plan that nobody would choose: one or two pipelines over peers in any order, over links
    that may be slow."""
    for again in itertools.count():
        rng = random.Random(seed + 1000 * again)
        request = random_case(seed, operators=operators, peers=4, held=False)
        offers = tuple(
            dataclasses.replace(o, device_memory_bytes=2**40, threads=rng.choice([0, 1]))
            for o in request.offers
        )
        judge = CostModel(dataclasses.replace(request, offers=offers))
        m, n = request.microbatches, judge.operators
        count = 2 if m > 1 and rng.random() < 0.5 else 1

        def line(
            rng: random.Random = rng, n: int = n, k: int = len(offers)
        ) -> Iterator[StageShare]:
            size = rng.randint(2, min(3, k, n))
            cuts = [0, *sorted(rng.sample(range(1, n), size - 1)), n]
            for peer, (a, b) in zip(
                rng.sample(range(k), size), itertools.pairwise(cuts), strict=True
            ):
                yield StageShare(peer, a, b)

        candidate = Candidate(
            tuple(tuple(line()) for _ in range(count)),
            (m,) if count == 1 else (m - m // 2, m // 2),
            rng.choice(["gpipe", "1f1b"]),
        )
        if judge.cuttable(candidate):
            return judge, judge.plan(candidate), rng
    raise AssertionError


def everywhere(text: str, **changed: object) -> CodecOptions:
    return CodecOptions(activation=text, activation_grad=text, sync=text, **changed)


def replicas(memory: int = 2**40) -> CodedStepCost:
    """Two equal peers that hold the whole model each, over a slow link."""
    graph, costs = random_graph(random.Random(1), 4)
    names = (PeerId("a"), PeerId("b"))
    offers = tuple(PeerOffer(p, device_memory_bytes=memory, flops_per_s=1e10) for p in names)
    judge = CostModel(
        PlanRequest(graph, offers, 2, 1, links=uniform(names, 0.0, 1e5), known_costs=costs)
    )
    both = Candidate(((StageShare(0, 0, 4),), (StageShare(1, 0, 4),)), (1, 1))
    plan, report = judge.plan(both)
    return CodedStepCost(judge, plan, report.predicted)


# ---------------------------------------------------------------- what is there without codecs


@pytest.mark.parametrize("seed", range(12))
def test_without_codecs_the_step_is_the_judges(seed: int) -> None:
    judge, made, _ = random_plan(seed)
    carried = CodedStepCost(judge, made.plan, made.report.predicted)
    assert carried.seconds({}) == pytest.approx(made.report.predicted.step_s, rel=1e-12)
    alone = dataclasses.replace(carried.prediction({}, {}), alternatives=())
    assert [dataclasses.replace(x, codecs=()) for x in alone.links] == list(
        made.report.predicted.links
    )
    assert alone.step_s == made.report.predicted.step_s
    assert [p.compute_s for p in alone.peers] == pytest.approx(
        [p.compute_s for p in made.report.predicted.peers]
    )
    assert carried.choices({}) == ()


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize("text", ["bf16", "int8:block=128", "topk:ratio=20", "auto", "adatopk"])
@pytest.mark.parametrize("seed", range(6))
def test_predicted_bytes_are_those_of_the_wire(seed: int, text: str) -> None:
    judge, made, _ = random_plan(seed)
    graph = judge.request.graph
    options = dataclasses.replace(judge.request.options, codecs=everywhere(text, error_budget=0.2))
    judge.request = dataclasses.replace(judge.request, options=options)
    found, report = with_codecs(judge, made)
    stages = cut(graph, [(s.start, s.stop) for s in found.stages])
    flow = Flow(found, stages, tied_groups(graph, stages))
    codings = Codings(TransferSpecs(flow, graph), found.codecs)
    expected: dict[tuple[str, ...], list[int]] = {}
    for peer in found.peers:
        for action in flow.actions(peer):
            for transfer in flow.gives(peer, action):
                if transfer.is_local or not flow.is_coded(transfer):
                    continue
                coding = codings.of(transfer)
                key = (peer, transfer.destination, transfer.role.value, coding.codec.name)
                sums = expected.setdefault(key, [0, 0])
                sums[0] += coding.size_bytes
                sums[1] += coding.whole.size_bytes
    uses = {
        (link.source, link.destination, use.role, use.codec): [use.bytes, use.dense_bytes]
        for link in report.predicted.links
        for use in link.codecs
    }
    assert uses == expected
    assert plan_from_proto(plan_to_proto(found)) == found


def test_a_text_is_on_every_link_of_its_role_and_gradients_get_feedback() -> None:
    judge, made, _ = random_plan(5)
    for feedback in ("ef", "ahead", "none"):
        options = CodecOptions(activation="int8", sync="int8", feedback=feedback)
        carried = CodedStepCost(judge, made.plan, made.report.predicted)
        chosen = choose(carried, options)
        for number, lane in carried.lanes.items():
            wanted = {
                "activation": "int8",
                "sync": "int8" if feedback == "none" else "ef+int8",
                "activation_grad": None,
            }[lane.role]
            small = wanted and carried.load(number, wanted).bytes >= lane.dense_bytes
            assert chosen.choice.get(number) == (None if small else wanted)
    assert codec_of("bf16", "activation", options) == "bf16"
    assert codec_of("delta+int8", "sync", CodecOptions()) == "delta+int8"


def test_lossless_is_taken_for_what_it_typically_makes() -> None:
    """Its bound is the tensor's own size, by which it would never pay."""
    assert 0.6 < costs.typical_share("lossless", "bfloat16") < 0.8
    assert 0.75 < costs.typical_share("lossless", "float32") < 0.95
    assert costs.typical_share("lossless", "int64") == 1.0
    judge, made, _ = random_plan(3)
    carried = CodedStepCost(judge, made.plan, made.report.predicted)
    chosen = choose(carried, everywhere("lossless"))
    assert set(chosen.choice.values()) == {"lossless"}
    for number, lane in carried.lanes.items():
        share = carried.load(number, "lossless").bytes / lane.dense_bytes
        assert share == pytest.approx(costs.typical_share("lossless", "float32"), rel=0.02)


def test_codecs_of_a_gpu_run_beside_its_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never make a step longer than the same seconds within the actions would, and on some
    plan shorter; without a GPU there is no difference."""
    slow = {
        word: tuple(c._replace(encode=200.0, decode=200.0) for c in both)
        for word, both in COSTS.items()
    }
    monkeypatch.setattr(costs, "COSTS", slow)
    monkeypatch.setattr(carried_module, "cost_of", cost_of.__wrapped__)  # which remembers nothing
    shorter = 0
    for seed in range(10):
        judge, made, _ = random_plan(seed)
        carried = CodedStepCost(judge, made.plan, made.report.predicted)
        choice = {
            n: "int8" for n, x in carried.lanes.items() if _shrinks(carried, x.number, "int8")
        }
        gpus, carried._on_gpu = carried._on_gpu, [False] * len(carried.peers)
        within = carried.seconds(choice)
        carried._on_gpu = gpus
        beside = carried.seconds(choice)
        assert beside <= within * (1 + 1e-9)
        assert any(gpus) or beside == within
        shorter += beside < 0.99 * within
    assert shorter


def _shrinks(carried: CodedStepCost, lane: int, text: str) -> bool:
    return carried.load(lane, text).bytes < carried.lanes[lane].dense_bytes


# ---------------------------------------------------------------- adatopk


def rule_a_cases() -> Iterator[tuple[int, float]]:
    yield from itertools.product(range(8), (3.0, 100.0))


@pytest.mark.parametrize(("seed", "ratio"), list(rule_a_cases()))
def test_rule_a_equalises_times(seed: int, ratio: float) -> None:
    """r_e = max(1, ratio · t_e / t_max), to two digits, of bytes: no compressed link takes longer
    than t_max / ratio, and each keeps as much as that allows. The gradient of a sparse value comes
    back on its support."""
    judge, made, _ = random_plan(seed)
    carried = CodedStepCost(judge, made.plan, made.report.predicted)
    chosen = choose(carried, everywhere("adatopk", ratio=ratio)).choice
    ends = {(x.source, x.destination, x.role): x.number for x in carried.lanes.values()}
    for role in CODED_ROLES:
        lanes = [x for x in carried.lanes.values() if x.role == role]
        most = max((x.dense_s for x in lanes), default=0.0)
        for lane in lanes:
            fewer = float(f"{ratio * lane.dense_s / most:.2g}")
            back = ends.get((lane.destination, lane.source, "activation_grad"))
            if role == "activation" and back is not None:  # as its gradient has to come back
                slowest = max(
                    x.dense_s for x in carried.lanes.values() if x.role == "activation_grad"
                )
                fewer = max(fewer, float(f"{ratio * carried.lanes[back].dense_s / slowest:.2g}"))
            aim = lane.dense_bytes / fewer
            if lane.number not in chosen:
                if fewer > 1:  # dense only where sparse is no smaller
                    sparsest = carried.load(lane.number, topk_text(2 * fewer)).bytes
                    assert sparsest >= 0.9 * lane.dense_bytes
                continue
            text = chosen[lane.number].removeprefix("ef+")
            got = float(text.partition("ratio=")[2].partition(",")[0])
            load = carried.load(lane.number, chosen[lane.number])
            assert load.bytes < lane.dense_bytes
            value = chosen.get(ends.get((lane.destination, lane.source, "activation"), -1), "")
            assert text.startswith("support") == (role == "activation_grad" and value != "")
            if text.startswith("support"):
                assert f"ratio={got:g}," in value
                assert load.bytes <= aim or got >= 2 * fewer
                continue
            assert load.bytes <= aim or got >= 2 * fewer
            if got > 1:
                width = text.partition("values=")[2]
                nearer = got - 10 ** (math.floor(math.log10(got)) - 2)
                both = [topk_text(nearer, width)]
                if role == "activation":  # and its gradient, which comes back on the support
                    both.append(support_text(nearer))
                assert max(carried.load(lane.number, text).bytes for text in both) > aim


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_on_its_support_keeps_positions_only(seed: int) -> None:
    """Eight bytes for each number that is sent, at both ends, until the gradient is back: no copy
    of the tensor, which a peer may have no room for."""
    judge, made, _ = random_plan(seed)
    carried = CodedStepCost(judge, made.plan, made.report.predicted)
    chosen = choose(carried, CodecOptions(activation="adatopk", activation_grad="adatopk"))
    on_support = {n: t for n, t in chosen.choice.items() if t.startswith("support")}
    assert on_support
    expected = [0] * len(carried.peers)
    for number, text in on_support.items():
        lane, ratio = carried.lanes[number], parse(text).ratio
        for end in (lane.source, lane.destination):
            expected[end] += 8 * lane.dense_bytes / 4 / ratio
    kept = carried.state_bytes(on_support)
    assert kept == pytest.approx(expected, rel=0.05, abs=8 * 64)
    assert max(kept) > 0


def test_rule_a_with_ratio_1_leaves_everything_as_it_is() -> None:
    judge, made, _ = random_plan(3)
    chosen = choose(
        CodedStepCost(judge, made.plan, made.report.predicted), everywhere("adatopk", ratio=1.0)
    )
    assert chosen.choice == {}
    assert chosen.seconds == chosen.dense_s
    assert any("its ratio is 1" in reason for reason in chosen.reasons)


# ---------------------------------------------------------------- auto


def budget(rng: random.Random) -> float:
    return rng.choice([0.002, 0.01, 0.2, 1.0])


@pytest.mark.parametrize("seed", SEEDS)
def test_auto_is_close_to_all_assignments_and_within_the_budget(seed: int) -> None:
    judge, made, rng = random_plan(seed, operators=4)
    carried = CodedStepCost(judge, made.plan, made.report.predicted)
    options = everywhere("auto", error_budget=budget(rng))
    chosen = choose(carried, options)
    assert chosen.seconds <= chosen.dense_s
    assert chosen.seconds == carried.seconds(chosen.choice)
    known = {r.codec: r.error for r in SLOW} | {f"ef+{r.codec}": r.error for r in SLOW}
    assert all(known[text] <= options.error_budget for text in chosen.choice.values())
    ladders = {n: ladder(carried, lane, options) for n, lane in carried.lanes.items()}
    each = [["", *(rung.codec for rung in rungs)] for rungs in ladders.values()]
    best = min(
        carried.seconds({n: t for n, t in zip(ladders, texts, strict=True) if t})
        for texts in itertools.product(*each)
    )
    assert best <= chosen.seconds * (1 + 1e-9)
    assert chosen.seconds <= best * 1.05


@pytest.mark.parametrize("seed", range(10))
def test_auto_compresses_nothing_that_the_step_does_not_need(seed: int) -> None:
    judge, made, rng = random_plan(seed)
    carried = CodedStepCost(judge, made.plan, made.report.predicted)
    chosen = choose(carried, everywhere("auto", error_budget=budget(rng)))
    for number in chosen.choice:
        without = {n: text for n, text in chosen.choice.items() if n != number}
        assert carried.seconds(without) > chosen.seconds


def test_auto_without_a_budget_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    judge, made, _ = random_plan(0)
    chosen = choose(CodedStepCost(judge, made.plan, made.report.predicted), everywhere("auto"))
    assert chosen.choice == {}
    assert any("an error of at most 0 %" in reason for reason in chosen.reasons)


def test_links_that_must_be_faster_together_are_compressed_together() -> None:
    """Two equal replicas exchange gradients both ways at once: one way alone gains nothing."""
    carried = replicas()
    chosen = choose(carried, CodecOptions(sync="auto", error_budget=0.01))
    assert [lane.role for lane in carried.lanes.values()] == ["sync", "sync"]
    assert len(chosen.choice) == 2
    assert chosen.seconds < 0.5 * chosen.dense_s
    for number, text in chosen.choice.items():
        assert carried.seconds({number: text}) > 0.8 * chosen.dense_s


def test_what_feedback_keeps_counts_and_must_fit() -> None:
    """Two replicas of N floats with error feedback on their gradients: each keeps a residual for
    half of them that it sends, and one for the half that it sums; and those of the step before."""
    carried = replicas()
    dense, judge = carried.dense, carried.judge
    floats = sum(judge.request.graph.parameter_bytes.values()) // 4
    choice = dict.fromkeys(carried.lanes, "ef+int8:block=256")
    for size in carried.state_bytes(choice):
        assert size == pytest.approx(2 * 4 * floats, abs=64)
    assert carried.state_bytes(dict.fromkeys(carried.lanes, "int8:block=256")) == [0, 0]
    found = carried.prediction(choice, {})
    grown = [b.device_bytes - a.device_bytes for a, b in zip(dense.peers, found.peers, strict=True)]
    assert grown == carried.state_bytes(choice)
    assert carried.without_room(choice) == frozenset()

    most = max(p.device_bytes for p in dense.peers)
    tight = replicas(memory=most + 4 * floats)
    assert tight.without_room(choice) == {0, 1}
    for options in (
        CodecOptions(sync="auto", error_budget=0.01),
        CodecOptions(sync="int8"),
        CodecOptions(sync="adatopk"),
    ):
        chosen = choose(tight, options)
        assert chosen.choice == {}
        assert any("too little memory is left there" in reason for reason in chosen.reasons)
    free = choose(tight, CodecOptions(sync="auto", error_budget=0.01, feedback="none"))
    assert len(free.choice) == 2


def test_the_reasons_name_links_codecs_and_what_they_save() -> None:
    judge, made, _ = random_plan(0)
    chosen = choose(
        CodedStepCost(judge, made.plan, made.report.predicted),
        everywhere("auto", error_budget=0.01),
    )
    assert chosen.choice
    first, *links = chosen.reasons
    assert f"{chosen.dense_s:.4g} s without" in first
    assert any(
        "peer-" in r and "x fewer bytes" in r and "less on the link" in r and "error 0.7 %" in r
        for r in links
    )


# ---------------------------------------------------------------- costs and errors


def test_every_word_has_its_costs() -> None:
    assert set(COSTS) == set(WORDS)
    assert set(costs.WRAPPERS) == set(codec.WRAPPERS)
    assert cost_of("topk:ratio=10", False).encode > cost_of("topk:ratio=100", False).encode
    assert cost_of("topk", False) == cost_of("topk:ratio=100.0", False)


def test_a_wrapper_costs_what_it_wraps_and_the_decoding_at_the_sender() -> None:
    for gpu in (False, True):
        plain, wrapped = cost_of("int8", gpu), cost_of("ef+int8", gpu)
        assert wrapped.encode > plain.encode + plain.decode
        assert wrapped.decode > plain.decode


def test_typical_errors_are_those_of_gaussian_numbers() -> None:
    assert typical_error("raw") == 0.0
    assert typical_error("bf16") == pytest.approx(0.0017, rel=0.1)
    # Kept fraction p of the energy of a Gaussian: p + 2 t φ(t) with t its quantile at 1 - p/2.
    t, p = 2.5758, 0.01
    kept = p + 2 * t * math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    assert typical_error("topk:ratio=100,values=fp32") == pytest.approx(
        math.sqrt(1 - kept), rel=0.01
    )
    assert typical_error("int8:block=256") < parse("int8:block=256").error_bound(
        type("S", (), {"sizes": (64, 1024), "dtype": "float32", "size_bytes": 262144})()
    )
    assert RAW.name == "raw/1"
