"""[sync] of kind "federated": whose data is trained on in a round, for how long, beside which
virtual data, and the methods by which the server's weights move."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .partitioning import Partitioning
from .settings import Settings, SettingsError, at_least, at_most

__all__ = [
    "AGGREGATES",
    "AdaptiveOptions",
    "Aggregate",
    "Cohorts",
    "FedAvgMOptions",
    "FedAvgOptions",
    "FedNovaOptions",
    "FedProxOptions",
    "LocalWork",
    "VhlOptions",
    "check_weight",
    "share_of",
]

Aggregate = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum"]
AGGREGATES: Mapping[Aggregate, int] = {"trimmed-mean": 1, "krum": 3, "multi-krum": 3}
"""Rules that leave out as many clients as may be wrong, f: how many a round has beside 2f, at
least."""


@dataclass(frozen=True, kw_only=True)
class FedAvgOptions(Settings):
    """fedavg (McMahan et al. 2017): all go on from the weighted mean of what clients came to."""


@dataclass(frozen=True, kw_only=True)
class FedProxOptions(Settings):
    """fedprox (Li et al. 2020): fedavg of clients that are drawn back to the version that they
    began with, by the gradient of mu/2 times the squared distance."""

    mu: float = 0.01
    """How strongly, at least 0."""

    def check(self) -> None:
        at_least(self, 0, "mu")


@dataclass(frozen=True, kw_only=True)
class FedNovaOptions(Settings):
    """fednova (Wang et al. 2020): the mean is of what clients moved by one step of theirs, so that
    who makes more steps does not count for more."""


@dataclass(frozen=True, kw_only=True)
class FedAvgMOptions(Settings):
    """fedavgm (Hsu et al. 2019): what clients moved on the mean is a gradient for a server's SGD
    with momentum."""

    lr: float = 1.0
    """The server's learning rate."""
    momentum: float = 0.9
    """In [0, 1)."""

    def check(self) -> None:
        if not self.lr > 0:
            raise SettingsError("lr", f"is {self.lr}: expected more than 0")
        if not 0 <= self.momentum < 1:
            raise SettingsError("momentum", f"is {self.momentum}: expected a number in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(Settings):
    """fedadam, fedyogi, fedadagrad (Reddi et al. 2021): what clients moved on the mean is a
    gradient for an adaptive optimizer of the server, without bias correction."""

    lr: float = 0.03
    """The server's learning rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay of the first and second moment; fedadagrad has no use for the second."""
    eps: float = 1e-3
    """Addend to the root of the second moment."""

    def check(self) -> None:
        if not self.lr > 0:
            raise SettingsError("lr", f"is {self.lr}: expected more than 0")
        if not self.eps > 0:
            raise SettingsError("eps", f"is {self.eps}: expected more than 0")
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise SettingsError(f"betas[{i}]", f"is {beta}: expected a number in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class LocalWork(Settings):
    """How long a client trains in a round: exactly one of passes and steps."""

    passes: int = 0
    """Over the client's own samples."""
    steps: int = 0
    """Updates, however many samples it has."""

    def check(self) -> None:
        at_least(self, 0, "passes", "steps")
        if bool(self.passes) == bool(self.steps):
            raise SettingsError("", "wants exactly one of passes and steps, 1 or more")


MOST_VIRTUAL = 1 << 16


@dataclass(frozen=True, kw_only=True)
class VhlOptions(Settings):
    """VHL (Tang et al. 2022, 2206.02465): clients train on labelled noise as well, the same set at
    all of them, and their features of a class are drawn to those of its noise. A client's loss is
    CE(real) + alpha·CE(virtual), and while it calibrates l1·SupCon(real, virtual) +
    l2·SupCon(virtual) besides."""

    alpha: float = 1.0
    """Of the cross entropy of noise, at least 0. With 0 the model learns no further classes."""
    l1: float = 1.0
    """Of the contrast of real features with those of noise, at least 0."""
    l2: float = 0.1
    """Of the contrast of noise with noise, at least 0."""
    temperature: float = 0.07
    """Of both contrasts."""
    calibrate: LocalWork = field(default_factory=lambda: LocalWork(passes=5))
    """How long both contrasts count in a client's work of a round: its first `passes` or `steps`.
    """
    classes: int = 0
    """Of noise; 0: as many as the model has."""
    per_class: int = 2000
    """Samples in a class of noise."""
    batch: int = 0
    """Samples of noise in a step of a client; 0: `train.batch`."""
    noise: tuple[int, ...] = ()
    """Shape in which a sample is drawn, before it is repeated up to that of the input; empty: that
    of the input, of which each dimension but the first of several is divided by four."""
    spread: float = 0.5
    """Standard deviation of the samples of a class, of which the means have 1."""

    def check(self) -> None:
        at_least(self, 0, "alpha", "l1", "l2", "spread")
        if not self.temperature > 0:
            raise SettingsError("temperature", f"is {self.temperature}: expected more than 0")
        at_least(self, 0, "classes", "batch")
        at_least(self, 1, "per_class")
        at_most(self, MOST_VIRTUAL, "classes", "batch", "per_class")
        for i, size in enumerate(self.noise):
            if size < 1:
                raise SettingsError(f"noise[{i}]", f"is {size}: expected at least 1")


@dataclass(frozen=True, kw_only=True)
class Cohorts(Settings):
    """Clients, cohorts, and what a client does in a round. Which client has which samples follows
    from `partition` and the column of labels, on every machine alike."""

    partition: Partitioning
    labels: str
    """The column that the partition goes by; empty: none."""
    clients: int
    """How many there are."""
    per_round: int
    """So many of them are in a round."""
    local: LocalWork = field(default_factory=lambda: LocalWork(passes=1))
    weight: Literal["samples", "equal"] = "samples"
    """What a client counts for in the mean: by its samples, or all alike."""
    aggregate: Aggregate = "mean"
    """What is made of what clients came to (`dag/rounds/combiners.py`)."""
    byzantine: int = 0
    """So many clients of a round may be wrong."""
    vhl: VhlOptions | None = None
    """Of the virtual data that clients train on besides; None: there is none."""

    @classmethod
    def of(
        cls,
        partition: Partitioning,
        labels: str,
        per_round: int | str,
        byzantine: int | str,
        **work: Any,
    ) -> Cohorts | None:
        """Cohorts of a partition; None: how many clients there are is only known with the data."""
        if (clients := partition.clients) is None:
            return None
        count = share_of(per_round, clients)
        wrong = share_of(byzantine, count, "byzantine") if work["aggregate"] in AGGREGATES else 0
        return cls(
            partition=partition,
            labels=labels,
            clients=clients,
            per_round=count,
            byzantine=wrong,
            **work,
        )

    @property
    def by_client(self) -> bool:
        """Whether each client's contribution is exchanged by itself, and not their mean."""
        return self.aggregate != "mean"

    @property
    def chooses(self) -> bool:
        """Whether clients count or do not by the whole of what they came to."""
        return self.aggregate in ("krum", "multi-krum")

    def check(self) -> None:
        at_least(self, 1, "clients", "per_round")
        at_least(self, 0, "byzantine")
        check_weight(self.aggregate, self.weight)
        if self.per_round > self.clients:
            raise SettingsError(
                "per_round",
                f"is {self.per_round}, and there are {self.clients} clients: expected at most as "
                "many",
            )
        needed = 2 * self.byzantine + AGGREGATES.get(self.aggregate, 0)
        if self.per_round < needed:
            raise SettingsError(
                "byzantine",
                f"is {self.byzantine} of the {self.per_round} clients of a round, and aggregate = "
                f'"{self.aggregate}" needs {needed} of them for that: expected fewer, or more '
                "per_round",
            )


def check_weight(aggregate: Aggregate, weight: str) -> None:
    """Raises SettingsError for weights that the aggregate has no use for."""
    if aggregate != "mean" and weight != "equal":
        raise SettingsError(
            "weight",
            f'is "{weight}" with aggregate = "{aggregate}", where one client is as good as the '
            'other, for who is wrong could have any weight: expected "equal"',
        )


def share_of(text: int | str, clients: int, key: str = "per_round") -> int:
    """Return how many clients a number or a share such as "10%" of so many is, at least 1. Raises
    SettingsError."""
    if isinstance(text, int):
        if text < 1:
            raise SettingsError(key, f"is {text}: expected at least 1")
        return text
    share = text.removesuffix("%")
    if share == text or not share.isdecimal() or not 0 < int(share) <= 100:
        raise SettingsError(
            key, f'is "{text}": expected a number of clients, or a share such as "10%"'
        )
    return max(1, -(-clients * int(share) // 100))
