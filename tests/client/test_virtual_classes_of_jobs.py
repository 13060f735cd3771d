"""What `sync.virtual_data` and fedimpro do to a captured model, and which jobs they are not for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.client.further_classes import with_feature_statistics, with_virtual_classes
from shoal.client.models.state_dicts import with_state
from shoal.dag.capture.capture import Captured, capture
from shoal.job import Job, SettingsError


class Labels:
    """A reader of labels alone, in two shards."""

    def __init__(self, *labels: int) -> None:
        self.labels = labels

    def pieces(self, column: str) -> Iterator[np.ndarray]:
        assert column == "y"
        return (np.array([label], np.int64) for label in self.labels)


class Model(nn.Module):
    def __init__(self, regression: bool = False) -> None:
        super().__init__()
        self.head, self.regression = nn.Linear(6, 3), regression

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.head(x)
        return F.mse_loss(out[:, 0], y.float()) if self.regression else F.cross_entropy(out, y)


class Deep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))  # type: ignore[assignment]


def captured(regression: bool = False, deep: bool = False) -> Captured:
    model = Deep() if deep else Model(regression)
    example = {"x": torch.zeros(2, 6), "y": torch.zeros(2, dtype=torch.int64)}
    return with_state(capture(model, example), model)


def job(virtual_data: str = "vhl", where: str = "submitter", **vhl: Any) -> Job:
    partition = {"kind": "iid", "clients": 40} if where == "submitter" else None
    return Job(
        model={"factory": "m.py:f"},
        data={"kind": "arrays", "source": "x.npz", "partition": partition, "where": where},
        sync={"kind": "federated", "virtual_data": virtual_data, "vhl": vhl},
        train={"steps": 5, "batch": 8},
    )


def test_the_state_dict_stays_the_users_and_further_rows_begin_at_zero() -> None:
    before = captured()
    assert with_virtual_classes(before, job("none"), Labels()) is before  # type: ignore[arg-type]
    after = with_virtual_classes(before, job(classes=5), Labels(0, 2))  # type: ignore[arg-type]
    assert after.graph.state == before.graph.state
    more = after.tensors.keys() - before.tensors.keys()
    assert {tuple(after.tensors[n].shape) for n in more} == {(5, 6), (5,)}
    assert not any(after.tensors[n].any() for n in more)
    assert {p.name for p in after.graph.parameters} == after.tensors.keys()


@pytest.mark.parametrize(
    ("vhl", "labels", "regression", "words"),
    [
        ({}, (0, 3), False, r"sync\.virtual_data.*expected those of 3 classes"),
        ({}, (-100, 1), False, r"sync\.virtual_data.*labels from -100"),
        ({"noise": [7]}, (0,), False, r"sync\.vhl\.noise.*none of them larger"),
        ({}, (0,), True, r"sync\.virtual_data.*for classifiers"),
        ({"features": "tail"}, (0,), False, r"sync\.virtual_data.*no module .tail."),
    ],
)
def test_what_does_not_fit_is_refused(
    vhl: dict[str, Any], labels: tuple[int, ...], regression: bool, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        with_virtual_classes(captured(regression), job(**vhl), Labels(*labels))  # type: ignore[arg-type]


def test_labels_that_stay_with_a_peer_are_not_read() -> None:
    after = with_virtual_classes(captured(), job(where="peer"), Labels(7))  # type: ignore[arg-type]
    assert len(after.graph.parameters) == 4


def impro(**options: Any) -> Job:
    return Job(
        model={"factory": "m.py:f"},
        data={
            **{"kind": "arrays", "source": "x.npz"},
            "partition": {"kind": "iid", "clients": 40},
        },
        sync={"kind": "federated", "method": "fedimpro", "options": options},
        train={"steps": 5, "batch": 8},
    )


def test_statistics_of_features_begin_at_zero_and_stand_in_no_export() -> None:
    before = captured(deep=True)
    assert with_feature_statistics(before, job()) is before
    after = with_feature_statistics(before, impro())
    assert after.graph.state == before.graph.state
    more = after.tensors.keys() - before.tensors.keys()
    assert sorted(tuple(after.tensors[n].shape) for n in more) == [(3,), (3, 4), (3, 4)]
    assert not any(after.tensors[n].any() for n in more)


@pytest.mark.parametrize(
    ("options", "regression", "words"),
    [
        ({}, True, "for classifiers: .*cross entrop"),
        ({}, False, "its features are its samples"),
        ({"features": "body"}, False, "no module"),
    ],
)
def test_a_model_without_such_features_is_refused(
    options: dict[str, Any], regression: bool, words: str
) -> None:
    with pytest.raises(SettingsError, match=rf"sync\.method.*{words}"):
        with_feature_statistics(captured(regression), impro(**options))
