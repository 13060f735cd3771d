"""How sparse each stage sends its gradients, where the strategy has a ratio of its own for each
(LAGS, `peer/sync/lags.py`): as little as costs no time.

The last stage's gradients are there first, and travel while earlier stages still have backward
passes to do. So from the last stage to the first: the smallest ratio with which the step is as
short as with the largest, which the job says, found by bisection of its logarithm with the event
calculation. A stage whose link has nothing else to do sends all.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...dag.plan.strategies import parse_strategy
from ..cost.candidate import Candidate
from ..cost.cost_model import CostModel

__all__ = ["with_ratios"]

HALVINGS = 7
FREE = 1.001
"""A step that is at most so many times longer costs no time."""


def with_ratios(judge: CostModel, candidate: Candidate) -> Candidate:
    """The candidate with a ratio for each stage; itself where the strategy asks for none."""
    choice = parse_strategy(judge.strategy)
    if not choice.traits.by_stage:
        return candidate
    most = max(1.0, choice.options["ratio"])
    slots = candidate.slots()
    ratios = [most] * len(slots)
    least = judge.seconds(replace(candidate, ratios=tuple(ratios)))

    def is_free(stage: int, ratio: float) -> bool:
        tried = (*ratios[:stage], ratio, *ratios[stage + 1 :])
        return judge.seconds(replace(candidate, ratios=tried)) <= FREE * least

    for stage in reversed([k for k, slot in enumerate(slots) if len(slot[2]) > 1]):
        low, high = 0.0, math.log(most)
        if is_free(stage, 1.0):
            high = 0.0
        for _ in range(HALVINGS if high else 0):
            middle = (low + high) / 2
            low, high = (low, middle) if is_free(stage, math.exp(middle)) else (middle, high)
        ratios[stage] = math.ceil(1000 * math.exp(high)) / 1000 if high < math.log(most) else most
    return replace(candidate, ratios=tuple(ratios))
