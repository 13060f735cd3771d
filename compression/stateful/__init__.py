"""Codecs that remember from tensor to tensor: error feedback, changes, and a basis that both ends
know."""
