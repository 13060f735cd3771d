"""Colours by what they mean, for a light and a dark background.

The kinds of action differ in lightness as well as in hue, so that they can be told apart without
seeing red and green.
"""

from __future__ import annotations

__all__ = ["PALETTE", "SERIES", "css", "rgb", "shade"]

PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#1b1f27"),
    "ink": ("#1d232c", "#e6e9ee"),
    "faint": ("#667080", "#98a2b3"),
    "grid": ("#e3e6ea", "#323946"),
    "wait": ("#eef0f3", "#262c37"),
    "forward": ("#3d7cc9", "#5b9bea"),
    "backward": ("#f0a03c", "#f0ac55"),
    "weight": ("#c9b458", "#d8c67a"),
    "exchange": ("#8b63c7", "#a685e0"),
    "update": ("#2f9468", "#45b384"),
    "evaluate": ("#3aa9b5", "#4fc0cc"),
    "build": ("#9aa3b0", "#76808f"),
    "send": ("#7c8797", "#8e99aa"),
    "recover": ("#cf3d3d", "#ec6464"),
    "accent": ("#b3125c", "#ff6fa8"),
    "good": ("#2f9468", "#45b384"),
    "bad": ("#cf3d3d", "#ec6464"),
    "heat0": ("#f1f4f8", "#232a35"),
    "heat1": ("#cfe0f2", "#23405f"),
    "heat2": ("#8fb9e3", "#2b5f95"),
    "heat3": ("#f3b35b", "#c98a33"),
    "heat4": ("#d9534f", "#e2605c"),
    "heat5": ("#99143f", "#ff7f9f"),
}
"""Name -> (light, dark)."""
SERIES = ("forward", "backward", "update", "exchange", "evaluate", "recover", "send", "build")
"""For things that have no colour of their own, in order."""
_STEPS = (0.01, 0.2, 0.5, 0.75, 0.95)
"""Shares at which the next colour of the heat scale begins."""


def shade(share: float) -> str:
    """The colour of a share, 0 to 1."""
    return f"heat{sum(share >= step for step in _STEPS)}"


def rgb(name: str) -> tuple[int, int, int]:
    """On a light background."""
    text = PALETTE[name][0]
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def css() -> str:
    """Variables for both backgrounds, and classes f-NAME (filled) and s-NAME (drawn)."""
    light = "".join(f"--{n}:{a};" for n, (a, _) in PALETTE.items())
    dark = "".join(f"--{n}:{b};" for n, (_, b) in PALETTE.items())
    classes = "".join(
        f".f-{n}{{fill:var(--{n})}}.s-{n}{{stroke:var(--{n});fill:none}}" for n in PALETTE
    )
    return f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{classes}"
