"""Recipes: any rows, on any number of threads, are what they are in the whole tensor."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from shoal.dag.ir.draws import CHUNK
from shoal.dag.ir.recipe import Initial, Recipe, RecipeError, RecipeStep, make

SHAPE = (24, 1537)  # of more than two chunks, and no multiple of one
COUNT = math.prod(SHAPE)


def whole(*kinds: tuple[str, tuple[float | None, ...]], text: str = "w") -> tuple[RecipeStep, ...]:
    return tuple(RecipeStep(kind, 0, COUNT, numbers, text) for kind, numbers in kinds)


RECIPES = {
    "uniform": whole(("uniform", (-0.5, 0.25))),
    "normal": whole(("normal", (1.0, 0.02))),
    "truncated": whole(
        ("uniform", (-0.9, 0.9)), ("erfinv", ()), ("scale", (0.03,)), ("clamp", (-0.03, None))
    ),
    "padded": (*whole(("normal", (0.0, 1.0))), RecipeStep("constant", 1537, 2 * 1537, (0.0,))),
    "in parts": (
        RecipeStep("normal", 0, 5000, (0.0, 1.0), "a", 17),
        RecipeStep("uniform", 5000, COUNT, (0.0, 1.0), "b"),
        RecipeStep("shift", 4000, 20_000, (3.0,)),
    ),
    "matrix": (
        RecipeStep("orthogonal", 100, 100 + 60, (6.0, 10.0), "m"),
        RecipeStep("scale", 0, 130, (2.0,)),
    ),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", RECIPES)
def test_any_number_of_threads_makes_the_same_bits(name, dtype):
    initial = Initial(SHAPE, dtype, RECIPES[name])
    one = make(initial, 3)
    assert one.dtype == getattr(torch, dtype)
    for threads in (2, 5):
        assert torch.equal(make(initial, 3, threads=threads), one)
    assert not torch.equal(make(initial, 4), one)


@given(st.sampled_from(sorted(RECIPES)), st.integers(0, 24), st.integers(0, 24))
def test_rows_are_what_they_are_in_the_whole_tensor(name, a, b):
    start, stop = sorted((a, b))
    initial = Initial(SHAPE, "float32", RECIPES[name])
    assert torch.equal(make(initial, 3, (start, stop)), make(initial, 3)[start:stop])


def test_steps_do_what_they_say():
    made = {n: make(Initial(SHAPE, "float64", steps), 3).numpy() for n, steps in RECIPES.items()}
    assert stats.kstest(made["uniform"].ravel(), "uniform", (-0.5, 0.75)).pvalue > 1e-3
    assert stats.kstest(made["normal"].ravel(), "norm", (1.0, 0.02)).pvalue > 1e-3
    truncated = made["truncated"].ravel()
    assert truncated.min() == -0.03
    assert abs(truncated.max() - 0.03 * 1.1630871536766743) < 1e-4  # erfinv(0.9)
    assert (made["padded"][1] == 0).all()
    assert (np.delete(made["padded"], 1, 0) != 0).all()
    flat = made["in parts"].ravel()
    assert flat[4000:20_000].min() < 3.0
    assert flat[5000:20_000].min() > 3.0
    m = made["matrix"].ravel()
    q = np.concatenate([m[100:130] / 2, m[130:160]]).reshape(6, 10)
    assert np.allclose(q @ q.T, np.eye(6), atol=1e-14)
    assert not m[:100].any()
    assert not m[160:].any()


def test_streams_and_not_tensors_say_what_is_drawn():
    """Copies of a layer have the same draws, and a part of a draw is that part."""
    a = make(
        Initial((3 * CHUNK,), "float64", (RecipeStep("normal", 0, 3 * CHUNK, (0, 1), "w"),)), 0
    )
    b = make(
        Initial((100,), "float64", (RecipeStep("normal", 0, 100, (0, 1), "w", CHUNK - 50),)), 0
    )
    c = make(Initial((100,), "float64", (RecipeStep("normal", 0, 100, (0, 1), "v"),)), 0)
    assert torch.equal(b, a[CHUNK - 50 : CHUNK + 50])
    assert not (c == a[:100]).any()


def nearest_bfloat16(x: float) -> float:
    """By fractions: the multiple of the last place that is next, ties to the even one."""
    _, e = math.frexp(x)
    last = Fraction(2) ** (e - 8)
    return float(round(Fraction(x) / last) * last)


@given(st.floats(-1e30, 1e30).filter(lambda x: x == 0 or abs(x) > 1e-30))
def test_a_number_is_rounded_once(x):
    for dtype, expected in (("bfloat16", nearest_bfloat16(x)), ("float32", float(np.float32(x)))):
        constant = (RecipeStep("constant", 0, 1, (x,)),)
        assert make(Initial((1,), dtype, constant), 0).item() == expected
        then = (*constant, RecipeStep("round", 0, 1, (), dtype))
        assert make(Initial((1,), "float64", then), 0).item() == expected


def test_a_tie_that_float32_would_make_is_not_made():
    """1 + 2^-8 is a tie of bfloat16; a little more than it is not, but float32 cannot tell."""
    x = 1 + 2**-8 + 2**-40
    made = make(Initial((1,), "bfloat16", (RecipeStep("constant", 0, 1, (x,)),)), 0)
    assert made.item() == 1 + 2**-7
    assert torch.tensor(x, dtype=torch.float32).bfloat16().item() == 1


def test_bytes_and_back():
    recipe = Recipe(5, {n: Initial(SHAPE, "float32", s) for n, s in RECIPES.items()})
    assert Recipe.from_bytes(recipe.to_bytes()) == recipe
    reversed_ = Recipe(5, dict(reversed(recipe.tensors.items())))
    assert reversed_.to_bytes() == recipe.to_bytes()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ([[2], "int64", []], "is 'int64': expected one of"),
        ([[-1], "float32", []], "has shape"),
        ([[1 << 60], "float32", []], "has shape"),
        ([[2] * 40, "float32", []], "has shape"),
        ([[2.5], "float32", []], "has shape"),
        ([[2], "float32", [["normal", 0, 2, [0, 1], "w", 0]] * 2000], "2000 steps"),
        ([[2], "float32", [["normal", 0, 3, [0, 1], "w", 0]]], "a step of 'w'"),
        ([[2], "float32", [["normal", 1, 1, [0, 1], "w", 0]]], "a step of 'w'"),
        ([[2], "float32", [["normal", 0, 2, [0], "w", 0]]], "a step of 'w'"),
        ([[2], "float32", [["normal", 0, 2, [0, None], "w", 0]]], "a step of 'w'"),
        ([[2], "float32", [["normal", 0, 2, [0, 1], "w", -1]]], "a step of 'w'"),
        ([[2], "float32", [["exec", 0, 2, [], "w", 0]]], "a step of 'w'"),
        ([[2], "float32", [["round", 0, 2, [], "int8", 0]]], "a step of 'w'"),
        ([[4], "float32", [["orthogonal", 0, 4, [1e5, 1e5], "w", 0]]], "a step of 'w'"),
        ([[4], "float32", [["orthogonal", 0, 4, [1.0, 3.0], "w", 0]]], "a step of 'w'"),
        ([[4], "float32", [["orthogonal", 0, 4, [2.0, 2.5], "w", 0]]], "a step of 'w'"),
        ([[4], "float32"], "cannot be read"),
        ("w", "cannot be read"),
    ],
)
def test_a_recipe_that_breaks_a_rule_is_refused_before_anything_is_made(tensor, says):
    record = {"version": 1, "seed": 0, "tensors": {"w": tensor}}
    with pytest.raises(RecipeError, match=says):
        Recipe.from_bytes(json.dumps(record).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"version": 2, "seed": 0, "tensors": {}}'])
def test_what_is_no_recipe_is_refused(data):
    with pytest.raises(RecipeError, match="recipe of the starting weights"):
        Recipe.from_bytes(data)


def test_numbers_are_finite():
    data = b'{"version":1,"seed":0,"tensors":{"w":[[2],"float32",[["scale",0,2,[NaN],"",0]]]}}'
    with pytest.raises(RecipeError, match="a step of 'w'"):
        Recipe.from_bytes(data)


def test_rows_that_are_not_there():
    with pytest.raises(RecipeError, match=r"rows 20 to 25 of a tensor of shape \(24, 1537\)"):
        make(Initial(SHAPE, "float32", ()), 0, (20, 25))
