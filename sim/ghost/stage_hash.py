"""A stage of a graph as two matrices over hashes (`hashes.py`), and what one holder keeps of it.

`Linear` is made once for all holders of a stage. Of a forward it has three rows of each value that
anyone wants (what leaves, results, statistics, results of operators that read a parameter): over
what comes in with a microbatch, and over what stands in a step (parameters, buffers, one constant).
Of a backward likewise: gradients that leave and those at the operators that read a parameter, over
the gradients that come in and that of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...dag.ir.graph import Operator
from ...dag.plan.cut import Stage
from .hashes import MASK, Hashes, Words

__all__ = ["HeldHash", "Linear"]


class Linear:
    """A stage of a graph as two matrices over hashes. `hashes.graph` is the graph that the stage is
    cut from."""

    def __init__(self, hashes: Hashes, stage: Stage) -> None:
        self.hashes, self.stage, graph = hashes, stage, hashes.graph
        operators = graph.operators[stage.start : stage.stop]
        trained = dict.fromkeys(stage.trainable)
        self.ports = tuple(p.value for p in stage.receives)
        self.inputs = stage.inputs
        self.standing = tuple(
            [f"param:{p}" for p in stage.parameters] + [f"buffer:{b}" for b in stage.buffers]
        )
        updates = {b.name: b.update for b in graph.buffers}
        self.updates = tuple((b, u.value) for b in stage.updates if (u := updates[b]))
        self.statistics = tuple(dict.fromkeys(v for _, v in self.updates if v))
        reading = [
            (v, u.removeprefix("param:"))
            for op in operators
            for v in op.values
            if v in graph.grads
            for u in op.reads
            if u.startswith("param:") and u.removeprefix("param:") in trained
        ]
        self.trained = tuple(trained)
        """Its trainable parameters, in the order of gradients and weights here."""
        place = {p: i for i, p in enumerate(self.trained)}
        reading.sort(key=lambda pair: place[pair[1]])
        self._gather = np.array([place[p] for _, p in reading], np.intp)
        self._one_each = [p for _, p in reading] == list(self.trained)
        self.salts = np.array([hashes.salt(v, p) for v, p in reading], np.uint64)
        self.weights_at = np.array(
            [self.standing.index(f"param:{p}") for p in self.trained], np.intp
        )
        self.values = tuple(
            dict.fromkeys((*(p.value for p in stage.sends), *stage.results, *self.statistics))
        )
        """What a forward gives by name."""
        self._forward(operators, [v for v, _ in reading])
        self._backward(operators, [v for v, _ in reading])

    def _forward(self, operators: Sequence[Operator], reading: Sequence[str]) -> None:
        hashes = self.hashes
        coming = [*self.ports, *(f"in:{x}" for x in self.inputs)]
        sources = [*coming, *self.standing, ""]
        unit = np.eye(len(sources), dtype=np.uint64)
        rows: dict[str, Words] = {name: unit[i] for i, name in enumerate(sources)}
        for op in operators:
            for v in op.values:
                row = unit[-1] * np.uint64(hashes.constant(v))
                for u in op.reads:
                    row = row + rows[u] * np.uint64(hashes.factor(v, u))
                rows[v] = row
        # A result may be a value that comes in, or none that is made here (a metric of the data).
        wanted = [*self.values, *reading]
        whole = np.array([rows[v] for v in wanted], np.uint64).reshape(len(wanted), len(sources))
        self.over_coming = np.ascontiguousarray(whole[:, : len(coming)])
        self.over_standing = np.ascontiguousarray(whole[:, len(coming) :])

    def _backward(self, operators: Sequence[Operator], reading: Sequence[str]) -> None:
        hashes, graph, stage = self.hashes, self.hashes.graph, self.stage
        self.returns = tuple(p.value for p in stage.receives if stage.index in p.grad_targets)
        """Values whose gradient leaves, in the order in which `backward` gives them."""
        self.answers = tuple(p.value for p in stage.sends if p.grad_targets)
        """Values whose gradient comes."""
        width = len(self.answers) + 1  # the last is the gradient of the loss
        rows: dict[str, Words] = {}
        unit = np.eye(width, dtype=np.uint64)
        nothing = np.zeros(width, np.uint64)
        for i, v in enumerate(self.answers):
            rows[v] = unit[i]
        if stage.makes_loss:
            rows[graph.loss] = rows.get(graph.loss, nothing) + unit[-1]
        for op in reversed(operators):
            for v in op.values:
                if v not in graph.grads or v not in rows:
                    continue
                for u in op.reads:
                    if u in graph.grads:
                        rows[u] = rows.get(u, nothing) + rows[v] * np.uint64(hashes.back(v, u))
        wanted = [*self.returns, *reading]
        whole = [rows.get(v, nothing) for v in wanted]
        self.back = np.array(whole, np.uint64).reshape(len(wanted), width)

    def summed(self, terms: Words) -> Words:
        """Terms of g(p) by operator, summed by parameter."""
        if self._one_each:
            return terms
        found = np.zeros(len(self.trained), np.uint64)
        np.add.at(found, self._gather, terms)
        return found


class HeldHash:
    """A stage on one holder: its parameters and buffers, and the gradients of this step."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear
        start = [linear.hashes.start(name) for name in linear.standing]
        self.state: Words = np.array([*start, 1], np.uint64)
        """The hashes of `linear.standing`, and a one for what is constant."""
        self._gradients: Words = np.zeros(len(linear.trained), np.uint64)
        self._reached: list[tuple[Words, Words]] = []
        """The backwards that are not in them: gradients at the operators, and their results."""
        self.statistics = dict.fromkeys(linear.statistics, 0)
        """Sums of this step, of the microbatches that ran here."""
        self.live: dict[int, Words] = {}
        """By microbatch that went forward: results of the operators that read a parameter."""
        self.waiting: dict[int, tuple[Words, Words]] = {}
        """By microbatch whose weights' gradients wait: what `_reached` will have of it."""
        self._base: Words | None = None

    @property
    def gradients(self) -> Words:
        """The gradients' hashes of this step, by parameter; what stands there may be changed. Terms
        of many microbatches are mixed at once: numpy takes longer to begin than to mix."""
        if self._reached:
            linear = self.linear
            found = np.array([terms for terms, _ in self._reached])
            results = np.array([results for _, results in self._reached])
            self._reached.clear()
            terms = linear.hashes.reached_all(linear.salts, found, results)
            self._gradients += linear.summed(np.add.reduce(terms, 0))
        return self._gradients

    @gradients.setter
    def gradients(self, words: Words) -> None:
        self._reached.clear()
        self._gradients = words

    def forward(
        self, m: int, ports: Mapping[str, int], at: tuple[int, int], *, training: bool
    ) -> dict[str, int]:
        """Hashes of `linear.values` of a microbatch; `ports` are of what comes, `at` the step and
        microbatch whose samples it has, step -1: held out."""
        linear, hashes = self.linear, self.linear.hashes
        if self._base is None:
            self._base = linear.over_standing @ self.state
        coming = [ports[v] for v in linear.ports]
        coming += [hashes.sample(x, *at) for x in linear.inputs]
        found = linear.over_coming @ np.array(coming, np.uint64) + self._base
        named = len(linear.values)
        values: dict[str, int] = dict(zip(linear.values, found[:named].tolist(), strict=True))
        if training:
            if linear.stage.has_backward:
                self.live[m] = found[named:]
            for v in linear.statistics:
                self.statistics[v] += hashes.statistic(m, values[v])
        return values

    def backward(
        self, m: int, gradients: Mapping[str, int], loss: int, *, apart: bool = False
    ) -> dict[str, int]:
        """Hashes of the gradients that leave; `gradients` sums those that came, `loss` is that of
        the loss, 0 where another stage makes it. `apart`: those of the weights wait for
        `backward_weight`."""
        linear = self.linear
        coming = np.array([*(gradients[v] for v in linear.answers), loss], np.uint64)
        found = linear.back @ coming
        leaving = len(linear.returns)
        self.waiting[m] = found[leaving:], self.live.pop(m)
        if not apart:
            self.backward_weight(m)
        return dict(zip(linear.returns, found[:leaving].tolist(), strict=True))

    def backward_weight(self, m: int) -> None:
        """Adds a microbatch's gradients of the weights to those of this step."""
        self._reached.append(self.waiting.pop(m))

    def update(self, total: int) -> None:
        """Ends the step."""
        linear, hashes = self.linear, self.linear.hashes
        if len(linear.trained):
            old = self.state[linear.weights_at]
            self.state[linear.weights_at] = hashes.updated_all(old, self.gradients, total)
        for name, value in linear.updates:
            at = linear.standing.index(f"buffer:{name}")
            statistics = self.statistics[value] if value else 0
            self.state[at] = np.uint64(hashes.buffered(int(self.state[at]), statistics & MASK))
        self.gradients[:] = 0
        self.statistics = dict.fromkeys(linear.statistics, 0)
        self._base = None

    def resume(self, states: Mapping[str, int]) -> None:
        """Goes on from what `exported` gave, under whatever cut; other names are passed over."""
        for at, name in enumerate(self.linear.standing):
            if name in states:
                self.put(at, states[name])

    def put(self, at: int, state: int) -> None:
        """Changes what stands in one place of `linear.standing`."""
        self.state[at] = np.uint64(state)
        self._base = None

    def named_gradients(self) -> dict[str, int]:
        return dict(zip(self.linear.trained, self.gradients.tolist(), strict=True))

    def exported(self) -> dict[str, int]:
        return dict(zip(self.linear.standing, self.state.tolist(), strict=False))
