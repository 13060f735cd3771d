"""The memory of all intervals at once is that of each interval, followed operator by operator."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.cost import OperatorCost
from shoal.dag.cost.memory import MemoryModel
from shoal.dag.cost.memory_table import MemoryTable
from shoal.dag.cost.speed import Work
from shoal.dag.cost.storages import Pairs, Storages
from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, TensorSpec


def drawn(seed: int, operators: int) -> tuple[Graph, tuple[OperatorCost, ...]]:
    """A graph of any values and costs: views, results without gradients, frozen and tied
    parameters, inputs read anywhere, storages saved long behind their last reader."""
    rng = random.Random(seed)
    grads, views, long = rng.choice([0.0, 0.5, 0.9, 1.0]), rng.random() / 2, rng.random() < 0.3
    parameters = tuple(
        Parameter(f"w{k}", TensorSpec((rng.randrange(1, 99),), "float32"), rng.random() < grads)
        for k in range(4)
    )
    inputs = tuple(Input(f"x{k}", TensorSpec((rng.randrange(1, 9),), "float32")) for k in range(2))
    found: list[Operator] = []
    costs: list[OperatorCost] = []
    values: list[tuple[str, int]] = []  # (value, storage)
    size: dict[int, int] = {}
    for i in range(operators):
        near = values[-3:] if rng.random() < 0.7 else values
        reads = rng.sample(near, min(len(near), rng.randrange(3)))
        names = [v for v, _ in reads]
        held = rng.sample(parameters, rng.randrange(3) if rng.random() < 0.5 else 0)
        names += [f"param:{p.name}" for p in held]
        if not names or rng.random() < 0.1:
            names.append(f"in:{rng.choice(inputs).name}")
        made, outputs = [], []
        for _ in range(rng.randrange(1, 3)):
            if reads and rng.random() < views:
                number = rng.choice(reads)[1]
            else:
                number = len(size)
                size[number] = rng.randrange(1, 200)
            made.append((number, size[number]))
            outputs.append(Output(TensorSpec((1,), "float32"), rng.random() < grads))
        op = Operator(
            f"v{i}", "aten.any.one", tuple(map(Ref, names)), (), tuple(outputs), returns_tuple=True
        )
        found.append(op)
        values += [(v, s) for v, (s, _) in zip(op.values, made, strict=True)]
        inner = len(size)
        size[inner] = rng.randrange(1, 50)
        saved = {s for _, s in (values if long else reads) if rng.random() < 0.3}
        saved |= {s for s, _ in (*made, (inner, 0)) if rng.random() < 0.3}
        bytes_of = tuple((f"param:{p.name}", p.spec.size_bytes) for p in held)
        saves = tuple((s, size[s]) for s in sorted(saved))
        forward, backward = rng.randrange(300), rng.randrange(300)
        costs.append(
            OperatorCost(Work(), Work(), 0, 0, bytes_of, saves, tuple(made), forward, backward)
        )
    return Graph(inputs, parameters, (), tuple(found), found[-1].values[0], 1), tuple(costs)


def alone(of: Storages, start: int, stop: int, recompute: bool) -> tuple[int, int]:
    """(kept, transient) of one interval, operator by operator."""

    def first(pairs: Pairs, storage: int) -> int:
        return min((o for o in at(pairs, storage) if start <= o < stop), default=stop)

    def at(pairs: Pairs, storage: int) -> list[int]:
        return pairs.at[pairs.what == storage].tolist()

    size, born, flows = of.size.tolist(), of.born.tolist(), of.flows.tolist()
    data = {i for o, i in zip(of.data.at, of.data.what, strict=True) if start <= o < stop}
    passed = sum(of.input_bytes.tolist()[i] for i in data)
    here = [
        s
        for s in range(len(size))
        if start <= born[s] < stop or min(first(of.read, s), first(of.saved, s)) < stop
    ]
    came = [s for s in here if born[s] < start]
    sent = [s for s in here if born[s] >= start and max(at(of.read, s), default=-1) >= stop]
    fixed = {s for s in (*came, *sent) if flows[s]}
    saved = {s: first(of.saved, s) for s in here if first(of.saved, s) < stop}
    ends = {
        s: max([o for o in at(of.read, s) if start <= o < stop] + [born[s], start]) for s in here
    }

    def forward(saves: bool) -> int:
        stay = {*sent, *fixed, *saved} if saves else {*sent, *came}
        return passed + max(
            of.forward.tolist()[o]
            + sum(size[s] for s in here if born[s] < o and (s in stay or o <= ends[s]))
            for o in range(start, stop)
        )

    answered = sum(size[s] for s in sent if flows[s])
    backward = max(
        of.backward.tolist()[o]
        + sum(size[s] for s in here if s in fixed or saved.get(s, stop) <= o)
        + sum(size[s] for s in here if flows[s] and s not in sent and born[s] <= o < ends[s])
        for o in range(start, stop)
    )
    backward += answered + passed
    received = sum(size[s] for s in came)
    kept = sum(size[s] for s in {*fixed, *saved}) + passed
    most = max(forward(True), backward)
    if recompute:
        kept, most = received + passed, max(forward(False), backward, forward(True) + answered)
    trained = any(
        of.numbers[w] for o, w in zip(of.held.at, of.held.what, strict=True) if start <= o < stop
    )
    if not trained and not any(flows[s] for s in came):
        kept, most = 0, forward(False)
    return kept, most - kept + received + answered


def agree(model: MemoryModel, positions: list[int]) -> None:
    table = MemoryTable(model.storages, np.array(positions))
    for j in range(len(positions)):
        for i in range(j):
            for again in (False, True):
                stage = model.stage(positions[i], positions[j], again)
                oracle = alone(model.storages, positions[i], positions[j], again)
                assert (stage.kept, stage.transient) == oracle
                assert (
                    table.weights[j, i],
                    table.trainable[j, i],
                    table.update[j, i],
                    table.kept[again][j, i],
                    table.transient[again][j, i],
                ) == (stage.weights, stage.trainable, stage.update, *oracle)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 12), st.data())
def test_all_intervals_take_what_each_takes_alone(
    seed: int, operators: int, data: st.DataObject
) -> None:
    inner = st.lists(st.integers(1, operators), unique=True, max_size=operators).map(sorted)
    agree(MemoryModel(*drawn(seed, operators)), [0, *data.draw(inner)])


@pytest.mark.parametrize("seed", range(6))
def test_every_position_of_a_drawn_graph(seed: int) -> None:
    agree(MemoryModel(*drawn(seed, 12)), list(range(13)))
