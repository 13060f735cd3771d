"""A byte-level GPT: tied embeddings, dropout, causal attention.

shoal train examples/gpt_bytes.toml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "gpt"]

# Shapes: B batch, T positions, D width, H heads, K width of a head, V vocabulary (256 bytes).
VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention over H heads."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x_btd: Tensor) -> Tensor:
        b, t, d = x_btd.shape
        qkv = self.qkv(x_btd).view(b, t, 3, self.heads, d // self.heads)
        q_bhtk, k_bhtk, v_bhtk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_bhtk = F.scaled_dot_product_attention(
            q_bhtk,
            k_bhtk,
            v_bhtk,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
        )
        out: Tensor = self.out(mixed_bhtk.transpose(1, 2).reshape(b, t, d))
        return out


class Block(nn.Module):
    """Pre-norm transformer block: attention, then a feed-forward of four times the width."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.drop(self.attention(self.norm_attention(x_btd)))
        out: Tensor = x_btd + self.drop(self.feed(self.norm_feed(x_btd)))
        return out


class GPT(nn.Module):
    """Predicts the next byte; the output layer is the transposed embedding (one tied weight)."""

    def __init__(self, layers: int, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.bytes.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Layers that write into the residual stream start smaller (as GPT-2 does).
                writes = name.endswith(("out.weight", "feed.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes else 0.02)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y (B, T): bytes and the bytes that follow them. Returns the mean loss per byte."""
        positions = torch.arange(x.shape[1], device=x.device)
        h_btd = self.drop(self.bytes(x) + self.positions(positions))
        for block in self.blocks:
            h_btd = block(h_btd)
        logits_btv = self.head(self.norm(h_btd))
        return F.cross_entropy(logits_btv.flatten(0, 1), y.flatten())


def gpt(
    layers: int = 4, width: int = 128, heads: int = 4, length: int = 64, dropout: float = 0.1
) -> GPT:
    """A GPT of about 12·layers·width² parameters for windows of at most `length` bytes."""
    return GPT(layers, width, heads, length, dropout)
