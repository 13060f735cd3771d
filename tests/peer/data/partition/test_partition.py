"""Every sample is with exactly one client, and who has what is as each kind promises."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.dag.permutation import key
from shoal.job import SettingsError
from shoal.peer.data import DataError
from shoal.peer.data.partition import dirichlet
from shoal.peer.data.partition.dirichlet import fill, level, lots
from shoal.peer.data.partition.variates import exp, log, log_gamma


def classes_of(count: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count)


@st.composite
def divisions(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments that can be met, of any kind."""
    kind = draw(st.sampled_from(["iid", "dirichlet", "shards", "by-key"]))
    clients = draw(st.integers(1, 12))
    count = clients * draw(st.integers(1, 20))
    least = 1 if kind == "by-key" else draw(st.integers(1, count // clients))
    if kind != "shards":
        count += draw(st.integers(0, 11))
    labels = draw(st.lists(st.integers(-3, 5), min_size=count, max_size=count))
    made: dict[str, Any] = {
        "labels": labels,
        "kind": kind,
        "clients": clients,
        "min_samples": least,
        "held_out": draw(st.sampled_from([0.0, 0.1, 0.5, 0.99])),
        "seed": draw(st.integers(-(2**63), 2**63 - 1)),
    }
    if kind == "shards":
        size = count // clients
        made["shards"] = draw(st.sampled_from([s for s in range(1, size + 1) if size % s == 0]))
    elif kind == "by-key":
        made["keys"] = draw(st.lists(st.sampled_from("abcäß"), min_size=count, max_size=count))
        made["clients"] = None
    elif kind == "dirichlet":
        made["alpha"] = draw(st.sampled_from([5e-324, 1e-9, 0.01, 0.1, 1.0, 100.0, 1e12, 1e308]))
        made["convention"] = draw(st.sampled_from(["per-class", "per-client", "per-client-prior"]))
        made["self_balancing"] = made["convention"] == "per-class" and draw(st.booleans())
    return made


@settings(max_examples=80, deadline=None)
@given(divisions())
def test_every_sample_is_with_exactly_one_client(made: dict[str, Any]) -> None:
    found = shoal.partition(**made)
    labels, least = np.asarray(made["labels"]), made["min_samples"]
    mine = [np.concatenate([found.train(i), found.held_out(i)]) for i in range(len(found))]
    assert sorted(np.concatenate(mine)) == list(range(labels.size))
    assert len(found) == (made["clients"] or len(set(made["keys"])))
    for i, each in enumerate(mine):
        assert found.sizes[i] == each.size >= least
        held_out = min(math.floor(each.size * made["held_out"] + 0.5), each.size - 1)
        assert found.held_out(i).size == held_out
        assert (np.diff(found.train(i)) > 0).all()
        assert (np.diff(found.held_out(i)) > 0).all()
        counted = Counter(labels[each].tolist())
        assert found.counts[i].tolist() == [counted[c] for c in found.classes.tolist()]
        mix = np.array([np.mean(labels == c) for c in found.classes])
        away = np.abs(found.counts[i] / each.size - mix).sum() / 2
        assert found.distances()[i] == pytest.approx(away)
    again = shoal.partition(**made | {"labels": torch.tensor(made["labels"])})
    assert np.array_equal(again.indices, found.indices)
    assert found.describe().startswith(f"{len(found):,} client")


def by_words(count: int, seed: int, *purpose: int) -> list[int]:
    """Numbers below `count`, shuffled: by the word that each has."""
    words = [int(key(seed, 5, 2, *purpose, i)[0]) for i in range(count)]
    return sorted(range(count), key=words.__getitem__)


def plain_gamma(alpha: float, seed: int, client: int, c: int) -> float:
    """Logarithm of the variate of a client and a class, by Best's rejection with `math`."""
    entry = int(key(seed, 5, 0, client, c)[0])

    def uniform(*words: int) -> float:
        return ((int(key(entry, *words)[0]) >> 12) + 0.5) / 2**52

    for attempt in range(100):
        u, v = uniform(attempt, 0), uniform(attempt, 1)
        w = u * (1 - u)
        y = math.sqrt((3 * alpha + 2.25) / w) * (u - 0.5)
        x = alpha + y
        if x > 0 and math.log(64 * w**3 * v**2) <= 2 * (alpha * math.log(x / alpha) - y):
            return math.log(x) + math.log(uniform(-1)) / alpha
    raise AssertionError


def plain_iid(labels: list[int], clients: int, seed: int) -> list[set[int]]:
    shuffled, found = by_words(len(labels), seed, 0), []
    for i in range(clients):
        size = len(labels) // clients + (i < len(labels) % clients)
        found.append(set(shuffled[:size]))
        shuffled = shuffled[size:]
    return found


def plain_shards(labels: list[int], clients: int, seed: int) -> list[set[int]]:
    ordered = sorted(by_words(len(labels), seed, 0), key=labels.__getitem__)
    size = len(labels) // (2 * clients)
    pieces = [ordered[p * size : (p + 1) * size] for p in by_words(2 * clients, seed, 1)]
    return [{*pieces[2 * i], *pieces[2 * i + 1]} for i in range(clients)]


def plain_dirichlet(labels: list[int], clients: int, seed: int) -> list[set[int]]:
    shuffled, found = by_words(len(labels), seed, 0), [set[int]() for _ in range(clients)]
    for number, c in enumerate(sorted(set(labels))):
        of_class = [i for i in shuffled if labels[i] == c]
        logs = [plain_gamma(0.5, seed, client, number) for client in range(clients)]
        weights = [math.exp(g - max(logs)) for g in logs]
        begin = 0
        for client in range(clients):
            share = sum(weights[: client + 1]) / sum(weights)
            end = math.floor(share * len(of_class) + 0.5)
            found[client] |= set(of_class[begin:end])
            begin = end
    return found


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize(
    ("kind", "more", "plain"),
    [
        ("iid", {}, plain_iid),
        ("shards", {}, plain_shards),
        ("dirichlet", {"alpha": 0.5}, plain_dirichlet),
    ],
)
def test_each_kind_is_as_a_plain_loop_has_it(
    kind: Any, more: dict[str, Any], plain: Callable[..., list[set[int]]], seed: int
) -> None:
    labels = classes_of(240, 4, 7).tolist()
    found = shoal.partition(labels, kind=kind, clients=6, seed=seed, **more)
    assert [set(found.train(i).tolist()) for i in range(6)] == plain(labels, 6, seed)


def test_by_key_has_a_client_for_each_key() -> None:
    keys = np.array(["romeo", "juliet", "romeo", "nurse"])
    found = shoal.partition(kind="by-key", keys=keys)
    assert found.keys is not None
    assert found.keys.tolist() == ["juliet", "nurse", "romeo"]
    assert [found.train(i).tolist() for i in range(3)] == [[1], [3], [0, 2]]
    assert found.counts.shape == (3, 0)
    assert not found.distances().any()
    numbers = shoal.partition([1, 1, 0, 0], kind="by-key", keys=[30, -1, 30, 30])
    assert [numbers.train(i).tolist() for i in range(2)] == [[1], [0, 2, 3]]


def test_clients_by_lot_need_no_labels() -> None:
    found = shoal.partition(kind="iid", clients=3, samples=10)
    assert found.sizes.tolist() == [4, 3, 3]
    assert "classes" not in found.describe()


def hashed(**how: Any) -> str:
    found = shoal.partition(classes_of_old(), clients=20, held_out=0.2, **how)
    data = found.indices.astype("<i8").tobytes() + found.offsets.astype("<i8").tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def classes_of_old() -> np.ndarray:
    """Ten classes, of any numpy."""
    return (key(1, np.arange(2000, dtype=np.uint64)) % np.uint64(10)).astype(np.int64)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"kind": "iid"}, "c5749b53d168c6c2"),
        ({"kind": "shards"}, "3e883a912773f639"),
        ({"kind": "dirichlet", "alpha": 0.1}, "364c08b669039b42"),
        (
            {"kind": "dirichlet", "alpha": 0.1, "self_balancing": True, "min_samples": 30},
            "bc269f1fee53a2ed",
        ),
        ({"kind": "dirichlet", "alpha": 0.1, "convention": "per-client"}, "f3e10bafddf13dc9"),
        ({"kind": "dirichlet", "alpha": 0.1, "convention": "per-client-prior"}, "0077791e9ccc514d"),
    ],
    ids=str,
)
def test_a_partition_is_the_same_everywhere_and_for_ever(
    how: dict[str, Any], expected: str
) -> None:
    assert hashed(**how) == expected


