"""The update of one stage's parameters: torch's own optimizers, fed by the job's [train] table.

The learning rate is a pure function of the step and clipping one of the global norm, so that every
holder, whatever stage it has, comes to the same numbers without talking to anyone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...dag.transforms.split_weights import block_of, whole_name
from ...job import Train
from ..optimizers.blockwise import check_state
from ..optimizers.kinds import kind_of, optimizer_of_kind, state_numbers
from .narrow import (
    NARROW,
    ParameterStep,
    step_in_8_bits,
    step_narrow,
    step_whole,
    wide_dtype,
)
from .norm import square_of

__all__ = ["KEPT", "StageOptimizer", "clip_factor", "learning_rate", "warm_up"]

KEPT = "sync."
"""What the names of parts begin with that are not the optimizer's but a strategy's."""
_BOOST, _SQUARE, _EMA = "boost", "square", "ema"


def learning_rate(train: Train, step: float) -> float:
    """The rate of update `step`, counted from 0, of `train.steps`; between two of them where local
    steps of replicas are.

    Warm-up of w steps: lr · (step + 1) / w. Then, with x = (step - w) / (steps - w) in [0, 1] and
    f = lr_final: lr · (f + (1 - f) · share(x)), where share is
    cosine (1 + cos πx) / 2, linear 1 - x, wsd min(1, 5·(1 - x)), constant 1.
    """
    assert train.steps is not None, "the number of steps must be known"
    warm = train.warmup_steps
    if step < warm:
        return train.lr * (step + 1) / warm
    x = min(1.0, (step - warm) / max(1, train.steps - warm))
    match train.schedule:
        case "cosine":
            share = (1 + math.cos(math.pi * x)) / 2
        case "linear":
            share = 1 - x
        case "wsd":
            share = min(1.0, (1 - x) / 0.2)
        case "constant":
            share = 1.0
    return train.lr * (train.lr_final + (1 - train.lr_final) * share)


def clip_factor(norm: float, clip: float) -> float:
    """What the mean gradient is multiplied with so that its global norm is at most `clip` (0: off).
    A norm that is not finite gives itself on: hiding it would only move the failure."""
    return clip / norm if 0 < clip < norm else 1.0


def warm_up() -> None:
    """Loads what torch loads when the first optimizer of a process is made: two seconds."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])


