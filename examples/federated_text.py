"""Text whose writers are the clients: each module of Python's standard library is one, with lines
of its own.

python -m shoal.examples.federated_text examples/modules.npz      # write the data once
shoal sim examples/federated/modules.toml --verify

With adapters for a Hugging Face model, of which nothing else goes over the network:

python -m shoal.examples.federated_text examples/modules_hf.npz --hf
shoal sim examples/federated/adapters.toml --verify
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import numpy as np

__all__ = ["write_modules"]

LENGTH = 64
LEAST, MOST = 32, 64
"""Samples of a module: shorter ones are left out, and of longer ones the beginning is taken."""


def write_modules(path: str | Path, *, hf: bool = False) -> list[str]:
    """Write x and y (samples, 64), int64, bytes and those that follow, and module (samples,), the
    name of the file that they stand in, as an .npz file. `hf`: as models of transformers take them,
    input_ids and labels, which are the same bytes. Return the names."""
    x, names = list[np.ndarray](), list[str]()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        found = np.frombuffer(file.read_bytes(), np.uint8)
        samples = min(MOST, (len(found) - 1) // LENGTH)
        if samples >= LEAST:
            at = np.arange(samples)[:, None] * LENGTH + np.arange(LENGTH + 1)
            x.append(found[at].astype(np.int64))
            names += [file.stem] * samples
    order = np.random.default_rng(0).permutation(len(names))  # the last ones are held out
    rows = np.concatenate(x)[order]
    text = {"x": rows[:, :-1], "y": rows[:, 1:]}
    if hf:
        text = {"input_ids": rows[:, :-1], "labels": rows[:, :-1]}
    np.savez_compressed(path, **text, module=np.array(names)[order])  # type: ignore[arg-type]
    return sorted({*names})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("file", nargs="?", default="modules.npz")
    parser.add_argument("--hf", action="store_true", help="for models of transformers")
    asked = parser.parse_args()
    print(f"wrote {len(write_modules(asked.file, hf=asked.hf))} modules to {asked.file}")
