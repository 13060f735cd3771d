"""Codecs that send few of the elements: which ones, where they are, and their numbers."""