class StageOptimizer:
    """The job's optimizer over the trainable parameters of one stage, by name: of Muon two, one
    for hidden matrices and AdamW for the rest. Owns their state; `step` changes the parameters in
    place. Those in 16 bits, and all where the job keeps states in bfloat16, are computed in float32
    and rounded (`narrow.py`) by bits that follow from `seed`; `firsts` has of blocks of a split
    parameter the number of their first element in the whole, and `position` says which step of the
    schedule a step is. Raises ValueError for a block where parameters have to be whole.

    A parameter whose gradient is None is left alone, decay included, as in torch. Copies of a tied
    parameter stay equal when all get the same gradient, because nothing else enters the update.
    `squares`: by parameter, the squared 2-norm of the last step's mean gradient before clipping,
    what rebuilding a lost stage weighs its neighbours by; kept only if `weighs`.
    """

    def __init__(
        self,
        train: Train,
        parameters: Mapping[str, nn.Parameter],
        *,
        weighs: bool = False,
        seed: int = 0,
        firsts: Mapping[str, int] | None = None,
        position: Callable[[int], float] = float,
    ) -> None:
        self.train = train
        self._position = position
        self._seed, self._firsts = seed, firsts or {}
        self.squares: dict[str, Tensor] = {}
        self._weighs = weighs
        self._boosts: dict[str, float] = {}
        self._averages: dict[str, Tensor] = {}
        self._named = {n: p for n, p in parameters.items() if p.requires_grad}
        self._kinds = {n: kind_of(train, whole_name(n), p) for n, p in self._named.items()}
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, parameter in self._named.items():
            if train.whole and block_of(name):
                raise ValueError(f"{name} is a block: {train.optimizer} has to have it whole")
            user = whole_name(name)
            exempt = any(fnmatchcase(user, glob) for glob in train.no_decay)
            pair = groups.setdefault(self._kinds[name], [])
            if not pair:
                pair += ({"params": [], "weight_decay": w} for w in (train.weight_decay, 0.0))
            pair[exempt]["params"].append(parameter)
        self._optimizers = {
            kind: optimizer_of_kind(kind, [g for g in pair if g["params"]], train)
            for kind, pair in groups.items()
        }

    def _owner(self, name: str) -> torch.optim.Optimizer:
        """Return that of a parameter's."""
        return self._optimizers[self._kinds[name]]

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers.values():
            yield from optimizer.param_groups

    @property
    def state_bytes(self) -> int:
        """Bytes that the optimizer's state takes once every parameter had a gradient."""
        found = 0
        for name, p in self._named.items():
            count = state_numbers(self._kinds[name], self.train, p)
            found += count * self._state_dtype(name).itemsize
            if self.train.ema:
                found += p.numel() * wide_dtype(p).itemsize
        return found

    def _state_dtype(self, name: str) -> torch.dtype:
        if self._kinds[name] == "adamw8bit":
            return torch.uint8
        narrow = self.train.state_dtype == "bf16"
        return torch.bfloat16 if narrow else wide_dtype(self._named[name])

    def _is_narrow(self, name: str) -> bool:
        return self._named[name].dtype in NARROW or self._state_dtype(name).itemsize < 4

    def step(self, step: int, *, weight: float, norm: float) -> None:
        """Turns the accumulated gradients (sums of weight·loss over the step's microbatches) into
        means, clips them, and updates. Leaves the gradients; the caller frees them.

        `weight` is the step's Σ weight. At 0 no sample counted: nothing is updated. `norm` is the
        global 2-norm of the mean gradient before clipping.
        """
        if weight == 0:
            return
        factor = clip_factor(norm, self.train.clip)
        self.squares.clear()
        grads = {n: p.grad for n, p in self._named.items() if p.grad is not None}
        if grads and weight != 1:  # all at once: on a card launches cost more than numbers
            torch._foreach_div_(list(grads.values()), weight)
        if self._weighs:
            self.squares = {name: square_of(grad) for name, grad in grads.items()}
        if grads and factor != 1:
            torch._foreach_mul_(list(grads.values()), factor)
        for group in self._groups():
            group["lr"] = learning_rate(self.train, self._position(step)) * group.get(_BOOST, 1.0)
        if self._is_plain:
            self._descend()
            return
        with self._narrow_ones(step):
            for optimizer in self._optimizers.values():
                optimizer.step()

    @torch.no_grad()
    def average(self) -> None:
        """Takes the weights, after an update, into their exponential mean: the first ones as they
        are, then mean + (1 - ema)·(weights - mean), as torch's AveragedModel does."""
        if not self.train.ema:
            return
        for name, parameter in self._named.items():
            now = parameter.detach().to(wide_dtype(parameter))
            if name in self._averages:
                self._averages[name].lerp_(now, 1 - self.train.ema)
            else:
                self._averages[name] = now.clone()

    def averages(self) -> dict[str, Tensor]:
        """Return the exponential mean of weights by name, in their dtype; nothing before the first
        update, and without `ema`."""
        return {n: t.to(self._named[n].dtype) for n, t in self._averages.items()}

    @property
    def _is_plain(self) -> bool:
        """Whether a step is the gradient times the learning rate: of small models, most of a step
        of torch's is what stands around that."""
        train = self.train
        return (
            (train.optimizer, train.momentum) == ("sgd", 0)
            and not any(group["weight_decay"] for group in self._groups())
            and not any(map(self._is_narrow, self._named))
        )

    @torch.no_grad()
    def _descend(self) -> None:
        for group in self._groups():
            moved = [p for p in group["params"] if p.grad is not None]
            if moved:
                torch._foreach_add_(moved, [p.grad for p in moved], alpha=-group["lr"])

    @contextmanager
    def _narrow_ones(self, step: int) -> Iterator[None]:
        """Updates what is kept in fewer bits, and keeps it out of torch's own step."""
        grads: dict[nn.Parameter, Tensor] = {}
        names = {parameter: name for name, parameter in self._named.items()}
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None or not self._is_narrow(names[parameter]):
                        continue
                    self._step_narrow(optimizer, group, names[parameter], step)
                    grads[parameter], parameter.grad = parameter.grad, None
        try:
            yield
        finally:
            for parameter, grad in grads.items():
                parameter.grad = grad

    def _step_narrow(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str, step: int
    ) -> None:
        parameter = self._named[name]
        state, user = optimizer.state[parameter], whole_name(name)
        one = ParameterStep(optimizer, group, parameter, state, self._seed, step, user)
        if not self.train.whole:
            step_narrow(one, self._state_dtype(name), self._firsts.get(name, 0))
        elif self._kinds[name] == "adamw8bit":
            step_in_8_bits(one)
        else:
            step_whole(one)

    def boost(self, names: Iterable[str], factor: float) -> None:
        """From here on the learning rate of these parameters is `factor` times as high; not more
        when it is said again."""
        names = [n for n in names if n in self._named and self._boosts.get(n, 1.0) != factor]
        chosen = {id(self._named[n]) for n in names}
        self._boosts.update(dict.fromkeys(names, factor))
        for optimizer in self._optimizers.values():
            for group in list(optimizer.param_groups):
                moved = [p for p in group["params"] if id(p) in chosen]
                group["params"] = [p for p in group["params"] if id(p) not in chosen]
                if moved:
                    optimizer.param_groups.append({**group, "params": moved, _BOOST: factor})
            optimizer.param_groups = [g for g in optimizer.param_groups if g["params"]]

    def reset(self, names: Iterable[str]) -> None:
        """Forgets the state of these parameters, as if they had had no gradient yet."""
        for name in names:
            if name in self._named:
                self._owner(name).state.pop(self._named[name], None)
                self.squares.pop(name, None)
                self._averages.pop(name, None)

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as NAME:PART, of parameters that had a gradient already; the
        optimizer's own tensors. Besides, NAME:boost, NAME:square, NAME:ema where there are some."""
        found = {
            f"{name}:{part}": tensor
            for name, parameter in self._named.items()
            for part, tensor in self._owner(name).state.get(parameter, {}).items()
            if isinstance(tensor, Tensor)
        }
        for name, factor in self._boosts.items():
            found[f"{name}:{_BOOST}"] = torch.tensor(factor, dtype=torch.float64)
        found |= {f"{name}:{_EMA}": mean for name, mean in self._averages.items()}
        return found | {f"{n}:{_SQUARE}": square for n, square in self.squares.items()}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from copies of what `state_tensors` gave; names of others' are passed over.
        Raises ValueError for what is no state in 8 bits where one is due."""
        in_8_bits: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            owner, _, part = name.rpartition(":")
            if (parameter := self._named.get(owner)) is None or part.startswith(KEPT):
                continue
            if part == _BOOST:
                self.boost([owner], float(tensor))
            elif part == _EMA:
                if self.train.ema:
                    wide = wide_dtype(parameter)
                    self._averages[owner] = tensor.to(parameter.device, wide, copy=True)
            elif part == _SQUARE:
                self.squares[owner] = tensor.to(parameter.device, copy=True)
            elif self._kinds[owner] == "adamw8bit":
                in_8_bits.setdefault(owner, {})[part] = tensor
            else:
                # Steps are counted on the host, whatever the device of the parameter.
                of_step = part == "step"
                there = tensor.device if of_step else parameter.device
                dtype = tensor.dtype if of_step else self._state_dtype(owner)
                self._owner(owner).state[parameter][part] = tensor.to(there, dtype, copy=True)
        for owner, state in in_8_bits.items():
            parameter = self._named[owner]
            check_state(owner, parameter, state)
            self._owner(owner).state[parameter] = {
                k: t.to(t.device if k == "step" else parameter.device, copy=True)
                for k, t in state.items()
            }

    def __repr__(self) -> str:
        return f"<StageOptimizer {self.train.optimizer}, {len(self._named)} parameters>"
