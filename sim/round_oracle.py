"""Rounds between replicas, the boring way: copies of one module, torch's own optimizers, one loop.

It is fed with what a run committed: which replica made how many local steps, on which samples, with
which weight, and who met whom. What every strategy of local steps does to the weights is compared
with it, so it shares no code with `dag`, `compression` or `peer`. The methods themselves stand in
`round_methods.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..job import Train
from .oracle import learning_rate, optimizer_of

__all__ = ["Gradients", "Member", "Method", "Replica", "Result", "Round", "even", "plain", "train"]

Batches = Callable[[Sequence[int]], Mapping[str, Tensor]]
"""Numbers of samples in the run's sequence -> their inputs by argument name."""
Gradients = Callable[[Sequence[nn.Module], Sequence[Mapping[str, Tensor]]], list[float]]
"""Leaves each module's gradient of its batch in `grad`, and returns the losses."""


@dataclass(frozen=True, slots=True)
class Member:
    """What one replica did in a round. Local step j has the j-th of `steps` equal parts of the
    samples; the last has what is over."""

    replica: int
    steps: int
    samples: Sequence[int]
    weight: int
    fresh: bool = False
    """Whether its optimizer begins anew: it was lost, and took the version from others."""
    planned: int = 0
    """Steps by which its learning rate moves, of which it made fewer; 0: `steps`."""

    def part(self, j: int) -> Sequence[int]:
        size = len(self.samples) // self.steps
        return self.samples[j * size : (j + 1) * size if j + 1 < self.steps else None]


@dataclass(frozen=True, slots=True)
class Round:
    """A committed round. `start` and `every` count committed samples in batches, as learning rates
    do: local step j of h has the rate of step start + every·j/h."""

    start: float
    every: float
    members: tuple[Member, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    """Of gossip: who met whom; who stands in none met nobody."""


class Replica:
    """A copy of the module with an optimizer of its own. `weights` has trained parameters once."""

    def __init__(self, module: nn.Module, t: Train, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.train, self.optimizer = module, t, optimizer
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def update(self, rate: float) -> None:
        """Clips the norm of what backward left in `grad`, and updates."""
        grads = [p.grad for p in self.weights.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        if 0 < self.train.clip < norm:
            for grad in grads:
                grad *= self.train.clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()


class Method:
    """What happens between replicas. `shared` is the version that all have agreed on; methods
    without a center leave it as it began."""

    shared: dict[str, Tensor]

    def begin(self, shared: dict[str, Tensor]) -> None:
        """`shared`: where training starts, the method's own to change."""
        self.shared = shared

    @torch.no_grad()
    def join(self, number: int, replica: Replica) -> None:
        """Of one that trains for the first time."""
        for name, p in replica.weights.items():
            p.copy_(self.shared[name])

    def stepped(self, j: int, number: int, replica: Replica) -> None:
        """After local step j, counted from 0, of a replica."""

    def commit(self, count: int, r: Round, replicas: Mapping[int, Replica]) -> None:
        """The end of round `count`. `replicas`: all that ever trained, members or not."""
        raise NotImplementedError

    def finish(self, replicas: Mapping[int, Replica]) -> None:
        """After the last round: applies what is still on its way."""


@dataclass
class Result:
    """`losses`: by round, of each member's local steps."""

    replicas: dict[int, Replica] = field(default_factory=dict)
    losses: list[dict[int, list[float]]] = field(default_factory=list)

    def mean(self) -> dict[str, Tensor]:
        """The weights' mean over all replicas: what gossip evaluates and exports."""
        each = [r.weights for r in self.replicas.values()]
        return {
            n: torch.stack([w[n].detach().double() for w in each]).mean(0).to(p.dtype)
            for n, p in each[0].items()
        }


def plain(modules: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]]) -> list[float]:
    """One backward after the other."""
    losses = []
    for module, batch in zip(modules, batches, strict=True):
        out = module(**batch)
        loss: Tensor = out if isinstance(out, Tensor) else out["loss"]
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(float(loss.detach()))
    return losses


def train(
    module: nn.Module,
    rounds: Sequence[Round],
    batches: Batches,
    t: Train,
    method: Method,
    *,
    steps: int,
    optimizer: Callable[[nn.Module, Train], torch.optim.Optimizer] = optimizer_of,
    gradients: Gradients = plain,
    committed: Callable[[int, Result], None] = lambda count, result: None,
) -> Result:
    """Every replica starts as `module`. Members step side by side: local step j of all of them
    before j + 1 of any. `steps`: of the whole run, for learning rates; `committed` sees each
    round's number and all that there is after it."""
    result = Result()
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    method.begin({n: p.detach().clone() for n, p in named.items()})
    for count, r in enumerate(rounds):
        for m in r.members:
            if m.replica not in result.replicas:
                own = copy.deepcopy(module)
                replica = result.replicas[m.replica] = Replica(own, t, optimizer(own, t))
                method.join(m.replica, replica)
            elif m.fresh:
                replica = result.replicas[m.replica]
                replica.optimizer = optimizer(replica.module, t)
        losses: dict[int, list[float]] = {m.replica: [] for m in r.members}
        for j in range(max(m.steps for m in r.members)):
            now = [m for m in r.members if j < m.steps]
            moving = [result.replicas[m.replica] for m in now]
            found = gradients([x.module for x in moving], [batches(m.part(j)) for m in now])
            for m, replica, loss in zip(now, moving, found, strict=True):
                losses[m.replica].append(loss)
                replica.update(
                    learning_rate(t, r.start + r.every * j / (m.planned or m.steps), steps)
                )
                method.stepped(j, m.replica, replica)
        method.commit(count, r, result.replicas)
        result.losses.append(losses)
        committed(count, result)
    method.finish(result.replicas)
    return result


def even(
    replicas: int,
    *,
    steps: int,
    every: int,
    batch: int,
    pairs: Callable[[int], tuple[tuple[int, int], ...]] = lambda count: (),
) -> list[Round]:
    """Rounds of equal replicas that are always there; `batch` is over all of them. The last round
    is as long as the steps allow."""
    size, rounds = batch // replicas, []
    for count, start in enumerate(range(0, steps, every)):
        h = min(every, steps - start)
        first = [start * batch + k * h * size for k in range(replicas)]
        members = tuple(Member(k, h, range(f, f + h * size), 1) for k, f in enumerate(first))
        rounds.append(Round(start, h, members, pairs(count)))
    return rounds
