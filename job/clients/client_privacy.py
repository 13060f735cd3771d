"""What versions may tell of clients: the budget of noise that hides them, and how many peers are in
a sum whose addends nobody sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..settings import Settings, SettingsError, at_least, expect

__all__ = [
    "LEAST_MEMBERS",
    "SPARE_SUMS",
    "STEP_BITS",
    "ClientPrivacy",
    "check_masked",
    "fewest_of",
    "no_integers",
    "why_members",
]

SPARE_SUMS = 8
"""Sums of a round that the budget has beside one for each round, for rounds that are made again."""
LEAST_MEMBERS = 3
"""Peers in a sum with masks: of the sum of two, each would know the other's addend."""
STEP_BITS = 24
"""Bits of the standard deviation of what one peer adds as its share of noise, in whole steps of the
sum's grid: so fine that what is rounded to it is hardly longer for it."""
_MOST_NOISE = 2.0**9
"""Of the noise in a mean: numbers of contributions and results are below 2^10."""


@dataclass(frozen=True, kw_only=True)
class ClientPrivacy(Settings):
    """Differential privacy of clients (DP-FedAvg with a fixed denominator; McMahan et al. 2018,
    1710.06963, section 3): whether any one client moves what it does, whatever its data is, or
    nothing, all versions together are as likely up to a factor e^epsilon, but for a chance of
    delta."""

    clip: float
    """The largest 2-norm of what a client moves, over all parameters."""
    epsilon: float
    """Of the whole run."""
    delta: float
    """Of the whole run, in (0, 1)."""
    noise: float = 0.0
    """Standard deviation of the noise in each sum, by `clip`. 0: the least that epsilon and delta
    allow, which is found when the run is submitted."""
    where: Literal["central", "distributed"] = "central"
    """Who adds the noise: "central": who adds up, once. "distributed": each peer that gives, a
    share of it, before what it gives is masked."""
    fewest: int = LEAST_MEMBERS
    """distributed: so many peers are in each sum, at least. Shares are so large that those of all
    of them but one, who knows its own, are the whole noise."""

    def check(self) -> None:
        for key in ("clip", "epsilon"):
            expect(self, key, 0 < getattr(self, key) < float("inf"), "a number above 0")
        expect(self, "delta", 0 < self.delta < 1, "a number in (0, 1)")
        at_least(self, 0, "noise")
        if not self.distributed and self.fewest != LEAST_MEMBERS:
            raise SettingsError(
                "fewest",
                f'is {self.fewest} with where = "central", whose noise is added once, whoever is '
                'there: leave it out, or set where = "distributed"',
            )
        at_least(self, LEAST_MEMBERS, "fewest")

    @property
    def distributed(self) -> bool:
        """Whether noise is added by who gives, and not by who adds up."""
        return self.where == "distributed"

    @property
    def share(self) -> float:
        """Standard deviation of the noise that each peer adds where it is distributed."""
        return self.noise * self.clip / math.sqrt(self.fewest - 1)

    @property
    def step(self) -> float:
        """The grid of sums whose noise is distributed, which no plan changes."""
        return math.ldexp(self.share, -STEP_BITS)

    def shortened(self, elements: int) -> float:
        """Return the 2-norm that what a client moves is shortened to, of so many numbers: `clip`,
        or so much less that sums with and without it differ by `clip` at most once both are rounded
        to the grid, each by half of a cell's diagonal. Raises SettingsError where nothing is
        left."""
        if not self.distributed:
            return self.clip
        left = self.clip - self.step * math.sqrt(elements)
        if left <= 0:
            raise SettingsError(
                "sync.privacy.epsilon",
                f"is {self.epsilon:g}: noise for that has too coarse a grid for a clip of "
                f"{self.clip:g} over {elements:,} numbers, expected a larger one",
            )
        return left

    def sums(self, rounds: int) -> int:
        """Return how many noisy sums the budget of so many rounds is for."""
        return rounds + SPARE_SUMS

    def check_fits(self, clients: int) -> None:
        """Raises SettingsError for noise that numbers of a mean over so many clients cannot have:
        nine standard deviations, with as many shares as clients where they are distributed; and for
        so little of it that a sum has too many steps of its grid."""
        noise = self.noise * self.clip
        if self.distributed:
            noise = max(noise, self.share * math.sqrt(clients))
        if self.distributed and self.noise and clients * self.clip > 2.0**60 * self.step:
            raise SettingsError(
                "noise",
                f"is {self.noise:g}, and the sum of {clients} clients has more steps of so fine a "
                "grid than an integer of 64 bits: expected more",
            )
        most = self.clip + 9 * noise / clients
        if most > _MOST_NOISE:
            raise SettingsError(
                "epsilon",
                f"is {self.epsilon}, and by that a number of the mean of {clients} clients has "
                f"noise of up to {most:.3g}: expected less than {_MOST_NOISE:g}, by a larger "
                "epsilon, a smaller clip or more clients in a round",
            )


def fewest_of(privacy: ClientPrivacy | None) -> int:
    """Return how many peers a sum with masks is of, at least."""
    return LEAST_MEMBERS if privacy is None else privacy.fewest


def why_members(privacy: ClientPrivacy | None) -> str:
    """Say how many peers a sum with masks is of, and why."""
    if privacy is not None and privacy.distributed:
        return (
            f"with sync.privacy.fewest = {privacy.fewest}: expected at least as many, whose shares "
            "of the noise are all of it"
        )
    return (
        f"with secure = true: expected at least {LEAST_MEMBERS}, since of the sum of two each "
        "knows the other's part"
    )


def check_masked(privacy: ClientPrivacy, *, secure: bool) -> None:
    """Raises SettingsError for noise in shares that no masks go with."""
    if privacy.distributed and not secure:
        raise SettingsError(
            "privacy.where",
            'is "distributed" with secure = false, and who adds up sees what each peer gives with '
            "that one's share of the noise, which is enough only with the others': expected "
            'secure = true, or "central"',
        )


def no_integers(name: str) -> str:
    """Say why sums of this are not masked."""
    return (
        f"is true, and the model has {name!r}, integers of which a round takes the largest: that "
        "is no sum, and masks cancel in sums alone. Expected a model without them, such as with "
        "GroupNorm in place of BatchNorm"
    )
