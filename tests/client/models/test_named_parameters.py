"""What a job says of parameters by name has to name some: nothing of it is passed over."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.client.submission import draft
from shoal.job import Job, SettingsError


class Tied(nn.Module):
    """An embedding whose table is the head's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(x) * self.scale), y)


def drafted(tmp_path: Path, **tables) -> None:
    x = np.arange(20) % 5
    np.savez(tmp_path / "d.npz", x=x, y=x)
    model = {"model": Tied(), "data": {"kind": "arrays", "source": str(tmp_path / "d.npz")}}
    draft(Job(**model | {"steps": 2, "batch": 4} | tables))


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ({"no_decay": ["scales"]}, r'train\.no_decay` has "scales", which names no parameter$'),
        ({"no_decay": ["head.*"]}, r'"head\.weight" is tied to "embed\.weight"'),
        ({"optimizer": "muon", "no_muon": ["body.*"]}, r'train\.no_muon` has "body\.\*"'),
    ],
)
def test_a_glob_that_names_no_parameter_is_refused(tmp_path: Path, train, says) -> None:
    with pytest.raises(SettingsError, match=says):
        drafted(tmp_path, **train)


def test_globs_that_name_some_and_the_defaults_are_taken(tmp_path: Path) -> None:
    drafted(tmp_path, no_decay=["*.bias", "*norm*", "scale"])


@pytest.mark.parametrize(
    "model", [{"rename": {"a.": "b."}}, {"fresh": ["head.*"]}], ids=["rename", "fresh"]
)
def test_what_is_said_of_weights_that_nobody_reads_is_refused(tmp_path: Path, model) -> None:
    table = {"factory": f"{__name__}:Tied", **model}
    with pytest.raises(SettingsError, match=rf"model\.{next(iter(model))}.*no weights are read"):
        drafted(tmp_path, model=table)
