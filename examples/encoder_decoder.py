"""An encoder-decoder transformer that learns to write a text backwards.

The encoder reads a window of bytes; the decoder writes it in reverse, and looks the bytes up
through cross-attention: every decoder layer reads the encoder's output, so that value crosses many
stages.

    shoal train examples/encoder_decoder.toml
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["EncoderDecoder", "encoder_decoder"]

# Shapes: B batch, T positions, S positions of the encoder, D width, H heads, K width of a head.
START = 256
"""The decoder's first input; the bytes are 0 to 255."""


class Attention(nn.Module):
    """Attention of one sequence to another (or to itself)."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x_btd: Tensor, source_bsd: Tensor) -> Tensor:
        def heads(h: Tensor) -> Tensor:
            b, t, d = h.shape
            return h.view(b, t, self.heads, d // self.heads).transpose(1, 2)  # (B, H, ., K)

        mixed_bhtk = F.scaled_dot_product_attention(
            heads(self.query(x_btd)),
            heads(self.key(source_bsd)),
            heads(self.value(source_bsd)),
            is_causal=self.causal,
        )
        out: Tensor = self.out(mixed_bhtk.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Self-attention, in the decoder cross-attention, and a feed-forward network; pre-norm."""

    def __init__(self, width: int, heads: int, decoder: bool) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(width)
        self.attend_self = Attention(width, heads, causal=decoder)
        self.norm_cross = nn.LayerNorm(width) if decoder else None
        self.attend_cross = Attention(width, heads) if decoder else None
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_btd: Tensor, source_bsd: Tensor | None = None) -> Tensor:
        h_btd = self.norm_self(x_btd)
        x_btd = x_btd + self.attend_self(h_btd, h_btd)
        if self.norm_cross is not None and self.attend_cross is not None:
            x_btd = x_btd + self.attend_cross(self.norm_cross(x_btd), source_bsd)
        out: Tensor = x_btd + self.feed(self.norm_feed(x_btd))
        return out


class EncoderDecoder(nn.Module):
    """A transformer from one sequence of bytes to another of the same length."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.symbols = nn.Embedding(257, width)
        self.positions = nn.Embedding(length, width)
        self.encoder = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.norm_encoder = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(Layer(width, heads, True) for _ in range(layers))
        self.norm_decoder = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """x (B, T) bytes. Returns the loss of writing them backwards, and the accuracy."""
        positions = self.positions(torch.arange(x.shape[1], device=x.device))
        source_bsd = self.symbols(x) + positions
        for layer in self.encoder:
            source_bsd = layer(source_bsd)
        source_bsd = self.norm_encoder(source_bsd)

        wanted = x.flip(1)
        written = F.pad(wanted[:, :-1], (1, 0), value=START)
        h_btd = self.symbols(written) + positions
        for layer in self.decoder:
            h_btd = layer(h_btd, source_bsd)
        logits = self.head(self.norm_decoder(h_btd)).flatten(0, 1)  # (B·T, 256)
        right = (logits.argmax(1) == wanted.flatten()).float()
        return {"loss": F.cross_entropy(logits, wanted.flatten()), "accuracy": right.mean()}


def encoder_decoder(
    layers: int = 2, width: int = 96, heads: int = 4, length: int = 24
) -> EncoderDecoder:
    """`layers` encoder and as many decoder layers, for windows of at most `length` bytes."""
    return EncoderDecoder(layers, width, heads, length)
