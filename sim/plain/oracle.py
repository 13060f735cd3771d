"""The boring version: one module, one process, one loop. It is what every run is compared with, so
it shares no code with `dag` or `peer`: torch's own optimizers, its own schedule, its own clipping,
under fp16 torch's own autocast and scaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from ...job import Train

__all__ = [
    "AdamW8bit",
    "HalfLossError",
    "PlainLoopResult",
    "gradient",
    "learning_rate",
    "move",
    "optimizer_of",
    "scaler_of",
    "train",
]

Batches = Callable[[int, int], Mapping[str, Tensor]]
"""(step, microbatch) -> the microbatch's inputs by argument name."""
LEAST_IN_8_BITS = 4096
"""Elements of a parameter below which its moments stay as they are."""
_BLOCK = 256


@dataclass
class PlainLoopResult:
    """What the loop saw: one entry per step; the module holds the weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    """Of losses, of each step under fp16."""


class HalfLossError(ValueError):
    """A loss that torch's autocast leaves in float16 on a CPU, where on a card it has float32: most
    scales are no numbers of its dtype."""


def learning_rate(t: Train, step: float, steps: int) -> float:
    """The rate of an update, counted from 0: linear warm-up, then the schedule to lr_final."""
    warm = t.warmup if isinstance(t.warmup, int) else round(float(t.warmup[:-1]) / 100 * steps)
    if step < warm:
        return t.lr * (step + 1) / warm
    x = (step - warm) / max(1, steps - warm)
    match t.schedule:
        case "constant":
            return t.lr
        case "linear":
            share = 1 - x
        case "cosine":
            share = (1 + math.cos(math.pi * x)) / 2
        case "wsd":  # stable, then linear decay over the last fifth
            share = min(1.0, (1 - x) / 0.2)
    return t.lr * (t.lr_final + (1 - t.lr_final) * share)


class _Several(torch.optim.Optimizer):
    """Optimizers of the parts of a model, as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        super().__init__([g for part in parts for g in part.param_groups], {})
        # What is set in a group is set in the part that has it.
        self.param_groups = [g for part in parts for g in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class _Signs(torch.optim.Optimizer):
    """Lion as its paper has it (2302.06675, algorithm 2)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, decay, (b1, b2) = group["lr"], group["weight_decay"], group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    way = torch.sign(m * b1 + (1.0 - b1) * p.grad)
                    p.copy_(p * (1.0 - lr * decay) - lr * way)
                    self.state[p]["m"] = m * b2 + (1.0 - b2) * p.grad


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits (2110.02861), block after block: between two steps they are
    (indices of the nearest numbers of a table, largest number of the block)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        of_m, of_v = _table_of_8_bits(True), _table_of_8_bits(False)
        for group in self.param_groups:
            lr, decay, (b1, b2) = group["lr"], group["weight_decay"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                wide = p.double() if p.dtype == torch.float64 else p.float()
                grad, small = p.grad.to(wide.dtype), p.numel() < LEAST_IN_8_BITS
                t = s["t"] = s.get("t", 0) + 1
                m, v = torch.zeros_like(wide), torch.zeros_like(wide)
                if t > 1:
                    m, v = s["m"], s["v"]
                    if not small:
                        m, v = _read(m, of_m, wide), _read(v, of_v, wide)
                m, v = torch.lerp(m, grad, 1 - b1), v * b2 + (1 - b2) * grad * grad
                below = v.sqrt() / math.sqrt(1 - b2**t) + group["eps"]
                p.copy_(wide * (1 - lr * decay) - lr / (1 - b1**t) * (m / below))
                s["m"], s["v"] = (m, v) if small else (_written(m, of_m), _written(v, of_v))


def _table_of_8_bits(signed: bool) -> Tensor:
    """Return 256 numbers: 0, 1, and in each of seven decades below 1 middles of equal parts."""
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for k in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (k + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 / 10 ** (6 - k)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values.float()


def _written(moment: Tensor, table: Tensor) -> list[tuple[Tensor, float]]:
    kept = []
    for block in torch.split(moment.flatten(), _BLOCK):
        most = float(block.abs().max().float())
        shares = block / most if most else block
        table = table.to(shares)
        above = torch.searchsorted(table, shares).clamp(1, 255)
        low, high = table[above - 1], table[above]
        index = torch.where(shares - low <= high - shares, above - 1, above)
        if table[0] == 0:  # of second moments none comes to nothing
            index = torch.where(shares > 0, index.clamp(min=1), 0)
        kept.append((index, most))
    return kept


def _read(kept: list[tuple[Tensor, float]], table: Tensor, like: Tensor) -> Tensor:
    table = table.to(like)
    return torch.cat([table[index] * most for index, most in kept]).view_as(like)


def _of_kind(kind: str, groups: list[dict[str, Any]], t: Train) -> torch.optim.Optimizer:
    betas = (t.betas[0], t.betas[1])
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=t.lr, momentum=t.momentum)
    if kind == "lion":
        return _Signs(groups, {"lr": t.lr, "betas": betas})
    if kind == "adamw8bit":
        return AdamW8bit(groups, {"lr": t.lr, "betas": betas, "eps": t.eps})
    if kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=t.lr)
    if kind == "muon":
        return torch.optim.Muon(
            groups, lr=t.lr, momentum=t.momentum, adjust_lr_fn="match_rms_adamw"
        )
    return torch.optim.AdamW(groups, lr=t.lr, betas=betas, eps=t.eps)


def optimizer_of(module: nn.Module, t: Train) -> torch.optim.Optimizer:
    """Return torch's optimizer, or for "muon" the two of which each has its part of the model."""

    def groups(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        plain = [p for n, p in named if any(fnmatch(n, glob) for glob in t.no_decay)]
        kept = {id(p) for p in plain}
        decay = [p for _, p in named if id(p) not in kept]
        return [
            {"params": decay, "weight_decay": t.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]

    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if t.optimizer != "muon":
        return _of_kind(t.optimizer, groups(named), t)
    assert t.no_muon != "auto", "a submitter says which matrices are not hidden"
    hidden = [
        (n, p) for n, p in named if p.dim() == 2 and not any(fnmatch(n, g) for g in t.no_muon)
    ]
    theirs = {n for n, _ in hidden}
    rest = [(n, p) for n, p in named if n not in theirs]
    parts = [(kind, part) for kind, part in (("muon", hidden), ("adamw", rest)) if part]
    return _Several([_of_kind(kind, groups(part), t) for kind, part in parts])


def scaler_of(t: Train) -> torch.amp.GradScaler:
    """Return torch's own scaler of losses, with the job's settings."""
    asked = t.loss_scale
    return torch.amp.GradScaler(
        "cpu", init_scale=asked.init_scale, growth_interval=asked.growth_interval
    )


def move(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Updates by what is in `grad`, divided by the scale already, unless that is not finite."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()


def gradient(
    module: nn.Module,
    microbatches: Iterable[Mapping[str, Tensor]],
    scaler: torch.amp.GradScaler | None = None,
) -> tuple[float, float]:
    """Leaves that of a step in `grad`: Σ weight·gradient of microbatches by Σ weight, none where
    that is 0. Returns the mean loss, and Σ weight. `scaler`: the forward is under fp16 autocast,
    and gradients are those of scaled losses."""
    total, weights = 0.0, 0.0
    for batch in microbatches:
        with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
            out = module(**batch)
        loss = out if isinstance(out, Tensor) else out["loss"]
        if scaler is not None and loss.dtype is torch.float16:
            raise HalfLossError("torch leaves the loss in float16 on a CPU")
        weight = float(out.get("weight", 1.0)) if isinstance(out, Mapping) else 1.0
        if weight == 0:
            continue
        weighed = loss * weight
        (weighed if scaler is None else scaler.scale(weighed)).backward()
        total, weights = total + float(loss.detach()) * weight, weights + weight
    for p in module.parameters():
        if p.grad is not None:
            p.grad /= weights
    return total / weights if weights else math.nan, weights


def train(
    module: nn.Module,
    batches: Batches,
    t: Train,
    *,
    steps: int,
    microbatches: int,
    lasting: int = 0,
    fp16: bool = False,
) -> PlainLoopResult:
    """Trains in place. A step accumulates Σ weight·loss over its microbatches, divides the gradient
    by Σ weight, clips its global 2-norm to t.clip, and updates. A microbatch of weight 0 has no
    say; a step of such ones updates nothing, and its loss is NaN. `lasting`: steps of the schedule,
    where these are only the first of them. `fp16`: as torch does it; a step that its scaler skips
    is one of the schedule. Raises HalfLossError."""
    seen, optimizer = PlainLoopResult(), optimizer_of(module, t)
    scaler = scaler_of(t) if fp16 else None
    trainable = [p for p in module.parameters() if p.requires_grad]
    for step in range(steps):
        loss, weight = gradient(module, (batches(step, m) for m in range(microbatches)), scaler)
        if scaler is not None:
            seen.scales.append(scaler.get_scale())
        if weight == 0:
            seen.losses.append(math.nan)
            seen.norms.append(0.0)
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        norm = torch.linalg.vector_norm(
            torch.stack([p.grad.norm() for p in trainable if p.grad is not None])
        )
        if 0 < t.clip < norm:
            for p in trainable:
                if p.grad is not None:
                    p.grad *= t.clip / norm
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(t, step, lasting or steps)
        move(optimizer, scaler)
        seen.losses.append(loss)
        seen.norms.append(float(norm))
    return seen
