"""Codecs that treat all elements alike: as they are, 16 bits, small integers in blocks, byte
planes."""

__all__ = [
    "block",
    "cast",
    "lossless",
    "raw",
]
