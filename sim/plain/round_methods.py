"""The methods of `round_oracle.py`, each as its paper has it, and the encodings that they bring.

An encoding is a function from a tensor to what arrives of it. `Residual` remembers what did not:
with decay b, e = b·e + x; q = encode(e); e -= q.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from .client_methods import copies
from .round_oracle import PlainMethod, PlainReplica, Round

__all__ = [
    "Average",
    "DiLoCo",
    "NoLoCo",
    "Overlapped",
    "Residual",
    "Saps",
    "SparseLoCo",
    "Streaming",
    "e3m0",
    "gather",
    "raw",
    "sign",
    "sparse_wire",
    "strided",
    "top_of_chunks",
    "two_bits",
]

Encode = Callable[[Tensor], Tensor]


def raw(x: Tensor) -> Tensor:
    return x


def e3m0(x: Tensor) -> Tensor:
    """Four bits: a sign, and the nearest of 0 and 2^0 … 2^-6 times the tensor's largest."""
    most = x.abs().max()
    if most == 0:
        return x.clone()
    share = x.abs() / most
    fraction, power = torch.frexp(share)  # fraction in [0.5, 1)
    power = torch.where(fraction < 0.75, power - 1, power).clamp(min=-6)
    near = torch.ldexp(torch.ones_like(x), power)
    return x.sign() * torch.where(share < 2.0**-7, 0.0, near) * most


def sign(x: Tensor) -> Tensor:
    """One bit: the mean magnitude with the entry's sign."""
    return x.sign() * x.abs().mean()


def two_bits(x: Tensor) -> Tensor:
    """A sign and one of two magnitudes: the means of what lies above the mean magnitude and below.
    `x` (…, n): each row has its own; zeros count for nothing and stay."""
    size = x.abs()
    there = size > 0
    mean = size.sum(-1, keepdim=True) / there.sum(-1, keepdim=True).clamp(min=1)
    high = size > mean
    found = torch.zeros_like(x)
    for part in (high, there & ~high):
        level = (size * part).sum(-1, keepdim=True) / part.sum(-1, keepdim=True).clamp(min=1)
        found += part * level
    return x.sign() * found


def top_of_chunks(keep: float, chunk: int = 4096, values: Encode = raw) -> Encode:
    """The largest `keep` (a share; at least one) of each `chunk` entries of the flattened tensor,
    of equal ones the first; `values` encodes what is kept, a row for each chunk."""

    def encode(x: Tensor) -> Tensor:
        rows = [row.unsqueeze(0) for row in torch.split(x.flatten(), chunk)]
        found = []
        for row in rows:
            k = max(1, round(keep * row.shape[-1]))
            if k == row.shape[-1]:
                found.append(values(row).flatten())
                continue
            at = row.abs().sort(dim=-1, descending=True, stable=True).indices[..., :k]
            kept = values(row.gather(-1, at))
            found.append(torch.zeros_like(row).scatter(-1, at, kept).flatten())
        return torch.cat(found).view_as(x)

    return encode


def sparse_wire(density: float = 1 / 64, chunk: int = 4096, bits: int = 2) -> Encode:
    """As a run of replicas writes what SparseLoCo gives: levels have the digits of bfloat16, and
    what has few elements goes as it is."""

    def levels(kept: Tensor) -> Tensor:
        return two_bits(kept).bfloat16().float()

    encode = top_of_chunks(density, chunk, levels if bits == 2 else raw)
    return lambda x: x if x.numel() < 64 else encode(x)


class Residual:
    """Error feedback by key, (replica, name) or name; see the module."""

    def __init__(self, encode: Encode, decay: float = 1.0) -> None:
        self.encode, self.decay, self.left = encode, decay, dict[object, Tensor]()

    def __call__(self, key: object, x: Tensor) -> Tensor:
        e = self.decay * self.left[key] + x if key in self.left else x
        q = self.encode(e)
        self.left[key] = e - q
        return q

    def forget(self, replica: int) -> None:
        """Forget a replica that was lost, and begins anew."""
        self.left = {
            k: e for k, e in self.left.items() if not (isinstance(k, tuple) and k[0] == replica)
        }


def mean(r: Round, of: Mapping[int, Tensor]) -> Tensor:
    """By the members' weights, in float64."""
    total = sum(m.weight for m in r.members)
    parts = torch.stack([of[m.replica].double() * m.weight for m in r.members if m.weight])
    return parts.sum(0) / total


class Average(PlainMethod):
    """All take the mean of the weights."""

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        for name, was in self.shared.items():
            was.copy_(mean(r, {k: x.weights[name] for k, x in replicas.items()}))
            for replica in replicas.values():
                replica.weights[name].copy_(was)


