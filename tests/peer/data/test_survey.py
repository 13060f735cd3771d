"""All of the data is looked through for rows that are not there. The oracle is brute force."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.ir.graph import Graph, Input, Operator, Output, Parameter, Ref, Size, TensorSpec
from shoal.peer.data import DataError, Reader, survey
from shoal.peer.data.sources import resolve
from shoal.peer.data.survey import Ignored

ROWS, CLASSES = 6, 4


def graph(length: int = 0, ignored: int = -100) -> Graph:
    """Looks ids up in a table, whose columns are logits of labels."""
    more = (length,) if length else ()
    rows = (Size(length or 1),)
    ids = TensorSpec((Size(1), *more), "int64")
    flat, logits = TensorSpec(rows, "int64"), TensorSpec((*rows, CLASSES), "float32")
    operators = (
        Operator("ids", "aten.reshape.default", (Ref("in:x"), (-1,)), (), (Output(flat),)),
        Operator("labels", "aten.reshape.default", (Ref("in:y"), (-1,)), (), (Output(flat),)),
        Operator(
            "h", "aten.embedding.default", (Ref("param:t"), Ref("ids")), (), (Output(logits),)
        ),
        Operator(
            "loss",
            "aten.cross_entropy_loss.default",
            (Ref("h"), Ref("labels"), None, 1, ignored),
            (),
            (Output(TensorSpec((), "float32")),),
        ),
    )
    table = Parameter("t", TensorSpec((ROWS, CLASSES), "float32"), True)
    return Graph((Input("x", ids), Input("y", ids)), (table,), (), operators, loss="loss")


def reader(folder: Path, **settings: object) -> Reader:
    manifest, paths = resolve(folder / "b", **settings)  # type: ignore[arg-type]
    return Reader(manifest, paths.__getitem__, seed=0, microbatches=1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    total=st.integers(4, 60),
    wrong=st.lists(
        st.tuples(
            st.sampled_from("xy"),
            st.integers(0, 59),
            st.sampled_from([-101, -100, -1, 3, 4, 5, 6, 2**40]),
        ),
        max_size=3,
    ),
    piece=st.sampled_from([1, 3, 1 << 14]),
)
def test_a_sample_that_asks_for_too_much_is_named_wherever_it_lies(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    total: int,
    wrong: list[tuple[str, int, int]],
    piece: int,
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("arrays")
    found = {"x": rng.integers(0, ROWS, total), "y": rng.integers(0, CLASSES, total)}
    for name, at, value in wrong:
        found[name][at % total] = value
    np.savez(folder / "d.npz", **found)
    read = reader(folder, kind="arrays", source=str(folder / "d.npz"), holdout=0.25)
    x, y = found["x"], found["y"]
    bad = (x < 0) | (x >= ROWS) | (((y < 0) | (y >= CLASSES)) & (y != -100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "MOST_AT_ONCE", piece)
        if not bad.any():
            seen = frozenset(["loss"] if (y == -100).any() else [])
            assert survey.survey(graph(), read) == Ignored(seen)
            return
        with pytest.raises(DataError, match=r"^sample \d+ of the data: ") as error:
            survey.survey(graph(), read)
    said = str(error.value)
    sample, value = (int(n) for n in re.findall(r"-?\d+", said)[:2])
    assert bad[sample]
    assert value in (x[sample], y[sample])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), wrong=st.sampled_from([None, 4, 5, 300]), ignored=st.booleans())
def test_every_token_is_looked_at(
    tmp_path_factory: pytest.TempPathFactory, seed: int, wrong: int | None, ignored: bool
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("tokens")
    ids = rng.integers(0, 3, 80)
    at = int(rng.integers(0, 80))
    if wrong is not None:
        ids[at] = wrong
    np.save(folder / "t.npy", ids)
    read = reader(folder, kind="tokens", source=str(folder / "t.npy"), length=7)
    net = graph(7, ignored=2 if ignored else -100)
    if wrong is None:
        there = ignored and (ids == 2).any()
        assert survey.survey(net, read) == Ignored(frozenset(["loss"] if there else []))
    else:  # 4 and 5 are rows, and no classes
        with pytest.raises(DataError, match=rf"item {at} of the data: .* asked for .* {wrong}, "):
            survey.survey(net, read)


def test_numbers_that_are_not_finite_are_said_with_the_first_sample(tmp_path: Path) -> None:
    x = np.zeros((9, 2, 3), np.float32)
    x[4, 1, 2], x[7, 0, 0] = np.nan, np.inf
    np.savez(tmp_path / "d.npz", x=x, w=np.ones(9), y=np.zeros(9, int))
    source = str(tmp_path / "d.npz")
    read = reader(tmp_path, kind="arrays", source=source, inputs="x,w", holdout=0.0)
    assert [*survey.not_finite(read)] == [
        "'x' has a NaN or an infinity in 2 of 9 samples, first in sample 4"
    ]
