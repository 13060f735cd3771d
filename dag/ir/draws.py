"""Numbers for starting weights: a draw is a function of (seed, stream, element) and nothing else.

    64 bits --hash--> a multiple of 2^-53 in (0, 1) --inverse--> a standard normal number

Whoever draws an element gets the same bits: on every machine, in any order, in chunks of any size
and on any number of threads. So here are only integer arithmetic modulo 2^64 and + − × ÷ √ of
float64, which IEEE 754 rounds in one way, one numpy operation at a time and in a fixed order; no
function of a mathematics library, no BLAS and no sum whose order numpy chooses.

    hash      SplitMix64 (Steele, Lea, Flood 2014) of the element, with a second key in its middle
    inverse   AS 241, PPND16 (Wichura 1988), exact to 1e-16; its logarithm is made below
    matrix    Q of Householder's QR of normal numbers, with the signs of R's diagonal: Haar measure
              over orthogonal matrices (Mezzadri 2007)
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHUNK",
    "Key",
    "key_of",
    "logarithm",
    "normal",
    "normal_quantile",
    "orthogonal",
    "uniform",
]

Floats = npt.NDArray[np.float64]
Key = tuple[int, int]
"""Two independent 64-bit numbers."""

CHUNK = 1 << 14
"""Elements that are best made at once: what is at work on them stays in a core's cache."""

_GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_WORD = (1 << 64) - 1

# AS 241, highest power first: ratios of two polynomials of degree 7.
_CENTRE = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)
_FAR = (
    (
        2.01033439929228813265e-7,
        2.71155556874348757815e-5,
        1.24266094738807843860e-3,
        2.65321895265761230930e-2,
        2.96560571828504891230e-1,
        1.78482653991729133580e0,
        5.46378491116411436990e0,
        6.65790464350110377720e0,
    ),
    (
        2.04426310338993978564e-15,
        1.42151175831644588870e-7,
        1.84631831751005468180e-5,
        7.86869131145613259100e-4,
        1.48753612908506148525e-2,
        1.36929880922735805310e-1,
        5.99832206555887937690e-1,
        1.0,
    ),
)
_HALF_ROOT_2 = 1.4142135623730951
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is ln 2
_ATANH = tuple(1.0 / k for k in range(23, 1, -2))  # s²-series of atanh, highest power first


def key_of(seed: int, stream: str) -> Key:
    """The key of a stream of draws."""
    seeded = struct.pack("<Q", seed & _WORD)
    a, b = struct.unpack("<QQ", hashlib.blake2b(seeded + stream.encode(), digest_size=16).digest())
    return a, b


_STEPS = np.arange(CHUNK, dtype=np.uint64) * np.uint64(_GOLDEN)


def _centred(key: Key, start: int, count: int) -> Floats:
    """`count` (at most CHUNK) numbers in (-1/2, 1/2) for elements start, start + 1, …: odd
    multiples of 2^-53, so 1/2 plus one of them is exact, and neither 0 nor 1."""
    first = (start * _GOLDEN + key[0]) & _WORD
    x = _STEPS[:count] + np.uint64(first)  # wraps
    t = x >> np.uint64(30)
    x ^= t
    x *= _M1
    x ^= np.uint64(key[1])
    np.right_shift(x, np.uint64(27), out=t)
    x ^= t
    x *= _M2
    np.right_shift(x, np.uint64(31), out=t)
    x ^= t
    # The upper 52 bits as the fraction of a number in [1, 2): no conversion, and exact.
    x >>= np.uint64(12)
    x |= np.uint64(0x3FF << 52)
    u = x.view(np.float64)
    u -= 1.5
    u += 2.0**-53
    return u


def uniform(key: Key, start: int, count: int) -> Floats:
    """Uniform in (0, 1), for elements start to start + count; count is at most CHUNK."""
    u = _centred(key, start, count)
    u += 0.5
    return u


def normal(key: Key, start: int, count: int) -> Floats:
    """Standard normal, for elements start to start + count; count is at most CHUNK. None is beyond
    8.3."""
    return _quantile(_centred(key, start, count))


