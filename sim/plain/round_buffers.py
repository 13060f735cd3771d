"""What becomes of buffers beside a method of `round_methods.py`, whatever that does to weights: who
meets goes on with the mean of running statistics and with the largest of integers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from .round_methods import strided
from .round_oracle import PlainMethod, PlainReplica, Round

__all__ = ["WithBuffers"]


class WithBuffers(PlainMethod):
    """`shared` has the buffers of the version, too. By samples where all have one version, and one
    as much as the other in gossip. A version that comes late is added to what a replica's own steps
    did since the round ended; who was in no round takes it as it is."""

    def __init__(self, method: PlainMethod, module: nn.Module) -> None:
        self.method = method
        trained = dict(module.named_parameters(remove_duplicate=False))
        self.buffers = {n: b.clone() for n, b in module.state_dict().items() if n not in trained}
        self.ended: dict[int, dict[str, Tensor]] = {}
        """By replica, those that were exchanged, as they were when the round ended."""
        self.late: dict[int, int] = {}

    def begin(self, shared: dict[str, Tensor]) -> None:
        self.method.begin(shared)
        self.shared = self.method.shared | self.buffers

    def join(self, number: int, replica: PlainReplica) -> None:
        self.method.join(number, replica)
        _put(replica, self.buffers)

    def begins(self, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        self.method.begins(r, replicas)
        self.late = {m.replica: m.late for m in r.members if m.late}
        for number in self.late:
            _put(replicas[number], self.ended[number])

    def stepped(self, j: int, number: int, replica: PlainReplica) -> None:
        self.method.stepped(j, number, replica)
        if j + 1 == self.late.get(number):
            was = self.ended[number]
            now = _of(replica, was)
            _put(replica, {n: self.buffers[n] + (now[n] - b) for n, b in was.items()})

    def take(self, number: int, source: int, replicas: Mapping[int, PlainReplica]) -> None:
        self.method.take(number, source, replicas)
        _put(replicas[number], _of(replicas[source], self.buffers))

    def commit(self, count: int, r: Round, replicas: Mapping[int, PlainReplica]) -> None:
        self.method.commit(count, r, replicas)
        apart, names = self.method.apart, [*self.buffers]
        if r.fragment:
            names = strided(names, self.method.fragments)[r.fragment - 1]
        weights = {m.replica: 1 if apart else m.weight for m in r.members if m.weight}
        self.ended = {k: _of(replicas[k], names) for k in weights}
        for met in r.groups if apart else [tuple(weights)]:
            made = {n: _mean([(weights[k], self.ended[k][n]) for k in met]) for n in names}
            for k in met:
                _put(replicas[k], made)
            for n in names if r.gathers or not apart else ():
                self.buffers[n].copy_(made[n])
        for k in () if apart else replicas.keys() - weights.keys():
            _put(replicas[k], self.buffers)

    def finish(self, replicas: Mapping[int, PlainReplica]) -> None:
        self.method.finish(replicas)


def _of(replica: PlainReplica, names: Iterable[str]) -> dict[str, Tensor]:
    return {n: replica.module.get_buffer(n).clone() for n in names}


def _put(replica: PlainReplica, buffers: Mapping[str, Tensor]) -> None:
    for n, b in buffers.items():
        replica.module.get_buffer(n).copy_(b)


def _mean(each: Sequence[tuple[int, Tensor]]) -> Tensor:
    """The mean of numbers, and the largest of integers."""
    if not each[0][1].is_floating_point():
        return torch.stack([b for _, b in each]).amax(0)
    total = sum(weight for weight, _ in each)
    return torch.stack([weight * b.double() for weight, b in each]).sum(0) / total
