"""One family of transformers: a small one by a plain loop of torch, and by what Shoal captured of
its folder, cut in four stages.

Both begin with the same weights (its own, and a little noise, so that no branch is multiplied by
zero; of other tasks than causal-lm by way of a folder that `save_pretrained` wrote), take the same
batches of token ids, and make STEPS steps of SGD.
"""

from __future__ import annotations

import itertools
import logging
import math
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.benchmarks.people.tasks import BATCH, Problem, problem_of
from shoal.client.models import models
from shoal.client.models.adapters import plain_name
from shoal.client.models.tasks import TASKS
from shoal.dag.capture.capture import Captured, capture
from shoal.dag.execute.execute import StageExecutor
from shoal.dag.plan.cut import Stage, cut
from shoal.job import Job

__all__ = ["STAGES", "STEPS", "Row", "compared", "stepped"]

STAGES, STEPS, RATE = 4, 3, 0.05
MOST_NUMBERS = 30_000_000
"""Parameters of a family that counts as shrunk."""
LOSS, WEIGHTS, MOVED = 1e-4, 1e-4, 1e-3
"""Relative differences: of a loss; of a parameter; of the way that a parameter went."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """What came of a family. status: "equal", "wrong" (captured, other numbers), "refused", or
    "not built" (transformers itself does not build or step it). why: for all but "equal".
    loss_difference, weight_difference: the largest, relative."""

    family: str
    status: str
    why: str = ""
    operators: int = 0
    loss_difference: float = 0.0
    weight_difference: float = 0.0

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def stepped(family: str) -> Row:
    """Return a row that says only whether transformers builds a model type and steps it."""
    try:
        _plain(family)
    except Exception as error:  # whatever the library raises
        return Row(family, "not built", _words(error))
    return Row(family, "built")


def compared(family: str) -> Row:
    """Return the row of a model type of MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, or of "TASK/FAMILY"."""
    try:
        problem, plain = _plain(family)
    except Exception as error:  # whatever the library raises
        return Row(family, "not built", _words(error))
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        try:
            _save(plain, problem, Path(folder))
            module, captured = _captured(Path(folder), problem)
        except Exception as error:  # whatever the product raises: a refusal where it is one of its
            kind = "refused" if isinstance(error, ValueError) else "error"
            return Row(family, kind, _words(error))
    try:
        _begin(plain, module, problem)
        return _trained(family, plain, captured, problem)
    except Exception as error:
        return Row(family, "wrong", _words(error), len(captured.graph.operators))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _plain(name: str) -> tuple[Problem, nn.Module]:
    """The small problem, and a model of it that made a step. Raises what the library raises."""
    import transformers

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    problem = problem_of(name)
    auto: Any = getattr(transformers, f"AutoModelFor{TASKS[problem.task].kind}")
    with torch.device("meta"):
        numbers = sum(p.numel() for p in auto.from_config(problem.config).parameters())
    if numbers > MOST_NUMBERS:
        raise ValueError(f"{numbers:,} parameters are left of it")
    model: nn.Module = auto.from_config(problem.config, dtype=torch.float32).train()
    loss = model(**problem.batch(0)).loss
    loss.backward()
    if not math.isfinite(found := float(loss.detach())):
        raise ValueError(f"its loss is {found}")
    return problem, model


def _save(model: nn.Module, problem: Problem, folder: Path) -> None:
    """Write the folder that a job names: of a causal model its config, of another task the model as
    transformers writes it."""
    if _begins_random(problem):
        problem.config.save_pretrained(folder)
        return
    _shaken(model)
    saved: Any = model
    saved.save_pretrained(folder)


def _begins_random(problem: Problem) -> bool:
    return problem.task == "causal-lm"


def _begin(plain: nn.Module, module: nn.Module, problem: Problem) -> None:
    """Let the plain model begin as the captured one; raise ValueError where that was read from
    files and has other values."""
    if _begins_random(problem):
        plain.load_state_dict(module.state_dict())
        return
    theirs = plain.state_dict()
    ours = module.state_dict()
    if other := [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]:
        raise ValueError(f"{len(other)} tensors are not those of the folder ({other[0]}, …)")


def _shaken(model: nn.Module) -> None:
    """Add a little noise to what is trained."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=random))


def _captured(folder: Path, problem: Problem) -> tuple[nn.Module, Captured]:
    """The model of a folder as a job has it, and its capture. Raises ModelError, CaptureError."""
    model = {"factory": f"hf:{folder}", "args": problem.args}
    job = Job(model=model, data={"kind": "arrays", "source": "none"}, steps=1)
    module = models.capturable(models.outline(job), job)
    if _begins_random(problem):
        _shaken(module)
    with models.ready(module, job):
        captured = capture(
            module,
            problem.batch(0),
            named=plain_name(module),
            sizes=(BATCH,),
            samples=lambda number, samples: {
                k: t[:samples] for k, t in problem.batch(number).items()
            },
        )
    return module, captured


