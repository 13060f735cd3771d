"""The verb that measures this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from .base import WRONG, Json, app, complain, echo, print_json, verb

__all__ = ["bench", "codecs"]

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure this machine. Example: shoal bench codecs --elements 1000000",
)
app.add_typer(bench, name="bench")


@bench.callback()
def _measures() -> None:
    """Measure this machine. Example: shoal bench codecs --elements 1000000"""


@bench.command()
@verb
def codecs(
    elements: Annotated[
        int, typer.Option(min=1, max=2**28, help="Elements of the fp32 tensor, about.")
    ] = 1_000_000,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Such as topk:ratio=50; may repeat. Default: a list."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda:N.")] = "cpu",
    json: Json = False,
) -> None:
    """Show bytes, speed and error of each codec on this machine, on Gaussian numbers. Example:
    shoal bench codecs --elements 10000000 --codec bf16 --codec topk:ratio=100"""
    from dataclasses import asdict

    import torch

    from ..client import bench as benches
    from ..compression.codec import CodecError, parse

    texts = list(dict.fromkeys(codec or benches.CODECS))
    for text in texts:
        parse(text)  # all of them before the first is measured
    count = torch.cuda.device_count()
    known = ["cpu", *(f"cuda:{i}" for i in range(count))]
    if device not in known:
        complain(f"--device {device} is not here: expected one of {', '.join(known)}")
        raise typer.Exit(WRONG)
    tensors = benches.gaussian(elements, device)
    rows = []
    for text in texts:
        try:
            rows.append(benches.measure(text, tensors))
        except CodecError as error:  # such as a rank that is more than so few elements have
            complain(f"{text} is left out: {error}")
    if not rows:
        raise typer.Exit(WRONG)
    about, shape = benches.machine(device), tuple(tensors[0].shape)
    if json:
        print_json({"machine": about, "shape": shape, "codecs": [asdict(r) for r in rows]})
        return
    echo(
        f"fp32{list(shape)}, standard normal, on {about['device']}: {about['threads']} threads of "
        f"{about['cores']} cores ({about['architecture']}), torch {about['torch']}"
    )
    for line in benches.table(rows):
        echo(line)
