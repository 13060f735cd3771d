"""Divides a data set among clients: which sample is whose follows from the settings, the labels and
the keys alone, bit for bit, on any machine.

    partition(labels, kind="dirichlet", alpha=0.1, clients=100)

Each kind says who owns each sample, as an array (samples,); all that follows is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ....job.clients.partitioning import Convention, Partitioning
from ....job.settings import SettingsError
from . import dirichlet
from .client_sets import Partition
from .labels_and_keys import Columns, read_columns
from .variates import Floats, Ints

__all__ = ["divide", "partition"]

_BY_LOT, _PIECES, _GIVEN, _RECEIVED, _HELD_OUT = range(5)
"""Purposes of lots."""


def partition(
    labels: npt.ArrayLike | None = None,
    *,
    kind: Literal["iid", "dirichlet", "shards", "by-key"],
    clients: int | None = None,
    alpha: float | None = None,
    convention: Convention | None = None,
    shards: int | None = None,
    self_balancing: bool = False,
    min_samples: int = 1,
    held_out: float = 0.0,
    seed: int = 0,
    keys: npt.ArrayLike | None = None,
    samples: int | None = None,
) -> Partition:
    """Divide a data set among clients; every sample goes to exactly one.

    `labels`: (samples,), integers. `keys`: (samples,), integers or text, for kind "by-key". `iid`
    and `by-key` need no labels; where there is neither, `samples` says how many there are.

    - `iid`: equal sizes, by lot.
    - `dirichlet`: mixes of classes by lot; the smaller `alpha`, the less alike. `convention` says
      what is drawn: "per-class" (default) each class's shares over clients, whose sizes differ, as
      `DirichletPartitioner` of Flower; "per-client" each client's shares over classes, all of
      equal size, as pfl-research and `InnerDirichletPartitioner` of Flower; "per-client-prior"
      likewise with `alpha` in all instead of for each class (Hsu et al. 2019), so with ten classes
      of equal size ten times less of it.
    - `shards`: sorted by label and cut into equal pieces, of which each client gets `shards` (2)
      by lot (McMahan et al. 2017).
    - `by-key`: a client for each key, in ascending order.

    `min_samples`: the least a client has. Kind `dirichlet` brings clients that drew fewer up to it,
    with samples of the largest ones and by their own mixes; the other kinds refuse. With
    `self_balancing` a client that has the mean size gets nothing of the classes still to come.
    `held_out`: share of each client's samples that it evaluates with and does not train on, by lot
    and rounded; one at least stays for training.

    A function of its arguments alone: the same bits on every machine. Raises SettingsError for a
    setting, and DataError for labels or keys, that cannot be used.
    """
    settings = Partitioning(
        kind=kind,
        clients=_plain(clients),
        alpha=_plain(alpha),
        convention=convention,
        shards=_plain(shards),
        self_balancing=_plain(self_balancing),
        min_samples=_plain(min_samples),
        held_out=_plain(held_out),
        seed=_plain(seed),
    )
    return divide(settings, read_columns(settings, labels, keys, _plain(samples)))


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python's own."""
    return value.item() if isinstance(value, np.generic) else value


def divide(settings: Partitioning, data: Columns) -> Partition:
    """The partition that the settings make of the data. Raises SettingsError where its numbers do
    not fit the settings."""
    clients = _clients(settings, data)
    owner = _KINDS[settings.kind](settings, data, clients)
    sizes = np.bincount(owner, minlength=clients)
    kept_out = np.minimum(np.floor(sizes * settings.held_out + 0.5).astype(np.int64), sizes - 1)
    offsets = np.concatenate([[0], np.cumsum(sizes)])

    group = owner * 2  # and one more for what is held out
    if settings.held_out:
        order = np.lexsort((dirichlet.lots(settings.seed, _HELD_OUT, owner.size), owner))
        rank = np.arange(owner.size) - offsets[owner[order]]
        group[order[rank < kept_out[owner[order]]]] += 1
    counts = np.bincount(owner * data.classes.size + data.of, minlength=clients * data.classes.size)
    return Partition(
        settings=settings,
        indices=np.argsort(group, kind="stable"),
        offsets=offsets,
        held_out_sizes=kept_out,
        classes=data.classes,
        counts=counts[: clients * data.classes.size].reshape(clients, data.classes.size),
        keys=data.keys if settings.kind == "by-key" else None,
    )


def _clients(settings: Partitioning, data: Columns) -> int:
    count, asked = data.samples, settings.clients
    if settings.kind == "by-key":
        there = data.keys.size
        if asked not in (None, there):
            raise SettingsError(
                "clients",
                f'is {asked:,}, but kind "by-key" makes a client of each of the {there:,} keys: '
                "leave it out, or give only the samples whose keys you want",
            )
        return there
    assert asked is not None
    least = settings.min_samples
    if asked > count:
        raise SettingsError(
            "clients", f"is {asked:,}, but there are {count:,} samples: a client needs one at least"
        )
    if asked * least > count:
        raise SettingsError(
            "min_samples",
            f"is {least:,}, and {asked:,} clients need {asked * least:,} samples for that, but "
            f"there are {count:,}: ask for {count // asked:,} or fewer, or for at most "
            f"{count // least:,} clients",
        )
    return asked


