"""A token from the command line, from a file, from standard input, or from the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Token", "TokenFile", "read_token"]

Token = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="From the line of the broker; default: SHOAL_TOKEN."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="File with the token, or - for standard input: no list of processes has it."),
]


def read_token(token: str | None, file: Path | None) -> str:
    """The token that was given, in whichever way; empty when none was. Raises ValueError when two
    were, OSError for a file that cannot be read."""
    if token and file:
        raise TokenChoiceError("--token and --token-file: expected one of them")
    if token:
        return token.strip()
    if file is not None:
        return (sys.stdin.readline() if str(file) == "-" else file.read_text()).strip()
    return os.environ.get("SHOAL_TOKEN", "").strip()


class TokenChoiceError(ValueError):
    """Two tokens were given."""
