"""Candidates, and the one judge of what they cost."""