def _iid(settings: Partitioning, data: Columns, clients: int) -> Ints:
    owner = np.empty(data.samples, np.int64)
    order = np.argsort(dirichlet.lots(settings.seed, _BY_LOT, data.samples), kind="stable")
    owner[order] = np.repeat(np.arange(clients), dirichlet.even(data.samples, clients))
    return owner


def _shards(settings: Partitioning, data: Columns, clients: int) -> Ints:
    pieces = clients * settings.pieces
    if data.samples % pieces:
        over = data.samples % pieces
        raise SettingsError(
            "shards",
            f"cannot be equal: {data.samples:,} samples do not divide into {clients:,} x "
            f"{settings.pieces} = {pieces:,} pieces; leave {over:,} samples out, or ask for other "
            "numbers of clients or shards",
        )
    order = np.lexsort((dirichlet.lots(settings.seed, _BY_LOT, data.samples), data.of))
    dealt = np.argsort(dirichlet.lots(settings.seed, _PIECES, pieces), kind="stable")
    of_piece = np.empty(pieces, np.int64)
    of_piece[dealt] = np.arange(pieces) // settings.pieces
    owner = np.empty(data.samples, np.int64)
    owner[order] = np.repeat(of_piece, data.samples // pieces)
    return owner


def _by_key(settings: Partitioning, data: Columns, clients: int) -> Ints:
    sizes = np.bincount(data.key_of, minlength=clients)
    few = int((sizes < settings.min_samples).sum())
    if few:
        worst = int(sizes.argmin())
        raise SettingsError(
            "min_samples",
            f"is {settings.min_samples}, but {few:,} of {clients:,} keys have fewer samples, "
            f'"{data.keys[worst]}" only {sizes[worst]:,}: ask for fewer, or leave the samples of '
            "such keys out",
        )
    return data.key_of


def _dirichlet(settings: Partitioning, data: Columns, clients: int) -> Ints:
    seed, of_class = settings.seed, np.bincount(data.of, minlength=data.classes.size)
    assert settings.alpha is not None
    if settings.drawn == "per-class":
        counts, scale = dirichlet.split_classes(
            seed, settings.alpha, clients, of_class, self_balancing=settings.self_balancing
        )
        owner = _by_counts(settings, data, counts)
        return _lifted(settings, data, owner, counts.sum(axis=1), scale)
    alpha = np.full(of_class.size, settings.alpha)
    if settings.drawn == "per-client-prior":
        alpha = settings.alpha * (of_class / data.samples)
    logs = dirichlet.log_weights(seed, alpha, np.arange(clients), np.arange(of_class.size))
    who = np.repeat(np.arange(clients), dirichlet.even(data.samples, clients))
    drawn = dirichlet.fill(seed, _BY_LOT, who, logs, of_class)
    at = np.bincount(who * of_class.size + drawn, minlength=clients * of_class.size)
    return _by_counts(settings, data, at.reshape(clients, of_class.size))


def _by_counts(settings: Partitioning, data: Columns, counts: Ints) -> Ints:
    """Owners, (samples,), such that each client has so many of each class, by lot."""
    owner = np.empty(data.samples, np.int64)
    order = np.lexsort((dirichlet.lots(settings.seed, _BY_LOT, data.samples), data.of))
    clients, classes = counts.shape
    owner[order] = np.repeat(np.tile(np.arange(clients), classes), counts.T.ravel())
    return owner


def _lifted(settings: Partitioning, data: Columns, owner: Ints, sizes: Ints, scale: Floats) -> Ints:
    """Owners, with all clients at the least: the largest give samples by lot, and who is short
    takes of these by its own weights."""
    short = np.flatnonzero(sizes < settings.min_samples)
    if not short.size:
        return owner
    seed, given = settings.seed, dirichlet.level(sizes, settings.min_samples)
    order = np.lexsort((dirichlet.lots(seed, _GIVEN, owner.size), owner))
    rank = np.arange(owner.size) - (np.cumsum(sizes) - sizes)[owner[order]]
    free = order[rank < given[owner[order]]]
    classes = data.classes.size
    logs = dirichlet.log_weights(seed, np.full(classes, settings.alpha), short, np.arange(classes))
    places = np.repeat(np.arange(short.size), settings.min_samples - sizes[short])
    supply = np.bincount(data.of[free], minlength=classes)
    wanted = dirichlet.fill(seed, _RECEIVED, places, logs + scale, supply)
    owner = owner.copy()
    by_class = free[np.lexsort((dirichlet.lots(seed, _RECEIVED, free.size), data.of[free]))]
    owner[by_class] = short[places[np.argsort(wanted, kind="stable")]]
    return owner


_KINDS: Mapping[str, Callable[[Partitioning, Columns, int], Ints]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
    "by-key": _by_key,
}
