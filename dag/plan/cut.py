"""Cutting: a bound graph and intervals of its operators become stages with named ports.

A stage is an interval of the graph's topological order, so values only ever flow to later stages,
gradients to earlier ones, and no order of stages can be wrong. What a stage needs, by kind:

- data inputs and parameters: every stage that reads one has it (a trainable parameter of several
  stages is a tied group, see `tied_groups`);
- a buffer that nothing updates: copied to every stage that reads it;
- a buffer with an update: belongs to one stage, its *owner*. Rule `ema`: the stage that makes the
  statistic. Rule `add` (a counter): the stage that owns another buffer of the same module; without
  one the stage of the module's first operator; without that the first stage;
- a value of an earlier stage: one Port per value, however many stages read it;
- weight and metrics: gathered in the stage that makes the loss. Made earlier, they are ports like
  all others. Made later (an accuracy that is computed behind the loss, cut off from it), they are
  `late`: the loss's stage takes them with its backward, for its forward is long over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..ir.graph import Graph, GraphError, Operator, TensorSpec
from .outline import Crossed, Outline, StageOutline, TiedGroup
from .plan import Plan, PlanError

__all__ = [
    "Cutter",
    "Port",
    "Stage",
    "TiedGroup",
    "bare_stages",
    "cut",
    "outline",
    "tied_groups",
]


@dataclass(frozen=True, slots=True)
class Port:
    """A value that crosses stages. Its producer sends it to every target and adds up the gradients
    that come back from `grad_targets`, in that order."""

    value: str
    spec: TensorSpec
    """Bound."""
    source: int
    """The stage that makes it."""
    targets: tuple[int, ...]
    """The stages that take it, ascending."""
    grad: bool
    """Whether a gradient comes back: the value is in `graph.grads` and some target reads it so."""
    grad_targets: tuple[int, ...] = ()
    """The targets that send a gradient back, ascending: those with an operator that reads the value
    and passes gradient on (one that only counts or reports it sends none)."""


@dataclass(frozen=True)
class Stage:
    """Operators [start, stop) of the full graph with everything that crosses their border.

    All tuples of names are in the order of the graph and hold each name once.
    """

    index: int
    start: int
    stop: int
    inputs: tuple[str, ...]
    """Data inputs that it reads, without `in:`."""
    parameters: tuple[str, ...]
    """Parameters that it reads, without `param:`."""
    trainable: tuple[str, ...]
    """Those of `parameters` that are trained: what an optimizer here holds state for."""
    buffers: tuple[str, ...]
    """Buffers that it reads or owns, without `buffer:`."""
    updates: tuple[str, ...]
    """Buffers that it owns: it applies their updates."""
    statistics: tuple[str, ...]
    """Values made here that updates of rule `ema` need, in the order of `updates`."""
    receives: tuple[Port, ...]
    """Ports that its forward takes, in the order in which the graph makes them."""
    sends: tuple[Port, ...]
    """Ports that its forward fills, one per value, in the order in which the graph makes them."""
    late: tuple[Port, ...]
    """Only for the stage of the loss: results made in later stages, taken by the backward."""
    results: tuple[str, ...]
    """Loss, weight and metrics values made here."""
    makes_loss: bool
    has_backward: bool
    """Whether a gradient of the loss flows through some value made here: it has something trainable
    in it or above it, and the loss in it or below it."""

    def __repr__(self) -> str:
        marks = "".join(
            f", {word}"
            for word, on in (("loss", self.makes_loss), ("no backward", not self.has_backward))
            if on
        )
        return (
            f"<Stage {self.index} [{self.start},{self.stop}) {len(self.receives)} in, "
            f"{len(self.sends)} out, {len(self.parameters)} parameters{marks}>"
        )


def cut(graph: Graph, bounds: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
    """The stages of the graph for intervals [start, stop) of its operators.

    Raises PlanError when the intervals are not consecutive, non-empty and complete, GraphError when
    the graph is not bound, makes no loss, or a buffer is read in another stage than its owner.
    """
    return Cutter(graph).cut(bounds)


class Cutter:
    """Cuts one graph many times: who reads what is found once, and each cut looks only at values
    that cross it. Raises GraphError when the graph is not bound or makes no loss."""

    def __init__(self, graph: Graph) -> None:
        if graph.batch is None:
            raise GraphError(
                "the graph is for any microbatch size: call graph.bind(microbatch) first"
            )
        if graph.loss not in graph.producer:
            raise GraphError(f"the loss is {graph.loss!r}: expected a value that an operator makes")
        self.graph = graph
        self._loss = graph.producer[graph.loss]
        self._takers: dict[str, list[int]] = {}
        """By value, the operators that read it."""
        self._differentiators: dict[str, list[int]] = {}
        """The ones of these that send its gradient back."""
        self._grads = [0]
        """By position, operators before it through which a gradient flows."""
        for i, operator in enumerate(graph.operators):
            passes_gradient = any(value in graph.grads for value in operator.values)
            self._grads.append(self._grads[-1] + passes_gradient)
            for value in operator.reads:
                _check_known(graph, operator, value)
                self._takers.setdefault(value, []).append(i)
                if passes_gradient and value in graph.grads:
                    self._differentiators.setdefault(value, []).append(i)
        reported = [graph.loss, graph.weight, *(value for _, value in graph.metrics)]
        self._reported = [value for value in dict.fromkeys(reported) if value]
        for value in self._reported:
            if value not in graph.spec:
                raise GraphError(f"result {value!r} is no value of the graph")
            # Results are gathered where the loss is made.
            self._takers.setdefault(value, []).append(self._loss)
        self._made = [(v, i) for v, i in graph.producer.items() if v in self._takers]
        takers = [self._takers[v] for v, _ in self._made]
        self._first = np.array(
            [min(i, *at) for (_, i), at in zip(self._made, takers, strict=True)], np.int64
        )
        self._last = np.array(
            [max(i, *at) for (_, i), at in zip(self._made, takers, strict=True)], np.int64
        )
        """By value of `_made`: the first and last operator that makes or takes it."""
        self._updates = {b.name: b.update for b in graph.buffers}
        self._owner = {name: self._owner_of(name) for name in self._updates}
        self.owners = {name: at for name, at in self._owner.items() if at is not None}
        """By buffer that is updated, an operator of the stage that it belongs to."""
        together = [
            (at, *self._takers.get(f"buffer:{name}", ()))
            for name, at in self._owner.items()
            if at is not None
        ]
        self._together = np.array([(min(x), max(x)) for x in together], np.int64).reshape(-1, 2)
        """By buffer that is updated: the first and last operator of those in one stage."""

    def can(self, bounds: Sequence[tuple[int, int]]) -> bool:
        """Whether no buffer is updated in one stage and read in another."""
        starts = np.array([start for start, _ in bounds], np.int64)
        first, last = np.searchsorted(starts, self._together, side="right").T
        return bool((first == last).all())

    def cut(self, bounds: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
        """As the function `cut`."""
        graph = self.graph
        _check_bounds(bounds, len(graph.operators))
        stage_at = np.repeat(np.arange(len(bounds)), [stop - start for start, stop in bounds])
        stage_of: list[int] = stage_at.tolist()
        loss_stage = stage_of[self._loss]
        receives: list[list[Port]] = [[] for _ in bounds]
        sends: list[list[Port]] = [[] for _ in bounds]
        late: list[list[Port]] = [[] for _ in bounds]
        for n in np.flatnonzero(stage_at[self._first] != stage_at[self._last]).tolist():
            value, made = self._made[n]
            port = self._port(value, stage_of[made], stage_of)
            sends[port.source].append(port)
            for i in port.targets:
                (receives if i > port.source else late)[i].append(port)

        inputs = self._by_stage("in:", [x.name for x in graph.inputs], stage_of, len(bounds))
        parameters = self._by_stage(
            "param:", [p.name for p in graph.parameters], stage_of, len(bounds)
        )
        trained = {p.name for p in graph.parameters if p.trainable}
        owner = {n: None if at is None else stage_of[at] for n, at in self._owner.items()}
        buffers: list[list[str]] = [[] for _ in bounds]
        updates: list[list[str]] = [[] for _ in bounds]
        for name, home in owner.items():
            at = {stage_of[i] for i in self._takers.get(f"buffer:{name}", ())}
            if home is not None:
                if at - {home}:
                    raise GraphError(
                        f"buffer {name!r} is updated in stage {home} and read in stage "
                        f"{min(at - {home})}: put the operators that read it into one stage with "
                        "the one that updates it"
                    )
                at.add(home)
                updates[home].append(name)
            for i in at:
                buffers[i].append(name)
        results: list[list[str]] = [[] for _ in bounds]
        for value in self._reported:
            made_at = graph.producer.get(value)
            results[loss_stage if made_at is None else stage_of[made_at]].append(value)
        found = []
        for i, (start, stop) in enumerate(bounds):
            rules = [self._updates[name] for name in updates[i]]
            found.append(
                Stage(
                    index=i,
                    start=start,
                    stop=stop,
                    inputs=tuple(inputs[i]),
                    parameters=tuple(parameters[i]),
                    trainable=tuple(name for name in parameters[i] if name in trained),
                    buffers=tuple(buffers[i]),
                    updates=tuple(updates[i]),
                    statistics=tuple(r.value for r in rules if r and r.rule == "ema"),
                    receives=tuple(receives[i]),
                    sends=tuple(sends[i]),
                    late=tuple(late[i]),
                    results=tuple(results[i]),
                    makes_loss=i == loss_stage,
                    has_backward=self._grads[stop] > self._grads[start],
                )
            )
        return tuple(found)

    def _by_stage(
        self, prefix: str, names: Sequence[str], stage_of: Sequence[int], stages: int
    ) -> list[list[str]]:
        """By stage, those of the names that its operators read."""
        found: list[list[str]] = [[] for _ in range(stages)]
        for name in names:
            for i in {stage_of[at] for at in self._takers.get(prefix + name, ())}:
                found[i].append(name)
        return found

    def _port(self, value: str, source: int, stage_of: Sequence[int]) -> Port:
        targets = {stage_of[i] for i in self._takers[value]} - {source}
        back = {stage_of[i] for i in self._differentiators.get(value, ())} - {source}
        return Port(
            value,
            self.graph.spec[value],
            source,
            tuple(sorted(targets)),
            bool(back),
            tuple(sorted(back)),
        )

    def _owner_of(self, name: str) -> int | None:
        """An operator of the stage that a buffer belongs to (see the module); None: nothing updates
        it."""
        producer, mine = self.graph.producer, self._updates[name]
        if mine is None:
            return None
        if mine.rule == "ema":
            if mine.value not in producer:
                raise GraphError(
                    f"buffer {name!r} is updated from {mine.value!r}, which nothing makes"
                )
            return producer[mine.value]
        module = name.rpartition(".")[0]
        for other, rule in self._updates.items():
            if rule and rule.rule == "ema" and other.rpartition(".")[0] == module:
                return producer.get(rule.value)
        read = self._takers.get(f"buffer:{name}", ())
        for i, operator in enumerate(self.graph.operators):
            if operator.module == module or i in read:
                return i
        return 0


def tied_groups(graph: Graph, stages: Sequence[Stage]) -> tuple[TiedGroup, ...]:
    """The trainable parameters that more than one stage reads, in the order of the graph."""
    at: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.trainable:
            at.setdefault(name, []).append(stage.index)
    several = [(p.name, tuple(at[p.name])) for p in graph.parameters if len(at.get(p.name, ())) > 1]
    return tuple(TiedGroup(i, name, where) for i, (name, where) in enumerate(several))


def _check_bounds(bounds: Sequence[tuple[int, int]], operators: int) -> None:
    if not bounds:
        raise PlanError("a cut has no stage: expected at least one")
    if len(bounds) > operators:
        raise PlanError(
            f"{len(bounds)} stages for a graph of {operators} operators: "
            "expected at most one stage per operator; ask for fewer stages"
        )
    at = 0
    for i, (start, stop) in enumerate(bounds):
        if start != at or stop <= start:
            raise PlanError(
                f"stage {i} is operators [{start}, {stop}): "
                f"expected a non-empty interval that starts at {at}"
            )
        at = stop
    if at != operators:
        raise PlanError(f"the stages cover {at} operators, the graph has {operators}")


def _check_known(graph: Graph, operator: Operator, value: str) -> None:
    if value not in graph.spec:
        raise GraphError(
            f"operator {operator.name} reads {value!r}, which has no spec in the graph"
        )


def outline(graph: Graph, bounds: Sequence[tuple[int, int]]) -> Outline:
    """What a plan with these stages says of them. Raises as `cut`."""
    stages = cut(graph, bounds)
    specs: dict[TensorSpec, int] = {}
    return Outline(
        tuple(
            StageOutline(
                s.index,
                tuple(
                    Crossed(
                        p.value, p.targets, p.grad_targets, specs.setdefault(p.spec, len(specs))
                    )
                    for p in s.sends
                ),
                bool(s.trainable),
                bool(s.statistics),
                s.makes_loss,
                s.has_backward,
            )
            for s in stages
        ),
        tied_groups(graph, stages),
    )


def bare_stages(plan: Plan) -> tuple[Stage, ...]:
    """The stages of a plan as its outline has them: with all that schedules and wiring ask for, and
    without what they hold. Raises PlanError for a plan that has none."""
    if len(plan.outline.stages) != len(plan.stages):
        raise PlanError(
            f"the outline has {len(plan.outline.stages)} stages, the plan {len(plan.stages)}"
        )
    sent = [[_bare(s.index, crossed) for crossed in s.sends] for s in plan.outline.stages]
    return tuple(
        Stage(
            index=s.index,
            start=slot.start,
            stop=slot.stop,
            inputs=(),
            parameters=(),
            trainable=("",) * s.trainable,
            buffers=(),
            updates=(),
            statistics=("",) * s.statistics,
            receives=(),
            sends=tuple(sent[s.index]),
            late=(),
            results=(),
            makes_loss=s.makes_loss,
            has_backward=s.has_backward,
        )
        for s, slot in zip(plan.outline.stages, plan.stages, strict=True)
    )


def _bare(source: int, crossed: Crossed) -> Port:
    value, targets, back, spec = crossed
    return Port(value, TensorSpec((spec,), "float32"), source, targets, bool(back), back)
