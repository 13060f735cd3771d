"""Codecs that treat all elements alike: as they are, 16 bits, small integers in blocks, signs
with powers of two, byte planes."""

__all__ = [
    "block",
    "cast",
    "e3m0",
    "lossless",
    "raw",
]
