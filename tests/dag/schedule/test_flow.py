"""The wiring: exact transfers, and whole steps carried out with integers instead of tensors."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.exchange import engine
from shoal.dag.ir.graph import Operator, Output, Ref, TensorSpec
from shoal.dag.plan.action import ExchangeContent
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.plan.plan import PeerId, StageSlot, Visit
from shoal.dag.plan.visit_lists import halved
from shoal.dag.schedule.flow import Flow, Role, Transfer
from shoal.dag.schedule.schedule import Action, Kind, listed
from shoal.tests.dag.schedule.checker import check

A, B, C, D = map(PeerId, "abcd")


def lines(transfers):
    return [str(t) for t in transfers]


def parameter_gradients(graph):
    """d loss / d parameter where every operator adds up what it reads: the number of paths."""
    slope = Counter({graph.loss: 1})
    for op in reversed(graph.operators):
        through = sum(slope[v] for v in op.values if v in graph.grads)
        for value in [v for arg in op.args for v in _refs(arg)] if through else ():
            if value in graph.grads or value.startswith("param:"):
                slope[value] += through
    return {p.name: slope[f"param:{p.name}"] for p in graph.parameters if p.trainable}


def _refs(arg):
    if isinstance(arg, Ref):
        yield arg.value
    elif isinstance(arg, tuple):
        for item in arg:
            yield from _refs(item)


class Names:
    """Gradients by name in whole numbers; shard i of n has every n-th name from i on."""

    def __init__(self, names, shards):
        self.parts = [[n for n in names[i::shards]] for i in range(shards)]

    def cut(self, vector):
        return [Counter({n: vector[n] for n in part}) for part in self.parts]

    def split(self, vector, shards):
        return [Counter({n: vector[n] for n in self.parts[s]}) for s in shards]

    def concat(self, shards):
        return self.add(shards)

    join = concat

    def add(self, parts):
        return sum(parts, Counter())

    def relay(self, total):
        return total


class Holders:
    """Carries out a whole step as peers would, with integers: a forward checks that all it reads is
    there, a backward moves path counts. Each peer sees only its own store."""

    def __init__(self, world):
        self.world, self.graph = world, world.bound
        self.flow = Flow(world.plan, world.stages, world.tied)
        self.store = {peer: {} for peer in world.plan.peers}
        self.grads = Counter()  # (peer, stage, parameter)
        self.apart = {}  # by peer, microbatch and stage whose weights' gradients wait
        self.norm = {}

    def run(self, lists):
        for peer, action in check(self.world.plan, self.world.stages, self.world.tied, lists).order:
            taken = {t: self.store[peer].pop(t) for t in self.flow.takes(peer, action)}
            given_ = self.perform(peer, action, taken)
            assert set(given_) == set(self.flow.gives(peer, action))
            for transfer, what in given_.items():
                assert transfer not in self.store[transfer.destination]
                self.store[transfer.destination][transfer] = what
        assert not any(self.store.values())
        assert not self.apart

    def perform(self, peer, action, taken):
        gives = self.flow.gives(peer, action)
        match action.kind:
            case Kind.FORWARD | Kind.EVALUATE:
                return self.forward(action, taken, gives)
            case Kind.BACKWARD:
                return self.backward(peer, action, taken, gives)
            case Kind.WEIGHT:
                self.grads += self.apart.pop((peer, action.microbatch, action.stage))
                return {}
            case Kind.UPDATE:
                return {}
        exchange = self.flow.exchange_of(action)
        hops = [(self.flow.hops[t][1], what) for t, what in taken.items() if t.role is Role.SYNC]
        space = Names(self.names(exchange), len(exchange.edges) - 1)
        if action.kind is Kind.TAKE:
            self.end(exchange, peer, hops, space)
            return {}
        if action.kind is Kind.GIVE:
            given_ = engine.give(exchange, lambda hop: self.own(exchange, peer, hop), space)
        else:
            given_ = engine.pass_on(hops, space)
        return {t: given_(self.flow.hops[t][1]) for t in gives}

    def names(self, exchange):
        if exchange.content is ExchangeContent.GRADIENT:
            return self.world.stages[exchange.index].trainable
        return ["all"]

    def own(self, exchange, peer, hop):
        if exchange.content is ExchangeContent.GRADIENT:
            return self.of(peer, exchange.index)
        if exchange.content is ExchangeContent.TIED:
            group = self.world.tied[exchange.index]
            return Counter(all=self.grads[peer, group.stages[hop.part], group.parameter])
        return Counter({peer: 1})

    def end(self, exchange, peer, hops, space):
        match exchange.content:
            case ExchangeContent.GRADIENT:
                self.set(peer, exchange.index, engine.take(hops, space))
            case ExchangeContent.TIED:
                self.set_tied(peer, exchange.index, engine.take(hops, space)["all"])
            case ExchangeContent.NORM | ExchangeContent.SCORES:
                self.norm[peer, exchange.content] = sorted(engine.take(hops, space).elements())

    def forward(self, action, taken, gives):
        stage = self.world.stages[action.stage]
        known = {t.value for t in taken} | {f"in:{n}" for n in stage.inputs}
        known |= {f"param:{n}" for n in stage.parameters} | {f"buffer:{n}" for n in stage.buffers}
        for op in self.graph.operators[stage.start : stage.stop]:
            assert known >= set(op.reads)
            known |= set(op.values)
        return {t: self.graph.spec[t.value] for t in gives if t.value in known}

    def backward(self, peer, action, taken, gives):
        stage, graph = self.world.stages[action.stage], self.graph
        slope = Counter({graph.loss: 1} if stage.makes_loss else {})
        for t, paths in taken.items():
            if t.role is Role.ACTIVATION_GRAD:
                slope[t.value] += paths
        own = {v for op in graph.operators[stage.start : stage.stop] for v in op.values}
        grads = Counter()
        for op in reversed(graph.operators[stage.start : stage.stop]):
            through = sum(slope[v] for v in op.values if v in graph.grads)
            for value in [v for arg in op.args for v in _refs(arg)]:
                if value.removeprefix("param:") in stage.trainable:
                    grads[peer, stage.index, value.removeprefix("param:")] += through
                elif value in graph.grads:
                    slope[value] += through
        if action.stage in halved(self.flow.actions(peer)):
            self.apart[peer, action.microbatch, action.stage] = grads
        else:
            self.grads += grads
        return {t: slope[t.value] for t in gives if t.value not in own}

    def of(self, peer, stage):
        return Counter({n: self.grads[peer, stage, n] for n in self.world.stages[stage].trainable})

    def set(self, peer, stage, total):
        for name in self.world.stages[stage].trainable:
            self.grads[peer, stage, name] = total[name]

    def set_tied(self, peer, group, total):
        for stage in self.world.tied[group].stages:
            if peer in self.world.plan.stages[stage].holders:
                self.grads[peer, stage, self.world.tied[group].parameter] = total


@given(st.data())
def test_every_holder_ends_with_the_gradient_of_the_whole_graph(worlds, data):
    """I1 in whole numbers: paths from parameters to the loss, summed over all microbatches."""
    world = data.draw(worlds)
    holders = Holders(world)
    holders.run({peer: holders.flow.actions(peer) for peer in world.plan.peers})
    wanted = parameter_gradients(world.bound)
    for stage, slot in zip(world.stages, world.plan.stages, strict=True):
        for peer in slot.holders:
            for name in stage.trainable:
                got = holders.grads[peer, stage.index, name]
                assert got == len(world.plan.routes) * wanted[name]
    receivers = holders.flow.exchanges[ExchangeContent.NORM, 0].members.receivers
    assert receivers[0] == holders.flow.hub
    assert world.plan.without_norm or set(receivers) == set(world.plan.peers)
    for peer in receivers:
        assert holders.norm[peer, ExchangeContent.NORM] == sorted(world.plan.peers)


@given(st.data())
def test_evaluation_takes_and_gives_only_values_of_its_own(worlds, data):
    world = data.draw(worlds)
    if not world.plan.evaluation_routes:
        return
    holders = Holders(world)
    lists = {peer: holders.flow.evaluation_actions(peer) for peer in world.plan.peers}
    holders.run(lists)
    transfers = [t for p in world.plan.peers for a in lists[p] for t in holders.flow.gives(p, a)]
    assert all(t.port.startswith("eval:") for t in transfers if t.role is Role.ACTIVATION)
    assert all(t.port.startswith("eval/") for t in transfers if t.role is not Role.ACTIVATION)


@given(st.data())
def test_every_transfer_is_given_once_and_taken_once(worlds, data):
    world = data.draw(worlds)
    flow = Flow(world.plan, world.stages, world.tied)
    actions = {p: (*flow.actions(p), *flow.evaluation_actions(p)) for p in world.plan.peers}
    given_ = [t for p, found in actions.items() for a in found for t in flow.gives(p, a)]
    taken = [t for p, found in actions.items() for a in found for t in flow.takes(p, a)]
    assert sorted(given_) == sorted(taken) == sorted(flow.taken_by) == sorted(flow.given_by)
    assert len(set(given_)) == len(given_)
    for transfer, action in flow.taken_by.items():
        assert transfer in flow.takes(transfer.destination, action)
        assert transfer in flow.gives(transfer.source, flow.given_by[transfer])
        if transfer.role is Role.SYNC:
            assert (transfer.microbatch, transfer.hop) == (0, 0)
        else:
            held_out = flow.given_by[transfer].kind is Kind.EVALUATE
            routes = world.plan.evaluation_routes if held_out else world.plan.routes
            assert routes[transfer.microbatch][transfer.hop].peer == transfer.destination


def test_values_go_along_the_route_and_gradients_back(chain):
    world = chain(3, 2)
    flow = Flow(world.plan(evaluations=1), world.stages, ())
    assert flow.takes(A, Action.parse("F1@0")) == ()
    assert lines(flow.gives(B, Action.parse("F1@1"))) == ["activation v1 m1 hop 2 b->c"]
    assert lines(flow.takes(B, Action.parse("B1@1"))) == ["activation_grad v1<2 m1 hop 1 c->b"]
    assert lines(flow.gives(B, Action.parse("B1@1"))) == ["activation_grad v0<1 m1 hop 0 b->a"]
    assert lines(flow.takes(C, Action.parse("E0@2"))) == ["activation eval:v1 m0 hop 2 b->c"]
    assert flow.taken_by[flow.gives(B, Action.parse("F1@1"))[0]] == Action.parse("F1@2")
    assert flow.takes(B, Action.parse("F7@1")) == ()


def test_one_microbatch_on_another_route_and_two_stages_on_one_peer(chain):
    world = chain(3, 2)
    plan = replace(
        world.plan(),
        stages=(StageSlot(0, 1, (A,)), StageSlot(1, 2, (B, A)), StageSlot(2, 3, (C,))),
        routes=(
            (Visit(0, A), Visit(1, B), Visit(2, C)),
            (Visit(0, A), Visit(1, A), Visit(2, C)),
        ),
    ).validate(3)
    flow = Flow(plan, world.stages, ())
    assert lines(flow.takes(C, Action.parse("F0@2"))) == ["activation v1 m0 hop 2 b->c"]
    assert lines(flow.takes(C, Action.parse("F1@2"))) == ["activation v1 m1 hop 2 a->c"]
    assert [t.is_local for t in flow.gives(A, Action.parse("F1@0"))] == [True]
    assert lines(flow.takes(A, Action.parse("B1@0"))) == ["activation_grad v0<1 m1 hop 0 a->a"]


def test_gradients_of_a_shared_value_come_back_in_stage_order(chain):
    spec = TensorSpec((2, 3), "float32")
    graph = chain(3, 1).graph
    total = Operator("sum", "aten.add.Tensor", (Ref("v0"), Ref("v2")), (), (Output(spec, True),))
    graph = replace(graph, operators=(*graph.operators, total), loss="sum")
    bounds = [(0, 1), (1, 2), (2, 4)]
    plan = replace(
        chain(3, 1).plan(),
        stages=tuple(StageSlot(a, b, (p,)) for (a, b), p in zip(bounds, (A, B, C), strict=False)),
    ).validate(4)
    stages = cut(graph, bounds)
    flow = Flow(plan, stages, tied_groups(graph, stages))
    assert lines(flow.gives(A, Action.parse("F0@0"))) == [
        "activation v0 m0 hop 1 a->b",
        "activation v0 m0 hop 2 a->c",
    ]
    assert lines(flow.takes(A, Action.parse("B0@0"))) == [
        "activation_grad v0<1 m0 hop 0 b->a",
        "activation_grad v0<2 m0 hop 0 c->a",
    ]
    assert {t.value for t in flow.takes(A, Action.parse("B0@0"))} == {"v0"}


@pytest.fixture
def shared(chain):
    """Two stages, the second on b and c; parameter p0 is used by both; only b runs evaluations."""
    world = chain(2, 2)
    graph = world.graph
    head = Operator(
        "head",
        "aten.add.Tensor",
        (Ref("v1"), Ref("param:p0")),
        (),
        (Output(TensorSpec((2, 3), "float32"), True),),
    )
    graph = replace(graph, operators=(*graph.operators, head), loss="head")
    plan = replace(
        world.plan(),
        stages=(StageSlot(0, 1, (A,)), StageSlot(1, 3, (B, C))),
        routes=((Visit(0, A), Visit(1, B)), (Visit(0, A), Visit(1, C))),
        evaluation_routes=((Visit(0, A), Visit(1, C)),),
        visits=(),
        evaluations=(),
    ).validate(3)
    stages = cut(graph, [(0, 1), (1, 3)])
    return Flow(listed(plan, stages), stages, tied_groups(graph, stages))


def exchanged(flow, peer, text):
    action = Action.parse(text)
    takes = [f"{t.port} from {t.source}" for t in flow.takes(peer, action)]
    return takes, [f"{t.port} to {t.destination}" for t in flow.gives(peer, action)]


def test_holders_exchange_shards(shared):
    assert exchanged(shared, C, ">@grad1") == ([], ["grad1/0-1 to b", "grad1/0-1 to c"])
    assert exchanged(shared, C, "+1@grad1") == (
        ["grad1/0-1 from b", "grad1/0-1 from c"],
        ["grad1/1-2 to b", "grad1/1-2 to c"],
    )
    assert exchanged(shared, C, "<2@grad1") == (["grad1/1-2 from b", "grad1/1-2 from c"], [])


def test_a_tied_gradient_is_summed_by_the_lowest_stages_first_holder(shared):
    assert exchanged(shared, B, ">@tied0") == ([], ["tied0/0-1.1 to a"])
    assert exchanged(shared, A, "+1@tied0") == (
        ["tied0/0-1 from a", "tied0/0-1.1 from b"],
        ["tied0/1-2 to a", "tied0/1-2 to b", "tied0/1-2 to c"],
    )
    assert exchanged(shared, C, "<2@tied0") == (["tied0/1-2 from a"], [])
    assert [str(a) for a in shared.actions(C)][-7:] == [
        ">@grad1",
        "+1@grad1",
        "<2@grad1",
        "<2@tied0",
        ">@norm",
        "<2@norm",
        "U",
    ]


def test_the_norm_is_a_star_at_the_first_holder_of_the_loss(shared):
    assert shared.hub == B
    assert exchanged(shared, C, ">@norm") == ([], ["norm/0-1.2 to b"])
    assert exchanged(shared, B, "+1@norm") == (
        ["norm/0-1 from a", "norm/0-1.1 from b", "norm/0-1.2 from c"],
        ["norm/1-2 to b", "norm/1-2 to a", "norm/1-2 to c"],
    )
    assert exchanged(shared, A, "<2@norm") == (["norm/1-2 from b"], [])
    assert exchanged(shared, A, "U") == ([], [])


def test_only_holders_that_evaluated_report_to_the_hub(shared):
    assert exchanged(shared, C, ">@eval") == ([], ["eval/0-1 to b"])
    assert exchanged(shared, B, "+1@eval") == (["eval/0-1 from c"], ["eval/1-2 to b"])
    assert [str(a) for a in shared.evaluation_actions(B)] == ["+1@eval", "<2@eval"]


@given(st.data())
def test_statistics_go_from_holders_that_ran_microbatches_to_all(worlds, data):
    world = data.draw(worlds)
    flow = Flow(world.plan, world.stages, world.tied)
    for stage, slot in zip(world.stages, world.plan.stages, strict=True):
        ran = {route[stage.index].peer for route in world.plan.routes}
        for peer in slot.holders:
            action = Action(Kind.TAKE, 1, stage.index, ExchangeContent.STATISTICS)
            sources = {t.source for t in flow.takes(peer, action)}
            exchanged = stage.statistics and len(slot.holders) > 1
            assert sources == (ran if exchanged else set())


def test_results_made_behind_the_loss_come_with_its_backward(chain):
    graph = chain(2, 1).graph
    late = Operator(
        "late", "aten.add.Tensor", (Ref("v1"),), (), (Output(TensorSpec((2, 3), "float32")),)
    )
    graph = replace(graph, operators=(*graph.operators, late), metrics=(("late", "late"),))
    slots = tuple(StageSlot(i, i + 1, (p,)) for i, p in enumerate((A, B, C)))
    route = (Visit(0, A), Visit(1, B), Visit(2, C))
    plan = replace(chain(2, 1).plan(), stages=slots, routes=(route,), evaluation_routes=(route,))
    stages = cut(graph, [(0, 1), (1, 2), (2, 3)])
    flow = Flow(listed(plan, stages).validate(3), stages, ())
    assert lines(flow.takes(B, Action.parse("B0@1"))) == ["activation late m0 hop 1 c->b"]
    assert lines(flow.takes(B, Action.parse(">@eval"))) == ["activation eval:late m0 hop 1 c->b"]
    assert [str(a) for a in flow.actions(B)] == [
        *("F0@1", "B0@1", ">@norm", "+1@norm", "<2@norm", "U")
    ]
    operators = tuple(replace(op, outputs=(Output(op.outputs[0].spec),)) for op in graph.operators)
    frozen = cut(replace(graph, operators=operators), [(0, 1), (1, 2), (2, 3)])
    flow = Flow(plan, frozen, ())
    assert lines(flow.takes(B, Action.parse(">@norm"))) == ["activation late m0 hop 1 c->b"]


def test_a_transfer_is_a_value(chain):
    one = Transfer(Role.ACTIVATION, 0, 1, "eval:v0", A, B)
    assert one.value == "v0"
    assert one == Transfer(Role.ACTIVATION, 0, 1, "eval:v0", A, B)
    assert Transfer(Role.ACTIVATION_GRAD, 0, 1, "v0.1<2", A, B).value == "v0.1"
