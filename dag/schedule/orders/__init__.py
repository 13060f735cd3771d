"""Schedules: one file for each, over the same list scheduling, and the registry of their names."""

__all__ = ["gpipe", "interleaved", "list_scheduler", "one_f_one_b", "schedules", "zero_bubble"]
