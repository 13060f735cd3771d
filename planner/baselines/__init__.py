"""Planners that the literature compares with."""
