"""Who has how much of each class, by Dirichlet: as logarithms of weights, and as numbers of samples
or places that are given out by such weights.

Weight g(client, class) is a Gamma(alpha) variate of (seed, client, class). Divided by their sum
over clients, those of a class are Dirichlet shares over clients; divided by their sum over classes,
those of a client are Dirichlet shares over classes. So both conventions are one table, read along
either axis, and any part of it can be made by itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ....dag.permutation import Domain, key
from .variates import Floats, Ints, Words, log, log_gamma, log_sum, shares, uniform

__all__ = ["even", "fill", "level", "log_weights", "lots", "split_classes"]

_WEIGHTS, _PLACES, _LOTS = 0, 1, 2
_TICKETS = 2**32
_BLOCK = 2**20


def lots(seed: int, purpose: int, count: int) -> Words:
    """One word for each of `count` things, of their own for each purpose: in the order of their
    words they are shuffled."""
    return key(seed, Domain.PARTITION, _LOTS, purpose, np.arange(count, dtype=np.uint64))


def log_weights(seed: int, alpha: Floats, clients: Ints, classes: Ints) -> Floats:
    """Logarithms of g, (clients, classes), for these numbers of clients and classes; `alpha` by
    class."""
    found = np.empty((clients.size, classes.size))
    for at in _blocks(*found.shape):
        rows = clients[at].astype(np.uint64)[:, None]
        keys = key(seed, Domain.PARTITION, _WEIGHTS, rows, classes.astype(np.uint64)[None, :])
        each = np.broadcast_to(alpha, keys.shape)
        found[at] = log_gamma(each.ravel(), keys.ravel()).reshape(keys.shape)
    return found


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    """Rows of a table in parts of about a million entries: what is made on the way stays small."""
    step = max(1, _BLOCK // columns)
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def even(count: int, clients: int) -> Ints:
    """Sizes of equal parts, (clients,); the first ones have one more where it does not divide."""
    return count // clients + (np.arange(clients) < count % clients).astype(np.int64)


def split_classes(
    seed: int, alpha: float, clients: int, of_class: Ints, *, self_balancing: bool
) -> tuple[Ints, Floats]:
    """Samples of each client and class, (clients, classes), by shares of each class over clients;
    all `of_class` samples of a class are given out. Where it balances, a client that has the mean
    size gets nothing of later classes.

    And what to add to the weights of each class, (classes,), so that they are logarithms of the
    samples that a client gets in expectation."""
    found = np.zeros((clients, of_class.size), np.int64)
    scale = np.zeros(of_class.size)
    everyone, sizes = np.arange(clients), np.zeros(clients, np.int64)
    for k, count in enumerate(of_class):
        logs = log_weights(seed, np.asarray([alpha]), everyone, np.asarray([k]))[:, 0]
        if self_balancing:
            full = sizes * clients >= of_class.sum()
            logs = np.where(full, -np.inf, logs)
        ends = np.floor(shares(logs) * count + 0.5).astype(np.int64)
        found[:, k] = np.diff(ends, prepend=0)
        sizes += found[:, k]
        scale[k] = (log(np.asarray([float(count)])) - log_sum(logs))[0]
    return found, scale


def fill(seed: int, purpose: int, who: Ints, logs: Floats, supply: Ints) -> Ints:
    """Return a class for each place, (places,), so that each class is taken `supply` times; there
    are as many places as that. Place p is of the client with the weights `logs[who[p]]`.

    Each place draws a class of those that are left, by its client's weights. Where more draw one
    than there is of it, lots say who gets it, and the others draw again among the rest. So no
    client comes first, and it ends: each time either all have one, or a class is used up.
    """
    found = np.empty(who.size, np.int64)
    left, todo = supply.copy(), np.arange(who.size)
    words = key(seed, Domain.PARTITION, _PLACES, purpose, np.arange(who.size, dtype=np.uint64))
    classes, attempt = supply.size, 0
    while todo.size:
        rows, row = np.unique(who[todo], return_inverse=True)
        # Whole numbers, so that a class without weight is never drawn, at whatever rounding.
        ends = np.empty((rows.size, classes), np.int64)
        for at in _blocks(*ends.shape):
            table = np.where(left > 0, logs[rows[at]], -np.inf)
            ends[at] = np.floor(shares(table) * _TICKETS)
        ends += np.arange(rows.size)[:, None] * _TICKETS
        ticket = np.floor(uniform(key(words[todo], attempt, 0)) * _TICKETS).astype(np.int64)
        drawn = np.searchsorted(ends.ravel(), ticket + row * _TICKETS, side="right")
        drawn -= row * classes
        order = np.lexsort((key(words[todo], attempt, 1), drawn))
        wanted = np.bincount(drawn, minlength=classes)
        rank = np.arange(todo.size) - np.repeat(np.cumsum(wanted) - wanted, wanted)
        got = np.zeros(todo.size, bool)
        got[order] = rank < left[drawn[order]]
        found[todo[got]] = drawn[got]
        left -= np.minimum(wanted, left)
        todo = todo[~got]
        attempt += 1
    return found


def level(sizes: Ints, least: int) -> Ints:
    """Return how many samples each client gives away so that all can have `least`: the largest are
    brought down to one level. There are at least `least` for each."""
    need = int(np.maximum(least - sizes, 0).sum())
    low, high = least, int(sizes.max())
    while low < high:  # the highest level that frees enough
        middle = (low + high + 1) // 2
        if int(np.maximum(sizes - middle, 0).sum()) >= need:
            low = middle
        else:
            high = middle - 1
    given = np.maximum(sizes - low, 0)
    over = int(given.sum()) - need
    given[np.flatnonzero(given)[:over]] -= 1
    return given
