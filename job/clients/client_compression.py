"""What clients of federated training send of their updates: [sync] compression, its options, and
the links that ratios go by (BCRS and OPWA: Tang et al. 2024, 2408.14736, whose letters stand
beside the keys)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..settings import Settings, SettingsError, at_least, expect
from ..units import Duration, Rate, UnitError

__all__ = [
    "ClientCompression",
    "ClientLinks",
    "Compression",
    "CompressionOptions",
    "Spread",
    "spread_of",
]

Compression = Literal["none", "topk", "bcrs", "bcrs+opwa"]
_WORDS = ("normal", "uniform")


class Spread(NamedTuple):
    """Numbers that are drawn: all are `first`; normal around `first` with deviation `second`, none
    below a tenth of `first`; or uniform from `first` to `second`."""

    kind: Literal["fixed", "normal", "uniform"]
    first: float
    second: float = 0.0


def spread_of(text: str, unit: type[Rate] | type[Duration]) -> Spread:
    """Return what "20Mbit", "normal:1Mbit,0.2Mbit" or "uniform:0.5Mbit,20Mbit" says, in the base
    of its unit. Raises UnitError."""
    kind, _, rest = text.partition(":")
    if kind not in _WORDS:
        return Spread("fixed", float(unit(text)))
    given = rest.split(",")
    if len(given) != 2:
        raise UnitError(f'"{text}": expected two quantities behind "{kind}:", with a comma between')
    first, second = (float(unit(part)) for part in given)
    if kind == "normal":
        return Spread("normal", first, second)
    if second < first:
        raise UnitError(f'"{text}": expected the smaller one first')
    return Spread("uniform", first, second)


@dataclass(frozen=True, kw_only=True)
class ClientLinks(Settings):
    """The links of clients that are a partition of one's own data; each client's is drawn once."""

    up: str
    """Uplink (B_i): one rate for all, or "normal:MEAN,DEVIATION" or "uniform:LEAST,MOST"."""
    latency: str = "0ms"
    """Seconds before the first byte arrives (L_i): likewise."""
    seed: int = 0
    """Of the draws."""

    def check(self) -> None:
        for key, unit in (("up", Rate), ("latency", Duration)):
            try:
                found = spread_of(getattr(self, key), unit)
            except UnitError as error:
                raise SettingsError(key, f"is not readable: {error}") from None
            if key == "up" and not found.first > 0:
                raise SettingsError(key, f'is "{self.up}": expected a rate above 0')


@dataclass(frozen=True, kw_only=True)
class CompressionOptions(Settings):
    """How much clients send, and what becomes of it."""

    least_ratio: float = 0.1
    """The share of its update that a client sends at least (CR*), in (0, 1]; with "topk" all send
    as much."""
    alpha: float = 1.0
    """bcrs: how much more those weigh that send more, in [0, 1]; 0: not at all."""
    gamma: float = 5.0
    """opwa: by what the mean of a number is multiplied that few clients sent, at least 1."""
    overlap_degree: int = 1
    """opwa: so many clients are few (D)."""
    explore: float = 0.5
    """secure: the share, in (0, 1], of the numbers that all send which is drawn anew in each round;
    the others are those that the last version moved farthest."""

    def check(self) -> None:
        expect(self, "least_ratio", 0 < self.least_ratio <= 1, "a share in (0, 1]")
        expect(self, "alpha", 0 <= self.alpha <= 1, "a number in [0, 1]")
        expect(self, "explore", 0 < self.explore <= 1, "a share in (0, 1]")
        at_least(self, 1, "gamma", "overlap_degree")


_ONLY_OF = {"alpha": "bcrs", "gamma": "bcrs+opwa", "overlap_degree": "bcrs+opwa"}
"""Options that one compression, and what is built on it, has alone."""


@dataclass(frozen=True, kw_only=True)
class ClientCompression(Settings):
    """The keys of [sync] that say what clients send."""

    compression: Compression = "none"
    compression_options: CompressionOptions = field(default_factory=CompressionOptions)
    client_links: ClientLinks | None = None
    client_feedback: Literal["none", "ef"] = "none"
    """What becomes of what a client does not send; "ef": it is added to what it moves next."""

    def check(self) -> None:
        options, usual = self.compression_options, CompressionOptions()
        none, instead = 'with compression = "none"', 'or name one of "topk", "bcrs", "bcrs+opwa"'
        if not self.sparse and options != usual:
            raise SettingsError("compression_options", f"is given {none}: leave it out, {instead}")
        if not self.sparse and self.feedback:
            why = f"{none}, where clients send all: leave it out, {instead}"
            raise SettingsError("client_feedback", f'is "ef" {why}')
        if not self.sparse and self.client_links is not None:
            why = f"{none}, where no client sends by its link: leave them out, {instead}"
            raise SettingsError("client_links", f"are given {why}")
        for key, kind in _ONLY_OF.items():
            if not self.compression.startswith(kind) and getattr(options, key) != getattr(
                usual, key
            ):
                raise SettingsError(
                    f"compression_options.{key}",
                    f'is of "{kind}", and this is "{self.compression}": leave it out',
                )

    def check_links(self, *, hosts: bool) -> None:
        """Raise SettingsError unless the job says what links clients have, or their `hosts` do."""
        if hosts and self.client_links is not None:
            raise SettingsError(
                "sync.client_links",
                'are given with data.where = "peer", where each client has the measured link of '
                "its host: leave them out",
            )
        if self.by_links and self.client_links is None and not hosts:
            raise SettingsError(
                "sync.client_links",
                f'is missing: compression = "{self.compression}" gives each client a ratio by its '
                "link. Clients are parts of one data set here, and what links they stand for only "
                'the job knows: expected a table such as { up = "uniform:0.5Mbit,20Mbit", latency '
                '= "100ms" }',
            )

    @property
    def sparse(self) -> bool:
        """Whether clients send a part of what they moved."""
        return self.compression != "none"

    @property
    def feedback(self) -> bool:
        """Whether a client keeps what it does not send until its next round."""
        return self.client_feedback == "ef"

    @property
    def by_links(self) -> bool:
        """Whether each sends as much as its link carries while the slowest sends the least."""
        return self.compression.startswith("bcrs")

    @property
    def overlap(self) -> tuple[float, int] | None:
        """(gamma, D) of OPWA; None: how many sent a number makes no difference."""
        options = self.compression_options
        weighs = self.compression == "bcrs+opwa"
        return (options.gamma, options.overlap_degree) if weighs else None
