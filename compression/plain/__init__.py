"""Codecs that treat all elements alike: as they are, 16 bits, small integers in blocks, signs
with powers of two, byte planes."""
