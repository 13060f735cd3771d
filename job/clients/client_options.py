"""[sync] of kind "federated": whose data is trained on in a round, and the methods by which the
server's weights move."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from ..settings import Settings, SettingsError, at_least, expect
from .client_compression import ClientCompression, CompressionOptions
from .client_privacy import ClientPrivacy, check_masked, fewest_of, why_members
from .local_work import LocalWork, VhlOptions
from .partitioning import Partitioning

__all__ = [
    "AGGREGATES",
    "AdaptiveOptions",
    "Aggregate",
    "Cohorts",
    "FedAvgMOptions",
    "FedAvgOptions",
    "FedBuffOptions",
    "FedNovaOptions",
    "FedProxOptions",
    "ScaffoldOptions",
    "check_weight",
    "share_of",
]

Aggregate = Literal["mean", "median", "trimmed-mean", "krum", "multi-krum", "flag"]
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
class ScaffoldOptions(Settings):
    """scaffold (Karimireddy et al. 2020): clients are corrected by how their gradients differ from
    those of all, as far as that is known from rounds that they were in."""

    lr: float = 1.0
    """The server's learning rate."""

    def check(self) -> None:
        expect(self, "lr", self.lr > 0, "more than 0")


@dataclass(frozen=True, kw_only=True)
class FedAvgMOptions(Settings):
    """fedavgm (Hsu et al. 2019): what clients moved on the mean is a gradient for a server's SGD
    with momentum."""

    lr: float = 1.0
    """The server's learning rate."""
    momentum: float = 0.9
    """In [0, 1)."""

    def check(self) -> None:
        expect(self, "lr", self.lr > 0, "more than 0")
        expect(self, "momentum", 0 <= self.momentum < 1, "a number in [0, 1)")


@dataclass(frozen=True, kw_only=True)
class FedBuffOptions(Settings):
    """fedbuff (Nguyen et al. 2022, 2106.06639): nobody waits for who is slow. A version is made as
    soon as some clients have come, each of whom may have begun with an older one."""

    buffer: int | str = "50%"
    """So many clients make a version, or so large a share of those that train at a time."""
    max_staleness: int = 10
    """What a client moved does not count if more versions than that were made since it began."""
    lr: float = 1.0
    """The server's learning rate."""

    def check(self) -> None:
        share_of(self.buffer, 100, "buffer")
        at_least(self, 0, "max_staleness")
        expect(self, "lr", self.lr > 0, "more than 0")

    def wanted(self, per_round: int) -> int:
        """Return how many clients make a version, of so many that train at a time. Raises
        SettingsError."""
        found = share_of(self.buffer, per_round, "buffer")
        if found > per_round:
            raise SettingsError(
                "buffer",
                f"is {found}, and {per_round} clients train at a time: expected at most as many",
            )
        return found


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
        expect(self, "lr", self.lr > 0, "more than 0")
        expect(self, "eps", self.eps > 0, "more than 0")
        for i, beta in enumerate(self.betas):
            if not 0 <= beta < 1:
                raise SettingsError(f"betas[{i}]", f"is {beta}: expected a number in [0, 1)")


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
    privacy: ClientPrivacy | None = None
    """How clients are hidden in the sum; None: they are not."""
    sends: ClientCompression = field(default_factory=ClientCompression)
    """What it sends of its update."""
    vhl: VhlOptions | None = None
    """Of the virtual data that clients train on besides; None: there is none."""
    secure: bool = False
    """Whether what peers give to a sum is masked (`peer/secure/`)."""
    selected: bool = False
    """Whether a rule of the submitter's may say who is in a round."""

    @property
    def shares_positions(self) -> bool:
        """Whether all clients of a round send the same numbers, and not each its largest."""
        return self.secure and self.sends.sparse

    @property
    def own_positions(self) -> bool:
        """Whether each client sends numbers at places of its own."""
        return self.sends.sparse and not self.secure

    @property
    def fewest(self) -> int:
        """How many peers are in a sum, at least."""
        return fewest_of(self.privacy) if self.secure else 1

    @property
    def places(self) -> int:
        """How many places of a round's order may be in it: the first `per_round`, or all where a
        rule says which."""
        return self.clients if self.selected else self.per_round

    @property
    def told(self) -> bool:
        """Whether the broker is told what single clients come to, which a rule may go by: not where
        they are hidden."""
        return self.selected and not self.secure and self.privacy is None

    @property
    def by_client(self) -> bool:
        """Whether each client's contribution is exchanged by itself, and not their mean."""
        return self.aggregate != "mean"

    @property
    def chooses(self) -> bool:
        """Whether what a client counts for goes by the whole of what clients came to."""
        return self.aggregate in ("krum", "multi-krum", "flag")

    def check(self) -> None:
        at_least(self, 1, "clients", "per_round")
        at_least(self, 0, "byzantine")
        check_weight(self.aggregate, self.weight)
        if self.privacy is not None:
            try:
                self.privacy.check_fits(self.per_round)
            except SettingsError as error:
                raise error.inside("privacy") from None
        usual = CompressionOptions().explore
        if not self.secure and self.sends.compression_options.explore != usual:
            raise SettingsError(
                "compression_options.explore",
                f"is {self.sends.compression_options.explore} with secure = false, where each "
                "client sends its own largest numbers: leave it out",
            )
        if self.secure:
            self._check_secure()
        elif self.privacy is not None:
            check_masked(self.privacy, secure=self.secure)
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

    def _check_secure(self) -> None:
        why = ""
        if self.by_client:
            why = f'aggregate = "{self.aggregate}", which looks at each update, and nobody sees one'
        elif self.sends.by_links:
            why = (
                f'compression = "{self.sends.compression}", where each client sends as many '
                "numbers as its link carries, and masks cancel only where all send the same ones"
            )
        elif self.sends.feedback:
            why = (
                'client_feedback = "ef": what a client keeps would be of places that the round\'s '
                "version decides, which is not shown to learn as it should"
            )
        if why:
            raise SettingsError(
                "secure", f"is true with {why}: expected false, or another of these"
            )
        if self.per_round < self.fewest:
            raise SettingsError("per_round", f"is {self.per_round} {why_members(self.privacy)}")


def check_weight(aggregate: Aggregate, weight: str) -> None:
    """Raises SettingsError for weights that the aggregate has no use for."""
    if aggregate != "mean" and weight != "equal":
        raise SettingsError(
            "weight",
            f'is "{weight}" with aggregate = "{aggregate}", where one client is as good as the '
            'other, for who is wrong could have any weight: expected "equal"',
        )


def share_of(text: int | str, clients: int, key: str = "per_round", what: str = "clients") -> int:
    """Return how many clients a number or a share such as "10%" of so many is, at least 1. `what`
    they are, for a message. Raises SettingsError."""
    if isinstance(text, int):
        if text < 1:
            raise SettingsError(key, f"is {text}: expected at least 1")
        return text
    written = re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)%", text, re.ASCII)
    share = Fraction(written[1] if written else 0)
    if not 0 < share <= 100:
        raise SettingsError(
            key, f'is "{text}": expected a number of {what}, or a share such as "10%" or "0.1%"'
        )
    return max(1, math.ceil(clients * share / 100))