def test_shares_of_a_class_over_clients_have_the_moments_of_dirichlet() -> None:
    alpha, clients, each = 0.3, 50, 5000
    labels = np.repeat(np.arange(40), each)
    found = shoal.partition(labels, kind="dirichlet", alpha=alpha, clients=clients)
    share = found.counts / each
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert share.mean() == pytest.approx(1 / clients, rel=1e-6)
    assert share.var() == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize(("convention", "total"), [("per-client", 3.0), ("per-client-prior", 0.3)])
def test_shares_of_a_client_over_classes_have_the_moments_of_dirichlet(
    convention: Any, total: float
) -> None:
    """Counts of a client are Dirichlet-multinomial, with `total` of concentration in all; a little
    less, as there is only so much of each class: about a share of 1 / sqrt(clients)."""
    classes, size, clients = 10, 10, 20_000
    labels = np.repeat(np.arange(classes), size * clients // classes)
    found = shoal.partition(
        labels, kind="dirichlet", alpha=0.3, clients=clients, convention=convention
    )
    p = 1 / classes
    expected = size * p * (1 - p) * (size + total) / (1 + total)
    assert (found.sizes == size).all()
    assert found.counts.var() == pytest.approx(expected, rel=0.03)


def test_alpha_in_all_is_a_tenth_for_each_of_ten_equal_classes() -> None:
    labels = np.tile(np.arange(10), 100)
    how: dict[str, Any] = {"kind": "dirichlet", "clients": 25, "seed": 3}
    one = shoal.partition(labels, alpha=1.0, convention="per-client-prior", **how)
    other = shoal.partition(labels, alpha=0.1, convention="per-client", **how)
    assert np.array_equal(one.indices, other.indices)
    assert np.array_equal(one.offsets, other.offsets)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0, 30.0])
