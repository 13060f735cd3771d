"""Whether training is the same however a batch is divided into microbatches.

The loss of a step is Σ weight·loss / Σ weight over its microbatches. For a mean over samples that
is the same for every division. It is not for a loss that sums over samples, for one that compares
the samples of a microbatch with each other (a mixture's balance loss), and for batch statistics.
The planner may choose the division only where nobody can tell from the training which one it took.

The operators of the graph have to show it (dag/analysis/samples.py), for all labels of the data: a
few samples on which nothing differs show nothing of the next ones. A small model is tried with
values besides; where that contradicts, it is not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...dag.analysis.samples import why_samples_meet
from ...dag.ir.graph import Graph
from ...dag.ir.operators import takes_key
from ...job import Job
from ...peer.data.reader import Reader
from . import models

__all__ = ["loss_and_metrics", "why_it_depends"]

SAMPLES = 4
TOLERANCE = 1e-4
"""Relative, of the loss and of each parameter's gradient. Rounding in fp32 leaves up to 4e-6 in the
examples; the balance loss of the mixture of experts, which is a hundredth of its loss, 2e-3."""
SMALL = 1e-4
"""Share of the whole gradient's norm below which a parameter's gradient is taken for rounding: that
of a bias in front of a softmax or a normalisation is zero but for it."""


def why_it_depends(
    module: nn.Module, job: Job, graph: Graph, reader: Reader, ignoring: Collection[str] = ()
) -> str:
    """Say why another division of a batch could be another training, in words; empty: the graph's
    operators show that it is the same, whatever the data. `ignoring`: names of the cross-entropies
    of which it is not shown that they count every label of all of the data (peer/data/survey.py).

    What operators show is tried as well, where the model is small: loss and gradients of the first
    few training samples together are compared with those one by one, in fp32 on this machine. A
    model that draws random masks is tried without them, in eval mode. The module is as it was
    afterwards.
    """
    if any(b.update is not None for b in graph.buffers):
        return "its buffers take statistics of each microbatch"
    if why := why_samples_meet(graph, lambda op: op.name not in ignoring):
        return why
    if not models.is_small(module):
        return ""
    training = not any(takes_key(op.target) for op in graph.operators)
    modes = {part: part.training for part in module.modules()}
    try:
        with models.ready(module, job):
            module.train(training)
            return _difference(module, job, reader)
    except Exception as error:  # whatever the user's code raises on a CPU
        return f"it could not be tried ({type(error).__name__}: {error})"
    finally:
        for part, mode in modes.items():
            part.training = mode


def _difference(module: nn.Module, job: Job, reader: Reader) -> str:
    """Say how a module that is ready differs on a few samples; empty: it does not. Needs memory for
    the activations of twice SAMPLES samples, and for one gradient."""

    def run(batch: Mapping[str, Tensor]) -> tuple[float, Tensor]:
        output = module(**batch)
        return loss_and_metrics(output)[0], _entries(output)["loss"]

    _, together = run(reader.batch(0, 0, SAMPLES))
    if not module.training:
        again = run(reader.batch(0, 0, SAMPLES))[1]
        if math.isfinite(found := float(again.detach())) and found != float(together.detach()):
            return ""  # it draws in eval mode, too: no two computations of it can be compared
    parts = [run(reader.batch(0, m, 1)) for m in range(SAMPLES)]
    whole = sum(weight for weight, _ in parts)
    # A mean over nothing is no number, and has no say.
    alone = sum((weight / whole * loss for weight, loss in parts if weight), torch.zeros(()))
    a, b = float(together.detach()), float(alone.detach())
    if not abs(a - b) <= TOLERANCE * abs(a):  # not >: a NaN shows nothing
        return f"the loss of {SAMPLES} samples is {a:.6g} together and {b:.6g} one by one"
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    scale = _norms(together, trained)
    apart = _norms(together - alone, trained)
    least = SMALL * math.hypot(*scale.values())
    for name in trained:
        if not apart[name] <= TOLERANCE * (scale[name] + least):
            return (
                f"the gradient of {name} from {SAMPLES} samples together differs from that one by "
                f"one by {apart[name]:.2g}, its norm is {scale[name]:.2g}"
            )
    return ""


def _norms(loss: Tensor, trained: Mapping[str, Tensor]) -> dict[str, float]:
    """Norm of the loss's gradient by parameter; 0 where there is none."""
    found: Sequence[Tensor | None] = torch.autograd.grad(
        loss, list(trained.values()), retain_graph=True, allow_unused=True
    )
    norms = (0.0 if g is None else float(g.norm()) for g in found)
    return dict(zip(trained, norms, strict=True))


def loss_and_metrics(output: Any) -> tuple[float, dict[str, float]]:
    """(weight, loss and metrics) of one microbatch; the capture has seen that a loss is there."""
    entries = _entries(output)
    weight = entries.get("weight")
    scalars = {
        str(k): float(v.detach())
        for k, v in entries.items()
        if isinstance(v, Tensor) and v.dim() == 0
    }
    scalars.pop("weight", None)
    return 1.0 if weight is None else float(torch.as_tensor(weight).detach()), scalars


def _entries(output: Any) -> Mapping[str, Any]:
    """What a model returned, by name: a loss alone, a mapping, or an object."""
    found = {"loss": output} if isinstance(output, Tensor) else output
    return found if isinstance(found, Mapping) else vars(found)
