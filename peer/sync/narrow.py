"""Updates of what is kept in fewer bits than it is computed in: bfloat16 weights, and optimizer
states in bfloat16 (`train.state_dtype`) or 8 bits (`peer/optimizers/blockwise.py`).

    for every slice of at most `SLICE` elements of a parameter, its gradient and its states:
        float32 copies  ->  torch's own step on them  ->  back, rounded

AdamW, SGD and Lion go by element, so slices change nothing, and temporaries do not grow with a
parameter. Others get a parameter whole (`step_whole`), and keep their states in float32.
Rounding to the nearest would lose updates: a bfloat16 has 8 bits, so a change of less than 2^-9 of
a number leaves it as it is, step after step. Rounding is stochastic instead (Gupta et al. 2015,
1502.02551), by bits that hang on (seed, step, name, element) alone: every holder of a parameter,
whatever the plan, comes to the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...dag.cost.optimizer_states import BLOCK, blocks
from ...dag.ir.random import ROUNDED, rounded, rounding_key
from ..optimizers.blockwise import SCALE, SIGNED, decoded, encoded

__all__ = [
    "NARROW",
    "ParameterStep",
    "step_in_8_bits",
    "step_narrow",
    "step_whole",
    "wide_dtype",
]

NARROW = (torch.bfloat16, torch.float16)
SLICE = ROUNDED


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """What a parameter is updated in."""
    return torch.float32 if parameter.dtype in NARROW else parameter.dtype


@dataclass(frozen=True)
class ParameterStep:
    """One step of a parameter by an optimizer's rule and its group's numbers. `state` is changed in
    place, and filled at the first step. name: of the whole one that the parameter is a block of, if
    it is."""

    optimizer: torch.optim.Optimizer
    group: Mapping[str, Any]
    parameter: nn.Parameter
    state: dict[str, Any]
    seed: int
    step: int
    name: str

    def worker(self, parameter: nn.Parameter) -> torch.optim.Optimizer:
        """An optimizer of the same rule, which takes its numbers from the group."""
        kind: Any = type(self.optimizer)
        found: torch.optim.Optimizer = kind([{**self.group, "params": [parameter]}])
        return found

    def rounded(self, kind: str, found: Tensor, first: int) -> Tensor:
        """Elements from number `first` on of a kind of number of the parameter, in bfloat16."""
        key = rounding_key(self.seed, self.step, f"{self.name}:{kind}")
        return rounded(found, first, key=key)


def step_narrow(one: ParameterStep, state_dtype: torch.dtype, first: int = 0) -> None:
    """Makes a step slice by slice. `first`: the number of the parameter's first element in the
    whole one."""
    parameter, state = one.parameter, one.state
    assert parameter.grad is not None, "a parameter without a gradient is left alone"
    worker = one.worker(nn.Parameter(torch.zeros(())))
    flat, grad = parameter.detach().view(-1), parameter.grad.reshape(-1)
    wide = wide_dtype(parameter)
    given = {k: t.view(-1) for k, t in state.items() if isinstance(t, Tensor) and k != "step"}
    scalars = {k: t for k, t in state.items() if k not in given}
    moments = dict(given)  # with those that the first step makes
    made: dict[str, Any] = {}
    for at in range(0, max(1, flat.numel()), SLICE):
        part = slice(at, min(at + SLICE, flat.numel()))
        proxy = nn.Parameter(flat[part].to(wide, copy=True))
        proxy.grad = grad[part].to(wide, copy=True)
        worker.param_groups[0]["params"] = [proxy]
        before = {k: t[part].to(wide, copy=True) for k, t in given.items()}
        before |= {k: t.clone() if isinstance(t, Tensor) else t for k, t in scalars.items()}
        worker.state.clear()
        if before:
            worker.state[proxy] = before
        worker.step()
        keys = {"": (flat, proxy.detach())}
        made = worker.state[proxy]
        for k, after in made.items():
            if isinstance(after, Tensor) and k != "step":
                if k not in moments:
                    moments[k] = torch.empty_like(flat, dtype=state_dtype)
                keys[k] = moments[k], after
        for k, (kept, after) in keys.items():
            if kept.dtype is torch.bfloat16:
                after = one.rounded(k, after, first + at)
            kept[part].copy_(after)
    state.clear()
    for k, found in made.items():
        state[k] = moments[k].view(parameter.shape) if k in moments else found


def step_whole(one: ParameterStep) -> None:
    """As `step_narrow`, of a rule that has to see all of a parameter; states stay as they are."""
    parameter, state = one.parameter, one.state
    assert parameter.grad is not None, "a parameter without a gradient is left alone"
    wide = wide_dtype(parameter)
    proxy = nn.Parameter(parameter.detach().to(wide, copy=True))
    proxy.grad = parameter.grad.to(wide, copy=True)
    worker = one.worker(proxy)
    if state:
        worker.state[proxy] = dict(state)  # whose tensors it changes
    worker.step()
    state.clear()
    state.update(worker.state[proxy])
    flat, after = parameter.detach().view(-1), proxy.detach().view(-1)
    for at in range(0, flat.numel(), SLICE):
        part = slice(at, min(at + SLICE, flat.numel()))
        found = after[part]
        if flat.dtype is torch.bfloat16:
            found = one.rounded("", found, at)
        flat[part].copy_(found)


def step_in_8_bits(one: ParameterStep) -> None:
    """As `step_narrow`, of AdamW over a whole parameter whose moments are in 8 bits between steps:
    they are decoded, updated and encoded slice by slice, each of which is whole blocks."""
    parameter, state = one.parameter, one.state
    assert parameter.grad is not None, "a parameter without a gradient is left alone"
    flat, grad = parameter.detach().view(-1), parameter.grad.reshape(-1)
    before, made = dict(state), dict[str, Any]()
    for moment in SIGNED if not before else ():
        state[moment] = torch.empty_like(parameter, dtype=torch.uint8)
        state[moment + SCALE] = flat.new_empty(blocks(flat.numel()), dtype=torch.float32)
    for at in range(0, flat.numel(), SLICE):
        end = min(at + SLICE, flat.numel())
        kept = {
            m: (state[m].view(-1)[at:end], state[m + SCALE][at // BLOCK : blocks(end)])
            for m in SIGNED
        }
        made = {}
        if before:
            wide = wide_dtype(parameter)
            made = {m: decoded(*kept[m], signed=s, dtype=wide) for m, s in SIGNED.items()}
            made["step"] = before["step"].clone()
        part = nn.Parameter(flat[at:end])  # of the same memory
        part.grad = grad[at:end]
        step_narrow(replace(one, parameter=part, state=made), wide_dtype(parameter), at)
        for moment, signed in SIGNED.items():
            codes, scales = encoded(made[moment], signed=signed)
            kept[moment][0].copy_(codes)
            kept[moment][1].copy_(scales)
    state["step"] = made["step"]
