"""Federated rounds, the boring way: one copy of the module trains for one client after the other,
and a method says what becomes of what they come to (`client_methods.py`). What federated runs do
is compared with it, so it shares no code with `dag`, `compression` or `peer`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .client_methods import ClientUpdate, FedAvg, Named, Rate, copies, rate_of
from .client_updates import overlapped, sent
from .oracle import gradient, move

__all__ = ["ClientWork", "FederatedResult", "train_cohorts"]


@dataclass(frozen=True, slots=True)
class ClientWork:
    """What one client does in a round: a local step on each of `batches`, sample numbers or what
    else the loop is told to read. `weight`: such as how many samples it has. `kept`: so many
    numbers of its update it sends; None: all. `new`: whether it has nothing from earlier rounds.
    `behind`: so many versions were made since it began."""

    client: int
    batches: Sequence[Any]
    weight: float = 1.0
    kept: int | None = None
    new: bool = False
    behind: int = 0


@dataclass
class FederatedResult:
    """`shared`: the version after the last round; `buffers`: of it, those that are averaged.
    `losses`: by round, of each client's steps."""

    shared: Named = field(default_factory=dict)
    buffers: Named = field(default_factory=dict)
    losses: list[dict[int, list[float]]] = field(default_factory=list)


def train_cohorts(
    module: nn.Module,
    cohorts: Iterable[Sequence[ClientWork]],
    batches: Callable[[Any], Mapping[str, Any]],
    method: FedAvg,
    *,
    lr: Rate,
    momentum: float = 0.0,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    clip: float = 0.0,
    scaler: Callable[[], torch.amp.GradScaler] | None = None,
    aggregate: Callable[[Sequence[Named]], Named] | None = None,
    overlap: tuple[float, int] | None = None,
    feedback: bool = False,
    positions: Callable[[int, Named], Named] | None = None,
    averaged: Collection[str] = (),
    committed: Callable[[int, FederatedResult], None] = lambda count, result: None,
) -> FederatedResult:
    """Train from the module's weights, which stay as they are: a cohort in each round. The module
    takes the inputs of `batches` by name and returns a mean loss, or a mapping with "loss".

    `optimizer` makes the local one, fresh for each client, in place of SGD with `momentum`; its
    rate is `lr`. `clip`: the largest norm of a gradient, 0: any. `scaler` makes what scales losses
    under fp16, fresh for each client too. `aggregate`: what is made of what
    clients moved, in place of their weighted mean. `overlap`: gamma and D, by which numbers that
    few clients sent count for more. `feedback`: whether what a client does not send is added to
    what it moves next. `positions`: by a round's number and what the version before moved, which
    numbers all clients send, True or False. `averaged`: names of buffers of which the version has
    the weighted mean. A round without a cohort changes nothing. `committed` sees each round's
    number and the result so far. Raises ValueError where training changes another buffer: nothing
    says what its mean would be; and for a client that began with an older version than the method
    takes, or than there is."""
    make = optimizer or (lambda m: torch.optim.SGD(m.parameters(), lr=1.0, momentum=momentum))
    local = copy.deepcopy(module)
    weights = {n: p for n, p in local.named_parameters() if p.requires_grad}
    buffers = copies(dict(local.named_buffers()))
    method.begin(copies(weights))
    result, rests = FederatedResult(method.shared), dict[int, Named]()
    last = {n: torch.zeros_like(p) for n, p in copies(weights).items()}
    result.buffers = {n: buffers[n] for n in averaged}
    versions = list[Named]()
    for count, cohort in enumerate(cohorts):
        versions = [*versions, copies(method.shared)][-1 - method.oldest :]
        total = sum(work.weight for work in cohort)
        method.start(count)
        mask, before = positions(count, last) if positions else {}, copies(method.shared)
        losses: dict[int, list[float]] = {}
        came, masks, ends = list[ClientUpdate](), list[Named](), list[Named]()
        for work in cohort:
            if not 0 <= work.behind < len(versions):
                raise ValueError(f"client {work.client} began {work.behind} versions ago")
            began, rate = versions[-1 - work.behind], rate_of(lr, count - work.behind)
            with torch.no_grad():
                for name, p in weights.items():
                    p.copy_(began[name])
                for name, buffer in result.buffers.items():
                    local.get_buffer(name).copy_(buffer)
            own, scales = make(local), scaler() if scaler is not None else None
            for group in own.param_groups:
                group["lr"] = rate
            losses[work.client] = []
            for batch in work.batches:
                loss, weight = gradient(local, [batches(batch)], scales)
                if not weight:
                    continue  # no sample counts: it is no step
                losses[work.client].append(loss)
                if scales is not None:
                    scales.unscale_(own)
                for name, p in weights.items():
                    if p.grad is not None:
                        p.grad += method.bend(work.client, name, p.detach())
                if clip:
                    nn.utils.clip_grad_norm_(weights.values(), clip)
                move(own, scales)
            for name, buffer in local.named_buffers():
                if name not in averaged and not torch.equal(buffer, buffers[name]):
                    raise ValueError(f"training changes the buffer {name}")
            share = work.weight / total
            ends.append({n: share * local.get_buffer(n).double() for n in averaged})
            moved = {n: p.detach().double() - began[n] for n, p in weights.items()}
            if work.kept is not None:
                rest = {} if work.new else rests.get(work.client, {})
                whole = {n: m + rest.get(n, 0.0) for n, m in moved.items()}
                moved, own_mask = sent(whole, work.kept)
                if feedback:
                    rests[work.client] = {n: m - moved[n] for n, m in whole.items()}
                masks.append(own_mask)
            moved = {n: m * mask[n] for n, m in moved.items()} if mask else moved
            steps = len(work.batches)
            came.append(ClientUpdate(work.client, share, steps, moved, rate, momentum, work.behind))
        if came and overlap is not None:
            came = overlapped(came, masks, *overlap)
        if came:
            for name, buffer in result.buffers.items():
                buffer.copy_(torch.stack([end[name] for end in ends]).sum(0))
            if aggregate is not None:
                whole = aggregate([u.moved for u in came])
                came = [replace(came[0], share=1.0, moved=whole)]
            with torch.no_grad():
                method.commit(count, came)
            last = {n: p - method.shared[n] for n, p in before.items()}
        result.losses.append(losses)
        committed(count, result)
    return result
