"""What a federated method makes of a round, as its paper has it; `client_loops.py` has the loop.

Names as in the papers: w is the version, w_i what client i of a cohort comes to from it in tau_i
steps of SGD, D_i = w_i - w, and p_i its weight by the cohort's sum. D = sum p_i D_i. With FedBuff
w_i and D_i are from the version before s_i others, and w is the newest. State of a method is in
float64.

    FedAvg      w += D                                              (McMahan et al. 2017)
    FedBuff     w += lr·sum p_i D_i / sqrt(1 + s_i)                 (Nguyen et al. 2022)
    FedAvgM     v = b·v - D; w -= lr·v                              (Hsu et al. 2019)
    FedProx     FedAvg; local gradients += mu·(w_i - w)             (Li et al. 2020)
    Scaffold    local gradients += c - c_i; w += lr·mean D_i;       (Karimireddy et al. 2020,
                c_i' = c_i - c - D_i / (tau_i·rate);                 its option II)
                c += sum(c_i' - c_i) / N
    FedNova     w += (sum p_i a_i)·sum p_i D_i / a_i                (Wang et al. 2020)
    FedOpt      m = b1·m + (1 - b1)·D; w += lr·m / (sqrt(v) + eps)  (Reddi et al. 2021)
      FedAdam     v = b2·v + (1 - b2)·D²
      FedYogi     v = v - (1 - b2)·D²·sign(v - D²)
      FedAdagrad  v = v + D²
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "ClientUpdate",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedNova",
    "FedProx",
    "FedYogi",
    "Named",
    "Rate",
    "Scaffold",
    "copies",
    "rate_of",
]

Rate = float | Callable[[int], float]
"""A learning rate, or one for each round, counted from 0."""
Named = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ClientUpdate:
    """What came of a client: `share` is p_i, `steps` tau_i, `moved` D_i in float64. `rate` and
    `momentum` are those of its local SGD; `behind` is s_i."""

    client: int
    share: float
    steps: int
    moved: Named
    rate: float
    momentum: float
    behind: int = 0


class FedAvg:
    """The base of all: local SGD as it is, and the weighted mean of what clients come to."""

    oldest = 0
    """So many versions may have been made since a client of a round began."""

    def begin(self, shared: Named) -> None:
        """`shared`: where training starts, the method's own to change."""
        self.shared = shared
        self.zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in shared.items()}

    def start(self, count: int) -> None:
        """The beginning of round `count`, from 0."""

    def bend(self, client: int, name: str, local: Tensor) -> Tensor | float:
        """Return what is added to the gradient of a parameter, `local` at the client."""
        return 0.0

    def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
        """The end of round `count`, from 0."""
        self.move({n: self.mean(came, n) for n in self.shared})

    def mean(self, came: Sequence[ClientUpdate], name: str) -> Tensor:
        """D of a parameter."""
        return torch.stack([u.share * u.moved[name] for u in came]).sum(0)

    def move(self, by: Mapping[str, Tensor]) -> None:
        for name, w in self.shared.items():
            w.copy_(w.double() + by[name])


class FedBuff(FedAvg):
    """Moves count for less the older the version is that they began with. Of whom a version is the
    loop is told, so `buffer` has no say."""

    def __init__(
        self, lr: Rate = 1.0, max_staleness: int = 10, buffer: int | str | None = None
    ) -> None:
        self.lr, self.oldest = lr, max_staleness

    def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
        rate = rate_of(self.lr, count)
        self.move({name: rate * self.mean(came, name) for name in self.shared})

    def mean(self, came: Sequence[ClientUpdate], name: str) -> Tensor:
        each = [u.share / (1 + u.behind) ** 0.5 * u.moved[name] for u in came]
        return torch.stack(each).sum(0)


