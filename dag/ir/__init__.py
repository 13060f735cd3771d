"""The graph itself: operators and their allow-list, random numbers, starting weights as recipes,
validation, and the way to the wire and back."""

__all__ = [
    "capture_errors",
    "convert",
    "convert_args",
    "draws",
    "experts",
    "fused",
    "fx_args",
    "graph",
    "infer",
    "operators",
    "random",
    "recipe",
    "rules",
    "torch_parts",
    "validate",
]
