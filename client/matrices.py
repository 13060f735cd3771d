"""What a job says of matrices, settled before it is submitted: which are Muon's (everybody who
updates one, and the plain loop, goes by names in the job), and which frozen ones peers keep in 8
bits (`model.frozen_dtype`)."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from ..dag.analysis.hidden_matrices import hidden_matrices
from ..dag.ir.graph import Graph
from ..dag.ir.quantized import quantized
from ..dag.transforms.quantize import in_int8, kept_wide
from ..dag.transforms.split_weights import scale_name
from ..job import Job, SettingsError
from ..job.training import Train
from ..job.words import size_text, some_of
from .models.adapters import plain_name

__all__ = ["round_base", "with_base", "with_matrices"]


def with_matrices(job: Job, graph: Graph, say: Callable[[str], None]) -> Job:
    """Return the job with `train.no_muon` said, where it is open. Raises SettingsError for globs of
    [train] that name no parameter, and for a parameter that the optimizer cannot update."""
    _check_globs(job.train, graph)
    empty = [p.name for p in graph.parameters if p.trainable and 0 in p.spec.shape]
    if empty and job.train.optimizer in ("muon", "adafactor"):
        raise SettingsError(
            "train.optimizer",
            f'is "{job.train.optimizer}", and "{empty[0]}" has no elements, by whose number torch '
            'divides: freeze it (model.freeze), or take "adamw"',
        )
    if job.train.optimizer != "muon" or job.train.no_muon != "auto":
        return job
    hidden = hidden_matrices(graph.bind(job.train.microbatch_size))
    flat = [p.name for p in graph.parameters if p.trainable and len(p.spec.shape) == 2]
    others = tuple(glob.escape(name) for name in flat if name not in hidden)
    say(f"muon: {len(hidden)} hidden matrices; everything else by AdamW")
    return replace(job, train=replace(job.train, no_muon=others))


def _check_globs(train: Train, graph: Graph) -> None:
    """Raise SettingsError for a glob, apart from the defaults, by which nothing is chosen."""
    for key in ("no_decay", "no_muon"):
        globs: tuple[str, ...] = () if (said := getattr(train, key)) == "auto" else said
        for one in set(globs) - set(Train.no_decay):
            if any(fnmatchcase(p.name, one) for p in graph.parameters):
                continue
            tied = [(t, p.name) for p in graph.parameters for t in p.tied if fnmatchcase(t, one)]
            also = (
                f': "{tied[0][0]}" is tied to "{tied[0][1]}", and goes by that name' if tied else ""
            )
            raise SettingsError(f"train.{key}", f'has "{one}", which names no parameter{also}')


def with_base(job: Job, graph: Graph, say: Callable[[str], None]) -> Graph:
    """Return the graph as peers hold it: its frozen matrices in 8 bits, where the job says so.
    Raises SettingsError where it says so and there are none."""
    if job.model.frozen_dtype != "int8":
        return graph
    made, wide = in_int8(graph), kept_wide(in_int8(graph))
    if made is graph:
        frozen = some_of(wide) or "nothing"
        raise SettingsError(
            "model.frozen_dtype",
            f'is "int8", and no frozen matrix is one of linear layers or embeddings alone (frozen: '
            f"{frozen}): expected model.lora, model.freeze, or no frozen_dtype",
        )
    before, after = (sum(g.parameter_bytes.values()) for g in (graph, made))
    line = f"frozen_dtype: weights of {size_text(before)} take {size_text(after)}"
    if wide:
        line += f"; as they are made stay {some_of(wide)}, which other operators read"
    say(line)
    return made


def round_base(module: nn.Module, graph: Graph) -> None:
    """Gives the frozen weights of a module the values that they have in 8 bits: it then computes
    what peers do that hold such a graph of it."""
    known, name_of = graph.spec, plain_name(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            scale = known.get(f"param:{scale_name(name_of(name))}")
            if scale is not None:
                by_row = scale.shape[-1] == 1
                numbers, scales = quantized(parameter, 0 if by_row else 1)
                parameter.copy_(numbers * scales)
