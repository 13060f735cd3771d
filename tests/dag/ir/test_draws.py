"""Draws: the bits, the distributions, and that neither order nor chunks nor threads matter."""

from __future__ import annotations

import ast
import hashlib
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from shoal.dag.ir import draws

GOLDEN = {
    "uniform": "26d39f04d9d9050d",
    "normal": "ed662fb147fc72c1",
    "orthogonal": "4437c6b6b9c1bc21",
}
KEY = draws.key_of(7, "layers.0.weight")


def many(draw, count, key=KEY):
    starts = range(0, count, draws.CHUNK)
    return np.concatenate([draw(key, s, min(draws.CHUNK, count - s)) for s in starts])


def test_the_bits_of_a_draw_are_for_ever():
    """What a run began with must be made again by another version, on another machine."""
    made = {
        "uniform": many(draws.uniform, 40_000),
        "normal": many(draws.normal, 40_000),
        "orthogonal": np.ascontiguousarray(draws.orthogonal(KEY, 9, 5)),
    }
    found = {n: hashlib.sha256(a.astype("<f8").tobytes()).hexdigest()[:16] for n, a in made.items()}
    assert found == GOLDEN


def test_the_bits_do_not_depend_on_the_processors_instructions():
    """Without AVX and fused multiply-adds, as far as numpy can do without them."""
    code = (
        "import hashlib\n"
        "from shoal.dag.ir import draws\n"
        f"made = draws.normal({KEY!r}, 0, draws.CHUNK)\n"
        "print(hashlib.sha256(made.astype('<f8').tobytes()).hexdigest())"
    )
    off = {"NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX X86_V3 X86_V4"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | off,
        capture_output=True,
        check=True,
        text=True,
    )
    here = draws.normal(KEY, 0, draws.CHUNK).astype("<f8").tobytes()
    assert ran.stdout.strip() == hashlib.sha256(here).hexdigest()


def test_only_arithmetic_that_ieee_754_fixes_is_used():
    """No call of a function whose result depends on the library: an allow-list of numpy's names."""
    tree = ast.parse(Path(draws.__file__).read_text(encoding="utf-8"))
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert imported == {"hashlib", "struct", "numpy", "numpy.typing"}
    used = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "np"
    }
    assert used <= {
        *("abs", "arange", "ascontiguousarray", "empty", "float64", "int64", "nonzero", "ones"),
        *("right_shift", "sqrt", "subtract", "uint64", "where", "zeros"),
    }
    assert not any(isinstance(n, ast.MatMult) for n in ast.walk(tree))


def test_an_element_is_the_same_wherever_a_chunk_begins():
    whole = many(draws.normal, 50_000)
    for start, count in ((0, 1), (1, 7), (16_383, 2), (33_333, 16_384)):
        assert np.array_equal(draws.normal(KEY, start, count), whole[start : start + count])


def test_the_inverse_is_that_of_the_normal_distribution():
    p = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 10_001), 2.0 ** -np.arange(1.0, 54)])
    p = np.round(p * 2**53) * 2.0**-53  # as draws have them
    ours = draws.normal_quantile(p)
    known = np.array([statistics.NormalDist().inv_cdf(x) for x in p])
    assert np.allclose(ours, known, rtol=1e-14, atol=1e-15)
    assert np.allclose(ours, special.ndtri(p), rtol=1e-13, atol=1e-15)


def test_the_logarithm_is_right_to_the_last_digits():
    x = np.concatenate([np.linspace(1e-9, 3, 20_000), 2.0 ** -np.arange(1.0, 1000, 7)])
    assert np.allclose(draws.logarithm(x), np.log(x), rtol=4e-16, atol=2e-16)


@pytest.mark.parametrize("stream", ["a", "b", "model.layers.3.mlp.gate_proj.weight"])
def test_draws_have_their_distribution(stream):
    key = draws.key_of(11, stream)
    uniform, normal = many(draws.uniform, 200_000, key), many(draws.normal, 200_000, key)
    assert uniform.min() > 0
    assert uniform.max() < 1
    assert stats.kstest(uniform, "uniform").pvalue > 1e-3
    assert stats.kstest(normal, "norm").pvalue > 1e-3
    for limit in (2.0, 3.0, 4.0):  # the tails, of which Kolmogorov and Smirnov see little
        expected = 200_000 * 2 * statistics.NormalDist().cdf(-limit)
        beyond = int((np.abs(normal) > limit).sum())
        assert stats.poisson.cdf(beyond, expected) > 1e-4
        assert stats.poisson.sf(beyond - 1, expected) > 1e-4


def test_neighbours_streams_and_seeds_are_independent():
    a = many(draws.uniform, 200_000) - 0.5
    others = [
        a[1:],
        a[2:],
        a[64:],
        a[768:],  # the row below, in a matrix of that width
        many(draws.uniform, 200_000, draws.key_of(7, "layers.1.weight")) - 0.5,
        many(draws.uniform, 200_000, draws.key_of(8, "layers.0.weight")) - 0.5,
    ]
    for b in others:
        n = min(len(a), len(b))
        assert abs(float(np.corrcoef(a[:n], b[:n])[0, 1])) < 4.5 / n**0.5
    pairs = np.histogram2d(a[::2], a[1::2], bins=32)[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 5), (40, 17), (17, 40), (1, 6)])
def test_orthogonal_matrices_are_orthogonal(rows, columns):
    q = draws.orthogonal(KEY, rows, columns)
    assert q.shape == (rows, columns)
    gram = q.T @ q if rows >= columns else q @ q.T
    assert np.allclose(gram, np.eye(min(rows, columns)), atol=1e-14)


def test_orthogonal_matrices_favour_no_direction():
    """Of Haar measure: each column is uniform on the sphere, so with three rows an element is
    uniform in (-1, 1), and the determinant has either sign."""
    made = [draws.orthogonal(draws.key_of(0, f"{i}"), 3, 3) for i in range(600)]
    for element in ((0, 0), (2, 0), (1, 2)):
        assert stats.kstest([q[element] for q in made], "uniform", (-1, 2)).pvalue > 1e-3
    positive = sum(np.linalg.det(q) > 0 for q in made)
    assert stats.binomtest(positive, 600).pvalue > 1e-3
