"""The picture of a partition shows its numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shoal
from shoal.dag.permutation import key


def labels_of(count: int, classes: int) -> Any:
    return (key(3, np.arange(count, dtype=np.uint64)) % np.uint64(classes)).astype(np.int64)


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (10, 10), (100, 10), (600, 100)])
def test_a_picture_has_room_for_any_number_of_clients(
    tmp_path: Path, clients: int, classes: int
) -> None:
    found = shoal.partition(labels_of(2000, classes), kind="dirichlet", alpha=0.1, clients=clients)
    found.picture(tmp_path / "who.png")
    with Image.open(tmp_path / "who.png") as image:
        assert 1150 <= image.width <= 2000
        assert 400 <= image.height <= 1600


def test_a_cell_is_dark_where_a_client_has_the_class(tmp_path: Path) -> None:
    labels = [0] * 6 + [1] * 6
    found = shoal.partition(labels, kind="shards", shards=1, clients=2)
    found.picture(str(tmp_path / "who.png"))
    with Image.open(tmp_path / "who.png") as image:
        pixels = np.asarray(image.convert("L")).astype(int)
    # The table is what lies below the bars: two by two cells, the dark ones on the diagonal.
    dark = pixels[400:496, 130 : 130 + 1500]
    corners = [dark[4, 20], dark[4, -20], dark[-4, 20], dark[-4, -20]]
    assert [c < 60 for c in corners] == [True, False, False, True]


def test_without_labels_the_picture_has_sizes_alone(tmp_path: Path) -> None:
    keys = [f"speaker {i % 7} of a very long name" for i in range(50)]
    found = shoal.partition(kind="by-key", keys=keys)
    found.picture(tmp_path / "who.png")
    with Image.open(tmp_path / "who.png") as image:
        assert image.height < 500


def test_a_picture_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    found = shoal.partition(kind="iid", clients=2, samples=4)
    with pytest.raises(OSError, match="nowhere"):
        found.picture(tmp_path / "nowhere" / "who.png")
