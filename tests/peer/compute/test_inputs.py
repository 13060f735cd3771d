"""What a peer reads is looked at before an operator has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.analysis.lookups import MissingRow, lookups_of
from shoal.dag.execute.rows import RowError
from shoal.peer.compute.inputs import CheckedReader
from shoal.peer.data import DataError
from shoal.peer.data.survey import survey
from shoal.tests.peer.data.test_survey import CLASSES, ROWS, graph, reader


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    at=st.integers(0, 39),
    value=st.sampled_from([-1, ROWS, 2**40]),
    name=st.sampled_from("xy"),
)
def test_the_microbatch_with_a_bad_sample_is_refused_and_no_other(
    tmp_path_factory: pytest.TempPathFactory, seed: int, at: int, value: int, name: str
) -> None:
    rng, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("arrays")
    found = {"x": rng.integers(0, ROWS, 40), "y": rng.integers(0, CLASSES, 40)}
    found[name][at] = value
    np.savez(folder / "d.npz", **found)
    read = reader(folder, kind="arrays", source=str(folder / "d.npz"), holdout=0.2)
    checked = CheckedReader("r-7", graph().bind(4), read)
    for step in range(8):  # one pass over the 32 that are trained on
        if at in read.sampler.train(step, 0, 4):
            where = (
                f"^sample {at} of the data, in step {step} of run r-7: .* {value}, and has 0 to "
            )
            with pytest.raises(DataError, match=where):
                checked.train(step, 0, (name,))
        else:
            assert [*checked.train(step, 0, (name,))] == [name]
        assert checked.train(step, 0, ("xy".replace(name, ""),))  # another stage's is not its own
    if at >= 32:
        with pytest.raises(DataError, match=f"sample {at} of the data, in an evaluation of run"):
            [checked.held_out(m, (name,)) for m in range(2)]


def test_a_row_that_an_operator_lacks_gets_its_sample_and_private_data_is_not_quoted(
    tmp_path: Path,
) -> None:
    np.savez(tmp_path / "d.npz", x=np.full(8, 4711), y=np.zeros(8, int))
    read = reader(tmp_path, kind="arrays", source=str(tmp_path / "d.npz"), holdout=0.0)
    bound = graph().bind(4)
    [lookup] = lookups_of(bound.operators[2], bound.spec)
    error = RowError("no row", MissingRow(lookup, 4711, 2))
    item = read.sampler.train(1, 0, 4)[2]
    for private in (False, True):
        checked = CheckedReader("r-7", bound, read, private=private)
        wanted = pytest.raises(DataError, match=f"^sample {item} of the data, in step 1 of run r-7")
        with wanted as found, checked.named(1, (1, 0)):
            raise error
        with pytest.raises(DataError) as read_first:
            checked.train(0, 0, ("x",))
        with pytest.raises(DataError) as surveyed:
            survey(graph(), read, private=private)
        for said in (found, read_first, surveyed):
            assert ("4711" in str(said.value)) == (not private)
