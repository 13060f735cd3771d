"""Random variates that are the same bits on every machine and with every numpy.

Peers make the partition of a data set each by itself, and a sample must not be with two clients. So
the words are `sampler.key`, which is integers only, and what is made of them uses + - * / and sqrt
alone, which IEEE 754 rounds in one way. `log` and `exp` of numpy are of the processor and of its
release, so there are own ones here, to 4 units in the last place. Sums run from left to right
(`cumsum`): the order in which `sum` adds depends on the processor.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....dag.permutation import key

__all__ = ["Floats", "Ints", "Words", "exp", "log", "log_gamma", "log_sum", "shares", "uniform"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_LN2 = 0.6931471805599453
_LN2_HIGH, _LN2_LOW = 0.6931471803691238, 1.9082149292705877e-10  # k times the high one is exact
_BOOST = -1  # no attempt has this number


def uniform(words: Words) -> Floats:
    """One number in (0, 1) for each word, of its upper 52 bits."""
    return ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def log(x: Floats) -> Floats:
    """The natural logarithm of finite positive numbers: with x = m·2^e and m near 1, it is
    e·ln 2 + 2·artanh((m - 1) / (m + 1)), whose series ends at the 23rd power."""
    m, e = np.frexp(x)
    small = m < 0.7071067811865476
    m, e = np.where(small, 2 * m, m), e - small
    s = (m - 1) / (m + 1)
    z = s * s
    series = np.zeros_like(z)
    for power in range(23, 0, -2):
        series = series * z + 1 / power
    found: Floats = e * _LN2 + 2 * s * series
    return found


def exp(x: Floats) -> Floats:
    """e^x of numbers up to 0: with x = k·ln 2 + r, it is 2^k times the series of e^r, which ends at
    the 13th power; 0 where that is less than the smallest double."""
    x = np.maximum(x, -746.0)
    k = np.rint(x / _LN2)
    r = x - k * _LN2_HIGH - k * _LN2_LOW
    series = np.ones_like(r)
    for power in range(13, 0, -1):
        series = series * r / power + 1
    found: Floats = np.ldexp(series, k.astype(np.int32))
    return found


def shares(logs: Floats) -> Floats:
    """Cumulative shares along the last axis of what has these logarithms, (…, n): the last is 1.
    -inf is no share; not all of a row may be that."""
    top = logs.max(axis=-1, keepdims=True)
    cumulative = np.cumsum(exp(logs - top), axis=-1)
    return cumulative / cumulative[..., -1:]


def log_sum(logs: Floats) -> Floats:
    """Logarithm of the sum of what has these logarithms, (n,), as shape (1,); not all are -inf."""
    top = logs.max()
    found: Floats = top + log(np.cumsum(exp(logs - top))[-1:])
    return found


def log_gamma(alpha: Floats, keys: Words) -> Floats:
    """Return the logarithm of a Gamma(alpha) variate for each key, both of shape (n,).

    A variate of alpha + 1 (Best's rejection, 1978, with a tail that needs no normal numbers) times
    U^(1/alpha) is one of alpha. As logarithms, so that the tiny ones of a small alpha keep their
    order. Beyond the bounds of alpha shares are one, or all alike, to the last bit that counts.
    """
    a = np.clip(alpha, 1e-250, 1e15)
    found = np.empty_like(a)
    todo = np.arange(a.size)
    attempt = 0
    while todo.size:  # about half are accepted in each attempt
        b, k = a[todo], keys[todo]
        u, v = uniform(key(k, attempt, 0)), uniform(key(k, attempt, 1))
        w = u * (1 - u)
        y = np.sqrt((3 * b + 2.25) / w) * (u - 0.5)
        positive = b + y > 0
        x = np.where(positive, b + y, 1.0)
        z = 64 * w * w * w * v * v
        quick = z <= 1 - 2 * y * y / x
        taken = positive & (quick | (log(z) <= 2 * (b * log(x / b) - y)))
        found[todo[taken]] = log(x[taken])
        todo = todo[~taken]
        attempt += 1
    return found + log(uniform(key(keys, _BOOST))) / a