def test_logarithms_of_gamma_have_their_moments(alpha: float) -> None:
    count = 40_000
    drawn = log_gamma(np.full(count, alpha), lots(1, 9, count))
    a = torch.tensor(alpha, dtype=torch.float64)
    spread = float(torch.polygamma(1, a)) ** 0.5
    assert drawn.mean() == pytest.approx(float(torch.digamma(a)), abs=5 * spread / count**0.5)
    assert drawn.std() == pytest.approx(spread, rel=0.04)


def test_log_and_exp_are_those_of_numpy_to_a_few_units_in_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.exp(rng.uniform(-700, 700, 5000)), rng.uniform(0.5, 2, 5000), [1.0]])
    assert (np.abs(log(x) - np.log(x)) <= 4 * np.spacing(np.abs(np.log(x)))).all()
    x = np.concatenate([rng.uniform(-700, 0, 5000), rng.uniform(-1e-3, 0, 5000), [0.0]])
    assert (np.abs(exp(x) - np.exp(x)) <= 4 * np.spacing(np.exp(x))).all()
    assert exp(np.array([-800.0, -np.inf])).tolist() == [0, 0]


def test_who_has_the_mean_size_gets_nothing_of_later_classes() -> None:
    labels = classes_of(3000, 10)
    found = shoal.partition(
        labels, kind="dirichlet", alpha=0.1, clients=20, self_balancing=True, seed=4
    )
    for counts in found.counts:
        assert counts[: counts.nonzero()[0][-1]].sum() < 3000 / 20
    loose = shoal.partition(labels, kind="dirichlet", alpha=0.1, clients=20, seed=4)
    assert found.sizes.std() < loose.sizes.std()


