"""The example of many writers."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from shoal.examples import federated_writers
from shoal.examples.federated_writers import EACH, write_writers


def test_a_writer_has_some_digits_more_often_than_others(tmp_path: Path) -> None:
    write_writers(tmp_path / "plain.npz", 36)
    found = np.load(tmp_path / "plain.npz")
    x, y, writer = found["x"], found["y"], found["writer"]
    assert x.shape == (40 * EACH, 1, 8, 8)
    assert (x >= 0).all()
    assert (x <= 1).all()
    assert np.array_equal(np.bincount(writer), [EACH] * 40)
    shares = np.stack([np.bincount(y[writer == w], minlength=10) for w in range(40)]) / EACH
    assert shares.max(1).mean() > 0.3, "a writer has some digits more often: a tenth would be even"


def test_what_is_held_out_is_in_nobody_elses_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLANT", "SIZE", "SHIFT", "PEN"):  # in one hand, so that pictures are known again
        monkeypatch.setattr(federated_writers, name, 0.0)
    write_writers(tmp_path / "alike.npz", 36)
    found = np.load(tmp_path / "alike.npz")
    rows = {
        kind: {row.round(4).tobytes() for row in found["x"][mine]}
        for kind, mine in (("own", found["writer"] < 36), ("held", found["writer"] >= 36))
    }
    digits = {(d / 16).astype(np.float32).round(4).tobytes() for d in load_digits().images}
    assert not rows["own"] & rows["held"]
    assert rows["own"] | rows["held"] <= digits, "they are pictures of the digits as they were"


def test_a_tenth_is_a_whole_number_of_writers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 9"):
        write_writers(tmp_path / "odd.npz", 35)
