"""The shell's look at a device that was measured while its host was busy: in the pool, once the
host is idle, it is measured anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from ...proto import broker_pb2
from ..core.events import SpeedsMeasured
from ..host.lending import speed_text
from ..host.profile import speeds_to_proto
from ..host.speeds_file import newer_speeds
from ..logs import note

__all__ = ["LOOKED_S", "measure_again"]

_log = logging.getLogger(__name__)

LOOKED_S = 60.0
"""Between two looks at how busy the host is, which itself is a mean over a minute."""


async def measure_again(
    device: torch.device,
    profile: broker_pb2.Profile,
    path: Path | None,
    tell: Callable[[SpeedsMeasured], None],
    free: Callable[[], bool],
    looked_s: float = LOOKED_S,
) -> None:
    """Until it is cancelled, tell the speeds of a device that differ from those told last.

    path: the file of speeds. free: whether the peer has no part in a run."""
    told = profile.speeds
    while True:
        await asyncio.sleep(looked_s)
        if not free():
            continue
        found = await asyncio.to_thread(newer_speeds, device, profile.device, path)
        speeds = None if found is None else speeds_to_proto(found)
        if speeds is None or speeds == told or not free():
            continue
        told = speeds
        note(_log, logging.INFO, "measured", speed=speed_text(speeds.product_flops_per_s))
        tell(SpeedsMeasured(speeds))
