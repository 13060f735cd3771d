"""A byte-level GPT whose feed-forward layers are mixtures of experts.

Routing depends on data, which a captured graph can hold as long as the shapes do not: every expert
runs on every token, and a gate that is zero for all but the best two experts says what counts. (A
Python `if` on data, or an index list whose length depends on data, cannot be captured.)

    shoal train examples/moe.toml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MoE", "moe"]

# Shapes: B batch, T positions, D width, E experts, H heads, K width of a head.


class Experts(nn.Module):
    """The best two of E feed-forward networks for each token, weighted by a learned router."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x_btd: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mixture and the balance loss, which is 1 when all experts get as much."""
        share_bte = self.router(x_btd).softmax(2)
        best_bt2 = share_bte.topk(2, dim=2).indices
        chosen_bte = F.one_hot(best_bt2, self.experts).sum(2) > 0
        gate_bte = torch.where(chosen_bte, share_bte, 0.0)
        gate_bte = gate_bte / gate_bte.sum(2, keepdim=True)

        h_bted = F.gelu(torch.einsum("btd,edf->btef", x_btd, self.up))
        out_bted = torch.einsum("btef,efd->bted", h_bted, self.down)
        mixed_btd = (out_bted * gate_bte.unsqueeze(3)).sum(2)

        used_e = chosen_bte.float().mean((0, 1)) / 2
        balance = self.experts * (used_e * share_bte.mean((0, 1))).sum()
        return mixed_btd, balance


class Block(nn.Module):
    """Causal self-attention, then a mixture of experts; pre-norm."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_experts = nn.LayerNorm(width)
        self.experts = Experts(width, experts)

    def forward(self, x_btd: Tensor) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(self.norm_attention(x_btd)).unflatten(2, (3, self.heads, -1))
        q_bhtk, k_bhtk, v_bhtk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
        x_btd = x_btd + self.out(mixed.transpose(1, 2).flatten(2))
        mixture_btd, balance = self.experts(self.norm_experts(x_btd))
        return x_btd + mixture_btd, balance


class MoE(nn.Module):
    """Predicts the next byte. The balance loss is a mean over the tokens of a microbatch."""

    def __init__(self, layers: int, width: int, heads: int, experts: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x, y (B, T): bytes and the bytes after them. Loss with balance; both parts as metrics."""
        h_btd = self.bytes(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        balances = []
        for block in self.blocks:
            h_btd, balance = block(h_btd)
            balances.append(balance)
        logits = self.head(self.norm(h_btd))  # (B, T, 256)
        entropy = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        uneven = torch.stack(balances).mean()
        return {"loss": entropy + 0.01 * uneven, "entropy": entropy, "balance": uneven}


def moe(
    layers: int = 2, width: int = 64, heads: int = 4, experts: int = 4, length: int = 64
) -> MoE:
    """`layers` blocks with `experts` experts each, for windows of at most `length` bytes."""
    return MoE(layers, width, heads, experts, length)
