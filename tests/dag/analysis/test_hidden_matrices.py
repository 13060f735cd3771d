"""Which matrices are hidden, told of models of which it is plain."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.dag.analysis.hidden_matrices import hidden_matrices
from shoal.dag.capture.capture import capture


class Words(nn.Module):
    """An embedding, a table of positions that is added, two layers and a head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(11, 8), nn.Parameter(torch.ones(4, 8))
        self.up, self.down = nn.Linear(8, 16), nn.Parameter(torch.ones(16, 8))
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)
        self.still = nn.Linear(8, 8).requires_grad_(False)
        if tied:
            self.out.weight = self.words.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.still(self.words(x) + self.places)
        h = self.norm(torch.tanh(self.up(h)) @ self.down)
        return F.cross_entropy(self.out(h).flatten(0, 1), y.flatten())


class Adapted(nn.Module):
    """A matrix that a frozen head stands behind, and two branches of which one ends early."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side = nn.Linear(6, 5), nn.Linear(5, 3)
        self.last, self.head = nn.Linear(5, 5), nn.Linear(5, 3).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return F.cross_entropy(self.head(self.last(h)) + self.side(h), y)


@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_positions_norms_and_heads_are_not(tied: bool) -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    graph = capture(Words(tied), {"x": ids, "y": ids}).graph
    assert hidden_matrices(graph.bind(2)) == {"up.weight", "down"}


def test_what_is_frozen_counts_as_a_layer_behind() -> None:
    example = {"x": torch.zeros(2, 6), "y": torch.zeros(2, dtype=torch.int64)}
    graph = capture(Adapted(), example).graph
    assert hidden_matrices(graph.bind(2)) == {"first.weight", "last.weight"}
