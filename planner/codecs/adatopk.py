"""What AdaTopK sends on a link: how many times fewer bytes, and the best top-k within them.

**Rule A** of FusionLLM: the slowest link sends 1/ratio of its bytes, another as much more as it is
faster (`rule_a`). Ratios are of bytes, positions and scales included.

**Width.** Within its bytes a link keeps few numbers exactly or more of them roughly. Of the widths
that kept numbers may have, that one is taken with which a tensor of Gaussian numbers suffers least:

    dropped + NOISE · f · ε²        f = 1 / ratio, the share of the numbers that is kept
    dropped = 1 - f - 2·t·φ(t)      their energy outside of ±t, t = Φ⁻¹(1 - f/2); all energy is 1
    f · ε²                          what rounding adds, ε the width's error on Gaussian numbers

Rounding counts NOISE times what is dropped: a network learns with zeros that are always there and
gets the exact gradient, but not with noise. int8 is best up to about five times fewer bytes, int6
from there on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

from .carried import CodecLane
from .codec_table import typical_error

__all__ = ["WIDTHS", "best_within", "harm", "least_ratio", "rule_a", "support_text", "topk_text"]

WIDTHS = ("int8", "int6")
"""int4 would be best by the formula beyond about 30 times fewer bytes, by 1 to 3 % of the harm."""
NOISE = 40.0
"""From benchmarks/learning/learning.py: int4 on slow links (ε² = 0.012) cost 5.5 % of the loss,
top-k at ratio 3.67 (0.25 of a Gaussian's energy dropped) 2.8 %."""
_BELL = NormalDist()


def rule_a(lanes: Sequence[CodecLane], ratio: float) -> dict[int, float]:
    """By lane of one role, r_e = max(1, ratio · t_e / t_max). Of two digits, so that links that
    differ little share a text."""
    most = max((lane.dense_s for lane in lanes), default=0.0)
    return {
        lane.number: max(1.0, float(f"{ratio * lane.dense_s / most:.2g}")) if most else 1.0
        for lane in lanes
    }


def topk_text(ratio: float, values: str = "int8") -> str:
    """The codec of AdaTopK that keeps one of `ratio` elements."""
    return f"topk:ratio={ratio:g},values={values}"


def support_text(ratio: float) -> str:
    """The codec of the gradients of such values. They need no positions, so int8 has room."""
    return f"support:ratio={ratio:g},values=int8"


def harm(ratio: float, values: str) -> float:
    """The mean square that a top-k loses of a value, which keeps one of `ratio` elements: what it
    drops, and the noise of what it rounds."""
    share = 1 / ratio
    cut = _BELL.inv_cdf(1 - share / 2)
    dropped = 1 - share - 2 * cut * _BELL.pdf(cut)
    return dropped + NOISE * share * typical_error(values) ** 2


def best_within(size_bytes: Mapping[str, Callable[[float], int]], aim: float, fewer: float) -> str:
    """The top-k that harms least within `aim` bytes, which are 1/`fewer` of all. `size_bytes`: by
    width, the bytes at a ratio."""
    ratios = {width: least_ratio(size_bytes[width], aim, fewer) for width in size_bytes}
    width = min(ratios, key=lambda width: harm(ratios[width], width))
    return topk_text(ratios[width], width)


def least_ratio(size_bytes: Callable[[float], int], aim: float, fewer: float) -> float:
    """The least ratio, to three digits, with which `size_bytes(ratio)` is at most `aim`; where none
    is, because every tensor is tiny, one of about 2 · `fewer`, at most ten times that."""
    ratios = range(900 * math.ceil(math.log10(2 * fewer)))
    enough = bisect_left(ratios, True, key=lambda n: size_bytes(_three_digits(n)) <= aim)
    return _three_digits(enough)


def _three_digits(number: int) -> float:
    """1.00, 1.01, …, 9.99, 10.0, 10.1, …"""
    decade, place = divmod(number, 900)
    return float(f"{(100 + place) / 100 * 10**decade:.3g}")
