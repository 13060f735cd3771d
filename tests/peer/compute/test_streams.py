"""Codecs in a run: which transfer has which, that holders agree, and what reports say of it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.compression.codec import CodecError
from shoal.dag.cost.pace import Vectors
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.plan import CodecChoice, PeerId
from shoal.dag.schedule.flow import Role, Transfer
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.frame_codecs.streams import encoding_key

from ..conftest import key_of
from .coded_runs import Mlp, Tied, coded, digits, one_step, parameters, stateful_world

# ---------------------------------------------------------------- which codec


def test_only_values_and_gradients_may_lose_anything(make_case):
    case = make_case(Mlp(norm=True), **digits(), microbatch=4)
    plan = coded(case.plan(2, ["a b", "c"], held_out=2), "int8")
    world = case.world(plan)
    flow = world.built["c"].flow
    for transfer in flow.given_by:
        lossy = world.devices["c"]._work.streams.codings.of(transfer).exact is False
        exact = transfer.role is Role.SYNC and (
            flow.hops[transfer][0].content
            in (ExchangeContent.NORM, ExchangeContent.SCORES, ExchangeContent.STATISTICS)
        )
        assert flow.is_coded(transfer) is not exact
        assert not (lossy and exact)
    there = {e.content for b in world.built.values() for e in b.flow.exchanges.values()}
    assert there == {
        ExchangeContent.GRADIENT,
        ExchangeContent.STATISTICS,
        ExchangeContent.NORM,
        ExchangeContent.SCORES,
    }
    world.run(2)
    world.evaluate(1)
    seen = {(k.role, k.port): frame.codec.partition("/")[0] for k, frame in world.frames}
    for (role, port), word in seen.items():
        if role is Role.SYNC:
            assert word == ("int8" if port.startswith("grad") else "raw"), port
    assert {w for (r, _), w in seen.items() if r is Role.ACTIVATION_GRAD} == {"int8"}


def test_what_is_alike_for_several_is_a_total_or_an_update(make_case):
    case = make_case(Tied(), length=8)
    flow = case.world(case.plan(2, ["a b", "c"])).built["a"].flow
    for transfer, (exchange, hop) in flow.hops.items():
        sums = exchange.content in (ExchangeContent.GRADIENT, ExchangeContent.TIED)
        assert flow.is_shared(transfer) is (sums and hop.total)
    values = [t for t in flow.given_by if t.role is not Role.SYNC]
    assert values
    assert not any(map(flow.is_shared, values))


def test_a_sum_has_one_codec_on_all_links(make_case):
    case = make_case(Mlp(), **digits())
    plan = case.plan(1, ["a b c"])
    choices = (
        CodecChoice(PeerId("a"), PeerId("b"), "sync", "int8"),
        CodecChoice(PeerId("a"), PeerId("c"), "sync", "int4"),
        CodecChoice(PeerId("b"), PeerId("a"), "sync", "bf16"),
    )
    world = case.world(replace(plan, codecs=choices))
    found = {}
    for transfer in world.built["a"].flow.given_by:
        if transfer.is_local:
            continue
        ends = [world.devices[p] for p in (transfer.source, transfer.destination)]
        codings = {d._work.streams.codings.of(transfer).codec.name for d in ends}
        assert len(codings) == 1, "the ends disagree"
        found[transfer.port, transfer.source, transfer.destination] = codings.pop()
    assert found["grad0/0-1", "a", "b"].startswith("int8")
    assert found["grad0/0-1", "a", "c"].startswith("int4")
    assert (
        found["grad0/1-2", "a", "b"] == found["grad0/1-2", "a", "c"] == found["grad0/0-1", "a", "c"]
    )
    assert found["grad0/1-2", "b", "a"] == found["grad0/1-2", "b", "c"] == "bf16/1"
    assert found["grad0/0-1", "b", "c"] == found["grad0/1-2", "c", "a"] == "raw/1"


def test_a_choice_that_names_no_codec_fails_the_build(make_case):
    case = make_case(Mlp(), **digits())
    with pytest.raises(CodecError, match="zip9"):
        case.world(coded(case.plan(2, ["a", "b"]), "zip9"))


def test_a_key_is_a_place_in_the_run_and_not_a_sender(make_case):
    t = Transfer(Role.SYNC, 0, 0, "grad0/0-1", PeerId("a"), PeerId("b"))
    key = encoding_key(5, key_of(3, t))
    assert 0 <= key < 2**64
    assert key == encoding_key(5, key_of(3, t._replace(source=PeerId("c"))))
    others = [
        encoding_key(6, key_of(3, t)),
        encoding_key(5, key_of(4, t)),
        encoding_key(5, key_of(3, t._replace(microbatch=1))),
        encoding_key(5, key_of(3, t._replace(port="grad0/1-2"))),
        encoding_key(5, key_of(3, t._replace(role=Role.ACTIVATION))),
    ]
    assert len({key, *others}) == 6


# ---------------------------------------------------------------- whole runs


def test_lossless_links_train_bit_for_bit_as_raw_ones(make_case):
    """I1 for the codec that loses nothing."""
    case = make_case(Tied(), length=32, batch=8, microbatch=2, steps=3)
    plan = case.plan(2, ["a b", "c"], held_out=2)
    raw, lossless = case.world(plan), case.world(coded(plan, "lossless"))
    assert raw.run(3) == lossless.run(3)
    assert raw.evaluate(2).loss == lossless.evaluate(2).loss
    one, other = raw.weights(), lossless.weights()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n], other[n]) for n in one)
    used = {(k.role, f.codec) for k, f in lossless.frames}
    assert {r for r, codec in used if codec.startswith("lossless")} == {
        *(Role.ACTIVATION, Role.ACTIVATION_GRAD, Role.SYNC)
    }
    sizes = [sum(f.data.nbytes for _, f in w.frames) for w in (raw, lossless)]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(("text", "rel"), [("bf16", 2e-3), ("int8", 1e-2), ("ef+int8", 1e-2)])
def test_a_codec_that_loses_little_gives_nearly_the_same_losses(make_case, text, rel):
    case = make_case(Mlp(), **digits())
    plan = case.plan(2, ["a b", "c"])
    losses, close = case.world(plan).run(6), case.world(coded(plan, text)).run(6)
    assert close == pytest.approx(losses, rel=rel)
    assert close != losses


TEXTS = ["bf16", "int4:rounding=stochastic", "topk:ratio=10", "ef+topk:ratio=10", "delta+int8"]


@pytest.mark.parametrize("text", TEXTS)
def test_holders_of_a_stage_keep_the_same_bits(make_case, text):
    case = make_case(Mlp(norm=True), **digits(), microbatch=4, batch=16)
    world = case.world(coded(case.plan(2, ["a b c", "d a"]), sync=text))
    start = parameters(world, 0)[0]["net.0.weight"].clone()
    for step in range(4):
        one_step(world, step)
        for stage in (0, 1):
            first, *others = parameters(world, stage)
            assert others
            for other in others:
                assert all(torch.equal(first[n], other[n]) for n in first), f"step {step}"
    assert not torch.equal(start, parameters(world, 0)[0]["net.0.weight"])


@pytest.mark.parametrize("text", ["int8", "ef+topk:ratio=10", "delta+int8"])
def test_copies_of_a_tied_weight_keep_the_same_bits(make_case, text):
    case = make_case(Tied(), length=8)
    world = case.world(coded(case.plan(3, ["a b", "c", "d"]), sync=text))
    for step in range(4):
        one_step(world, step)
        copies = [
            p["tokens.weight"] for k in range(3) for p in parameters(world, k)
            if "tokens.weight" in p
        ]  # fmt: skip
        assert len(copies) > 2
        assert all(torch.equal(copies[0], c) for c in copies)
    assert {f.codec for k, f in world.frames if k.port[0] == "T"} != {"raw/1"}


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_sum_is_encoded_once_whoever_asks_first(make_case, first):
    """Two lanes send it, the compute thread wants its echo: all at once, in any order."""
    case = make_case(Mlp(), **digits())
    world = case.world(coded(case.plan(1, ["a b c"]), sync="ef+int4:rounding=stochastic"))
    a, b, c = (world.devices[p]._work.streams for p in "abc")
    flow = world.built["a"].flow
    to_b, to_c = (
        t for t in flow.hops if (t.port, t.source) == ("grad0/1-2", "a") and not t.is_local
    )  # in the plan's order
    with ThreadPoolExecutor(3) as pool:
        for step in range(8):
            total = torch.randn(a.codings.of(to_b).whole.sizes)
            asks = [
                partial(a.encode, key_of(step, to_b), to_b, total),
                partial(a.encode, key_of(step, to_c), to_c, total),
                partial(a.echo, key_of(step, to_b), to_b, total),
            ]
            found = list(pool.map(lambda ask: ask(), asks[first:] + asks[:first]))
            sent_b, sent_c, echo = found[3 - first :] + found[: 3 - first]
            heard = [
                streams.decode(
                    key_of(step, t), t, sent.header, memoryview(bytearray(b"".join(sent.buffers)))
                )
                for streams, t, sent in ((b, to_b, sent_b), (c, to_c, sent_c))
            ]
            assert torch.equal(heard[0], echo)
            assert torch.equal(heard[1], echo)
            assert not torch.equal(echo, total)


def test_holders_agree_where_their_links_have_different_codecs(make_case):
    case = make_case(Mlp(), **digits())
    plan = case.plan(1, ["a b c"])
    slow = CodecChoice(PeerId("a"), PeerId("c"), "sync", "topk:ratio=5")
    other = CodecChoice(PeerId("c"), PeerId("b"), "sync", "ef+int4")
    world = case.world(replace(plan, codecs=(slow, other)))
    for step in range(3):
        one_step(world, step)
        a, b, c = parameters(world, 0)
        assert all(torch.equal(a[n], b[n]) and torch.equal(a[n], c[n]) for n in a)


def test_the_flags_of_a_gradient_are_exact_under_any_codec(make_case):
    """A sparse codec that saw the flags would drop most parameters, and a coarse one the small
    gradients beside them."""

    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 30), nn.Linear(30, 4)
            self.never = nn.Parameter(torch.ones(3))

        def forward(self, x, y):
            h = torch.tanh(self.first(x))
            return F.cross_entropy(self.second(h) + 0 * self.never.detach().sum(), y)

    case = make_case(Sometimes(), **digits(), weight_decay=0.5, no_decay=())
    world = case.world(coded(case.plan(1, ["a b"]), sync="topk:ratio=100"))
    before = {n: p.clone() for n, p in parameters(world, 0)[0].items()}
    one_step(world, 0)
    after = parameters(world, 0)[0]
    trained = [n for n in before if n != "never"]
    # Decay reaches every parameter that has a gradient, even one of which nothing was sent.
    assert all(not torch.equal(before[n], after[n]) for n in trained)
    if "never" in before:
        assert torch.equal(before["never"], after["never"])


@pytest.mark.parametrize("holders", [["a b", "c", "d a"], ["a b c", "d", "b"]])
def test_planner_and_peers_mean_the_same_tensors(make_case, holders):
    case = make_case(Tied(), length=8)
    work = case.world(case.plan(3, holders)).devices["a"]._work
    flow, wire = work.flow, work.wire
    vectors = Vectors(flow.plan, flow.stages, flow.tied, work.graph)
    tails = {}
    for transfer, (exchange, hop) in flow.hops.items():
        if not exchange.coded:
            continue
        spec, tail = vectors.tensor(exchange, hop)
        assert spec == wire.spec(transfer)
        if transfer.port == "grad0/0-1" and transfer.source == "a":
            tails[transfer.destination] = tail
    assert sum(tails.values()) == len(wire.layouts[0].parameters)


# ---------------------------------------------------------------- sizes and reports


def test_a_frame_is_never_larger_than_the_plan_allows(make_case):
    world = stateful_world(make_case(Mlp(), **digits()))
    world.run(2)
    for key, frame in world.frames:
        most = world.devices[key.destination].most_bytes(key)
        assert frame.data.nbytes <= most
    device, key = world.devices["a"], key._replace(destination="a")
    assert device.most_bytes(key._replace(port="nonsense")) == 0
    largest = max(f.data.nbytes for k, f in world.frames if k.destination == "a")
    again = world.devices["a"]
    again.build(replace(again._work.order, term=3))
    for term in (2, 4):  # was on its way, or is nobody's
        assert largest <= again.most_bytes(key._replace(term=term)) < 1 << 20
    assert TorchDevice().most_bytes(key) == 64 << 20


def test_reports_say_what_frames_took_by_link_role_and_codec(make_case):
    case = make_case(Mlp(), **digits(), steps=25)
    world = case.world(coded(case.plan(2, ["a b", "c"]), activation="int8", sync="ef+int8"))
    told = {p: [] for p in world.devices}
    for peer, device in world.devices.items():
        inner = device.compute

        def compute(step, action, inner=inner, peer=peer):
            result = inner(step, action)
            told[peer].append((step, str(action), result.links))
            return result

        device.compute = compute
    for step in range(22):
        one_step(world, step)
    for peer, results in told.items():
        assert all(not links for _, action, links in results if not action.startswith("U"))
        uses = [u for _, _, links in results for u in links]
        for u in uses:
            assert peer in (u.source, u.destination)
        sent = sum(u.bytes for u in uses if u.source == peer)
        frames = [f for k, f in world.frames if k.source == peer and k.step < 21]
        late = [f for k, f in world.frames if k.source == peer and k.step == 21]
        assert 0 <= sent - sum(f.data.nbytes for f in frames) <= sum(f.data.nbytes for f in late)
    first = {(u.destination, u.role, u.codec.partition("/")[0]): u for u in told["a"][-1][2]}
    assert ("c", "activation", "int8") in first
    assert ("b", "sync", "ef") in first
    assert ("c", "sync", "raw") in first
    lossy = [
        (step, u.error) for step, _, links in told["a"] for u in links
        if u.source == "a" and u.role == "activation" and not u.codec.startswith("raw")
    ]  # fmt: skip
    assert [step for step, error in lossy if error] == [0, 20]
    assert all(error < 0.02 for _, error in lossy)
    for _, _, links in told["a"]:
        for u in links:
            assert (u.bytes == u.dense_bytes) == (u.codec == "raw/1" or u.destination == "a")
            assert u.source == "a" or (u.bytes, u.error, u.encode_s) == (0, 0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("text", ["int8", "ef+topk:ratio=10", "delta+int8", "lossless"])
def test_codecs_work_beside_the_compute_of_a_cuda_device(make_case, text):
    case = make_case(Mlp(), **digits())
    plan = coded(case.plan(2, ["a b", "c"]), text)
    cpu, cuda = case.world(plan), case.world(plan, device="cuda")
    assert cuda.run(4) == pytest.approx(cpu.run(4), rel=1e-2)
    for stage in (0, 1):
        first, *others = parameters(cuda, stage)
        assert all(torch.equal(first[n], other[n]) for other in others for n in first)
