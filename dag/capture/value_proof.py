"""The proof with numbers: what forward gives, in three calls one after the other, is what the graph
gives, in train and in eval mode.

The module computes as its user's loop would, on tensors of its own: its weights with a little noise
(a branch that is multiplied by zero at the start would show nothing), or random ones where there
are none yet. Where it draws (dropout), it gets the masks that the graph draws. Loss, weight,
metrics and running statistics are compared in every call, gradients in the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import FlopCounterMode

from ..ir.capture_errors import first_line, place_of, refused, text_of
from ..ir.graph import Graph, Operator
from ..ir.infer import call, infer
from ..ir.operators import takes_key
from ..ir.random import step_key
from ..transforms.evaluation import evaluation
from .draws_given import GivenDraws, UnlikeDrawsError
from .export import forward_of
from .from_fx import Names
from .modes import in_mode, with_tensors
from .proof import PROOF_S, Forward, Late
from .python_state import PythonState
from .torch_calls import TorchCalls

__all__ = ["MOST_FLOPS", "MOST_NUMBERS", "Samples", "prove_values"]

MOST_NUMBERS = 200_000_000
"""Parameters and buffers with which a model is tried."""
MOST_FLOPS = 1e10
"""Products and sums of one call. Module and graph make three each in both modes, and a backward:
together sixteen times as many, some seconds of one core."""
CALLS = 3
TOLERANCE = 1e-3
"""Relative. Where a weight is narrower than float32: ROUNDED."""
ROUNDED = 5e-2
SMALL = 1e-3
"""Share of the whole gradient's norm below which a parameter's is taken for rounding."""

Samples = Callable[[int, int], Mapping[str, Tensor]]
"""(microbatch, samples) → inputs by name, others for each microbatch."""


@dataclass(frozen=True)
class _Values:
    """Tensors with values, by the module's names and by the graph's."""

    module: dict[str, Tensor]
    graph: dict[str, Tensor]
    tolerance: float


def prove_values(
    forward: Forward,
    graph: Graph,
    names: Names,
    constants: Mapping[str, Tensor],
    size: int,
    samples: Samples | None,
    late: Late = lambda: False,
) -> str:
    """Raises CaptureError where the module and its graph give different numbers for microbatches of
    `size` samples. Returns why not all calls were compared; empty: they were. Models of more than
    MOST_NUMBERS, or of which a call takes more than MOST_FLOPS, are not tried, and those of which
    buffers have no values; nor is anything once it is `late`. The module, and all random state, are
    as they were."""
    module = forward.module
    numbers = sum(t.numel() for t in (*module.parameters(), *module.buffers()))
    if numbers > MOST_NUMBERS:
        return _untried(f"it has {numbers:,} numbers, and up to {MOST_NUMBERS:,} are tried")
    if not _known(forward.module, constants):
        return _untried("not all of its tensors have values on the CPU here")
    with FlopCounterMode(display=False) as counter:
        infer(bound := graph.bind(size))
    if (flops := counter.get_total_flops()) > MOST_FLOPS:
        most = MOST_FLOPS / 1e9
        return _untried(f"a call takes {flops / 1e9:,.0f} GFLOP, and up to {most:,.0f} are tried")
    batches = [_batch(forward.inputs, size, m, samples) for m in range(CALLS)]
    why = ""
    for train in (True, False):
        form = bound if train else evaluation(bound)
        with torch.random.fork_rng(devices=[]), in_mode(forward.module, train):
            values = _values(forward.module, graph, names, constants)
            found = _Comparison(forward, form, values, train, late).run(batches)
            why = why or found
    return _untried(why) if why else ""


def _untried(why: str) -> str:
    return f"what it computes was not compared with the model: {why}"


class _UntriedError(Exception):
    """A call cannot be compared; says why."""


@dataclass
class _Comparison:
    """The calls of one mode."""

    forward: Forward
    graph: Graph
    values: _Values
    train: bool
    late: Late
    state: PythonState = field(init=False)

    def run(self, batches: Sequence[Mapping[str, Tensor]]) -> str:
        """Raises CaptureError at the first difference. Returns why not all calls were compared."""
        module = self.forward.module
        with with_tensors(module, self.values.module):
            self.state = PythonState(module, self.forward.loss)
            before = {n: self.values.module[n].clone() for n in self._buffers()}
            draws: GivenDraws | None = None
            with self.state.restored():
                try:
                    if any(takes_key(op.target) for op in self.graph.operators):
                        draws = self._draws(batches[0], before)
                    for number, batch in enumerate(batches):
                        self._compare(number, batch, draws)
                except _UntriedError as error:
                    return str(error)
        return ""

    def _buffers(self) -> list[str]:
        return [n for n, t in self.values.module.items() if not isinstance(t, nn.Parameter)]

    def _draws(self, batch: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> GivenDraws:
        """The graph's draws in the order of forward's: one call says which of those count."""
        self._in_time(0)
        calls = TorchCalls({id(t): n for n, t in self.values.module.items()}, self.forward.known)
        calls.begin(batch)
        try:
            with torch.no_grad(), calls:
                results = forward_of(self.forward.module, batch, self.forward.loss)
        except Exception as error:  # what the data or the machine does not allow
            raise self._raised(error) from error
        live = frozenset(calls.trace(results).live)
        self.state.restore()
        with torch.no_grad():
            for name, tensor in before.items():
                self.values.module[name].copy_(tensor)
        return GivenDraws(self.graph, live)

    def _in_time(self, number: int) -> None:
        if self.late():
            done = number + (0 if self.train else CALLS)
            raise _UntriedError(f"{done} of {2 * CALLS} calls were compared in {PROOF_S:g} s")

    def _raised(self, error: Exception) -> _UntriedError:
        return _UntriedError(
            f"{self._when(0)} it raises {type(error).__name__} ({first_line(error)})"
        )

    def _compare(self, number: int, batch: Mapping[str, Tensor], draws: GivenDraws | None) -> None:
        """Raises CaptureError where a call differs, _UntriedError where it cannot be made."""
        self._in_time(number)
        key = step_key(0, 0, number)
        wants = self.train and number == 0
        old = {n: self.values.graph[n].clone() for n in self._updated()}
        try:
            # As a loop does, though nothing goes back (a forward may call retain_grad).
            with torch.set_grad_enabled(self.train), _drawing(draws, key):
                theirs = forward_of(self.forward.module, batch, self.forward.loss)
        except UnlikeDrawsError as error:
            raise _UntriedError(str(error)) from error
        except Exception as error:  # whatever the user's code raises
            if number == 0 or self._raises_at_first(batch, draws, key):
                raise self._raised(error) from error
            raise refused(
                text_of(place_of(error)),
                f"{self._when(number)} it raises {type(error).__name__} ({first_line(error)}), "
                "though its calls of torch are those of the first",
                "let forward do the same in every call",
            ) from error
        with torch.set_grad_enabled(wants):
            ours = _computed(self.graph, self.values.graph, batch, key, old)
        wanted = [self.graph.loss, *filter(None, [self.graph.weight])]
        wanted += [value for _, value in self.graph.metrics]
        said = ["loss", *(["weight"] if self.graph.weight else [])]
        said += [name for name, _ in self.graph.metrics]
        for name, value, result in zip(said, wanted, theirs, strict=True):
            self._check(f"its {name}", result, ours[value], number)
        for name, update in self._updated().items():
            made = old[name] + update.factor if update.rule == "add" else None
            if made is None:
                share = update.factor
                made = (1 - share) * old[name].double() + share * ours[update.value].double()
            self._check(f"buffer {name}", self.values.graph[name], made, number)
        if wants and not (draws and draws.recomputes):
            self._check_gradients(theirs[0], ours[self.graph.loss])

    def _raises_at_first(
        self, batch: Mapping[str, Tensor], draws: GivenDraws | None, key: int
    ) -> bool:
        """Whether a batch is the reason, not that there were calls before."""
        self.state.restore()
        try:
            with torch.no_grad(), _drawing(draws, key):
                forward_of(self.forward.module, batch, self.forward.loss)
        except Exception:  # whatever the user's code raises
            return True
        return False

    def _updated(self) -> dict[str, Any]:
        return {b.name: b.update for b in self.graph.buffers if b.update is not None}

    def _when(self, number: int) -> str:
        mode = "train" if self.train else "eval"
        return f"in its {('first', 'second', 'third')[number]} call in {mode} mode"

    def _check(self, what: str, theirs: Tensor, ours: Tensor, number: int) -> None:
        a, b = theirs.detach().double().flatten(), ours.detach().double().flatten()
        within = self.values.tolerance
        if torch.allclose(a, b, rtol=within, atol=within * 1e-2, equal_nan=True):
            return
        worst = int((a - b).abs().nan_to_num(math.inf).argmax())
        changed = "".join(
            f"; {n.name} went from {n.before} to {n.now}" for n in self.state.numbers()
        )
        raise refused(
            "the model's forward",
            f"{self._when(number)} {what} is {float(a[worst]):.6g}, and {float(b[worst]):.6g} by "
            f"the operators that were captured{changed}",
            "let forward be a function of its inputs, its parameters and torch's random numbers: "
            "no state of its own, no other branch while it is exported, no tensor changed outside "
            "of torch",
        )

    def _check_gradients(self, theirs: Tensor, ours: Tensor) -> None:
        trained = {
            n: p
            for n, p in self.values.graph.items()
            if isinstance(p, nn.Parameter) and p.requires_grad
        }
        if not trained or not (theirs.requires_grad or ours.requires_grad):
            return
        found = [
            torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            if loss.requires_grad
            else [None] * len(trained)
            for loss in (theirs, ours)
        ]
        norms = [float(g.norm()) if g is not None else 0.0 for g in found[0]]
        least = SMALL * math.hypot(*norms)
        for name, norm, a, b in zip(trained, norms, *found, strict=True):
            if a is None and b is None:
                continue
            apart = float(((0 if a is None else a) - (0 if b is None else b)).norm())  # type: ignore[union-attr]
            if apart > self.values.tolerance * 10 * (norm + least):
                raise refused(
                    "the model's forward",
                    f"the gradient of {name} has the norm {norm:.4g}, and differs by {apart:.4g} "
                    "by the operators that were captured",
                    "write the forward so that autograd gives this gradient from its operators "
                    "alone: no .data, no gradient that is set or changed elsewhere",
                )


@contextmanager
def _drawing(draws: GivenDraws | None, key: int) -> Iterator[None]:
    """With the graph's draws in place of torch's."""
    if draws is None:
        yield
        return
    with draws.of(key):
        yield


def _computed(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    key: int,
    old: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The results of a bound graph, and the statistics of its buffers."""
    values: dict[str, Any] = {f"in:{name}": tensor for name, tensor in batch.items()}
    values |= {f"param:{p.name}": tensors[p.name] for p in graph.parameters}
    values |= {f"buffer:{b.name}": old.get(b.name, tensors[b.name]) for b in graph.buffers}
    last = {v: n for n, op in enumerate(graph.operators) for v in op.reads}
    kept = {graph.loss, graph.weight, *(v for _, v in graph.metrics)}
    kept |= {b.update.value for b in graph.buffers if b.update}
    for number, op in enumerate(graph.operators):
        values |= zip(op.values, call(op, values, torch.device("cpu"), key), strict=True)
        for value in _dead(op, number, last, kept):
            values.pop(value, None)
    return values


