"""Gradients that many holders exchange in rows: the same sums on all of them, to the bit."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shoal.dag.check import check
from shoal.dag.cut import cut
from shoal.dag.flow import Flow, Role
from shoal.dag.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from shoal.dag.plan import PeerId, Plan, StageSlot, Visit
from shoal.dag.schedule import step_actions
from shoal.peer.exchange import Exchange, Held, Wire
from shoal.peer.sync.allreduce import gathered, scattered

from .test_streams import Mlp, coded, digits, one_step, parameters

CPU = torch.device("cpu")
SYNC = ("S>", "S=", "S+", "S*", "S<")


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
    """The holders of one stage at the end of a step, each with gradients of its own; runs only S,
    in an order that the checker found."""

    def __init__(self, graph, holders, rows, gradients):
        peers = [PeerId(f"p{i}") for i in range(holders)]
        slot = StageSlot(0, 1, tuple(peers), rows=rows)
        self.plan = Plan((slot,), ((Visit(0, peers[0]),),), 2).validate(1)
        self.stages = cut(graph, [(0, 1)])
        self.flow = Flow(self.plan, self.stages, ())
        self.wire = Wire(self.flow, graph)
        self.parameters, self.exchanges = {}, {}
        for peer, own in zip(peers, gradients, strict=True):
            found = {n: nn.Parameter(torch.zeros_like(g)) for n, g in gradients[0].items()}
            for name, parameter in found.items():
                parameter.grad = own[name]
            executor = SimpleNamespace(parameters=found)
            held = {0: Held(self.stages[0], executor, None)}
            self.parameters[peer] = found
            self.exchanges[peer] = Exchange(peer, self.wire, held, CPU)

    def run(self):
        store = {}
        lists = step_actions(self.plan, self.stages, ())
        for peer, action in check(self.plan, self.stages, (), lists).order:
            if not str(action).startswith(SYNC):
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
    rows = data.draw(st.one_of(st.just(round(math.sqrt(n))), st.integers(0, n)))
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
    for found in Stage(graph, n, rows, own).run():
        assert all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(("n", "rows"), [(9, 3), (10, 3), (13, 4), (5, 2), (7, 7), (6, 1)])
def test_all_holders_have_the_same_bits_and_no_gradient_where_nobody_has_one(n, rows):
    graph = graph_of("float32", [(17,), (3, 4), (5,)])
    torch.manual_seed(n)
    own = [{p.name: torch.randn(p.spec.sizes) * 10**i for p in graph.parameters} for i in range(n)]
    for i, gradients in enumerate(own):
        gradients["p1"] = None
        if i != 2:
            gradients["p2"] = None
    own[0] = {**own[0], "p1": torch.zeros(3, 4), "p2": torch.zeros(5)}
    stage = Stage(graph, n, rows, own)
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


def test_what_is_gathered_can_be_scattered():
    vector = torch.arange(12.0)
    parts = [
        ((0, 3), gathered(vector, 6, (0, 3))),
        ((1, 2, 4, 5), gathered(vector, 6, [1, 2, 4, 5])),
    ]
    assert parts[0][1].tolist() == [0, 1, 6, 7]
    assert torch.equal(scattered(parts, 6), vector)


# ---------------------------------------------------------------- whole steps on devices


NAMES = "a b c d e f g h i j"


def rows_of(plan, rows):
    return replace(
        plan,
        stages=tuple(replace(s, rows=rows if len(s.holders) > 2 else 0) for s in plan.stages),
    )


def test_ten_holders_train_as_the_plain_loop(make_case):
    """With batch statistics; four of them run no microbatch."""
    case = make_case(Mlp(norm=True), **digits(), batch=24, microbatch=4, steps=4)
    plan = rows_of(case.plan(2, [NAMES, "k a"], held_out=2), 3)
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
    ports = {k.port for k, _ in world.frames}
    assert {"S0>row", "S0=row", "S0+row", "S0*row", "S0>stats", "S1+grad"} <= ports


def test_what_goes_in_rows_goes_raw_under_any_codec(make_case):
    case = make_case(Mlp(), **digits(), batch=20, microbatch=2)
    plan = case.plan(2, [NAMES, "k a"])
    dense, lossy = case.world(rows_of(plan, 3)), case.world(coded(rows_of(plan, 3), sync="ef+int8"))
    for world in (dense, lossy):
        for step in range(2):
            one_step(world, step)
            first, *others = parameters(world, 0)
            assert all(torch.equal(first[n], other[n]) for other in others for n in first)
    used = {(k.port, f.codec) for k, f in lossy.frames if k.role is Role.SYNC}
    assert {codec for port, codec in used if port.endswith("row")} == {"raw/1"}
    assert {codec for port, codec in used if port == "S1>grad"} != {"raw/1"}


def test_rows_change_no_loss_but_by_rounding(make_case):
    case = make_case(Mlp(), **digits(), batch=20, microbatch=2)
    plan = case.plan(1, [NAMES])
    losses = [case.world(rows_of(plan, rows)).run(4) for rows in (0, 1, 2, 3, 5, 10)]
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-6)
    assert losses[1] == losses[0], "one row adds up in the same order"
