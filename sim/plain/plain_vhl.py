"""VHL (2206.02465) the boring way: a classifier with further rows beside its last linear, which
goes through samples and noise in one batch, and the contrasts anchor by anchor. `client_loops.py`
trains it, one client at a time. Which noise a step has is a matter of data, as which samples: it is
read where peers read it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...job import Job
from ...job.clients.local_work import VhlOptions
from ...peer.data.reader import Reader
from ...peer.federated.virtual_data import virtual_batch, virtual_samples
from .client_loops import ClientWork

__all__ = ["VhlClient", "with_noise"]


@dataclass(frozen=True, slots=True)
class _Step:
    """Sample numbers of a client's step, and what its noise follows from."""

    samples: Sequence[int]
    client: int
    round: int
    step: int
    calibrates: bool


def with_noise(cohorts: Iterable[Sequence[ClientWork]], job: Job) -> Iterator[list[ClientWork]]:
    """The work of clients, each of whose steps knows what its noise follows from."""
    first = job.sync.vhl.calibrate
    for round_, cohort in enumerate(cohorts):
        found = []
        for work in cohort:
            own = len({n for batch in work.batches for n in batch})
            until = first.steps or first.passes * -(-own // job.train.batch)
            steps = [
                _Step(batch, work.client, round_, k, k < until)
                for k, batch in enumerate(work.batches)
            ]
            found.append(replace(work, batches=steps))
        yield found


def _last_linear(module: nn.Module, inputs: Mapping[str, Tensor]) -> str:
    """Return the name of the last linear that a forward calls. Raises ValueError where none is a
    module of its own."""
    called: list[str] = []
    hooks = [
        part.register_forward_hook(lambda *_, n=name: called.append(n))
        for name, part in module.named_modules()
        if type(part) is nn.Linear
    ]
    with torch.no_grad():
        module(**inputs)
    for hook in hooks:
        hook.remove()
    if not called:
        raise ValueError("no linear of the model is an nn.Linear, which could have further rows")
    return called[-1]


class VhlClient(nn.Module):
    """A module with further rows, which are parameters of their own and begin at zero. Its forward
    takes a batch with `noise`, `of` (classes of noise) and `calibrates` besides and returns the
    loss. `x`, `y`: what the module calls samples and labels; `linear`: the name of its last one;
    `batch`: samples of noise in a step."""

    def __init__(
        self, module: nn.Module, linear: str, vhl: VhlOptions, *, x: str, y: str, batch: int
    ) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        head = self.module.get_submodule(linear)
        assert isinstance(head, nn.Linear)
        self.further = vhl.classes or head.out_features
        self.rows = nn.Linear(head.in_features, self.further, bias=head.bias is not None)
        for p in self.rows.parameters():
            nn.init.zeros_(p)
        self.x, self.y, self.vhl, self.batch = x, y, vhl, vhl.batch or batch
        self.linear = linear

    @classmethod
    def of(cls, module: nn.Module, job: Job, reader: Reader) -> VhlClient:
        """That of a job. Raises ValueError for a module without an nn.Linear."""
        linear = _last_linear(module, reader.samples(np.zeros(1, np.int64)))
        names = {"x": job.data.inputs, "y": job.data.targets}
        return cls(module, linear, job.sync.vhl, batch=job.train.batch, **names)

    def reading(self, reader: Reader, seed: int) -> Callable[[_Step], dict[str, Any]]:
        """What reads a step's samples and noise. `seed`: the run's."""

        def read(step: _Step) -> dict[str, Any]:
            found: dict[str, Any] = {**reader.samples(np.array(step.samples))}
            where = {"seed": seed, "round_": step.round, "step": step.step}
            of, numbers = virtual_batch(self.vhl, self.further, self.batch, [step.client], **where)
            noise = virtual_samples(self.vhl, of[0], numbers[0], found[self.x].shape[1:], seed)
            noisy = {"noise": torch.from_numpy(noise), "of": torch.from_numpy(of[0])}
            return {**found, **noisy, "calibrates": step.calibrates}

        return read

    def forward(self, *, noise: Tensor, of: Tensor, calibrates: bool, **batch: Tensor) -> Tensor:
        alpha, l1, l2 = self.vhl.alpha, self.vhl.l1, self.vhl.l2
        samples, labels = batch[self.x], batch[self.y]
        seen: list[tuple[Tensor, Tensor]] = []
        hook = self.module.get_submodule(self.linear).register_forward_hook(
            lambda _, given, out: seen.append((given[0], out))
        )
        n = len(samples)
        ignored = labels.new_zeros(n + len(noise))
        self.module(**{self.x: torch.cat([samples, noise]), self.y: ignored})
        hook.remove()
        features, logits = seen[-1]
        classes = logits.shape[1]
        whole = torch.cat([logits, self.rows(features)], 1) if alpha else logits
        loss = nn.functional.cross_entropy(whole[:n], labels)
        if alpha:
            loss = loss + alpha * nn.functional.cross_entropy(whole[n:], classes + of)
        if calibrates:
            units = [_unit(f) for f in features]
            real, virtual, kinds = units[:n], units[n:], of.tolist()
            fixed = [(v.detach(), c) for v, c in zip(virtual, kinds, strict=True)]
            pairs = [*zip(virtual, kinds, strict=True)]
            heat = self.vhl.temperature
            far = [_contrast(z, c, fixed, heat) for z, c in zip(real, labels.tolist(), strict=True)]
            near = [
                _contrast(z, c, [*pairs[:i], *pairs[i + 1 :]], heat)
                for i, (z, c) in enumerate(pairs)
            ]
            loss = loss + l1 * torch.stack(far).mean() + l2 * torch.stack(near).mean()
        return loss


def _contrast(z: Tensor, label: int, others: Sequence[tuple[Tensor, int]], heat: float) -> Tensor:
    """The supervised contrast of one anchor."""
    positives = [other for other, c in others if c == label]
    if not positives:
        return z.sum() * 0
    whole = torch.stack([z @ other / heat for other, _ in others]).logsumexp(0)
    return torch.stack([whole - z @ p / heat for p in positives]).mean()


def _unit(feature: Tensor) -> Tensor:
    return feature / torch.clamp(feature.square().sum().sqrt(), min=1e-3)
