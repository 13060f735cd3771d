"""Streaming DiLoCo (Douillard et al. 2025, 2501.18512): DiLoCo of one fragment a round, in four
bits, beside local steps, with a part of the local weights kept.

    m ← μ·m + D        θ ← θ - η·(D + μ·m)        local ← α·local + (1 - α)·θ

Which fragment it is, and when the version lands, is the broker's to say.
"""

from __future__ import annotations

from ...job.rounds import StreamingOptions
from .diloco import DilocoRounds

__all__ = ["StreamingRounds"]


class StreamingRounds(DilocoRounds):
    """`mix` is α."""

    options: StreamingOptions

    def __init__(self, options: StreamingOptions, seed: int = 0) -> None:
        super().__init__(options, seed)
        self.mix = options.mix
        self.codecs = (options.codec, "int8:block=128" if options.bits == 4 else "none")
