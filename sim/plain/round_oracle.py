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

from ...job import Train
from .oracle import gradient, learning_rate, move, optimizer_of, scaler_of

__all__ = [
    "Batches",
    "Gradients",
    "PlainMember",
    "PlainMethod",
    "PlainReplica",
    "PlainResult",
    "Round",
    "even",
    "plain",
    "train",
]

Batches = Callable[[Sequence[int]], Mapping[str, Tensor]]
"""Numbers of samples in the run's sequence -> their inputs by argument name."""
Scalers = Sequence[torch.amp.GradScaler | None]
"""Of each replica under fp16; None: its losses are not scaled."""
Gradients = Callable[[Sequence[nn.Module], Sequence[Mapping[str, Tensor]], Scalers], list[float]]
"""Leaves each module's gradient of its batch in `grad`, of scaled losses, and returns the losses as
they are."""


@dataclass(frozen=True, slots=True)
class PlainMember:
    """What one replica did in a round. Local step j has the j-th of `steps` equal parts of the
    samples; the last has what is over."""

    replica: int
    steps: int
    samples: Sequence[int]
    weight: int
    fresh: bool = False
    """Whether its optimizer begins anew: it was lost, and took the version from others."""
    late: int = 0
    """Behind so many steps comes the version of the round before, which it was in."""
    at: tuple[float, ...] = ()
    """Where each step stands, in steps of the run; none: as `Round` says."""
    clients: tuple[int, ...] = ()
    """Of federated training, whom it trained."""
    behind: int = 0
    """So many versions were made since the one that these began with."""

    def part(self, j: int) -> Sequence[int]:
        size = len(self.samples) // self.steps
        return self.samples[j * size : (j + 1) * size if j + 1 < self.steps else None]