def test_who_drew_few_gets_samples_of_the_largest_and_others_keep_theirs() -> None:
    labels = classes_of(2000, 10)
    how: dict[str, Any] = {"kind": "dirichlet", "alpha": 0.05, "clients": 40, "seed": 1}
    drawn = shoal.partition(labels, **how)
    found = shoal.partition(labels, min_samples=20, **how)
    assert drawn.sizes.min() < 20 == found.sizes.min()
    gave, got = found.sizes < drawn.sizes, found.sizes > drawn.sizes
    assert found.sizes[gave].min() >= found.sizes[~gave].max() - 1
    assert (found.sizes[got] == 20).all()
    assert (found.counts[gave] <= drawn.counts[gave]).all()
    same = ~(gave | got)
    assert np.array_equal(found.counts[same], drawn.counts[same])


def test_who_drew_few_takes_what_is_given_by_its_own_mix() -> None:
    labels = classes_of(4000, 4)
    how: dict[str, Any] = {"kind": "dirichlet", "alpha": 0.02, "clients": 60, "seed": 2}
    drawn = shoal.partition(labels, **how)
    found = shoal.partition(labels, min_samples=5, **how)
    got = np.flatnonzero(found.sizes > drawn.sizes)
    assert got.size > 10
    logs = [[plain_gamma(0.02, 2, client, c) for c in range(4)] for client in range(60)]
    logs -= np.max(logs, axis=0)  # what the largest client has of a class is about all of it
    favoured = logs[got].argmax(axis=1)
    gained = (found.counts - drawn.counts)[got]
    # By lot it would be a quarter; all, if the largest gave as much of each class as is asked.
    assert gained[np.arange(got.size), favoured].sum() > 0.5 * gained.sum()


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 9))
def test_largest_clients_give_what_is_missing_and_not_more(sizes: list[int], least: int) -> None:
    had = np.array(sizes)
    had[0] += max(0, least * had.size - int(had.sum()))
    given_away = level(had, least)
    assert given_away.sum() == np.maximum(least - had, 0).sum()
    left = (had - given_away)[given_away > 0]
    assert (left >= max(least, (had - given_away).max() - 1)).all()


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 5), st.integers(0, 99))
def test_places_take_each_class_as_often_as_there_is_of_it(
    supply: list[int], clients: int, seed: int
) -> None:
    supply[0] += 1
    rng = np.random.default_rng(seed)
    who = rng.integers(0, clients, sum(supply))
    logs = rng.uniform(-1e6, 0, (clients, len(supply)))  # all but one share of most are 0
    found = fill(seed, 0, who, logs, np.array(supply))
    assert np.bincount(found, minlength=len(supply)).tolist() == supply


