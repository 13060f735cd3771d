"""Models of published sizes as graphs, captured without memory for their weights: GPT-2 (124M and
1.5B parameters; Radford et al. 2019) and ResNet-101 (He et al. 2015, section 4.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Graph
from shoal.examples.gpt import Block

__all__ = ["MODELS", "graph_of"]


class GPT2(nn.Module):
    """Tied embedding and head, learned positions, 1,024 tokens."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(50257, width)
        self.positions = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads, 0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50257, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        h = self.words(x) + self.positions(at)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return F.cross_entropy(logits.view(-1, 50257), y.view(-1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut; four times as many channels come out as are inside."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inside != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.path(x) + self.shortcut(x))


class ResNet101(nn.Module):
    """3, 4, 23, 3 bottlenecks, 224 x 224 pixels, 1,000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        inside, blocks = 64, []
        for width, count in ((64, 3), (128, 4), (256, 23), (512, 3)):
            for i in range(count):
                blocks.append(Bottleneck(inside, width, 2 if i == 0 and width > 64 else 1))
                inside = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inside, 1000)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.blocks(self.stem(x)).mean((2, 3))
        return F.cross_entropy(self.head(h), y)


MODELS = ("gpt2-124m", "gpt2-1.5b", "resnet-101")


def graph_of(model: str) -> Graph:
    """The graph of one of MODELS, for any microbatch size."""
    with torch.device("meta"):
        if model == "resnet-101":
            module: nn.Module = ResNet101()
            inputs = {"x": torch.zeros(2, 3, 224, 224), "y": torch.zeros(2, dtype=torch.long)}
        else:
            module = GPT2(12, 768, 12) if model == "gpt2-124m" else GPT2(48, 1600, 25)
            tokens = torch.zeros(2, 1024, dtype=torch.long)
            inputs = {"x": tokens, "y": tokens}
    return capture(module, inputs).graph
