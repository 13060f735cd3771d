"""Text whose writers are the clients: each module of Python's standard library is one, with lines
of its own.

python -m shoal.examples.federated_text examples/modules.npz      # write the data once
shoal sim examples/federated/modules.toml --verify
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np

__all__ = ["write_modules"]

LENGTH = 64
LEAST, MOST = 32, 64
"""Samples of a module: shorter ones are left out, and of longer ones the beginning is taken."""


def write_modules(path: str | Path) -> list[str]:
    """Write x and y (samples, 64), int64, bytes and those that follow, and module (samples,), the
    name of the file that they stand in, as an .npz file. Return these names."""
    x, names = list[np.ndarray](), list[str]()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = np.frombuffer(file.read_bytes(), np.uint8)
        samples = min(MOST, (len(text) - 1) // LENGTH)
        if samples >= LEAST:
            at = np.arange(samples)[:, None] * LENGTH + np.arange(LENGTH + 1)
            x.append(text[at].astype(np.int64))
            names += [file.stem] * samples
    order = np.random.default_rng(0).permutation(len(names))  # the last ones are held out
    rows = np.concatenate(x)[order]
    np.savez_compressed(path, x=rows[:, :-1], y=rows[:, 1:], module=np.array(names)[order])
    return sorted({*names})


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else "modules.npz"
    print(f"wrote {len(write_modules(target))} modules to {target}")
