"""How a data set is divided among the clients of federated training, as plain settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..settings import Settings, SettingsError, at_least, expect

__all__ = ["CONVENTIONS", "MOST_CLIENTS", "Convention", "Partitioning"]

Convention = Literal["per-class", "per-client", "per-client-prior"]
CONVENTIONS: tuple[Convention, ...] = ("per-class", "per-client", "per-client-prior")
MOST_CLIENTS = 10_000_000

_ONLY_OF = {
    "alpha": "dirichlet",
    "convention": "dirichlet",
    "self_balancing": "dirichlet",
    "shards": "shards",
    "key": "by-key",
}
"""Keys that one kind has alone."""
_NOT_OF_HOSTS = {
    "min_samples": "each of which has what it has",
    "held_out": "which hold out what data.holdout says",
    "seed": "for whom nothing is drawn",
}
"""Keys that say nothing of kind "by-peer", and why."""


@dataclass(frozen=True, kw_only=True)
class Partitioning(Settings):
    """The division of one data set among clients; which sample goes where follows from this, the
    labels (or keys) and nothing else."""

    kind: Literal["iid", "dirichlet", "shards", "by-key", "by-peer"]
    """iid: by lot. dirichlet: mixes of classes by lot. shards: sorted by label and cut, a client
    has `shards` pieces. by-key: a client for each key that samples have, such as a speaker.
    by-peer: a client for each host that has the data, which stays there."""
    key: str = ""
    """Of by-key, of a job: the array of the data's source that has each sample's key, integers or
    text."""
    clients: int | None = None
    """How many. None: of by-key, as many as there are keys, of by-peer as hosts; the other kinds
    need a number."""
    alpha: float | None = None
    """Of dirichlet, above 0: the smaller, the less alike clients are."""
    convention: Convention | None = None
    """Of dirichlet: what is drawn. per-class (the default): for each class, its shares over
    clients. per-client: for each client, its shares over classes, each with concentration alpha;
    clients are of equal size. per-client-prior: likewise, but with alpha in all, divided over
    classes as the whole data set is."""
    shards: int | None = None
    """Of shards: how many pieces a client has. None: 2."""
    self_balancing: bool = False
    """Of dirichlet per-class: a client that has reached the mean size gets nothing of the classes
    that are still to come."""
    min_samples: int = 1
    """The least a client has. dirichlet brings who drew fewer up to it, with samples of the largest
    clients; the other kinds refuse what does not meet it."""
    held_out: float = 0.0
    """Share of each client's own samples that it evaluates with and does not train on, below 1."""
    seed: int = 0

    def check(self) -> None:
        for key, kind in _ONLY_OF.items():
            if self.kind != kind and getattr(self, key) not in (None, False, ""):
                raise SettingsError(
                    key, f'is of kind "{kind}", and this is "{self.kind}": leave it out'
                )
        if self.clients is None and self.kind not in ("by-key", "by-peer"):
            raise SettingsError("clients", f'is missing: kind "{self.kind}" needs their number')
        if self.clients is not None:
            at_least(self, 1, "clients")
            if self.clients > MOST_CLIENTS:
                raise SettingsError("clients", f"is {self.clients}: at most {MOST_CLIENTS}")
        if self.kind == "dirichlet":
            self._check_dirichlet()
        if self.shards is not None:
            at_least(self, 1, "shards")
        why = "as a client without samples has nothing to train on"
        expect(self, "min_samples", self.min_samples >= 1, f"at least 1, {why}")
        expect(self, "held_out", 0 <= self.held_out < 1, "a share in [0, 1), such as 0.2")

    def _check_dirichlet(self) -> None:
        if self.alpha is None:
            raise SettingsError(
                "alpha",
                'is missing: kind "dirichlet" needs a number above 0, such as 0.1 for clients '
                "that are very unlike or 100 for nearly equal ones",
            )
        expect(self, "alpha", self.alpha > 0, "a finite number above 0")
        if self.self_balancing and self.drawn != "per-class":
            raise SettingsError(
                "self_balancing",
                f'is of convention "per-class"; with "{self.drawn}" all clients are of '
                "equal size: leave it out",
            )

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yield (key, with what) for each key that says something of which nothing would come."""
        if self.kind == "by-peer":
            for key, why in _NOT_OF_HOSTS.items():
                if getattr(self, key) != getattr(Partitioning, key):
                    yield key, f"clients that are hosts, {why}"
        elif self.kind == "by-key" and self.seed and not self.held_out:
            yield "seed", 'kind = "by-key" and held_out = 0, which draw nothing'

    @property
    def drawn(self) -> Convention:
        """The convention, or its default."""
        return self.convention or "per-class"

    @property
    def pieces(self) -> int:
        """Shards of a client, or their default."""
        return self.shards or 2