class DiLoCo(PlainMethod):
    """The mean of D = shared - local is the gradient of an outer SGD with Nesterov's momentum.

    `up` encodes what a member sends and `down` what all get of the mean, both with a residual:
    of the replica, and one that all share."""

    def __init__(
        self, lr: float = 0.7, momentum: float = 0.9, *, up: Encode = raw, down: Encode = raw
    ) -> None:
        self.lr, self.momentum = lr, momentum
        self.up, self.down = Residual(up), Residual(down)

    def begin(self, shared: dict[str, Tensor]) -> None:
        super().begin(shared)
        nesterov = self.momentum > 0
        self.outer = torch.optim.SGD(
            shared.values(), lr=self.lr, momentum=self.momentum, nesterov=nesterov
        )

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        self._outer_step(r, {k: x.weights for k, x in replicas.items()}, self.shared)
        for replica in replicas.values():
            for name, p in replica.weights.items():
                p.copy_(self.shared[name])

    def _outer_step(
        self, r: Round, local: Mapping[int, Mapping[str, Tensor]], names: Collection[str]
    ) -> None:
        """Steps these parameters; the others have no gradient: the optimizer passes them over."""
        for name in names:
            was = self.shared[name]
            came = {
                m.replica: self.up((m.replica, name), was - local[m.replica][name])
                for m in r.members
                if m.weight
            }
            was.grad = self.down(name, mean(r, came).to(was.dtype))
        self.outer.step()
        self.outer.zero_grad()


