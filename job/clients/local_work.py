"""What a client does in a round: for how long it trains, and on which data beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Literal

from ..settings import Settings, SettingsError, at_least, at_most, expect

__all__ = ["FedImproOptions", "LocalWork", "VhlOptions"]

MOST_LOCAL = 1 << 20
"""Passes or steps of a client in a round, whose batches are found before the first one."""
MOST_WALKED = 1 << 24
"""Samples that a client goes over in them, each as often as it does; while their order is found,
they take 1.5 GB."""
MOST_VIRTUAL = 1 << 16
"""Classes of noise, samples of a class, and of a batch, which may be of features."""


@dataclass(frozen=True, kw_only=True)
class LocalWork(Settings):
    """How long a client trains in a round: exactly one of passes and steps."""

    passes: int = 0
    """Over the client's own samples."""
    steps: int = 0
    """Updates, however many samples it has."""

    def check(self) -> None:
        at_least(self, 0, "passes", "steps")
        at_most(self, MOST_LOCAL, "passes", "steps")
        if bool(self.passes) == bool(self.steps):
            raise SettingsError("", "wants exactly one of passes and steps, 1 or more")

    def check_walked(self, sizes: Iterable[int], batch: int) -> None:
        """Raises SettingsError where a client of so many samples goes over too many of them in a
        round: all of the passes that its steps are of, in batches of `batch`."""
        key = "steps" if self.steps else "passes"
        for samples in sorted({*sizes} - {0}, reverse=True):
            passes = self.passes or -(-self.steps // -(-samples // batch))
            if passes * samples > MOST_WALKED:
                raise SettingsError(
                    f"sync.local.{key}",
                    f"is {getattr(self, key)}, and a client of {samples} samples goes over them "
                    f"{passes} times in a round then, {passes * samples:,} in all: expected at "
                    f"most {MOST_WALKED:,}, and more train.rounds",
                )


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
    source: Literal["gaussian", "generator"] = "gaussian"
    """What makes noise: normal numbers, or an untrained network of normal latents."""
    noise: tuple[int, ...] = ()
    """Shape in which a sample is drawn, before it is repeated up to that of the input; empty: that
    of the input, of which each dimension but the first of several is divided by four."""
    spread: float = 0.5
    """Standard deviation of the samples of a class, or of their latents, of which the means have 1.
    """
    features: str = ""
    """The module of the model that gives the features of the contrasts; empty: its last linear
    reads them."""
    logits: str = ""
    """The module that gives the logits; empty: it is the last linear."""

    def check(self) -> None:
        at_least(self, 0, "alpha", "l1", "l2", "spread")
        expect(self, "temperature", self.temperature > 0, "more than 0")
        at_least(self, 0, "classes", "batch")
        at_least(self, 1, "per_class")
        at_most(self, MOST_VIRTUAL, "classes", "batch", "per_class")
        for i, size in enumerate(self.noise):
            if size < 1:
                raise SettingsError(f"noise[{i}]", f"is {size}: expected at least 1")

    def idle(self) -> Iterator[tuple[str, str]]:
        """Yield (key, with what) for each key that says something of which nothing would come."""
        if self.l1 or self.l2:
            return
        what = "l1 = 0 and l2 = 0, without which features meet no noise"
        keys = {"temperature", "calibrate"}
        if not self.alpha:
            what = "alpha, l1 and l2 = 0, with which noise has no loss"
            keys = {f.name for f in fields(self)} - {"alpha", "l1", "l2"}
        usual = VhlOptions()
        for key in sorted(keys):
            if getattr(self, key) != getattr(usual, key):
                yield key, what


@dataclass(frozen=True, kw_only=True)
class FedImproOptions(Settings):
    """fedimpro (2402.07011): fedavg of clients that train what lies above their features on
    features of all clients as well, drawn by the mean and variance of each class."""

    weight: float = 1.0
    """Of the loss of drawn features, at least 0."""
    rise: int = 0
    """Rounds until the weight is that; it rises in a line from 0. 0: it is that from the first."""
    share: float = 0.1
    """What a step's batch counts for in the statistics of its client, in (0, 1]."""
    batch: int = 0
    """Features that are drawn in a step of a client; 0: `train.batch`."""
    most_std: float = 0.1
    """The largest standard deviation that features are drawn with; 0: any."""
    features: str = ""
    """The module of the model that gives features; empty: its last linear reads them."""
    logits: str = ""
    """The module that gives the logits; empty: it is the last linear."""

    def check(self) -> None:
        at_least(self, 0, "weight", "rise", "batch", "most_std")
        at_most(self, MOST_VIRTUAL, "batch")
        expect(self, "share", 0 < self.share <= 1, "a number in (0, 1]")
