"""Running one stage: forward, backward, evaluation, buffer updates.

The second of the two planes (docs/architecture.md, "Two planes").

    forward    values at the input ports  ->  values at the output ports, and the results
    backward   gradients of what left     ->  gradients of what came

A backward may be split: `backward_input` gives the gradients of what came, and `backward_weight`
adds those of the parameters later (weight_half.py).

Rules that keep this equal to plain autograd on the whole model:

1. A tensor that comes through a port is a leaf here, and one that leaves is detached. Between them
   autograd records what it would record in the whole model, and nothing else.
2. A value that several stages read leaves once; its gradients are summed in stage order. If it is
   also read in its own stage, autograd adds that part in the same pass, so it counts once.
3. Parameter gradients accumulate in `.grad` over the microbatches, as in a plain loop. A parameter
   that no gradient reached keeps `None`, as in a plain loop.
4. The loss of a microbatch is seeded with the microbatch's weight.
5. Running a microbatch changes no buffer. It returns statistics, and `apply_updates` applies those
   of all microbatches in their order when the step ends.
6. Whatever (step, microbatch) keeps for its backward is gone after it. Of a split one, only what
   the weights' gradients need is left until its second half. Second halves come in the order of
   the first ones, so that sums are those of rule 3, to the bit.
7. A stage that recomputes keeps what came and the data that it read, and no graph: its backward
   runs the forward again on them, now with autograd. Nothing differs between the two runs, as masks
   hang on (seed, step, microbatch), and parameters and buffers change only when a step ends. The
   first run gives values, results and statistics; the second gives only gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..analysis.weight_gradients import WeightGradient, WeightGradients, weight_gradients
from ..ir.graph import Graph, TensorSpec
from ..ir.random import step_key, table
from ..plan.cut import Stage
from ..transforms.evaluation import evaluation as evaluation_form
from .gradients import Gradients, total
from .rows import RowError, lacking
from .saved import SavedTensors
from .stage_module import StageModule, build
from .weight_half import Noted, WeightHalf, accumulate, held_bytes, input_half

__all__ = ["Forwarded", "Gradients", "RowError", "StageExecutor", "TensorSpecError", "check_spec"]


class TensorSpecError(ValueError):
    """A tensor that is not what the graph says: expected and got are in the message."""


def check_spec(value: str, tensor: Tensor, spec: TensorSpec) -> None:
    """Raises TensorSpecError unless the tensor has exactly the bound spec's shape and dtype.

    To be called for everything that comes from outside before anything runs: kernels trust the
    shapes that they were captured with, and a wrong one can crash the process.
    """
    got = TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if got != spec:
        raise TensorSpecError(
            f"{value}: expected {spec!r}, got {got!r}; "
            "the sender's graph or microbatch size is not this run's"
        )


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What one microbatch left: values for other stages by name, results (loss, weight, metrics)
    by value name, and the statistic for each buffer with an `ema` update. All detached."""

    ports: dict[str, Tensor]
    results: dict[str, Tensor]
    updates: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a backward needs: leaves of the received ports, and outputs with their graph. With
    recomputation there are no outputs yet, and `taken` is all that the forward took."""

    leaves: dict[str, Tensor]
    roots: dict[str, Tensor]
    taken: dict[str, Tensor] | None = None
    notes: Sequence[Noted | None] = ()


class StageExecutor:
    """One stage on one device.

    `graph` is bound; `tensors` gives every parameter and buffer of the stage by its own name and is
    read once per name, so a mapping that loads on demand keeps one copy in memory. The executor
    owns copies: two stages never share a parameter. For a core peer, `graph` is the lowered graph
    and `operators` the interval there; ports and names stay those of `stage`. `evaluation` is an
    evaluation form with its interval; without it, that of `graph` is derived when first used.
    `recompute`: whether a backward computes the forward again (rule 7), for less memory. `split`:
    whether forwards take down what a split backward needs.

    Not thread-safe: one call at a time.
    """

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        tensors: Mapping[str, Tensor],
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        operators: tuple[int, int] | None = None,
        evaluation: tuple[Graph, tuple[int, int]] | None = None,
        recompute: bool = False,
        split: bool = False,
    ) -> None:
        self.stage = stage
        self.device = torch.device(device)
        self._graph = graph
        self._seed = seed
        self._masks = table()  # held, so that masks find it in the next step
        self._operators = operators or (stage.start, stage.stop)
        self._evaluation = evaluation
        self.recompute, self.split = recompute, split
        self.saved_bytes = 0
        """What autograd keeps of a microbatch, beside parameters and buffers (with recomputation:
        and beside what came); counted in the first that runs with autograd, 0 before."""
        self.apart_bytes = 0
        """What a microbatch keeps between the halves of its backward; counted likewise."""
        owned = frozenset(stage.updates)
        self.parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(self._own("param", name, tensors), name in stage.trainable)
            for name in stage.parameters
        }
        self.buffers: dict[str, Tensor] = {
            name: self._own("buffer", name, tensors) for name in stage.buffers
        }
        self._rules = {b.name: b.update for b in graph.buffers if b.update and b.name in owned}
        self._statistics = {n: rule.value for n, rule in self._rules.items() if rule.value}
        self._sent = tuple(port.value for port in stage.sends)
        self._received = tuple(port.value for port in stage.receives)
        # Leaves: what this stage sends a gradient back for. Roots: what gradients start from.
        self._leaves = tuple(p.value for p in stage.receives if stage.index in p.grad_targets)
        self._loss = graph.loss if stage.makes_loss else ""
        self._roots = tuple(p.value for p in stage.sends if p.grad and p.value != self._loss)
        if stage.makes_loss:
            self._roots += (self._loss,)
        # The loss's stage also reports the weight and the metrics that earlier stages made.
        reported = {graph.loss, graph.weight, *(value for _, value in graph.metrics)}
        self._results = stage.results
        if stage.makes_loss:
            self._results += tuple(value for value in self._received if value in reported)
        waits = WeightGradients()
        if split:
            waits = weight_gradients(graph, *self._operators, self._roots)
        statistics = tuple(self._statistics.values())
        self._training = self._build(graph, self._operators, statistics, waits.operators)
        at_once = (n for n in stage.trainable if f"param:{n}" not in waits.parameters)
        self._at_once = tuple(self.parameters[name] for name in at_once)
        self._evaluating: StageModule | None = None
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._waiting: dict[tuple[int, int], list[WeightHalf]] = {}

    def _own(self, kind: str, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """A copy on the device; raises TensorSpecError when it is not what the graph names."""
        value, tensor = f"{kind}:{name}", tensors[name].detach()
        check_spec(value, tensor, self._graph.spec[value])
        return tensor.to(self.device, copy=True, memory_format=torch.contiguous_format)

    def _build(
        self,
        graph: Graph,
        where: tuple[int, int],
        extra: tuple[str, ...],
        waits: Sequence[WeightGradient] = (),
    ) -> StageModule:
        gives = tuple(dict.fromkeys((*self._sent, *self._results, *extra)))
        return build(graph, *where, gives, self._standing, self.device, waits)

    @property
    def _standing(self) -> dict[str, Tensor]:
        """Parameters and buffers by value name."""
        tensors: dict[str, Tensor] = {f"param:{n}": t for n, t in self.parameters.items()}
        return tensors | {f"buffer:{n}": t for n, t in self.buffers.items()}

    @property
    def live(self) -> tuple[tuple[int, int], ...]:
        """The (step, microbatch) pairs that wait for their backward."""
        return tuple(self._kept)

    @property
    def waiting(self) -> tuple[tuple[int, int], ...]:
        """The (step, microbatch) pairs that wait for the second half of their backward."""
        return tuple(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """What those keep, beside parameters and buffers; an embedding's ids are not counted."""
        return held_bytes(self._waiting.values(), self._standing.values())

    def forward(
        self,
        step: int,
        microbatch: int,
        ports: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
    ) -> Forwarded:
        """Runs the stage on one microbatch and keeps what its backward needs.

        `ports` holds every received value, `inputs` every data input that the stage reads, on any
        device, already checked against their specs. Raises RowError for a row that an operator is
        asked for and does not have.
        """
        assert (step, microbatch) not in self._kept, f"F{microbatch} of step {step} ran twice"
        backward = self.stage.has_backward
        taken = self._place(ports, inputs)
        leaves: dict[str, Tensor] = {}
        if backward:
            leaves = {value: taken[value].requires_grad_() for value in self._leaves}
        made, notes = self._run(step, microbatch, taken, grad=backward and not self.recompute)
        if backward and self.recompute:
            self._kept[step, microbatch] = _Kept(leaves, {}, taken)
        elif backward:
            self._kept[step, microbatch] = _Kept(leaves, self._differentiable(made), notes=notes)
        forwarded = self._forwarded(made)
        forwarded.updates.update(
            {name: made[value].detach() for name, value in self._statistics.items()}
        )
        return forwarded

    def backward(
        self, step: int, microbatch: int, grads: Gradients, weight: float = 1.0
    ) -> dict[str, Tensor | None]:
        """Accumulates parameter gradients and returns the gradients of the received values that
        take one (None: no gradient reached it).

        `grads` has the gradients of the values that left with one. `weight` seeds the loss where
        this stage makes it; at 0 the loss is left out altogether, because the mean over nothing is
        NaN and the microbatch contributes nothing.
        """
        kept = self._again(step, microbatch)
        roots, seeds = self._seeds(kept, grads, weight)
        if roots:
            torch.autograd.backward(roots, seeds)
        return {value: leaf.grad for value, leaf in kept.leaves.items()}

    def backward_input(
        self, step: int, microbatch: int, grads: Gradients, weight: float = 1.0
    ) -> dict[str, Tensor | None]:
        """As `backward`, but for the gradients of parameters that `backward_weight` adds."""
        kept = self._again(step, microbatch)
        roots, seeds = self._seeds(kept, grads, weight)
        noted = [*zip(self._training.waiting, kept.notes, strict=True)]
        back, waiting = input_half(roots, seeds, kept.leaves, self._at_once, noted)
        self._waiting[step, microbatch] = waiting
        self.apart_bytes = self.apart_bytes or held_bytes([waiting], self._standing.values())
        return back

    def backward_weight(self, step: int, microbatch: int) -> None:
        """Accumulates the parameter gradients that `backward_input` left out."""
        accumulate(self._waiting.pop((step, microbatch)))

    def _again(self, step: int, microbatch: int) -> _Kept:
        """What a backward needs, which nobody keeps from here on."""
        kept = self._kept.pop((step, microbatch))
        if kept.taken is None:
            return kept
        made, notes = self._run(step, microbatch, kept.taken, grad=True)
        return _Kept(kept.leaves, self._differentiable(made), notes=notes)

    def _seeds(
        self, kept: _Kept, grads: Gradients, weight: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Where gradients start from, and those that they start with."""
        roots: list[Tensor] = []
        seeds: list[Tensor] = []
        for value, root in kept.roots.items():
            seed = total(grads.get(value), self.device)
            if value == self._loss and weight != 0:
                own = torch.full_like(root, weight)
                seed = own if seed is None else own + seed
            if seed is not None:
                roots.append(root)
                seeds.append(seed)
        return roots, seeds

    def evaluate(self, ports: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Forwarded:
        """Runs the evaluation form (running batch-norm statistics, no dropout) without autograd;
        keeps nothing and changes nothing. Raises RowError as `forward` does."""
        if self._evaluation is None:
            self._evaluation = evaluation_form(self._graph), self._operators
        if self._evaluating is None:
            self._evaluating = self._build(*self._evaluation, ())
        module = self._evaluating
        taken = self._place(ports, inputs)
        # The core form's attention asks for a key even where it drops nothing.
        key = (step_key(self._seed, 0, 0),) if module.takes_key else ()
        try:
            with torch.no_grad():
                made, _ = module.made([*(taken[value] for value in module.takes), *key])
        except (IndexError, RuntimeError) as error:
            found = lacking(*self._evaluation, {**taken, **self._standing}, error)
            if found is None:
                raise
            raise found from error
        return self._forwarded(made)

    def apply_updates(self, statistics: Sequence[Mapping[str, Tensor]]) -> None:
        """Changes the buffers that this stage updates: once per microbatch of the step, with the
        statistics that its forward returned (here or on another holder), in microbatch order.

        In float64 between reading and writing, as torch's own batch norm does on a CPU.
        """
        with torch.no_grad():
            for found in statistics:
                for name, rule in self._rules.items():
                    buffer = self.buffers[name]
                    if rule.rule == "add":
                        buffer.add_(rule.factor if buffer.is_floating_point() else int(rule.factor))
                        continue
                    value = found[name].to(self.device, torch.float64)
                    buffer.copy_((1 - rule.factor) * buffer.double() + rule.factor * value)

    def zero_grad(self) -> None:
        """Forgets the accumulated gradients; to be called after an update."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def forget(self) -> None:
        """Drops what unfinished microbatches keep, e.g. when a term ends."""
        self._kept.clear()
        self._waiting.clear()

    def _place(
        self, ports: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What comes from outside by value name, on the device, apart from anyone's graph."""
        found = {value: ports[value] for value in self._received}
        found |= {f"in:{name}": inputs[name] for name in self.stage.inputs}
        return {v: t.detach().to(self.device, non_blocking=True) for v, t in found.items()}

    def _run(
        self, step: int, microbatch: int, taken: Mapping[str, Tensor], *, grad: bool
    ) -> tuple[dict[str, Tensor], Sequence[Noted | None]]:
        """What the training form makes of a microbatch, by value name, and what it took down for
        the weight half."""
        module = self._training
        args: list[object] = [taken[value] for value in module.takes]
        if module.takes_key:
            args.append(step_key(self._seed, step, microbatch))
        try:
            if grad and not self.saved_bytes:
                return self._counted(args, taken)
            with torch.set_grad_enabled(grad):
                return module.made(args)
        except (IndexError, RuntimeError) as error:
            values = {**taken, **self._standing}
            key = step_key(self._seed, step, microbatch) if module.takes_key else 0
            found = lacking(self._graph, self._operators, values, error, key)
            if found is None:
                raise
            raise found from error

    def _counted(
        self, args: Sequence[object], taken: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Sequence[Noted | None]]:
        """Runs a microbatch with autograd, and counts what that keeps."""
        module, saved = self._training, SavedTensors()
        with torch.enable_grad(), saved:
            made, notes = module.made(args)
        stands: list[Tensor] = [*self.parameters.values(), *self.buffers.values()]
        if self.recompute:
            stands += taken.values()
        kept = [taken[value] for value in self._leaves]
        kept += self._differentiable(made).values()
        self.saved_bytes = saved.count(kept, stands)
        return made, notes

    def _differentiable(self, made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {value: made[value] for value in self._roots if made[value].requires_grad}

    def _forwarded(self, made: Mapping[str, Tensor]) -> Forwarded:
        return Forwarded(
            {value: made[value].detach() for value in self._sent},
            {value: made[value].detach() for value in self._results},
        )

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.parameters.values())
        return (
            f"<StageExecutor stage {self.stage.index}, operators [{self._operators[0]}, "
            f"{self._operators[1]}), {size} parameters on {self.device}, {len(self._kept)} live>"
        )
