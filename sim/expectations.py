"""Whether a simulation reached what its scenario expects."""

from __future__ import annotations

from collections.abc import Iterator

from .report import Summary
from .scenario.mishaps import Expectations

__all__ = ["missed"]


def missed(expect: Expectations, summary: Summary) -> Iterator[str]:
    """A sentence for each expectation that was not met, with what came instead."""
    error = None
    if summary.step_s and summary.predicted_step_s:
        error = abs(summary.predicted_step_s / summary.step_s - 1)
    for name, came, most in (
        ("loss_below", summary.loss_last, True),
        ("max_loss_difference", summary.max_loss_difference, True),
        ("step_time_error_at_most", error, True),
        ("goodput_at_least", summary.goodput, False),
    ):
        wanted = getattr(expect, name)
        if wanted is None:
            continue
        if came is None:
            yield f"[expect] {name} = {wanted:g}, and nothing measured it"
        elif not (came <= wanted if most else came >= wanted) or (
            name == "loss_below" and came == wanted
        ):
            yield f"[expect] {name} = {wanted:g}, and it came to {came:.4g}"
