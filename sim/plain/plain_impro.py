"""FedImpro (2402.07011) the boring way: a classifier that goes through its batch, and then once
more with features put in the place of its own, one client at a time (`client_loops.py`). Features
are drawn one by one: only the hash of words (`dag/permutation.py`) is shared with peers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...dag.permutation import Domain, key
from ...job import Job
from ...job.clients.local_work import FedImproOptions
from ...job.rounds import options_of
from ...peer.data.reader import Reader
from .plain_vhl import ClientStep, normal, seen_in

__all__ = ["ImproClient"]


class ImproClient(nn.Module):
    """A module with statistics of its features by class. Its forward takes a batch with the `step`
    that it is of, updates the statistics, and returns the loss; features are drawn by the
    statistics that there were at the client's first step. `x`, `y`: what the module calls samples
    and labels."""

    AVERAGED = ("count", "sum", "square")

    def __init__(
        self,
        module: nn.Module,
        options: FedImproOptions,
        like: Mapping[str, Tensor],
        *,
        x: str,
        y: str,
        batch: int,
        seed: int,
    ) -> None:
        super().__init__()
        self.module, self.options = copy.deepcopy(module), options
        self.x, self.y, self.batch, self.seed = x, y, options.batch or batch, seed
        names = {"features": options.features, "logits": options.logits}
        self.seen = seen_in(module, like, like[y], **names)
        with torch.no_grad():
            features, logits, _ = self.seen.of(copy.deepcopy(module).eval(), like)
        self.shape, self.classes = features.shape[1:], logits.shape[1]
        self.like = like[x].shape[1:]
        width = math.prod(self.shape)
        self.register_buffer("count", torch.zeros(self.classes))
        self.register_buffer("sum", torch.zeros(self.classes, width))
        self.register_buffer("square", torch.zeros(self.classes, width))
        self.began: dict[str, Tensor] = {}

    @classmethod
    def of(cls, module: nn.Module, job: Job, reader: Reader) -> ImproClient:
        """Return the client of a job. Raises ValueError as `seen_in` does."""
        options = options_of(job.sync.chosen, job.sync.options)
        assert isinstance(options, FedImproOptions)
        names = {"x": job.data.inputs, "y": job.data.targets}
        some = reader.samples(np.zeros(2, np.int64))
        return cls(module, options, some, batch=job.train.batch, seed=job.seed, **names)

    def reading(self, reader: Reader) -> Callable[[ClientStep], dict[str, Any]]:
        """What reads a step's samples."""
        return lambda step: {**reader.samples(np.array(step.samples)), "step": step}

    def forward(self, *, step: ClientStep, **batch: Tensor) -> Tensor:
        if not step.step:
            self.began = {n: self.get_buffer(n).double() for n in self.AVERAGED}
        features, _, loss = self.seen.of(self.module, batch)
        self._follow(features.detach().flatten(1), batch[self.y])
        rise = self.options.rise
        weight = self.options.weight * (min(1.0, step.round / rise) if rise else 1.0)
        known = [c for c in range(self.classes) if float(self.began["count"][c]) >= 1e-6]
        if weight and known:
            loss = loss + weight * self._above(*self._drawn(step, known))
        return loss

    @torch.no_grad()
    def _follow(self, features: Tensor, labels: Tensor) -> None:
        share = self.options.share
        for name in self.AVERAGED:
            self.get_buffer(name).mul_(1 - share)
        for feature, label in zip(features, labels.tolist(), strict=True):
            self.get_buffer("count")[label] += share
            self.get_buffer("sum")[label] += share * feature
            self.get_buffer("square")[label] += share * feature**2

    def _drawn(self, step: ClientStep, known: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Features of a step, one after the other, and their classes."""
        words = (self.seed, Domain.FEATURE_CLASS, step.round, step.client, step.step)
        first, features, labels = int(key(*words)[0]), list[Tensor](), list[int]()
        for place in range(self.batch):
            c = known[(first + place) % len(known)]
            mean = self.began["sum"][c] / self.began["count"][c]
            variance = (self.began["square"][c] / self.began["count"][c] - mean**2).clamp(min=0.0)
            std = (variance + 1e-5).sqrt().clamp(max=self.options.most_std or math.inf)
            of = (self.seed, Domain.FEATURE_SAMPLE, step.round, step.client, step.step, place)
            features.append((mean + std * normal((len(mean),), int(key(*of)[0]))).float())
            labels.append(c)
        return torch.stack(features).view(-1, *self.shape), torch.tensor(labels)

    def _above(self, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of a forward, of anything, whose features are replaced. The module's
        buffers stay as they are."""
        buffers = {n: b.clone() for n, b in self.module.named_buffers()}
        at = self.module.get_submodule(self.seen.features)
        if self.seen.reads:
            hook = at.register_forward_pre_hook(lambda _, given: (features, *given[1:]))
        else:
            hook = at.register_forward_hook(lambda _, given, out: features)
        samples = torch.zeros(len(labels), *self.like)
        inputs = {self.x: samples, self.y: labels}
        made = torch.func.functional_call(self.module, buffers, (), inputs)
        hook.remove()
        loss: Tensor = made if isinstance(made, Tensor) else made["loss"]
        return loss
