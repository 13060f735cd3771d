"""From the [model] of a job to a module, with or without its weights."""

__all__ = [
    "adapters",
    "contents",
    "division",
    "fitting",
    "initialise",
    "making",
    "models",
    "recorded",
    "recorded_steps",
    "recording",
]
