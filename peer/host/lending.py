"""What the owner of a host reads first: what this is, what it gives, and that it is in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ...job.words import size_text

if TYPE_CHECKING:
    from ...proto.broker_pb2 import Profile
    from .config import SharedConfig

__all__ = ["in_text", "lending_lines", "speed_text"]


def lending_lines(config: SharedConfig, devices: Sequence[str]) -> Iterator[str]:
    """Lines to say before anything is loaded. config: of the host, with what its owner allows."""
    yield (
        f"This host lends {', '.join(devices)} to train models together with others. It gets parts "
        "of a model as data, never a program to run (docs/security.md)."
    )
    given = [
        "a share of the memory that is free"
        if config.memory_bytes is None
        else f"{size_text(config.memory_bytes)} of memory of each device"
    ]
    given.append(f"between {config.hours}" if config.hours else "at any hour")
    for word, rate in (("up", config.up_bytes_per_s), ("down", config.down_bytes_per_s)):
        if rate:
            given.append(f"at most {8 * rate / 1e6:.3g} Mbit/s {word}")
    if config.monthly_bytes is not None:
        given.append(f"at most {config.monthly_bytes / 1e9:.3g} GB a month")
    yield f"It gives: {', '.join(given)}. Less: --memory, --hours, --up, or peer.toml."
    yield "Ctrl-C leaves in good order; `shoal pause` rests this host, `shoal unpause` ends that."


def in_text(name: str, profile: Profile) -> str:
    """Line to say when the broker has taken a peer."""
    return (
        f"you are in as {name}: {size_text(profile.device_memory_bytes)} and "
        f"{speed_text(profile.flops_per_s)} of {profile.device}; Ctrl-C leaves in good order"
    )


def speed_text(flops_per_s: float) -> str:
    """A speed of computing, for people."""
    return f"{flops_per_s / 1e12:.3g} TFLOP/s"