class FedAvgM(FedAvg):
    """The mean is the gradient of an SGD with momentum."""

    def __init__(self, lr: Rate = 1.0, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum

    def begin(self, shared: Named) -> None:
        super().begin(shared)
        self.v = copies(self.zeros)

    def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
        for name, v in self.v.items():
            v.mul_(self.momentum).sub_(self.mean(came, name))
        self.move({name: -rate_of(self.lr, count) * v for name, v in self.v.items()})


class FedProx(FedAvg):
    """Local loss + mu/2·|w_i - w|²."""

    def __init__(self, mu: float = 0.01) -> None:
        self.mu = mu

    def bend(self, client: int, name: str, local: Tensor) -> Tensor | float:
        return self.mu * (local - self.shared[name])


class Scaffold(FedAvg):
    """Control variates, of each client and their mean; `clients` is N, however few come. Its means
    are over clients, whatever their weights.

    `afresh`: rounds that begin with none. `lost`: by round, clients that begin it with none of
    their own, which their mean is told nothing of."""

    def __init__(
        self,
        clients: int,
        lr: Rate = 1.0,
        *,
        afresh: Collection[int] = (),
        lost: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.clients, self.lr, self.afresh, self.lost = clients, lr, afresh, lost or {}

    def begin(self, shared: Named) -> None:
        super().begin(shared)
        self.c = copies(self.zeros)
        self.own = [copies(self.zeros) for _ in range(self.clients)]

    def start(self, count: int) -> None:
        if count in self.afresh:
            self.c, self.own = copies(self.zeros), [copies(self.zeros) for _ in self.own]
        for client in self.lost.get(count, ()):
            self.own[client] = copies(self.zeros)

    def bend(self, client: int, name: str, local: Tensor) -> Tensor | float:
        return (self.c[name] - self.own[client][name]).to(local.dtype)

    def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
        for name, c in self.c.items():
            was = c.clone()
            for u in came:
                if u.momentum:
                    raise ValueError("SCAFFOLD's c_i are gradients of SGD without momentum")
                if not u.rate:
                    continue
                change = -was - u.moved[name] / (u.steps * u.rate)
                self.own[u.client][name] += change
                c += change / self.clients
        rate = rate_of(self.lr, count) / len(came)
        self.move({n: rate * torch.stack([u.moved[n] for u in came]).sum(0) for n in self.shared})


class FedNova(FedAvg):
    """Moves by normalised gradients, so that who made more steps does not count for more."""

    def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
        lengths = [self.length(u.steps, u.momentum) for u in came]
        effective = sum(u.share * a for u, a in zip(came, lengths, strict=True))
        for_each = [u.share * effective / a for u, a in zip(came, lengths, strict=True)]
        self.move(
            {
                n: torch.stack([k * u.moved[n] for k, u in zip(for_each, came, strict=True)]).sum(0)
                for n in self.shared
            }
        )

    @staticmethod
    def length(steps: int, momentum: float) -> float:
        """a: the sum of what each step's gradient counts for."""
        left = 1 - momentum
        if not left:
            return steps * (steps + 1) / 2
        return (steps - momentum * (1 - momentum**steps) / left) / left


class FedAdam(FedAvg):
    """An adaptive step along the mean; without a correction of bias, m and v begin at 0.

    `FedAdam` of Flower 1.42 corrects it, at a round more than there were: there, lr of round r,
    counted from 0, is eta·sqrt(1 - b2^(r + 2)) / (1 - b1^(r + 2))."""

    def __init__(
        self,
        lr: Rate = 0.1,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
    ) -> None:
        self.lr, self.betas, self.eps = lr, betas, eps

    def begin(self, shared: Named) -> None:
        super().begin(shared)
        self.m, self.v = copies(self.zeros), copies(self.zeros)

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v. `square`: D²."""
        return self.betas[1] * v + (1 - self.betas[1]) * square

    def commit(self, count: int, came: Sequence[ClientUpdate]) -> None:
        b1, steps = self.betas[0], {}
        for name in self.shared:
            mean = self.mean(came, name)
            self.m[name] = b1 * self.m[name] + (1 - b1) * mean
            self.v[name] = self.second(self.v[name], mean**2)
            steps[name] = rate_of(self.lr, count) * self.m[name] / (self.v[name].sqrt() + self.eps)
        self.move(steps)


class FedYogi(FedAdam):
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.betas[1]) * square * torch.sign(v - square)


class FedAdagrad(FedAdam):
    """`betas[0]` is 0 in Flower's; `betas[1]` has no say."""

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


def rate_of(rate: Rate, count: int) -> float:
    return rate(count) if callable(rate) else rate


def copies(tensors: Mapping[str, Tensor]) -> Named:
    return {name: t.detach().clone() for name, t in tensors.items()}
