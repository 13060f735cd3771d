"""When what runs: schedules, the wiring of action lists, their proof, and a plan's way to the wire
and back."""

__all__ = [
    "convert_plan",
    "convert_report",
    "convert_slice",
    "filled",
    "flow",
    "orders",
    "replay",
    "schedule",
    "slices",
]
