"""A job without what means something on its submitter's machine alone: factory, files, outputs.

A job that came from somebody else, through a broker or in a checkpoint, is read without any of it
(`Job.from_json`). So nothing of it can be imported, read or written on this machine, whichever verb
gets it; and a submitter's paths are told to nobody. Whoever wants places in it says them himself.
"""

from __future__ import annotations

from dataclasses import replace

from .sync import Sync
from .tables import LIVE, Data, Model, Output

__all__ = ["ELSEWHERE", "data_without", "model_without", "output_without", "sync_without"]

ELSEWHERE = LIVE + "elsewhere"
"""The factory of such a job: none that could be imported."""


def model_without(model: Model) -> Model:
    """Return the model without its factory and files; URLs that peers read weights from stay."""
    weights = model.weights if model.where == "url" else "init"
    return replace(model, factory=ELSEWHERE, weights=weights, loss="forward", sidecars=())


def data_without(data: Data) -> Data:
    """Return the data without where its submitter has it; the name of a peer's data set stays."""
    if data.where == "peer":
        return data
    if data.is_records:  # its samples are numbers by now
        return Data(kind="arrays", inputs=data.inputs, targets=data.targets, length=data.length)
    tokenizer = "bytes" if data.tokenizer == "bytes" else "auto"
    held = data.holdout or (Data.holdout if data.validation else 0.0)  # something is, whatever
    return replace(data, source="", validation="", holdout=held, tokenizer=tokenizer)


def output_without(output: Output) -> Output:
    """Keep what a broker needs: when checkpoints are made, and how many are kept."""
    return Output(every=output.every, keep=output.keep)


def sync_without(sync: Sync) -> Sync:
    """Keep whether a rule of the submitter's says who is in a round, and not which."""
    return replace(sync, select=ELSEWHERE) if sync.select else sync
