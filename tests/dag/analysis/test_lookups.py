"""Rows that are not there are found without the model's weights. The oracle is the model itself."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.dag.analysis.lookups import beyond
from shoal.dag.capture.capture import capture


class Words(nn.Module):
    def __init__(self, words: int, positions: int, classes: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, 4), nn.Embedding(positions, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.words(x[:, 1:]) + self.places(torch.arange(x.shape[1] - 1) + 1)
        return F.cross_entropy(self.head(h).flatten(0, 1), y[:, :-1].flatten())


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(5, 7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = self.table[x]
        return (rows.gather(-1, y.unsqueeze(-1)) * F.one_hot(y, 7)).mean()


class Routed(nn.Module):
    """Which row is taken depends on a weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.router = nn.Embedding(2, 4), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.table((x * self.router).sum(-1).long()).mean()


CASES: dict[str, tuple[Callable[[], nn.Module], int, int, str]] = {
    "all there": (lambda: Words(9, 8, 9), 8, 8, ""),
    "a word": (lambda: Words(8, 8, 9), 8, 8, "module 'words' (embedding) is asked for row 8"),
    "a position": (lambda: Words(9, 7, 9), 8, 8, "module 'places' (embedding) is asked for row 7"),
    "a class": (lambda: Words(9, 8, 6), 8, 8, "the model itself (cross_entropy_loss) is asked"),
    "ignored": (lambda: Words(9, 8, 9), 8, -100, ""),
    "rows and columns": (Picks, 4, 6, ""),
    "a row": (Picks, 5, 6, "(index) is asked for row 5, and has -5 to 4"),
    "from behind": (Picks, -5, 6, ""),
    "a column": (Picks, 4, 7, "(gather) is asked for row 7"),
    "what nobody knows": (Routed, 1, 0, ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_is_not_there_is_found(name: str) -> None:
    make, x, y, says = CASES[name]
    module = make()
    batch = {"x": torch.full((2, 8), x), "y": torch.full((2, 8), y)}
    graph = capture(module, {k: torch.zeros_like(t) for k, t in batch.items()}).graph
    found = beyond(graph.bind(2), {f"in:{k}": t for k, t in batch.items()})
    assert found.startswith(says) if says.startswith(("module", "the")) else says in found
    assert bool(found) == bool(says)
    if says:
        with pytest.raises((IndexError, RuntimeError)):
            module(**batch)
    elif name != "what nobody knows":
        module(**batch)