# ---------------------------------------------------------------- training


class _Stages:
    """The stages of a capture in this process."""

    def __init__(self, captured: Captured, problem: Problem) -> None:
        self.batch = problem.batch
        self.graph = captured.graph.bind(BATCH)
        count = len(self.graph.operators)
        edges = [count * n // STAGES for n in range(STAGES + 1)]
        self.stages = cut(self.graph, list(itertools.pairwise(edges)))
        self.executors = [StageExecutor(self.graph, s, captured.tensors) for s in self.stages]

    def step(self, number: int, rate: float) -> float:
        """A step of SGD; returns its loss."""
        found: dict[str, Tensor] = {}
        updates: list[Mapping[str, Tensor]] = []
        results: dict[str, Tensor] = {}
        for stage, executor in zip(self.stages, self.executors, strict=True):
            ports = {p.value: found[p.value].contiguous() for p in stage.receives}
            forwarded = executor.forward(number, 0, ports, self.batch(number))
            found |= forwarded.ports
            results |= forwarded.results
            updates.append(forwarded.updates)
        self._back(number)
        self._update(rate)
        for executor, update in zip(self.executors, updates, strict=True):
            executor.apply_updates([update])
            executor.zero_grad()
        return float(results[self.graph.loss])

    def _back(self, number: int) -> None:
        grads: dict[str, dict[int, Tensor | None]] = {}
        for stage, executor in reversed(list(zip(self.stages, self.executors, strict=True))):
            if not stage.has_backward:
                continue
            given = {p.value: _from(p.grad_targets, grads[p.value]) for p in _asked(stage)}
            for value, grad in executor.backward(number, 0, given).items():
                grads.setdefault(value, {})[stage.index] = grad

    def _update(self, rate: float) -> None:
        summed: dict[str, Tensor] = {}
        for executor in self.executors:
            for name, parameter in executor.parameters.items():
                if parameter.grad is not None:
                    so_far = summed.get(name)
                    grad = parameter.grad
                    summed[name] = grad if so_far is None else so_far + grad
        with torch.no_grad():
            for executor in self.executors:
                for name, parameter in executor.parameters.items():
                    if name in summed:
                        parameter.sub_(rate * summed[name])

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers by name."""
        found: dict[str, Tensor] = {}
        for executor in self.executors:
            found |= {n: p.detach() for n, p in executor.parameters.items()}
            found |= executor.buffers
        return found


def _asked(stage: Stage) -> list[Any]:
    return [p for p in stage.sends if p.grad]


def _from(targets: tuple[int, ...], grads: Mapping[int, Tensor | None]) -> list[Tensor | None]:
    return [grads[target] for target in targets]


def _rate(plain: nn.Module, problem: Problem) -> float:
    """A rate at which the first step is no longer than RATE: longer ones make what rounding does to
    the first step so large by the third that it hides what is compared."""
    buffers = {n: b.clone() for n, b in plain.named_buffers()}
    plain.zero_grad()
    plain.train()(**problem.batch(0)).loss.backward()
    plain.load_state_dict(buffers, strict=False)
    norms = [float(p.grad.norm()) for p in plain.parameters() if p.grad is not None]
    return RATE / max(1.0, math.hypot(*norms))


def _trained(family: str, plain: nn.Module, captured: Captured, problem: Problem) -> Row:
    """Steps of both, compared."""
    stages = _Stages(captured, problem)
    began = {n: t.detach().clone() for n, t in _tensors(plain).items()}
    rate = _rate(plain, problem)
    optimizer = torch.optim.SGD(plain.parameters(), lr=rate)
    losses, apart = 0.0, 0.0
    why = ""
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = plain.train()(**problem.batch(number)).loss
        loss.backward()
        optimizer.step()
        ours = stages.step(number, rate)
        theirs_loss = float(loss.detach())
        losses = max(losses, abs(ours - theirs_loss) / abs(theirs_loss))
    if losses > LOSS:
        why = f"a loss differs by {losses:.2g}"
    ours_now = stages.tensors()
    ways = [float((t.detach() - began[n]).norm()) for n, t in plain.named_parameters()]
    whole = math.hypot(*ways)
    for name, theirs in _tensors(plain).items():
        start, mine = began[name], ours_now.get(name)
        moved = float((theirs.detach().double() - start.double()).norm())
        if mine is None:
            if moved and not why:
                why = f"{name} changed, and no stage has it"
            continue
        off = float((mine.double() - theirs.detach().double()).norm())
        size = float(theirs.detach().double().norm())
        apart = max(apart, off / size if size else off)
        if off > WEIGHTS * size or off > MOVED * (moved + MOVED * whole) + 1e-6 * size:
            why = why or f"{name} differs by {off:.2g}; its norm is {size:.3g}, it went {moved:.2g}"
    count = len(captured.graph.operators)
    return Row(family, "wrong" if why else "equal", why, count, losses, apart)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
