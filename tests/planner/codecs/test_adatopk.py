"""How wide AdaTopK's numbers are: the formula against the codec, the choice against all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression.codec import parse
from shoal.compression.sparse.topk import TopK
from shoal.dag.ir.graph import TensorSpec
from shoal.planner.codecs.adatopk import NOISE, WIDTHS, best_within, harm, support_text, topk_text
from shoal.planner.codecs.codec_table import typical_error


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.76, 10.0, 100.0])
@pytest.mark.parametrize("values", WIDTHS)
def test_harm_is_what_the_codec_does_to_gaussian_numbers(values: str, ratio: float) -> None:
    """Energy dropped, as top-k with exact numbers drops it, and what rounding adds, times NOISE. A
    block of kept numbers has a smaller largest one than a formula of all numbers thinks, at most
    by half; so rounding is compared as an upper bound."""
    dropped = typical_error(topk_text(ratio, "fp32")) ** 2
    rounding = typical_error(topk_text(ratio, values)) ** 2 - dropped
    assert harm(ratio, values) >= dropped - 0.003
    added = harm(ratio, values) - dropped
    assert NOISE * rounding / 3 - 0.003 <= added <= NOISE * rounding * 1.5 + 0.003


def sizes(spec: TensorSpec) -> dict[str, Callable[[float], int]]:
    def size(values: str, ratio: float) -> int:
        return parse(topk_text(ratio, values)).size_bytes(spec)

    return {values: partial(size, values) for values in WIDTHS}


def width(text: str) -> str:
    codec = parse(text)
    assert isinstance(codec, TopK)
    return codec.values.text


@settings(max_examples=12, deadline=None)
@given(elements=st.integers(2000, 300_000), fewer=st.floats(2, 300))
def test_the_best_fits_and_none_that_fits_harms_less(elements: int, fewer: float) -> None:
    """Close to ratio 1 the smallest numbers are better dropped than rounded, by up to 0.001."""
    spec = TensorSpec((elements,), "float32")
    aim = spec.size_bytes / fewer
    best = parse(best_within(sizes(spec), aim, fewer))
    assert isinstance(best, TopK)
    assert best.size_bytes(spec) <= aim
    for values, size in sizes(spec).items():
        for more in (0.8, 0.9, 0.95, 1.05, 1.2):
            ratio = max(1.0, best.ratio * more)
            if size(ratio) <= aim:
                assert harm(best.ratio, best.values.text) <= harm(ratio, values) + 0.001


def test_numbers_get_narrower_where_bytes_get_fewer() -> None:
    spec = TensorSpec((16, 32, 32), "float32")
    widths = [
        width(best_within(sizes(spec), spec.size_bytes / fewer, fewer))
        for fewer in (3, 5, 6, 10, 20, 50, 100)
    ]
    assert widths == sorted(widths, key=WIDTHS.index)
    assert widths[0] == "int8"
    assert "int6" in widths


def test_their_gradients_need_no_more_bytes_than_they_do() -> None:
    """Positions cost more than two bits more for each number do, from about 6 times fewer on."""
    spec = TensorSpec((16, 32, 32), "float32")
    for ratio in (2.76, 10.0, 100.0):
        there = parse(topk_text(ratio, "int6")).size_bytes(spec)
        assert parse(support_text(ratio)).size_bytes(spec) <= there
