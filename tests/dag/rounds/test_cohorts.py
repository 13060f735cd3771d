"""What follows from (seed, round) of the clients of a run."""

from __future__ import annotations

import pytest

from shoal.dag.rounds.cohorts import effective_lengths


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0, 1.5])
def test_steps_with_momentum_count_as_often_as_a_loop_adds_their_gradients(
    momentum: float,
) -> None:
    def loop(steps: int) -> float:
        kept = moved = 0.0
        for _ in range(steps):  # of SGD, by a gradient of 1
            kept = momentum * kept + 1.0
            moved += kept
        return moved

    sizes = [1, 8, 9, 40]
    found = effective_lengths(sizes, 8, passes=3, steps=0, momentum=momentum)
    assert found.tolist() == pytest.approx([loop(3 * -(-n // 8)) for n in sizes])
