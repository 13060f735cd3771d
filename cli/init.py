"""The verb that begins a project."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from .base import WRONG, Json, app, complain, echo, print_json, verb

__all__ = ["init"]


@app.command()
@verb
def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A folder that is new or empty.")
    ] = None,
    template: Annotated[str, typer.Option(metavar="NAME", help="One of --list.")] = "pretrain",
    show: Annotated[bool, typer.Option("--list", help="Show the templates.")] = False,
    json: Json = False,
) -> None:
    """Write a small working project to begin from: job, model, data, a network to try it on.
    Example: shoal init mine --template classify"""
    from ..client.templates.project import TEMPLATES, about, begin, next_line

    if show:
        rows = [{"name": name, "about": about(name)} for name in TEMPLATES]
        if json:
            print_json(rows)
            return
        width = max(map(len, TEMPLATES))
        for row in rows:
            echo(f"{row['name']:<{width}}  {row['about']}")
        return
    if folder is None:
        complain("where shall the project be? Expected shoal init DIR (or --list)")
        raise typer.Exit(WRONG)
    begin(folder, template)
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    line = next_line(template)
    if json:
        print_json({"folder": str(folder), "files": files, "next": line})
        return
    echo(f"{folder}: {', '.join(files)}", err=True)
    there = "" if folder.resolve() == Path(os.getcwd()).resolve() else f"cd {folder} && "
    echo(f"next: {there}{line}")
