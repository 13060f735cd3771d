"""VHL (2206.02465) the boring way: a classifier with further rows beside what makes its logits,
which goes through samples and noise in one batch, and the contrasts anchor by anchor.
`client_loops.py` trains it, one client at a time. Noise is that of peers made once more, sample by
sample: only the hash of words (`dag/permutation.py`) is shared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...dag.permutation import Domain, key
from ...job import Job
from ...job.clients.local_work import VhlOptions
from ...peer.data.reader import Reader
from .client_loops import ClientWork

__all__ = ["ClientStep", "VhlClient", "normal", "seen_in", "with_places"]


@dataclass(frozen=True, slots=True)
class ClientStep:
    """Sample numbers of a client's step, and what is drawn for it follows from."""

    samples: Sequence[int]
    client: int
    round: int
    step: int
    steps_of_pass: int


def with_places(cohorts: Iterable[Sequence[ClientWork]], batch: int) -> Iterator[list[ClientWork]]:
    """The work of clients, each of whose steps knows what is drawn for it follows from. `batch`:
    samples of a step."""
    for round_, cohort in enumerate(cohorts):
        found = []
        for work in cohort:
            of_pass = -(-len({n for some in work.batches for n in some}) // batch)
            steps = [
                ClientStep(some, work.client, round_, k, of_pass)
                for k, some in enumerate(work.batches)
            ]
            found.append(replace(work, batches=steps))
        yield found


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where features and logits are seen: what a module gives, or, of features, what it reads."""

    logits: str
    features: str
    reads: bool
    """Whether features are what the module `features` reads."""

    def of(self, module: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return features, logits and the loss of a forward."""
        seen: dict[str, Tensor] = {}
        hooks = [
            module.get_submodule(self.features).register_forward_hook(
                lambda _, given, out: seen.update(features=given[0] if self.reads else out)
            ),
            module.get_submodule(self.logits).register_forward_hook(
                lambda _, given, out: seen.update(logits=out)
            ),
        ]
        made = module(**batch)
        for hook in hooks:
            hook.remove()
        return seen["features"], seen["logits"], made if isinstance(made, Tensor) else made["loss"]


def seen_in(
    module: nn.Module, inputs: Mapping[str, Tensor], labels: Tensor, *, features: str, logits: str
) -> _Seen:
    """Return where a module has features and logits, by their names; empty: by the last linear that
    a forward calls. Raises ValueError where the loss is no cross entropy of these logits, or where
    there is no nn.Linear."""
    module, called = copy.deepcopy(module).eval(), list[str]()
    for name, part in module.named_modules():
        if type(part) is nn.Linear:
            part.register_forward_hook(lambda _, given, out, n=name: called.append(n))
    with torch.no_grad():
        module(**inputs)
    last = logits or (called[-1] if called else "")
    if last:
        found = _Seen(last, features or last, not features)
        with torch.no_grad():
            _, made, loss = found.of(module, inputs)
        if made.dim() == 2 and torch.allclose(nn.functional.cross_entropy(made, labels), loss):
            return found
    raise ValueError("the loss is not that of an nn.Linear, or of the logits that the job names")


def normal(shape: Sequence[int], by: int) -> Tensor:
    """Return about normal numbers, float64, each a sum of twelve uniform ones, by a word."""
    elements = np.arange(math.prod(shape), dtype=np.uint64)
    words = np.stack([key(by, elements, part) for part in range(3)]).astype("<u8")
    parts = torch.from_numpy(words.view("<u2").astype(np.float64)).view(3, -1, 4)
    return ((parts.sum((0, 2)) - 12 * 65535 / 2) / 65536).view(*shape)


class _Noise:
    """The set of noise of a run."""

    def __init__(self, vhl: VhlOptions, seed: int) -> None:
        self._vhl, self._seed = vhl, seed

    def drawn(self, step: ClientStep, place: int, classes: int) -> tuple[int, int]:
        """Return class and number of what stands at a place of a step's batch."""
        word = self._word(Domain.VIRTUAL_BATCH, step.round, step.client, step.step, place)
        number, of = divmod(word % (classes * self._vhl.per_class), classes)
        return of, number

    def sample(self, of: int, number: int, like: Sequence[int]) -> Tensor:
        """Return one sample by class and number, (*like,) float32."""
        small = self._vhl.noise or tuple(
            size if at == 0 and len(like) > 1 else math.ceil(size / 4)
            for at, size in enumerate(like)
        )
        generator = self._vhl.source == "generator"
        mean, apart = (
            normal((64,) if generator else small, word)
            for word in (
                self._word(Domain.VIRTUAL_MEAN, of),
                self._word(Domain.VIRTUAL_SAMPLE, of, number),
            )
        )
        if generator:
            latents = (mean + self._vhl.spread * apart) * 65536
            return self._generated(latents.round().clamp(-(2**20), 2**20), small, like)
        found = mean.float() + self._vhl.spread * apart.float()
        for axis, (few, many) in enumerate(zip(small, like, strict=True)):
            found = found.index_select(axis, torch.tensor([i * few // many for i in range(many)]))
        return found

    def _generated(self, latents: Tensor, small: Sequence[int], like: Sequence[int]) -> Tensor:
        """One sample of an untrained network, of its 64 latents."""
        layers = iter(range(99))

        def weights(*shape: int) -> Tensor:
            return normal(shape, self._word(Domain.VIRTUAL_GENERATOR, next(layers)))

        def layer(image: Tensor, addends: int) -> Tensor:
            return (image / math.sqrt(addends)).round().clamp(-65536, 65536)

        image = layer(latents @ weights(64, 8 * math.prod(small)), 64).view(8, *small)
        while True:
            sizes = image.shape[1:]
            for axis, (few, many) in enumerate(zip(sizes, like, strict=True)):
                wide = min(2 * few, many)
                at = torch.tensor([i * few // wide for i in range(wide)])
                image = image.index_select(1 + axis, at)
            for axis in range(1, 1 + len(like)):
                rows = image.movedim(axis, -1)
                kernel = weights(3, 8, 8).permute(2, 1, 0)
                flat = rows.reshape(8, -1, rows.shape[-1]).movedim(0, 1)
                mixed = nn.functional.conv1d(flat, kernel, padding=1).movedim(1, 0)
                image = layer(mixed.reshape(rows.shape), 24).movedim(-1, axis)
            if tuple(image.shape[1:]) == tuple(like):
                break
        flat = layer(torch.tensordot(image, weights(8), dims=([0], [0])), 8)
        return (flat / flat.square().mean().sqrt().clamp(min=1e-9)).float()

    def _word(self, *of: int) -> int:
        return int(key(self._seed, *of)[0])


class VhlClient(nn.Module):
    """A module with further rows, which are parameters of their own and begin at zero. Its forward
    takes a batch with `noise`, `of` (classes of noise) and `calibrates` besides and returns the
    loss. `x`, `y`: what the module calls samples and labels; `seen`: where its features and logits
    are, `like` those of a batch; `batch`: samples of noise in a step."""

    def __init__(
        self,
        module: nn.Module,
        seen: _Seen,
        like: Mapping[str, Tensor],
        vhl: VhlOptions,
        *,
        x: str,
        y: str,
        batch: int,
    ) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)
        with torch.no_grad():
            features, logits, _ = seen.of(copy.deepcopy(module).eval(), like)
        self.further = vhl.classes or logits.shape[1]
        bare = seen.reads and "bias" not in dict(
            self.module.get_submodule(seen.logits).named_parameters()
        )
        self.rows = nn.Linear(features.flatten(1).shape[1], self.further, bias=not bare)
        for p in self.rows.parameters():
            nn.init.zeros_(p)
        self.x, self.y, self.vhl, self.batch = x, y, vhl, vhl.batch or batch
        self.seen = seen

    @classmethod
    def of(cls, module: nn.Module, job: Job, reader: Reader) -> VhlClient:
        """Return the client of a job. Raises ValueError as `seen_in` does."""
        vhl, names = job.sync.vhl, {"x": job.data.inputs, "y": job.data.targets}
        some = reader.samples(np.zeros(2, np.int64))
        labels = some[job.data.targets]
        seen = seen_in(module, some, labels, features=vhl.features, logits=vhl.logits)
        return cls(module, seen, some, vhl, batch=job.train.batch, **names)

    def reading(self, reader: Reader, seed: int) -> Callable[[ClientStep], dict[str, Any]]:
        """What reads a step's samples and noise. `seed`: the run's."""
        made, first = _Noise(self.vhl, seed), self.vhl.calibrate

        def read(step: ClientStep) -> dict[str, Any]:
            found: dict[str, Any] = {**reader.samples(np.array(step.samples))}
            drawn = [made.drawn(step, place, self.further) for place in range(self.batch)]
            like = found[self.x].shape[1:]
            found["noise"] = torch.stack([made.sample(c, number, like) for c, number in drawn])
            of = torch.tensor([c for c, _ in drawn])
            calibrates = step.step < (first.steps or first.passes * step.steps_of_pass)
            return {**found, "of": of, "calibrates": calibrates}

        return read

    def forward(self, *, noise: Tensor, of: Tensor, calibrates: bool, **batch: Tensor) -> Tensor:
        alpha, l1, l2 = self.vhl.alpha, self.vhl.l1, self.vhl.l2
        samples, labels = batch[self.x], batch[self.y]
        n = len(samples)
        ignored = labels.new_zeros(n + len(noise))
        both = {self.x: torch.cat([samples, noise]), self.y: ignored}
        features, logits, _ = self.seen.of(self.module, both)
        features = features.flatten(1)
        classes = logits.shape[1]
        whole = torch.cat([logits, self.rows(features)], 1) if alpha else logits
        loss = nn.functional.cross_entropy(whole[:n], labels)
        if alpha:
            loss = loss + alpha * nn.functional.cross_entropy(whole[n:], classes + of)
        if calibrates:
            units = [f / torch.clamp(f.square().sum().sqrt(), min=1e-3) for f in features]
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