class Overlapped(PlainMethod):
    """Another method whose version comes `late` local steps into the next round of a member, as
    local += new - what it was when the round ended. Who was in no round takes it as it is."""

    def __init__(self, method: PlainMethod) -> None:
        self.method = method
        self.ended: dict[int, dict[str, Tensor]] = {}
        """By replica to which it is on its way, its local weights when the round ended."""
        self.late: dict[int, int] = {}

    def begin(self, shared: dict[str, Tensor]) -> None:
        super().begin(shared)
        self.method.begin(shared)

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        inside = {m.replica for m in r.members if m.weight}
        ended = {k: copies(x.weights) for k, x in replicas.items()}
        self.method.commit(count, r, replicas)
        self.ended = {k: was for k, was in ended.items() if k in inside}

    @torch.no_grad()
    def begins(self, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        self.late = {m.replica: m.late for m in r.members if m.late}
        for number in self.late:
            for name, p in replicas[number].weights.items():
                p.copy_(self.ended[number][name])

    @torch.no_grad()
    def stepped(self, j: int, number: int, replica: PlainReplica) -> None:
        if j + 1 == self.late.get(number):
            for name, p in replica.weights.items():
                p.copy_(self.shared[name] + (p - self.ended[number][name]))


class Streaming(DiLoCo):
    """DiLoCo of the fragment that a round says, strided as `strided` has it. It arrives `late`
    local steps into the next round, as local += (1 - mix)·(new - what it was when the round ended);
    the last round is one of all, and not mixed. Who was in no round takes all as it is."""

    def __init__(
        self,
        lr: float = 0.4,
        momentum: float = 0.9,
        *,
        fragments: int = 2,
        mix: float = 0.5,
        up: Encode = raw,
        down: Encode = raw,
    ) -> None:
        super().__init__(lr, momentum, up=up, down=down)
        self.fragments, self.mix = fragments, mix
        self.ended: dict[int, dict[str, Tensor]] = {}
        self.late: dict[int, int] = {}

    def begin(self, shared: dict[str, Tensor]) -> None:
        super().begin(shared)
        self.parts = strided(shared, self.fragments)

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        names = self.parts[r.fragment - 1] if r.fragment else [*self.shared]
        self._outer_step(r, {k: x.weights for k, x in replicas.items()}, names)
        inside = {m.replica for m in r.members if m.weight}
        self.kept = 0.0 if r.final else self.mix
        self.ended = {k: copies({n: replicas[k].weights[n] for n in names}) for k in inside}
        for k in replicas.keys() - inside:
            for name, p in replicas[k].weights.items():
                p.copy_(self.shared[name])

    def begins(self, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        self.late = {m.replica: m.late for m in r.members}
        for m in r.members:
            if not m.late:
                self._arrive(m.replica, replicas[m.replica])

    def stepped(self, j: int, number: int, replica: PlainReplica) -> None:
        if j + 1 == self.late[number]:
            self._arrive(number, replica)

    def finish(self, replicas: Mapping[int, PlainReplica]) -> None:
        for k, replica in replicas.items():
            self._arrive(k, replica)

    @torch.no_grad()
    def _arrive(self, number: int, replica: PlainReplica) -> None:
        for name, was in self.ended.pop(number, {}).items():
            p, target = replica.weights[name], self.shared[name]
            if self.kept:
                target = was + (target - was) * (1 - self.kept)
            p.copy_(target + (p - was))


class SparseLoCo(PlainMethod):
    """e = b·e + D; q = the top of each chunk of e in two bits; e -= q; shared -= lr · mean q: what
    stays behind is the outer momentum. `back`: what comes back of the mean; a q where that has
    nothing goes back into its e."""

    def __init__(
        self,
        lr: float = 1.0,
        decay: float = 0.95,
        encode: Encode | None = None,
        back: Encode | None = None,
    ) -> None:
        self.lr, self.back = lr, back
        self.sent = Residual(encode or top_of_chunks(64 / 4096, values=two_bits), decay)

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        for m in r.members:
            if m.fresh:
                self.sent.forget(m.replica)
        for name, was in self.shared.items():
            came = {
                m.replica: self.sent((m.replica, name), was - replicas[m.replica].weights[name])
                for m in r.members
                if m.weight
            }
            heard = mean(r, came)
            if self.back is not None:
                heard = self.back(heard.to(was.dtype))
                for k, q in came.items():
                    self.sent.left[k, name] += torch.where(heard == 0, q, 0.0)
            was.sub_(self.lr * heard)
            for replica in replicas.values():
                replica.weights[name].copy_(was)


class NoLoCo(PlainMethod):
    """Slow weights s and momentum m of each replica; with the means over a pair,
    m = momentum·m + lr·mean(p - s) + lr·(mean(s) - s); s += m; p = s. Where all meet, each makes
    that step alone, and the mean of what they come to is the s of all."""

    apart = True

    def __init__(self, lr: float = 0.7, momentum: float = 0.5) -> None:
        self.lr, self.momentum = lr, momentum
        self.slow: dict[int, dict[str, Tensor]] = {}
        self.momenta: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def join(self, number: int, replica: PlainReplica) -> None:
        super().join(number, replica)
        self.slow[number] = copies(replica.weights)
        self.momenta[number] = {n: torch.zeros_like(p) for n, p in replica.weights.items()}

    @torch.no_grad()
    def take(self, number: int, source: int, replicas: Mapping[int, PlainReplica]) -> None:
        super().take(number, source, replicas)
        for kept in (self.slow, self.momenta):
            kept[number] = copies(kept[source])

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        met = r.groups
        for each in [(k,) for k in met[0]] if r.gathers else met:
            for name in self.shared:
                slow = torch.stack([self.slow[k][name] for k in each])
                local = torch.stack([replicas[k].weights[name] for k in each])
                moved, middle = (local - slow).mean(0), slow.mean(0)
                for k in each:
                    s, m = self.slow[k][name], self.momenta[k][name]
                    m.mul_(self.momentum).add_(self.lr * moved + self.lr * (middle - s))
                    s.add_(m)
                    replicas[k].weights[name].copy_(s)
        if r.gathers:
            for name, was in self.shared.items():
                gather(was, [self.slow[k][name] for k in met[0]])
                for k in met[0]:
                    self.slow[k][name].copy_(was)
                    replicas[k].weights[name].copy_(was)


def gather(shared: Tensor, of: Sequence[Tensor]) -> None:
    """The plain mean, in float64."""
    shared.copy_(torch.stack([x.double() for x in of]).mean(0))


class Saps(PlainMethod):
    """Pairs take the mean of the entries that `mask(round, name, shape)` has; by itself of all."""

    apart = True

    def __init__(self, mask: Callable[[int, str, torch.Size], Tensor] | None = None) -> None:
        self.mask = mask or (lambda count, name, shape: torch.ones(shape, dtype=torch.bool))

    @torch.no_grad()
    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        if r.gathers:
            [met] = r.groups
            for name, was in self.shared.items():
                gather(was, [replicas[k].weights[name] for k in met])
                for k in met:
                    replicas[k].weights[name].copy_(was)
            return
        for name, like in self.shared.items():
            chosen = self.mask(count, name, like.shape)
            for a, b in r.pairs:
                one, other = replicas[a].weights[name], replicas[b].weights[name]
                middle = (one + other) / 2
                one.copy_(torch.where(chosen, middle, one))
                other.copy_(torch.where(chosen, middle, other))


def strided(names: Collection[str], count: int) -> list[list[str]]:
    """Cut into so many fragments: block i goes to fragment i mod count, what is in no block to the
    first."""
    found: list[list[str]] = [[] for _ in range(count)]
    for name in names:
        block = re.search(r"\.(\d+)\.", name)
        found[int(block[1]) % count if block else 0].append(name)
    return found