Y = [0, 1, 2] * 4
WRONG: list[tuple[dict[str, Any], type[ValueError], str]] = [
    ({"kind": "iid", "clients": 13}, SettingsError, "is 13, but there are 12 samples"),
    (
        {"kind": "dirichlet", "alpha": 1, "clients": 4, "min_samples": 4},
        SettingsError,
        "ask for 3 or fewer, or for at most 3 clients",
    ),
    (
        {"kind": "shards", "clients": 5},
        SettingsError,
        "12 samples do not divide into 5 x 2 = 10 pieces; leave 2 samples out",
    ),
    ({"kind": "shards", "clients": 5, "shards": 7}, SettingsError, "leave 12 samples out"),
    ({"kind": "by-key"}, DataError, "keys are missing"),
    ({"kind": "by-key", "keys": [1] * 11}, DataError, "differ in length, 12 and 11"),
    ({"kind": "by-key", "keys": [1.5] * 12}, DataError, "expected integers or text"),
    ({"kind": "by-key", "keys": ["a", 1] * 6}, DataError, "all integers, or all text"),
    ({"kind": "by-key", "keys": []}, DataError, "keys are empty"),
    (
        {"kind": "by-key", "keys": "aaaaaaaaaaab", "min_samples": 2},
        DataError,
        "shape ()",
    ),
    (
        {"kind": "by-key", "keys": [*"aaaaaaaaaaab"], "min_samples": 2},
        SettingsError,
        '1 of 2 keys have fewer samples, "b" only 1',
    ),
    (
        {"kind": "by-key", "keys": [*"aaaaaaaaaaab"], "clients": 3},
        SettingsError,
        "a client of each of the 2 keys",
    ),
    ({"kind": "iid", "clients": 2, "keys": Y}, DataError, "does not use them"),
    ({"kind": "iid", "clients": 2, "samples": 11}, DataError, "labels and samples differ"),
    ({"kind": "iid", "clients": 2, "samples": 1.5}, SettingsError, "`samples` is 1.5"),
    ({"kind": "iid", "clients": 2, "labels": None}, DataError, "labels, or samples=N"),
    ({"kind": "iid", "clients": 2, "labels": None, "samples": 0}, DataError, "there are 0 samples"),
    ({"kind": "shards", "clients": 2, "labels": None}, DataError, "labels are missing"),
    ({"kind": "iid", "clients": 2, "labels": []}, DataError, "labels are empty"),
    (
        {"kind": "iid", "clients": 2, "labels": np.ma.masked_equal([1, 2], 2)},
        DataError,
        "labels are masked",
    ),
    ({"kind": "iid", "clients": 2, "labels": [0.0, 1.0]}, DataError, "float64, such as"),
    ({"kind": "iid", "clients": 2, "labels": [*"ab"]}, DataError, "return_inverse=True"),
    ({"kind": "iid", "clients": 2, "labels": [None, 1]}, DataError, "expected integers"),
    ({"kind": "iid", "clients": 2, "labels": [[1, 0], [0, 1]]}, DataError, "labels.argmax(1)"),
    ({"kind": "iid", "clients": 2, "labels": [[1], [0, 1]]}, DataError, "not readable"),
    (
        {"kind": "iid", "clients": 2, "labels": np.array([2**63, 1], np.uint64)},
        DataError,
        "64 bits with a sign",
    ),
    (
        {"kind": "iid", "clients": 20_000, "labels": np.arange(20_000)},
        DataError,
        "20,000 different values, for 20,000 clients",
    ),
]


@pytest.mark.parametrize(("how", "error", "text"), WRONG, ids=lambda x: str(x)[:60])
def test_what_cannot_be_divided_is_refused_with_the_reason(
    how: dict[str, Any], error: type[ValueError], text: str
) -> None:
    with pytest.raises(error) as refused:
        shoal.partition(**{"labels": Y} | how)
    assert text in str(refused.value)


def test_a_large_table_is_made_in_blocks_of_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = classes_of(600, 7)
    how: dict[str, Any] = {"kind": "dirichlet", "alpha": 0.1, "clients": 50, "min_samples": 5}
    for convention in ("per-class", "per-client"):
        monkeypatch.setattr(dirichlet, "_BLOCK", 2**20)
        whole = shoal.partition(labels, convention=convention, **how)
        monkeypatch.setattr(dirichlet, "_BLOCK", 20)
        parts = shoal.partition(labels, convention=convention, **how)
        assert np.array_equal(whole.indices, parts.indices)
        assert np.array_equal(whole.offsets, parts.offsets)


def test_scalars_of_numpy_are_numbers() -> None:
    found = shoal.partition(Y, kind="iid", clients=np.int64(3), held_out=np.float32(0.5))
    assert found.held_out_sizes.tolist() == [2, 2, 2]


def test_no_array_of_a_partition_can_be_written_to() -> None:
    found = shoal.partition(Y, kind="by-key", keys=Y)
    for array in (found.indices, found.offsets, found.held_out_sizes, found.counts, found.train(0)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(IndexError, match="there are clients 0 to 2"):
        found.train(3)
    with pytest.raises(IndexError, match="client -1"):
        found.held_out(-1)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["per-class", "per-client"])
def test_a_million_samples_go_to_a_hundred_thousand_clients(convention: Any) -> None:
    labels = classes_of(1_000_000, 10)
    found = shoal.partition(
        labels, kind="dirichlet", alpha=0.1, clients=100_000, convention=convention, held_out=0.1
    )
    assert np.array_equal(np.sort(found.indices), np.arange(1_000_000))
    assert found.sizes.min() >= 1