def normal_quantile(p: Floats) -> Floats:
    """The standard normal number below which a share p in (0, 1) lies; p counts to 2^-53."""
    return _quantile(p - 0.5)


def _quantile(q: Floats) -> Floats:
    """By AS 241, of q = p - 1/2."""
    r = q * q
    np.subtract(0.180625, r, out=r)
    out = _ratio(_CENTRE, r)
    out *= q
    (outer,) = np.nonzero(np.abs(q) > 0.425)
    if len(outer):
        side = q[outer]
        r = np.sqrt(-logarithm(0.5 - np.abs(side)))
        tail = _ratio(_TAIL, r - 1.6)
        if (r > 5.0).any():
            far = r > 5.0
            tail[far] = _ratio(_FAR, r[far] - 5.0)
        out[outer] = np.where(side < 0.0, -tail, tail)
    return out


def _ratio(of: tuple[tuple[float, ...], tuple[float, ...]], x: Floats) -> Floats:
    above = _polynomial(of[0], x)
    above /= _polynomial(of[1], x)
    return above


def _polynomial(coefficients: tuple[float, ...], x: Floats) -> Floats:
    """By Horner's rule."""
    y = coefficients[0] * x
    for c in coefficients[1:-1]:
        y += c
        y *= x
    y += coefficients[-1]
    return y


def logarithm(x: Floats) -> Floats:
    """ln x of normal positive float64, to about 1e-16 of it: x = m·2^e with m in [√½, √2), and
    ln m = 2 atanh((m - 1) / (m + 1)) by its series."""
    bits = np.ascontiguousarray(x).view(np.int64)
    e = (bits >> 52) - 1023
    m = ((bits & ((1 << 52) - 1)) | (0x3FF << 52)).view(np.float64)
    large = m >= _HALF_ROOT_2
    m = np.where(large, m * 0.5, m)
    exponent = (e + large).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = _polynomial((*_ATANH, 0.0), z)
    series *= s
    series += s
    series *= 2.0
    series += exponent * _LN2_LOW
    series += exponent * _LN2_HIGH
    return series


def orthogonal(key: Key, rows: int, columns: int) -> Floats:
    """(rows, columns): orthonormal columns, or rows if there are fewer of them, drawn uniformly
    from all such matrices. Takes 8·rows·columns·4 bytes, and min(rows, columns) passes over it."""
    tall, few = max(rows, columns), min(rows, columns)
    flat = np.empty(tall * few)
    for start in range(0, len(flat), CHUNK):
        flat[start : start + CHUNK] = normal(key, start, min(CHUNK, len(flat) - start))
    a = flat.reshape(tall, few)
    reflections: list[tuple[Floats, float]] = []
    signs = np.ones(few)
    for k in range(few):
        v = a[k:, k].copy()
        length = float(np.sqrt(_sum((v * v)[:, None])[0]))
        first = float(v[0])
        away = length if first >= 0.0 else -length  # no cancellation
        v[0] = first + away
        square = 2.0 * length * (length + abs(first))  # of v: |v|²
        scale = 2.0 / square if square > 0.0 else 0.0
        signs[k] = -1.0 if away > 0.0 else 1.0  # R's diagonal is -away
        _reflect(a[k:, k:], v, scale)
        reflections.append((v, scale))
    q = np.zeros((tall, few))
    q[np.arange(few), np.arange(few)] = 1.0
    for k in range(few - 1, -1, -1):
        _reflect(q[k:, k:], *reflections[k])
    q *= signs
    return q if rows >= columns else q.T


def _reflect(a: npt.NDArray[Any], v: Floats, scale: float) -> None:
    """a -= scale · v (vᵀ a), in place."""
    w = _sum(v[:, None] * a)
    w *= scale
    a -= v[:, None] * w


def _sum(a: Floats) -> Floats:
    """The sum of the rows, found by halving them again and again: a fixed order. `a` is
    overwritten."""
    n = len(a)
    while n > 1:
        half = n // 2
        a[:half] += a[n - half : n]
        n -= half
    total: Floats = a[0]
    return total
