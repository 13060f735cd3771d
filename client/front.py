"""What a simulation needs of the client: submitting as a user does, and building the module for the
plain loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ..dag.ir.convert import graph_to_bytes, lowered_to_bytes
from ..dag.ir.graph import Graph
from ..job import Job
from ..job.settings import plain
from ..proto.broker_pb2 import RunSpec, WeightFile, Weights
from ..proto.common_pb2 import BlobRef
from .job_data import resolved
from .matrices import round_base, with_matrices
from .models import models
from .prepared import Prepared
from .privacy import with_noise
from .runs.half import half_spec
from .runs.run import Run
from .runs.selecting import rule_of
from .runs.session import Client
from .submission import prepare, spec_of

__all__ = ["SimulationFront"]


@dataclass(frozen=True, kw_only=True)
class PackedJob:
    """A job with all that a broker would store of it."""

    spec: RunSpec
    blobs: Mapping[str, bytes]
    """By SHA-256: graphs, manifest, weights, shards."""
    facts: Prepared


class SimulationFront:
    """Submits jobs of a simulation, and builds their modules for the plain loop. Jobs that differ
    in nothing but their plan, codecs and length are captured once. `close` ends its connections
    and files."""

    def __init__(self, say: Callable[[str], None] = lambda line: None) -> None:
        self._say, self._open = say, ExitStack()
        self._clients: dict[str, Client] = {}
        self._prepared: dict[str, Prepared] = {}

    def close(self) -> None:
        self._open.close()

    def names(self, address: str) -> dict[str, str]:
        """The names of the peers that have joined, by id. Raises BrokerUnreachable."""
        with Client(address) as client:
            return client.names()

    def prepared(self, job: Job) -> Prepared:
        """The job as it is submitted, captured once for all whose graph, weights and data are the
        same; its files live as long as this. Raises ValueError for what cannot run."""
        train = job.train
        shape = (train.batch, train.microbatch)
        key = repr((plain(job.model), plain(job.data), job.folder, job.seed, shape))
        if key not in self._prepared:
            self._prepared[key] = self._open.enter_context(prepare(job, self._say))
        prepared = self._prepared[key]
        job = replace(job, data=prepared.job.data)  # which may say how many clients there are
        job = with_noise(resolved(job, prepared.manifest))
        return replace(prepared, job=with_matrices(job, prepared.graph, lambda line: None))

    def submit(self, address: str, job: Job, folder: Path) -> tuple[Run, Prepared]:
        """Submits a job whose outputs go to `folder`. Raises ValueError for what cannot run."""
        if address not in self._clients:
            self._clients[address] = self._open.enter_context(Client(address))
        rule, prepared = rule_of(job), self.prepared(job)
        run = self._clients[address].submit_prepared(prepared, folder)
        if rule is not None:
            run.select(rule, self._say)
        return run, prepared

    def pack(self, job: Job) -> PackedJob:
        """The job for a world without a broker, with all its blobs in memory. Raises ValueError for
        what cannot run."""
        prepared = self.prepared(job)
        blobs, blob = _blobs()
        spec = spec_of(
            prepared.job, prepared.graph, prepared.microbatch_sizes, prepared.client_sizes
        )
        spec.graph.CopyFrom(blob(graph_to_bytes(prepared.graph)))
        if prepared.core is not None:
            spec.core_graph.CopyFrom(blob(lowered_to_bytes(prepared.core)))
        spec.data.CopyFrom(blob(prepared.manifest.to_json().encode()))
        if prepared.recipe is not None:
            spec.recipe.CopyFrom(blob(prepared.recipe.to_bytes()))
        spec.weights.append(WeightFile(blob=blob(prepared.weights.read_bytes())))
        if (found := prepared.pretrained) is not None:
            hashes = {cut: blob(found.read(cut)).hash for cut in found.cuts}
            manifest = blob(found.manifest(hashes).to_json().encode())
            spec.weights.append(WeightFile(blob=manifest, sharded=True))
        for path in prepared.shards.values():
            blob(path.read_bytes())
        return PackedJob(spec=spec, blobs=blobs, facts=prepared)

    def pack_half(
        self, before: RunSpec, graph: Graph, weights: Weights
    ) -> tuple[RunSpec, Mapping[str, bytes], tuple[str, ...]]:
        """The run that evaluates a model, whose graph this is, with its weights and without every
        second block that can be left out (`runs/half.py`); the new blobs, and the names of the
        blocks. Raises ValueError where there is nothing to evaluate."""
        blobs, store = _blobs()
        spec, names = half_spec(before, weights, graph, store)
        return spec, blobs, names

    @contextmanager
    def module(self, job: Job) -> Iterator[nn.Module]:
        """The job's module with its starting weights, in train mode, with its loss."""
        module = models.on_cpu(models.build(job))
        if job.model.frozen_dtype == "int8":
            round_base(module, self.prepared(job).graph)
        with models.ready(module, job):
            yield module.train()


def _blobs() -> tuple[dict[str, bytes], Callable[[bytes], BlobRef]]:
    """Return blobs by SHA-256, none yet, and what adds one to them."""
    blobs: dict[str, bytes] = {}

    def store(data: bytes) -> BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return BlobRef(hash=name, size_bytes=len(data))

    return blobs, store
