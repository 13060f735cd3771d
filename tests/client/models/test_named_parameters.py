"""What a job says of parameters by name has to name some: nothing of it is passed over."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.client.front import SimulationFront
from shoal.client.matrices import with_matrices
from shoal.client.submission import draft
from shoal.dag.capture.capture import capture
from shoal.dag.ir.graph import Graph
from shoal.job import Job, SettingsError


class Tied(nn.Module):
    """An embedding whose table is the head's, too, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale, self.none = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(0, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x) * self.scale + self.none.sum()
        return nn.functional.cross_entropy(self.head(h), y)


@pytest.fixture(scope="module")
def graph() -> Graph:
    ids = torch.zeros(2, dtype=torch.long)
    return capture(Tied(), {"x": ids, "y": ids}).graph


def settled(graph: Graph, **train) -> None:
    with_matrices(Job(model="a:b", steps=2, batch=4, **train), graph, print)


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"no_decay": ["scales"]}, r'train\.no_decay` has "scales", which names no parameter$'),
        ({"no_decay": ["head.*"]}, r'"head\.weight" is tied to "embed\.weight"'),
        ({"optimizer": "muon", "no_muon": ["body.*"]}, r'train\.no_muon` has "body\.\*"'),
        ({"optimizer": "adafactor"}, r'train\.optimizer.*"none" has no elements'),
    ],
)
def test_what_names_no_parameter_or_cannot_update_one_is_refused(graph: Graph, train, says) -> None:
    with pytest.raises(SettingsError, match=says):
        settled(graph, **train)


def test_globs_that_name_some_and_the_defaults_are_taken(graph: Graph) -> None:
    settled(graph, no_decay=["*.bias", "*norm*", "scale"])
    cold = [replace(p, trainable=p.name != "none") for p in graph.parameters]
    settled(replace(graph, parameters=tuple(cold)), optimizer="adafactor")


def test_jobs_that_share_a_capture_say_each_what_its_optimizer_has(tmp_path: Path) -> None:
    x = np.arange(20) % 5
    np.savez(tmp_path / "d.npz", x=x, y=x)
    tables = {
        "model": {"factory": f"{__name__}:Tied", "freeze": ["none"]},
        "data": {"kind": "arrays", "source": str(tmp_path / "d.npz")},
    }
    front = SimulationFront(print)
    try:
        found = [
            front.prepared(Job(**tables, steps=2, batch=4, optimizer=name)).job.train.no_muon
            for name in ("adamw", "muon")
        ]
    finally:
        front.close()
    assert found == ["auto", ("embed.weight",)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [{"rename": {"a.": "b."}}, {"fresh": ["head.*"]}], ids=["rename", "fresh"]
)
def test_what_is_said_of_weights_that_nobody_reads_is_refused(tmp_path: Path, model) -> None:
    x = np.arange(20) % 5
    np.savez(tmp_path / "d.npz", x=x, y=x)
    data = {"kind": "arrays", "source": str(tmp_path / "d.npz")}
    with pytest.raises(SettingsError, match=rf"model\.{next(iter(model))}.*no weights are read"):
        draft(Job(model={"factory": f"{__name__}:Tied", **model}, data=data, steps=2, batch=4))
