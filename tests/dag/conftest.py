"""Random worlds for the property tests of plans: a graph, a cut of it, and a plan for the cut."""

import itertools
import random
from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st

from shoal.dag.exchange.collectives import SUMS
from shoal.dag.exchange.rows import even_rows
from shoal.dag.ir.graph import (
    Buffer,
    BufferUpdate,
    Dtype,
    Graph,
    Input,
    MemoryFormat,
    Operator,
    Output,
    Parameter,
    Ref,
    Size,
    TensorSpec,
)
from shoal.dag.plan.cut import Stage, TiedGroup, cut, tied_groups
from shoal.dag.plan.plan import PeerId, Plan, Route, StageExchange, StageSlot, Visit
from shoal.dag.schedule.schedule import listed

FLOAT = TensorSpec((Size(1), 3), "float32")
WHOLE = TensorSpec((Size(1, 2),), "int64")
SCALAR = TensorSpec((), "float32")
ROW = TensorSpec((3,), "float32")


@dataclass(frozen=True)
class World:
    graph: Graph  # for any microbatch size
    bound: Graph
    stages: tuple[Stage, ...]
    tied: tuple[TiedGroup, ...]
    plan: Plan


def random_graph(rng: random.Random, operators: int) -> Graph:
    """A DAG whose every operator adds up what it reads; some have two outputs, some make integers,
    some carry the running statistic of a norm. The loss may stand anywhere."""
    parameters = tuple(
        Parameter(f"p{i}", ROW, rng.random() < 0.7, ("again",) if i == 0 else ())
        for i in range(rng.randint(1, 5))
    )
    constant = Buffer("constant", ROW, persistent=False)
    buffers, made, specs = [constant], ["in:x", "in:y"], {}
    found: list[Operator] = []
    for i in range(operators):
        reads = [rng.choice(made[-4:]) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.6:
            reads.append(f"param:{rng.choice(parameters).name}")
        if rng.random() < 0.2:
            reads.append("buffer:constant")
        pair, norm = rng.random() < 0.2, rng.random() < 0.15
        dtype = FLOAT if i == operators - 1 or rng.random() < 0.85 else WHOLE
        outputs = (Output(dtype),)
        if norm:
            pair = True
            update = BufferUpdate("ema", f"v{i}.1", 0.1)
            buffers.append(Buffer(f"m{i}.mean", ROW, update=update))
            buffers.append(
                Buffer(f"m{i}.count", TensorSpec((), "int64"), update=BufferUpdate("add", "", 1.0))
            )
            reads.append(f"buffer:m{i}.mean")
            outputs = (Output(FLOAT), Output(ROW))
        elif pair:
            outputs = (Output(dtype), Output(FLOAT), Output(None))
        args = (tuple(map(Ref, reads[:2])), *map(Ref, reads[2:]), 2, -0.5, True, None, Size(2, 1))
        kwargs = (("dtype", Dtype("float32")), ("layout", MemoryFormat("contiguous_format")))
        op = Operator(f"v{i}", "aten.add.Tensor", args, kwargs, outputs, pair, f"m{i}")
        found.append(op)
        made += [v for v, o in zip(op.values, outputs, strict=True) if o.spec and v != f"v{i}.1"]
        specs |= {v: o.spec for v, o in zip(op.values, outputs, strict=True) if o.spec}
    floating = [v for v in made if v in specs and specs[v].is_floating]
    loss = rng.choice(floating[-3:]) if rng.random() < 0.6 else floating[-1]
    weight = rng.choice(["", "in:y", rng.choice(floating)])
    metrics = tuple((f"metric {i}", rng.choice(floating)) for i in range(rng.randint(0, 2)))
    inputs = (Input("x", FLOAT), Input("y", WHOLE))
    graph = Graph(inputs, parameters, tuple(buffers), tuple(found), loss, weight, metrics)
    return with_grads(graph)


def with_grads(graph: Graph) -> Graph:
    """The graph with `Output.grad` set where a gradient can flow, as capture sets it."""
    carries = {f"param:{p.name}" for p in graph.parameters if p.trainable}
    for op in graph.operators:
        if carries & set(op.reads):
            floats = zip(op.values, op.outputs, strict=True)
            carries |= {v for v, o in floats if o.spec and o.spec.is_floating}
    wanted = {graph.loss}
    operators = []
    for op in reversed(graph.operators):
        outputs = tuple(
            Output(o.spec, v in wanted and v in carries)
            for v, o in zip(op.values, op.outputs, strict=True)
        )
        if any(o.grad for o in outputs):
            wanted |= set(op.reads)
        operators.append(
            Operator(op.name, op.target, op.args, op.kwargs, outputs, op.returns_tuple, op.module)
        )
    return Graph(
        graph.inputs,
        graph.parameters,
        graph.buffers,
        tuple(reversed(operators)),
        graph.loss,
        graph.weight,
        graph.metrics,
    )


def random_plan(rng: random.Random, operators: int) -> Plan:
    """Any number of holders per stage, stages that share peers, routes at random."""
    count = rng.randint(1, min(7, operators))
    cuts = [0, *sorted(rng.sample(range(1, operators), count - 1)), operators]
    peers = [PeerId(f"peer-{i}") for i in range(rng.randint(1, 6))]
    slots = tuple(
        StageSlot(a, b, tuple(rng.sample(peers, rng.randint(1, min(4, len(peers))))))
        for a, b in itertools.pairwise(cuts)
    )

    def route() -> Route:
        return tuple(Visit(i, rng.choice(slot.holders)) for i, slot in enumerate(slots))

    plan = Plan(
        slots,
        tuple(route() for _ in range(rng.randint(1, 6))),
        microbatch_size=rng.randint(1, 4),
        schedule=rng.choice(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
        evaluation_routes=tuple(route() for _ in range(rng.randint(0, 3))),
    )
    exchanges = tuple(
        random_exchange(rng, k, s.holders) for k, s in enumerate(slots) if rng.random() < 0.8
    )
    without = rng.random() < 0.3
    return replace(plan, exchanges=exchanges, without_norm=without).validate(operators)


def random_exchange(rng: random.Random, stage: int, holders: tuple[PeerId, ...]) -> StageExchange:
    """Any collective, with any groups or weights where it asks for them."""
    name = rng.choice(SUMS)
    groups: tuple[tuple[PeerId, ...], ...] = ()
    weights: tuple[int, ...] = ()
    if name in ("two-level", "hierarchical") and rng.random() < 0.8:
        mixed = rng.sample(holders, len(holders))
        groups = even_rows(mixed, rng.randint(1, len(holders)))
    if name in ("all-to-all", "hierarchical") and rng.random() < 0.5:
        weights = tuple(rng.randint(0, 3) for _ in holders)
        weights = weights if any(weights) else ()
    chunks = rng.choice([1, 1, 3]) if name in ("all-to-all", "hierarchical") else 1
    return StageExchange(stage, name, groups, weights, chunks)


def make_world(seed: int, operators: int) -> World:
    rng = random.Random(seed)
    graph = random_graph(rng, operators)
    plan = random_plan(rng, operators)
    bound = graph.bind(plan.microbatch_size)
    stages = cut(bound, [(s.start, s.stop) for s in plan.stages])
    return World(graph, bound, stages, tied_groups(bound, stages), listed(plan, stages))


@pytest.fixture(scope="session")
def worlds() -> st.SearchStrategy[World]:
    """To be drawn from; shrinks to few operators."""
    return st.builds(make_world, st.integers(0, 1 << 32), st.integers(1, 16))


@dataclass(frozen=True)
class Chain:
    """The textbook: K equal stages on K peers a, b, c, …, each with a parameter of its own."""

    count: int
    microbatches: int
    trainable: tuple[bool, ...] = ()

    @property
    def graph(self) -> Graph:
        operators = tuple(
            Operator(
                f"v{i}",
                "aten.add.Tensor",
                (Ref(f"v{i - 1}" if i else "in:x"), Ref(f"param:p{i}")),
                (),
                (Output(FLOAT),),
            )
            for i in range(self.count)
        )
        trainable = self.trainable or (True,) * self.count
        parameters = tuple(Parameter(f"p{i}", ROW, on) for i, on in enumerate(trainable))
        last = f"v{self.count - 1}"
        return with_grads(Graph((Input("x", FLOAT),), parameters, (), operators, last)).bind(2)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return cut(self.graph, [(i, i + 1) for i in range(self.count)])

    def plan(self, schedule: str = "1f1b", evaluations: int = 0) -> Plan:
        peers = [PeerId("abcdefgh"[i]) for i in range(self.count)]
        route = tuple(Visit(i, peer) for i, peer in enumerate(peers))
        plan = Plan(
            tuple(StageSlot(i, i + 1, (peer,)) for i, peer in enumerate(peers)),
            (route,) * self.microbatches,
            microbatch_size=2,
            schedule=schedule,
            evaluation_routes=(route,) * evaluations,
        )
        return listed(plan.validate(self.count), self.stages)


@pytest.fixture(scope="session")
def chain() -> type[Chain]:
    return Chain
