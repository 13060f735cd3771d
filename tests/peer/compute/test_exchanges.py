"""Gradients that holders exchange by any collective: the same sums on all of them, to the bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.dag.exchange.collectives import SUMS
from shoal.dag.exchange.rows import even_rows
from shoal.dag.execute.stage_visits import StageVisits
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.cut import cut
from shoal.dag.plan.plan import PeerId, Plan, StageExchange, StageSlot, Visit
from shoal.dag.plan.strategies import parse_strategy
from shoal.dag.schedule.flow import Flow, Role
from shoal.dag.schedule.schedule import listed
from shoal.peer.compute.exchange import Exchanges, LocalStage, TransferSpecs
from shoal.peer.sync.strategy import Holder, Strategy
from shoal.tests.dag.schedule.checker import check

from .coded_runs import Mlp, coded, digits, one_step, parameters

CPU = torch.device("cpu")


def graph_of(dtype, sizes):
    """One stage with parameters of these sizes."""
    row = TensorSpec((2,), dtype)
    names = [f"p{i}" for i in range(len(sizes))]
    reads = (Ref("in:x"), *(Ref(f"param:{n}") for n in names))
    return Graph(
        (Input("x", row),),
        tuple(Parameter(n, TensorSpec(s, dtype)) for n, s in zip(names, sizes, strict=True)),
        (),
        (Operator("v", "aten.add.Tensor", reads, (), (Output(row, True),)),),
        "v",
    ).bind(2)


class Stage:
    """The holders of one stage at the end of a step, each with gradients of its own; runs only the
    exchange, in an order that the checker found."""

    def __init__(self, graph, holders, collective, gradients, groups=()):
        peers = [PeerId(f"p{i}") for i in range(holders)]
        exchange = StageExchange(0, collective, tuple(groups))
        slot, route = StageSlot(0, 1, tuple(peers)), (Visit(0, peers[0]),)
        self.stages = cut(graph, [(0, 1)])
        plan = Plan((slot,), (route,), 2, exchanges=(exchange,)).validate(1)
        self.plan = listed(plan, self.stages)
        self.flow = Flow(self.plan, self.stages, ())
        self.wire = TransferSpecs(self.flow, graph)
        self.parameters, self.exchanges = {}, {}
        for peer, own in zip(peers, gradients, strict=True):
            found = {n: nn.Parameter(torch.zeros_like(g)) for n, g in gradients[0].items()}
            for name, parameter in found.items():
                parameter.grad = own[name]
            executor = SimpleNamespace(parameters=found)
            mean = Strategy(
                Holder(
                    layout=self.wire.layouts[0], parameters=found, optimizer=None, own=1, count=1,
                    peer=peer, holders=tuple(peers), tied=frozenset(),
                    choice=parse_strategy("mean"), device=CPU,
                )
            )  # fmt: skip
            held = {0: LocalStage(self.stages[0], executor, mean, StageVisits((0,), 0))}
            self.parameters[peer] = found
            self.exchanges[peer] = Exchanges(peer, self.wire, held, CPU)

    def run(self):
        store = {}
        lists = {peer: self.flow.actions(peer) for peer in self.plan.peers}
        for peer, action in check(self.plan, self.stages, (), lists).order:
            if action.content is not ExchangeContent.GRADIENT:
                continue
            taken = [(t, store.pop(t)) for t in self.flow.takes(peer, action)]
            for transfer, tensor in self.exchanges[peer].run(action, taken).items():
                sizes = self.wire.spec(transfer).sizes
                assert tuple(tensor.shape) == sizes
                store[transfer] = tensor.clone()
        assert not store
        return [{n: p.grad for n, p in found.items()} for found in self.parameters.values()]


SIZES = st.lists(st.sampled_from([(), (1,), (3,), (2, 5), (7, 11), (40,)]), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_sums_are_those_of_a_plain_loop(data):
    """Whole numbers as doubles: any order of adding gives the same."""
    n = data.draw(st.integers(2, 40))
    name = data.draw(st.sampled_from(SUMS))
    graph = graph_of("float64", data.draw(SIZES))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    own = [
        {
            p.name: torch.randint(-1000, 1000, p.spec.sizes, generator=rng).double()
            for p in graph.parameters
        }
        for _ in range(n)
    ]
    plain = {name: sum(g[name] for g in own) for name in own[0]}
    for found in Stage(graph, n, name, own).run():
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(("n", "rows"), [(9, 3), (10, 3), (13, 4), (5, 2), (7, 7), (6, 1), (3, 2)])
def test_all_holders_have_the_same_bits_and_no_gradient_where_nobody_has_one(n, rows, name):
    graph = graph_of("float32", [(17,), (3, 4), (5,)])
    torch.manual_seed(n)
    own = [{p.name: torch.randn(p.spec.sizes) * 10**i for p in graph.parameters} for i in range(n)]
    for i, gradients in enumerate(own):
        gradients["p1"] = None
        if i != 2:
            gradients["p2"] = None
    own[0] = {**own[0], "p1": torch.zeros(3, 4), "p2": torch.zeros(5)}
    stage = Stage(graph, n, name, own, even_rows([PeerId(f"p{i}") for i in range(n)], rows))
    stage.parameters[PeerId("p0")]["p1"].grad = None
    stage.parameters[PeerId("p0")]["p2"].grad = None
    first, *others = stage.run()
    assert first["p1"] is None
    torch.testing.assert_close(first["p0"], sum(g["p0"].double() for g in own).float())
    if n > 2:
        assert torch.equal(first["p2"], own[2]["p2"])
    for other in others:
        assert other["p1"] is None
        assert torch.equal(other["p0"], first["p0"])
        assert torch.equal(other["p2"], first["p2"])


# ---------------------------------------------------------------- whole steps on devices


NAMES = "a b c d e f g h i j"


def by(plan, name, rows=0):
    """The plan with another collective for stages of more than two holders."""
    wide = [k for k, s in enumerate(plan.stages) if len(s.holders) > 2]
    groups = {k: even_rows(plan.stages[k].holders, rows) if rows else () for k in wide}
    return replace(plan, exchanges=tuple(StageExchange(k, name, groups[k]) for k in wide))


@pytest.mark.parametrize("name", SUMS)
def test_ten_holders_train_as_the_plain_loop(make_case, name):
    """With batch statistics; four of them run no microbatch."""
    case = make_case(Mlp(norm=True), **digits(), batch=24, microbatch=4, steps=4)
    plan = by(case.plan(2, [NAMES, "k a"], held_out=2), name)
    world = case.world(plan)
    seen, module = case.plain()
    assert world.run(4) == pytest.approx(seen.losses, rel=1e-5)
    world.evaluate(3)
    wanted = dict(module.state_dict())
    for name, tensor in world.weights().items():
        torch.testing.assert_close(
            tensor, wanted[name.removeprefix("param:")], rtol=1e-4, atol=1e-6
        )
    first, *others = parameters(world, 0)
    assert len(others) == 9
    assert all(torch.equal(first[n], other[n]) for other in others for n in first)
    ports = {k.port.partition("/")[0] for k, _ in world.frames}
    assert {"grad0", "grad1", "stats0", "norm"} <= ports


@pytest.mark.parametrize("name", [n for n in SUMS if n != "all-to-all"])
def test_what_goes_in_several_hops_goes_raw_under_any_codec(make_case, name):
    case = make_case(Mlp(), **digits(), batch=20, microbatch=2)
    plan = case.plan(2, [NAMES, "k a"])
    dense, lossy = case.world(by(plan, name)), case.world(coded(by(plan, name), sync="ef+int8"))
    for world in (dense, lossy):
        for step in range(2):
            one_step(world, step)
            first, *others = parameters(world, 0)
            assert all(torch.equal(first[n], other[n]) for other in others for n in first)
    used = {(k.port, f.codec) for k, f in lossy.frames if k.role is Role.SYNC}
    assert {codec for port, codec in used if port.startswith("grad0/")} == {"raw/1"}
    assert {codec for port, codec in used if port.startswith("grad1/")} != {"raw/1"}


def test_collectives_change_no_loss_but_by_rounding(make_case):
    case = make_case(Mlp(), **digits(), batch=20, microbatch=2)
    plan = case.plan(1, [NAMES])
    plans = [plan, *(by(plan, "two-level", rows) for rows in (1, 2, 3, 5, 10))]
    losses = [case.world(p).run(4) for p in [*plans, *(by(plan, name) for name in SUMS)]]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-6)
    assert losses[1] == losses[0], "one row adds up in the same order"