@dataclass(frozen=True, slots=True)
class Round:
    """A committed round. `start` and `every` count committed samples in batches, as learning rates
    do: local step j of h has the rate of step start + every·j/h."""

    start: float
    every: float
    members: tuple[PlainMember, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    """Of gossip: who met whom; who stands in none met nobody."""
    gathers: bool = False
    """Of gossip: all met, and go on from one mean."""
    joined: tuple[tuple[int, int], ...] = ()
    """Of gossip: who took what another one came to, and whose."""
    fragment: int = 0
    """Which one it exchanged, from 1; 0: all."""
    final: bool = False
    """Whether it is the last one."""
    gone: tuple[int, ...] = ()
    """Members that were lost before it was committed, and whose part counts all the same, as others
    go on with it; of their steps nobody may have heard."""

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Return who met, in gossip: pairs, and everybody else alone; or all."""
        members = tuple(sorted(m.replica for m in self.members if m.weight))
        if self.gathers:
            return [members]
        paired = {k for pair in self.pairs for k in pair}
        return [*self.pairs, *((k,) for k in members if k not in paired)]


class PlainReplica:
    """A copy of the module with an optimizer of its own and, under fp16, a scaler of its own.
    `weights` has trained parameters once."""

    def __init__(
        self,
        module: nn.Module,
        t: Train,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.module, self.train, self.optimizer, self.scaler = module, t, optimizer, scaler
        self.weights = {n: p for n, p in module.named_parameters() if p.requires_grad}

    def update(self, rate: float) -> None:
        """Clips the norm of what backward left in `grad`, and updates."""
        grads = [p.grad for p in self.weights.values() if p.grad is not None]
        if not grads:
            return
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norm = nn.utils.get_total_norm(grads)
        if 0 < self.train.clip < norm:
            for grad in grads:
                grad *= self.train.clip / norm
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        move(self.optimizer, self.scaler)


class PlainMethod:
    """What happens between replicas. `shared` is the version that all have agreed on; methods
    without a center leave it as it began."""

    shared: dict[str, Tensor]
    apart = False
    """Whether replicas go on with versions of their own: they gossip."""
    fragments = 1
    """How many there are of the model, of which a round exchanges one."""

    def begin(self, shared: dict[str, Tensor]) -> None:
        """`shared`: where training starts, the method's own to change."""
        self.shared = shared

    @torch.no_grad()
    def join(self, number: int, replica: PlainReplica) -> None:
        """A replica trains for the first time."""
        for name, p in replica.weights.items():
            p.copy_(self.shared[name])

    def begins(self, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        """Before the local steps of a round."""

    def stepped(self, j: int, number: int, replica: PlainReplica) -> None:
        """After local step j, counted from 0, of a replica."""

    @torch.no_grad()
    def take(self, number: int, source: int, replicas: Mapping[int, PlainReplica]) -> None:
        """A replica goes on with what another one has come to."""
        for name, p in replicas[number].weights.items():
            p.copy_(replicas[source].weights[name])

    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        """The end of round `count`. `replicas`: all that ever trained, members or not."""
        raise NotImplementedError

    def finish(self, replicas: Mapping[int, PlainReplica]) -> None:
        """After the last round: applies what is still on its way."""


@dataclass
class PlainResult:
    """`losses`: by round, of each member's local steps; `scales`: of these, under fp16. `shared`:
    the version that all have agreed on."""

    replicas: dict[int, PlainReplica] = field(default_factory=dict)
    losses: list[dict[int, list[float]]] = field(default_factory=list)
    scales: list[dict[int, list[float]]] = field(default_factory=list)
    shared: dict[str, Tensor] = field(default_factory=dict)

    def mean(self) -> dict[str, Tensor]:
        """The weights' mean over all replicas: what gossip evaluates and exports."""
        each = [r.weights for r in self.replicas.values()]
        return {
            n: torch.stack([w[n].detach().double() for w in each]).mean(0).to(p.dtype)
            for n, p in each[0].items()
        }


def plain(
    modules: Sequence[nn.Module], batches: Sequence[Mapping[str, Tensor]], scalers: Scalers = ()
) -> list[float]:
    """One backward after the other, of losses that are not scaled."""
    assert not any(scalers), "losses are scaled"
    return [gradient(module, [batch])[0] for module, batch in zip(modules, batches, strict=True)]


def train(
    module: nn.Module,
    rounds: Sequence[Round],
    batches: Batches,
    t: Train,
    method: PlainMethod,
    *,
    steps: int,
    optimizer: Callable[[nn.Module, Train], torch.optim.Optimizer] = optimizer_of,
    gradients: Gradients = plain,
    committed: Callable[[int, PlainResult], None] = lambda count, result: None,
    fp16: bool = False,
) -> PlainResult:
    """Every replica starts as `module`. Members step side by side: local step j of all of them
    before j + 1 of any. `steps`: of the whole run, for learning rates; `committed` sees each
    round's number and all that there is after it. `fp16`: losses are scaled, by a scale that begins
    where the optimizer does."""
    result = PlainResult()
    named = {n: p for n, p in module.named_parameters() if p.requires_grad}
    method.begin({n: p.detach().clone() for n, p in named.items()})
    result.shared = method.shared

    def begin(number: int) -> None:
        own = copy.deepcopy(module)
        scaler = scaler_of(t) if fp16 else None
        replica = result.replicas[number] = PlainReplica(own, t, optimizer(own, t), scaler)
        method.join(number, replica)

    for count, r in enumerate(rounds):
        for m in r.members:
            if m.replica not in result.replicas:
                begin(m.replica)
            elif m.fresh:
                replica = result.replicas[m.replica]
                replica.optimizer = optimizer(replica.module, t)
                replica.scaler = scaler_of(t) if fp16 else None
        method.begins(r, result.replicas)
        losses: dict[int, list[float]] = {m.replica: [] for m in r.members}
        scales: dict[int, list[float]] = {m.replica: [] for m in r.members}
        for j in range(max(m.steps for m in r.members)):
            now = [m for m in r.members if j < m.steps]
            moving = [result.replicas[m.replica] for m in now]
            found = gradients(
                [x.module for x in moving],
                [batches(m.part(j)) for m in now],
                [x.scaler for x in moving],
            )
            for m, replica, loss in zip(now, moving, found, strict=True):
                losses[m.replica].append(loss)
                if replica.scaler is not None:
                    scales[m.replica].append(replica.scaler.get_scale())
                at = m.at[j] if m.at else r.start + r.every * j / m.steps
                replica.update(learning_rate(t, at, steps))
                method.stepped(j, m.replica, replica)
        method.commit(count, r, result.replicas)
        for number, source in r.joined:
            if number not in result.replicas:
                begin(number)
            method.take(number, source, result.replicas)
        result.losses.append(losses)
        result.scales.append(scales)
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
    fragments: int = 0,
    late: int = 0,
) -> list[Round]:
    """Rounds of equal replicas that are always there; `batch` is over all of them. The last round
    is as long as the steps allow. fragments: so many are exchanged in turn, but for the last round;
    late: steps behind which what a round came to arrives in the next."""
    size, rounds = batch // replicas, []
    for count, start in enumerate(range(0, steps, every)):
        h, last = min(every, steps - start), start + every >= steps
        behind = min(late, h) if count else 0
        first = [start * batch + k * h * size for k in range(replicas)]
        members = tuple(
            PlainMember(k, h, range(f, f + h * size), 1, late=behind) for k, f in enumerate(first)
        )
        fragment = 0 if last or not fragments else count % fragments + 1
        rounds.append(Round(start, h, members, pairs(count), fragment=fragment, final=last))
    return rounds
