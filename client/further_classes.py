"""What clients of a federated run train besides, in a captured model before it is submitted. With
`sync.virtual_data` its classifier gets further classes, with fedimpro statistics of its features.
Both begin at zero and stand in no export."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..dag.capture.capture import Captured
from ..dag.ir.graph import GraphError
from ..dag.transforms.classifier import classifier_of
from ..dag.transforms.feature_statistics import above_features, with_statistics
from ..dag.transforms.virtual_classes import with_classes
from ..job import Job, SettingsError
from ..job.clients.local_work import FedImproOptions
from ..job.rounds import method_of, options_of
from ..peer.data.reader import Reader
from ..peer.federated.virtual_data import noise_shape

__all__ = ["with_feature_statistics", "with_virtual_classes"]


def with_virtual_classes(captured: Captured, job: Job, reader: Reader) -> Captured:
    """Return the capture of a model that clients of the job train on noise as well; it is what it
    was where the job has none. Raises SettingsError for a model that is no classifier without
    doubt, and for labels that would be classes of noise."""
    if job.sync.virtual_data == "none":
        return captured
    names = {"features": job.sync.vhl.features, "logits": job.sync.vhl.logits}
    try:
        found = classifier_of(captured.graph, **names)
        graph = with_classes(captured.graph, job.sync.vhl.classes or found.classes, **names)
    except GraphError as error:
        problem = f'is "vhl", which is for classifiers: {error}'
        raise SettingsError("sync.virtual_data", problem) from None
    try:
        noise_shape(job.sync.vhl, found.sample)
    except ValueError as error:
        raise SettingsError("sync.vhl.noise", str(error)) from None
    for labels in () if job.data.where == "peer" else reader.pieces(found.labels):
        if len(labels) and not 0 <= labels.min() <= labels.max() < found.classes:
            raise SettingsError(
                "sync.virtual_data",
                f'is "vhl", and "{found.labels}" has labels from {labels.min()} to '
                f"{labels.max()}: expected those of {found.classes} classes, for the next are of "
                "noise",
            )
    old = {p.name for p in captured.graph.parameters}
    rows = {p.name: torch.zeros(p.spec.sizes) for p in graph.parameters if p.name not in old}
    return replace(captured, graph=graph, tensors={**captured.tensors, **rows})


def with_feature_statistics(captured: Captured, job: Job) -> Captured:
    """Return the capture of a model whose clients share statistics of its features; it is what it
    was where the job's method has none. Raises SettingsError for a model that is no classifier
    without doubt, and for one whose logits go by more than the features."""
    if job.rounds is None or not method_of(job.rounds.method).features:
        return captured
    options = options_of(job.rounds.method, job.rounds.options)
    assert isinstance(options, FedImproOptions)
    names = {"features": options.features, "logits": options.logits}
    try:
        graph, shapes = with_statistics(captured.graph, options.share, **names)
        above_features(graph, options.share, **names)
    except GraphError as error:
        problem = f'is "{job.rounds.method}", which is for classifiers: {error}'
        raise SettingsError("sync.method", problem) from None
    zeros = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return replace(captured, graph=graph, tensors={**captured.tensors, **zeros})
