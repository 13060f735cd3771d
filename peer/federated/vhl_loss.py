"""The loss of clients that train on virtual data as well (VHL, 2206.02465, section 3), of many
copies of a model at once:

    CE(real) + alpha·CE(virtual) + [l1·SupCon(real, virtual) + l2·SupCon(virtual, virtual)]

the part in brackets while a client calibrates. Class c of noise has label C + c, and is in contrast
what class c is. With alpha = 0 there are no further classes: CE(real) is over the first C logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ...dag.ir.graph import Graph
from ...dag.transforms.virtual_classes import AboveLoss, above_loss
from ...job import Training
from ...job.clients.local_work import VhlOptions
from ..data.manifest import DataError
from .batches import Participant
from .virtual_data import noise_shape, virtual_batch, virtual_samples

__all__ = ["VirtualData", "VirtualLoss", "contrast", "virtual_data"]

_LEAST_NORM = 1e-3


@dataclass(frozen=True, slots=True)
class VirtualLoss:
    """The losses of copies, (copies,), of what the graph made of a batch: samples first, then
    noise. labels: (copies, samples). classes: of noise, (copies, noise). calibrates: (copies,)
    bool."""

    form: AboveLoss
    vhl: VhlOptions
    labels: Tensor
    classes: Tensor
    calibrates: Tensor

    def __call__(self, made: Mapping[str, Tensor]) -> Tensor:
        vhl, form, count = self.vhl, self.form, self.labels.shape[1]
        logits, features = made[form.logits], made[form.features]
        own = logits[:, :count]
        real = _entropy(own if vhl.alpha else own[..., : form.classes], self.labels)
        loss = real + vhl.alpha * _entropy(logits[:, count:], form.classes + self.classes)
        if (vhl.l1 or vhl.l2) and bool(self.calibrates.any()):
            flat = features.flatten(2)
            mine, noise = flat[:, :count], flat[:, count:]
            fixed = noise.detach()
            pull = vhl.l1 * contrast(mine, self.labels, fixed, self.classes, vhl.temperature)
            among = vhl.l2 * contrast(noise, self.classes, None, None, vhl.temperature)
            loss = loss + torch.where(self.calibrates, pull + among, 0.0)
        return loss


@dataclass(frozen=True, slots=True)
class VirtualData:
    """The noise beside clients' samples, of a run. batch: the most samples of a client's own in a
    step. Raises ValueError for a shape of noise that does not fit the model's samples."""

    vhl: VhlOptions
    form: AboveLoss
    seed: int
    batch: int

    def __post_init__(self) -> None:
        noise_shape(self.vhl, self.form.sample)

    def beside(
        self,
        inputs: Mapping[str, Tensor],
        clients: Sequence[Participant],
        round_: int,
        step: int,
        device: torch.device,
    ) -> tuple[dict[str, Tensor], VirtualLoss]:
        """Return a step's inputs with noise behind the samples, and the loss of both. `inputs`: by
        argument, (clients, samples, ...). Raises DataError for labels that are of noise."""
        vhl, form, labels = self.vhl, self.form, inputs[self.form.labels]
        if not bool(((labels >= 0) & (labels < form.classes)).all()):
            raise DataError(
                f'"{form.labels}" has a label that is none of the {form.classes} classes of the '
                "model: expected those alone, for the next are of noise"
            )
        numbers = [c.number for c in clients]
        size = vhl.batch or self.batch
        classes, at = virtual_batch(
            vhl, form.further, size, numbers, seed=self.seed, round_=round_, step=step
        )
        noise = virtual_samples(vhl, classes, at, form.sample, self.seed)
        own = inputs[form.inputs].to(device)
        whole = torch.cat([own, torch.from_numpy(noise).to(device)], 1)
        calibrates = [step < self._calibration(len(c.samples)) for c in clients]
        loss = VirtualLoss(
            form,
            vhl,
            labels.to(device),
            torch.from_numpy(classes).to(device),
            torch.tensor(calibrates, device=device),
        )
        return {form.inputs: whole}, loss

    def _calibration(self, samples: int) -> int:
        """How many steps of a client with so many samples calibrate."""
        work = self.vhl.calibrate
        return work.steps or work.passes * -(-samples // self.batch)


def virtual_data(graph: Graph, training: Training) -> VirtualData | None:
    """Return the noise beside clients' samples of a run; None: there is none. Raises GraphError for
    a graph without virtual classes, ValueError as `VirtualData` does."""
    assert training.rounds is not None
    assert training.rounds.cohorts is not None
    if (vhl := training.rounds.cohorts.vhl) is None:
        return None
    form = above_loss(graph, features=vhl.features, logits=vhl.logits)
    return VirtualData(vhl, form, training.seed, training.train.batch)


def contrast(
    features: Tensor,
    labels: Tensor,
    others: Tensor | None,
    of: Tensor | None,
    temperature: float,
) -> Tensor:
    """Return the supervised contrast (Khosla et al. 2020, 2004.11362, its L_out) of anchors with
    others, or with each other where `others` is None: (copies,), the mean over anchors of

        -1/|P| sum over p in P of log(exp(z·z_p / T) / sum over a of exp(z·z_a / T))

    z a feature by its norm, or by 1e-3 if that is more; P the others of the anchor's class. An
    anchor without any gives 0. features: (copies, anchors, width); others: (copies, others, width);
    labels, of: (copies, anchors), (copies, others)."""
    z = F.normalize(features, dim=-1, eps=_LEAST_NORM)
    alone = others is None
    there = z if others is None else F.normalize(others, dim=-1, eps=_LEAST_NORM)
    of = labels if of is None else of
    near = z @ there.transpose(1, 2) / temperature
    same = labels[:, :, None] == of[:, None, :]
    if alone:
        itself = torch.eye(z.shape[1], dtype=torch.bool, device=z.device)
        near, same = near.masked_fill(itself, torch.finfo(near.dtype).min), same & ~itself
    log = near - near.logsumexp(2, keepdim=True)
    found = -torch.where(same, log, 0.0).sum(2) / same.sum(2).clamp_min(1)
    return found.mean(1)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy of each copy, (copies,)."""
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return each.view(labels.shape).mean(1)