def _dead(op: Operator, number: int, last: Mapping[str, int], kept: set[str]) -> list[str]:
    """What nobody reads any more."""
    done = [v for v in op.reads if last[v] == number] + [v for v in op.values if v not in last]
    return [v for v in done if v not in kept]


def _known(module: nn.Module, constants: Mapping[str, Tensor]) -> bool:
    """Whether all but the parameters has values."""
    rest = (*module.buffers(), *constants.values())
    own = all(not t.is_meta and not isinstance(t, FakeTensor) for t in rest)
    return own and all(p.device.type == "cpu" for p in module.parameters())


def _values(
    module: nn.Module, graph: Graph, names: Names, constants: Mapping[str, Tensor]
) -> _Values:
    """Copies that may be computed with. The same ones in every call of a process."""
    random = torch.Generator().manual_seed(0)
    statistics = {b.name for b in graph.buffers if b.update and b.update.rule == "ema"}
    found: dict[str, Tensor] = {}
    made: dict[str, Tensor] = dict(constants)
    for name, p in module.named_parameters(remove_duplicate=False):
        own = names.parameters[name]
        if own not in made:
            made[own] = nn.Parameter(_valued(p.detach(), random), p.requires_grad)
        found[name] = made[own]
    for name, b in module.named_buffers(remove_duplicate=False):
        own = names.buffers[name]
        if own not in made:
            made[own] = b.detach().clone()
            if own in statistics:
                made[own] += 0.1 * torch.rand(b.shape, generator=random)
        found[name] = made[own]
    narrow = any(t.is_floating_point() and t.dtype.itemsize < 4 for t in made.values())
    return _Values(found, made, ROUNDED if narrow else TOLERANCE)


def _valued(tensor: Tensor, random: torch.Generator) -> Tensor:
    """A parameter's values with a little noise, or random ones."""
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if _absent(tensor) else tensor.clone()
    if tensor.dim() < 2:
        noise = torch.rand(tensor.shape, generator=random)
        values = 0.5 + noise if _absent(tensor) else tensor + 0.02 * noise
    else:
        noise = torch.randn(tensor.shape, generator=random)
        scale = max(1, tensor.shape[1:].numel()) ** -0.5
        values = scale * noise if _absent(tensor) else tensor + 0.01 * noise
    return values.to(tensor.dtype)


def _absent(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _batch(
    inputs: Mapping[str, Tensor], size: int, number: int, samples: Samples | None
) -> dict[str, Tensor]:
    """Samples of the data, or random ones: integers are 0 or 1, which tables of any size have."""
    if samples is not None:
        return dict(samples(number, size))
    random = torch.Generator().manual_seed(number)
    made = {}
    for name, tensor in inputs.items():
        shape = (size, *tensor.shape[1:])
        if tensor.is_floating_point():
            made[name] = torch.randn(shape, generator=random).to(tensor.dtype)
        else:
            made[name] = torch.randint(0, 2, shape, generator=random).to(tensor.dtype)
    return made
