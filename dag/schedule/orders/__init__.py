"""Schedules: one file for each, over the same list scheduling, and the registry of their names."""
