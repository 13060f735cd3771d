"""Which rule updates a parameter, and the optimizer of that rule with the job's numbers.

Muon (Jordan et al. 2024; 2502.16982 for its rate) is for hidden matrices: what has two dimensions
and a name that no glob of `train.no_muon` is for (`client/matrices.py` finds them). Everything else
is AdamW's, by the same rate: a matrix's is multiplied with 0.2·√max(rows, columns), which makes
updates as large as AdamW's are.

"adamw8bit" is AdamW with moments in 8 bits (`blockwise.py`); a parameter of few elements is
AdamW's.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ...dag.cost.optimizer_states import counted_in_8_bits, is_in_8_bits
from ...job import Train
from .lion import Lion

__all__ = ["kind_of", "optimizer_of_kind", "state_numbers"]


def kind_of(train: Train, name: str, parameter: Tensor) -> str:
    """Return which optimizer a parameter with this name in the user's model is for."""
    if train.optimizer == "adamw8bit":
        return "adamw8bit" if is_in_8_bits(parameter.numel()) else "adamw"
    if train.optimizer != "muon":
        return train.optimizer
    assert train.no_muon != "auto", "a submitter says which matrices are not hidden"
    hidden = parameter.dim() == 2 and not any(fnmatchcase(name, g) for g in train.no_muon)
    return "muon" if hidden else "adamw"


def optimizer_of_kind(
    kind: str, groups: list[dict[str, Any]], train: Train
) -> torch.optim.Optimizer:
    """Return that over these groups of parameters."""
    match kind:
        case "sgd":
            return torch.optim.SGD(groups, lr=train.lr, momentum=train.momentum)
        case "muon":
            return torch.optim.Muon(
                groups, lr=train.lr, momentum=train.momentum, adjust_lr_fn="match_rms_adamw"
            )
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=train.lr)
        case "lion":
            return Lion(groups, lr=train.lr, betas=train.betas)
    return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)


def state_numbers(kind: str, train: Train, parameter: Tensor) -> int:
    """Return how many numbers an optimizer keeps of a parameter that had a gradient; bytes of those
    in 8 bits."""
    count = parameter.numel()
    match kind:
        case "adamw8bit":
            return 2 * counted_in_8_bits(count, 4 * count)
        case "adamw":
            return 2 * count
        case "sgd":
            return count if train.momentum else 0
        case "adafactor" if parameter.dim() > 1:
            rows, columns = parameter.shape[-2:]
            return count // max(1, columns) + count // max(1, rows)
    return count
