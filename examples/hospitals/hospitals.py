"""Three hospitals that train one model and show nobody a case: of scikit-learn's breast cancer data
(569 cases of 30 measured numbers) each has its own part, and not the same mixture.

python -m shoal.examples.hospitals.hospitals cases                     # each one's cases, the job
python -m shoal.examples.hospitals.hospitals cases model.safetensors   # right on held-out cases
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["Diagnosis", "copy_job", "diagnosis", "right", "write"]

NUMBERS = 30
HOSPITALS = {"north": 0.45, "east": 0.35, "south": 0.2}
"""Shares of the cases."""
MIXED = 3.0
"""How much chance is in who goes where, in the unit of the mean radius: without it, north has the
small tumours alone."""

PEER = """\
name = "{name}"
[data.cases-2026]
path = "{path}"
"""


class Diagnosis(nn.Module):
    """Two layers over logarithms of what was measured, which no hospital has to agree on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(NUMBERS, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """x (B, 30) as measured, y (B,): 1 is benign. Returns the loss, and the accuracy."""
        logits = self.layers(torch.log1p(x))  # (B, 2)
        right = (logits.argmax(1) == y).float().mean()
        return {"loss": F.cross_entropy(logits, y), "accuracy": right}


def diagnosis(width: int = 16) -> Diagnosis:
    """A small classifier with so many hidden units."""
    return Diagnosis(width)


def write(folder: Path) -> list[Path]:
    """Write what each hospital has, cases.npz and peer.toml in a folder of its own. Return these
    folders. Needs scikit-learn."""
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    x, y = data.data.astype(np.float32), data.target.astype(np.int64)
    rng = np.random.default_rng(2026)
    order = np.argsort(x[:, 0] + MIXED * rng.normal(size=len(x)))
    ends = np.cumsum([round(share * len(x)) for share in HOSPITALS.values()])
    found = []
    for name, part in zip(HOSPITALS, np.split(order, ends[:-1]), strict=True):
        own = folder / name
        own.mkdir(parents=True, exist_ok=True)
        mine = rng.permutation(part)
        np.savez(own / "cases.npz", x=x[mine], y=y[mine])
        path = (own / "cases.npz").resolve()
        (own / "peer.toml").write_text(PEER.format(name=name, path=path.as_posix()))
        found.append(own)
    return found


@torch.no_grad()
def right(weights: Path, folder: Path) -> dict[str, tuple[int, int]]:
    """Return by hospital of which the cases are here, how many of those that it held out a model is
    right about, and how many there are: the last quarter, by `holdout` of job.toml, on which
    nobody trained."""
    model, found = diagnosis(), {}
    model.load_state_dict(load_file(weights))
    for file in sorted(folder.glob("*/cases.npz")):
        with np.load(file) as cases:
            x, y = torch.from_numpy(cases["x"]), torch.from_numpy(cases["y"])
        count = len(y) // 4
        said = model.layers(torch.log1p(x[-count:])).argmax(1)
        found[file.parent.name] = int((said == y[-count:]).sum()), count
    return found


def report(found: dict[str, tuple[int, int]]) -> list[str]:
    """Return lines for people, of each hospital and of all."""
    both = [sum(numbers) for numbers in zip(*found.values(), strict=True)]
    return [
        f"{name}: {good} of {count} held-out cases right, {good / count:.1%}"
        for name, (good, count) in [*found.items(), ("all", (both[0], both[1]))]
    ]


def copy_job(folder: Path) -> list[Path]:
    """Copy the job and its model to a folder, but for what is there. Return the copies."""
    mine = [Path(__file__).with_name("job.toml"), Path(__file__)]
    return [Path(shutil.copy(p, folder)) for p in mine if not (folder / p.name).exists()]


if __name__ == "__main__":
    here, *model = map(Path, sys.argv[1:])
    if model:
        print(*report(right(model[0], here)), sep="\n")
    else:
        print(*write(here), *copy_job(here.parent), sep="\n")
