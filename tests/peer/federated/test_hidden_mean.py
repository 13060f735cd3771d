"""The mean of what clients moved, each by no more than a clip, against a loop over clients."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.federated.client_means import hidden_mean
from shoal.peer.federated.cohort import Trained

ODD = math.nan, math.inf, -math.inf
"""Lengths of clients that come to no finite number."""


@given(
    st.lists(st.floats(0.0, 30.0) | st.sampled_from(ODD), min_size=1, max_size=7),
    st.floats(0.01, 10.0),
    st.integers(1, 4),
    st.integers(0, 99),
)
def test_each_client_is_shortened_by_itself_however_many_train_together(
    lengths: list[float], clip: float, together: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    began = {"a": torch.randn(2, 3, generator=generator), "b": torch.randn(4, generator=generator)}
    came = []
    for length in lengths:
        moves = {n: torch.randn(t.shape, generator=generator) for n, t in began.items()}
        norm = math.sqrt(sum(float(m.square().sum()) for m in moves.values()))
        if length in ODD:  # of one element, and others as they may be
            moves["a"][1, 2], length = length, norm
        came.append({n: began[n] + m * length / norm for n, m in moves.items()})
    squares: dict[int, float] = {}
    for number, one in enumerate(came):
        squares[number] = sum(
            float((one[n].double() - t.double()).square().sum()) for n, t in began.items()
        )
    groups = [range(at, min(at + together, len(came))) for at in range(0, len(came), together)]
    trained = [
        Trained(
            tuple(g),
            {n: torch.stack([came[i][n] for i in g]) for n in began}
            | {"n": torch.ones(len(g)).long()},
            (1,) * len(g),
            torch.zeros(len(g)),
        )
        for g in groups
    ]
    found = hidden_mean(trained, began, squares, clip=clip, count=len(came))
    assert found.keys() == began.keys()
    for name, start in began.items():
        wanted = torch.zeros_like(start, dtype=torch.float64)
        for number, one in enumerate(came):
            norm = math.sqrt(squares[number])
            if not math.isfinite(norm):
                continue
            wanted += (one[name].double() - start.double()) * min(1.0, clip / max(norm, 1e-30))
        wanted /= len(came)
        torch.testing.assert_close(
            found[name], wanted.flatten().float(), rtol=1e-4, atol=1e-6 * clip
        )
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in found.values()))
    assert norm <= clip, "one more or less changes no more than that"


def test_where_no_client_comes_to_a_number_nobody_moves() -> None:
    values = {"a": torch.tensor([[1.0, torch.inf], [torch.nan, 1.0]])}
    trained = [Trained((0, 1), values, (1, 1), torch.zeros(2))]
    began, squares = {"a": torch.zeros(2)}, {0: math.inf, 1: math.nan}
    assert hidden_mean(trained, began, squares, clip=1.0, count=2)["a"].tolist() == [0.0, 0.0]
