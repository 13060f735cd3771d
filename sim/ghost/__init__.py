"""Hashes in the place of tensors, and what they must come to."""
