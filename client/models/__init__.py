"""From the [model] of a job to a module, with or without its weights."""

__all__ = [
    "adapters",
    "contents",
    "division",
    "factories",
    "fitting",
    "initialise",
    "losses",
    "making",
    "models",
    "pretrained",
    "recorded",
    "recorded_steps",
    "recording",
    "state_dicts",
]
