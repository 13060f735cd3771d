"""Which of a model's parameters are Muon's, said before a job is submitted: everybody who updates
one, and the plain loop, goes by names in the job."""

from __future__ import annotations

import glob
from collections.abc import Callable
from dataclasses import replace

from ..dag.analysis.hidden_matrices import hidden_matrices
from ..dag.ir.graph import Graph
from ..job import Job

__all__ = ["with_matrices"]


def with_matrices(job: Job, graph: Graph, say: Callable[[str], None]) -> Job:
    """Return the job with `train.no_muon` said, where it is open."""
    if job.train.optimizer != "muon" or job.train.no_muon != "auto":
        return job
    hidden = hidden_matrices(graph.bind(job.train.microbatch_size))
    flat = [p.name for p in graph.parameters if p.trainable and len(p.spec.shape) == 2]
    others = tuple(glob.escape(name) for name in flat if name not in hidden)
    say(f"muon: {len(hidden)} hidden matrices; everything else by AdamW")
    return replace(job, train=replace(job.train, no_muon=others))
