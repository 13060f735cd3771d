"""What `sync.virtual_data` does to a captured model before it is submitted: its classifier gets
further classes, which begin at zero and stand in no export."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..dag.capture.capture import Captured
from ..dag.ir.graph import GraphError
from ..dag.transforms.classifier import classifier_of
from ..dag.transforms.virtual_classes import with_classes
from ..job import Job, SettingsError
from ..peer.data.reader import Reader
from ..peer.federated.virtual_data import noise_shape

__all__ = ["with_virtual_classes"]


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
