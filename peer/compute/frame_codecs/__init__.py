"""Codecs of one peer's frames: `codings` says which one carries a transfer, `streams` has what its
ends remember from step to step, and `uses` what frames took."""
