"""What a partition is: which samples are whose, and what that looks like."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ....job.clients.partitioning import Partitioning
from .variates import Floats, Ints

__all__ = ["Partition"]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A data set, divided among clients: every sample is with exactly one. All arrays are
    read-only."""

    settings: Partitioning
    """How it was divided."""
    indices: Ints
    """(samples,): sample numbers, client after client; of each those that it trains on, then those
    that it holds out, both ascending."""
    offsets: Ints
    """(clients + 1,): client i has `indices[offsets[i]:offsets[i + 1]]`."""
    held_out_sizes: Ints
    """(clients,): how many samples at the end of its own each client holds out."""
    classes: Ints
    """(classes,): the labels that there are, ascending; none where the data has no labels."""
    counts: Ints
    """(clients, classes): samples of each client with each label, held-out ones too."""
    keys: npt.NDArray[np.generic] | None = None
    """(clients,): the key of each client where clients are keys, ascending."""

    def __post_init__(self) -> None:
        for array in (self.indices, self.offsets, self.held_out_sizes, self.classes, self.counts):
            array.flags.writeable = False

    def __len__(self) -> int:
        """How many clients there are."""
        return self.offsets.size - 1

    def __repr__(self) -> str:
        return f"<Partition {self.settings.kind}, {len(self)} clients, {self.indices.size} samples>"

    @property
    def sizes(self) -> Ints:
        """(clients,): samples of each, held-out ones too."""
        return np.diff(self.offsets)

    def train(self, client: int) -> Ints:
        """Return the numbers of the samples that a client trains on. Raises IndexError."""
        begin, end = self._bounds(client)
        return self.indices[begin : end - self.held_out_sizes[client]]

    def held_out(self, client: int) -> Ints:
        """Return the numbers of the samples that a client evaluates with. Raises IndexError."""
        _, end = self._bounds(client)
        return self.indices[end - self.held_out_sizes[client] : end]

    def _bounds(self, client: int) -> tuple[int, int]:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client}: there are clients 0 to {len(self) - 1}")
        return int(self.offsets[client]), int(self.offsets[client + 1])

    def distances(self) -> Floats:
        """Total-variation distance of each client's mix of classes from that of the whole data
        set, (clients,): 0 is the same mix, 1 would be nothing in common; 0 without labels."""
        whole = self.counts.sum(axis=0) / max(1, self.indices.size)
        found = np.zeros(len(self))
        for k in range(self.classes.size):  # by class: no second table of that size
            found += np.abs(self.counts[:, k] / self.sizes - whole[k])
        return found / 2

    def describe(self) -> str:
        """A few lines for people: how many clients, how large, of how many classes, and how unlike
        the whole."""
        s, sizes = self.settings, self.sizes
        how = f"{s.kind} {s.drawn}, alpha {s.alpha:g}" if s.alpha is not None else s.kind
        how += f", {s.pieces} a client" if s.kind == "shards" else ""
        head = f"{len(self):,} clients, {self.indices.size:,} samples"
        head += f", {self.classes.size:,} classes" if self.classes.size else ""
        lines = [f"{head} ({how}, seed {s.seed})", _spread("samples of a client", sizes)]
        if s.held_out:
            some = int((self.held_out_sizes > 0).sum())
            lines.append(
                f"  held out: {int(self.held_out_sizes.sum()):,} samples, by {some:,} clients"
            )
        if self.classes.size:
            lines.append(_spread("classes of a client", (self.counts > 0).sum(axis=1)))
            far = self.distances()
            worst = int(far.argmax())
            lines.append(
                f"  distance from the whole: median {np.median(far):.2f}, worst {far[worst]:.2f} "
                f"({self.name(worst)}); total variation, 0 is the same mix of classes"
            )
        return "\n".join(lines)

    def name(self, client: int) -> str:
        """What people call a client: its key, or its number."""
        return f"client {client}" if self.keys is None else f'"{self.keys[client]}"'

    def picture(self, path: str | Path) -> None:
        """Write who has what as a PNG file. Raises OSError."""
        from .who_has_what import draw  # slow to import

        head, *lines = self.describe().splitlines()
        text = head, lines[-1].strip() if self.classes.size else ""
        names = np.arange(len(self)) if self.keys is None else self.keys
        draw(Path(path), text, self.counts, self.sizes, self.classes, names)


def _spread(what: str, of: Ints) -> str:
    low, middle, high = int(of.min()), float(np.median(of)), int(of.max())
    return f"  {what}: smallest {low:,}, median {middle:,.10g}, largest {high:,}"
