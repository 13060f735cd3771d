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
from dataclasses import dataclass, replace

from .graph import Graph, GraphError, Operator, TensorSpec
from .plan import PlanError

__all__ = ["Port", "Stage", "TiedGroup", "cut", "stage_graph", "tied_groups"]


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


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """A trainable parameter that several stages hold; their gradients are summed in stage order."""

    index: int
    parameter: str
    stages: tuple[int, ...]


def cut(graph: Graph, bounds: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
    """The stages of the graph for intervals [start, stop) of its operators.

    Raises PlanError when the intervals are not consecutive, non-empty and complete, GraphError when
    the graph is not bound, makes no loss, or a buffer is read in another stage than its owner.
    """
    if graph.batch is None:
        raise GraphError("the graph is for any microbatch size: call graph.bind(microbatch) first")
    _check_bounds(bounds, len(graph.operators))
    if graph.loss not in graph.producer:
        raise GraphError(f"the loss is {graph.loss!r}: expected a value that an operator makes")

    stage_of_operator = [i for i, (start, stop) in enumerate(bounds) for _ in range(start, stop)]
    stage_of = {value: stage_of_operator[i] for value, i in graph.producer.items()}
    loss_stage = stage_of[graph.loss]
    reported = [graph.loss, graph.weight, *(value for _, value in graph.metrics)]
    reported = [value for value in dict.fromkeys(reported) if value]

    readers: dict[str, set[int]] = {}  # stages whose operators read a value
    differentiators: dict[str, set[int]] = {}  # of these, the ones that send its gradient back
    for operator, stage in zip(graph.operators, stage_of_operator, strict=True):
        passes_gradient = any(value in graph.grads for value in operator.values)
        for value in operator.reads:
            _check_known(graph, operator, value)
            readers.setdefault(value, set()).add(stage)
            if passes_gradient and value in graph.grads:
                differentiators.setdefault(value, set()).add(stage)
    takers = {value: set(stages) for value, stages in readers.items()}
    for value in reported:
        if value not in graph.spec:
            raise GraphError(f"result {value!r} is no value of the graph")
        takers.setdefault(value, set()).add(loss_stage)

    ports = [_port(graph, value, stage_of, takers, differentiators) for value in stage_of]
    crossing = [port for port in ports if port is not None]
    owner = {b.name: _owner(graph, b.name, stage_of, stage_of_operator) for b in graph.buffers}
    for name, home in owner.items():
        others = takers.get(f"buffer:{name}", set()) - {home}
        if home is not None and others:
            raise GraphError(
                f"buffer {name!r} is updated in stage {home} and read in stage {min(others)}: "
                "put the operators that read it into one stage with the one that updates it"
            )

    stages = []
    for i, (start, stop) in enumerate(bounds):
        reads = {value for value, at in takers.items() if i in at}
        own = [b for b in graph.buffers if owner[b.name] == i]
        stages.append(
            Stage(
                index=i,
                start=start,
                stop=stop,
                inputs=tuple(x.name for x in graph.inputs if f"in:{x.name}" in reads),
                parameters=tuple(p.name for p in graph.parameters if f"param:{p.name}" in reads),
                trainable=tuple(
                    p.name for p in graph.parameters if p.trainable and f"param:{p.name}" in reads
                ),
                buffers=tuple(
                    b.name for b in graph.buffers if b in own or f"buffer:{b.name}" in reads
                ),
                updates=tuple(b.name for b in own),
                statistics=tuple(
                    b.update.value for b in own if b.update and b.update.rule == "ema"
                ),
                receives=tuple(p for p in crossing if i in p.targets and p.source < i),
                sends=tuple(p for p in crossing if p.source == i),
                late=tuple(p for p in crossing if i in p.targets and p.source > i),
                results=tuple(v for v in reported if stage_of.get(v, loss_stage) == i),
                makes_loss=i == loss_stage,
                has_backward=any(
                    value in graph.grads
                    for op in graph.operators[start:stop]
                    for value in op.values
                ),
            )
        )
    return tuple(stages)


def tied_groups(graph: Graph, stages: Sequence[Stage]) -> tuple[TiedGroup, ...]:
    """The trainable parameters that more than one stage reads, in the order of the graph."""
    found = [
        (p.name, tuple(s.index for s in stages if p.name in s.trainable)) for p in graph.parameters
    ]
    several = [(name, at) for name, at in found if len(at) > 1]
    return tuple(TiedGroup(i, name, at) for i, (name, at) in enumerate(several))


def stage_graph(graph: Graph, stage: Stage) -> Graph:
    """The part of the graph that a holder of the stage builds. Values that its operators read and
    that it does not make are those of `stage.receives`; loss, weight and metrics are named only
    where they are made here."""
    return replace(
        graph,
        inputs=tuple(i for i in graph.inputs if i.name in stage.inputs),
        parameters=tuple(p for p in graph.parameters if p.name in stage.parameters),
        buffers=tuple(
            b if b.name in stage.updates else replace(b, update=None)
            for b in graph.buffers
            if b.name in stage.buffers
        ),
        operators=graph.operators[stage.start : stage.stop],
        loss=graph.loss if graph.loss in stage.results else "",
        weight=graph.weight if graph.weight in stage.results else "",
        metrics=tuple((name, value) for name, value in graph.metrics if value in stage.results),
    )


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


def _port(
    graph: Graph,
    value: str,
    stage_of: dict[str, int],
    takers: dict[str, set[int]],
    differentiators: dict[str, set[int]],
) -> Port | None:
    """The port of a value that an operator makes; None when it stays in its stage."""
    source = stage_of[value]
    targets = tuple(sorted(takers.get(value, set()) - {source}))
    if not targets:
        return None
    back = tuple(sorted(differentiators.get(value, set()) - {source}))
    return Port(value, graph.spec[value], source, targets, bool(back), back)


def _owner(
    graph: Graph, name: str, stage_of: dict[str, int], stage_of_operator: Sequence[int]
) -> int | None:
    """The stage that a buffer belongs to (see the module's docstring); None: nothing updates it."""
    update = {b.name: b.update for b in graph.buffers}
    mine = update[name]
    if mine is None:
        return None
    if mine.rule == "ema":
        if mine.value not in stage_of:
            raise GraphError(f"buffer {name!r} is updated from {mine.value!r}, which nothing makes")
        return stage_of[mine.value]
    module = name.rpartition(".")[0]
    for other, rule in update.items():
        if rule and rule.rule == "ema" and other.rpartition(".")[0] == module:
            return stage_of.get(rule.value)
    for operator, stage in zip(graph.operators, stage_of_operator, strict=True):
        if operator.module == module or f"buffer:{name}" in operator.reads:
            return stage
    return 0
