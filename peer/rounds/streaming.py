"""Streaming DiLoCo (Douillard et al. 2025, 2501.18512): DiLoCo of one fragment a round, in four
bits, beside local steps, with a part of the local weights kept.

    m ← μ·m + D        θ ← θ - η·(D + μ·m)        local ← α·local + (1 - α)·θ

Which fragment it is, and when the version lands, is the broker's to say.
"""

from __future__ import annotations

from ...job.rounds import StreamingOptions
from ...job.settings import Settings
from .diloco import DilocoRounds

__all__ = ["StreamingRounds"]


class StreamingRounds(DilocoRounds):
    """`mix` is α."""

    def __init__(self, options: Settings, seed: int = 0) -> None:
        super().__init__(options, seed)
        assert isinstance(options, StreamingOptions), f"options of streaming, not {options!r}"
        self.mix = options.mix
        self.codecs = (options.codec, "int8:block=128" if options.bits == 4 else "none")
