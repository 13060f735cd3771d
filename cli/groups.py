"""The list of verbs in `shoal --help`, in groups by what people want."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

__all__ = ["GROUPS", "Grouped"]

GROUPS = {
    "Try it on this machine": ("init", "sim", "plan", "compare", "bench"),
    "Train": (
        "train",
        "watch",
        "logs",
        "pause",
        "resume",
        "finish",
        "cancel",
        "eval",
        "sample",
        "export",
    ),
    "Lend a GPU": ("join", "unpause", "status", "doctor"),
    "Run a network": ("broker", "invite", "kick", "login", "peers", "runs", "page"),
}
"""Every verb, once."""


class Grouped(TyperGroup):
    """Verbs in the groups of GROUPS."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        width = max(map(len, self.commands))
        for title, verbs in GROUPS.items():
            rows = []
            for verb in verbs:
                said = self.commands[verb].get_short_help_str(formatter.width - 6 - width)
                rows.append((verb.ljust(width), said))
            with formatter.section(title):
                formatter.write_dl(rows)
