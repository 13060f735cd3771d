"""What a simulation needs of the client: submitting as a user does, and building the module for the
plain loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from ..broker.candidates import Rule
from ..dag.ir.convert import graph_to_bytes, lowered_to_bytes
from ..dag.ir.graph import Graph
from ..dag.ir.operators import takes_key
from ..job import Job
from ..job.settings import plain
from ..peer.data.manifest import Manifest
from ..peer.data.reader import Reader
from ..proto.broker_pb2 import RunSpec, WeightFile, Weights
from ..proto.common_pb2 import BlobRef
from .job_data import resolved
from .matrices import round_base, with_matrices
from .models import models
from .privacy import spent_epsilon, with_noise
from .runs.half import half_spec
from .runs.run import Run
from .runs.selecting import rule_of
from .runs.session import Client
from .show.wire import CompressionSums
from .submission import Prepared, prepare, spec_of

__all__ = ["SimulationFront"]


@dataclass(frozen=True, kw_only=True)
class CapturedFacts:
    """Facts of a job once it is captured."""

    graph: Graph
    operators: int
    """How many."""
    parameters: int
    """How many numbers."""
    tokens_per_step: int
    random: bool
    """Whether its graph draws masks."""
    manifest: Manifest
    """Of its data."""
    shards: Mapping[str, Path]
    """The data, by hash; they live as long as the front."""
    job: Job
    """As it is submitted: with its length, and the noise that hides clients, as numbers."""

    def reader(self, microbatches: int) -> Reader:
        """Return what reads the data, in steps of so many microbatches."""
        shards = self.shards.__getitem__
        return Reader(self.manifest, shards, seed=self.job.seed, microbatches=microbatches)

    def spent(self, sums: int) -> float:
        """Return the epsilon that so many noisy sums of the job come to; 0: it hides nobody."""
        privacy = self.job.sync.privacy
        return 0.0 if privacy is None else spent_epsilon(privacy, sums)


@dataclass(frozen=True, kw_only=True)
class PackedJob:
    """A job with all that a broker would store of it."""

    spec: RunSpec
    blobs: Mapping[str, bytes]
    """By SHA-256: graphs, manifest, weights, shards."""
    facts: CapturedFacts


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

    def wire(self, names: Mapping[str, str]) -> CompressionSums:
        """What sums up a run; `names` are the peers' by id."""
        return CompressionSums(lambda: dict(names))

    def names(self, address: str) -> dict[str, str]:
        """The names of the peers that have joined, by id. Raises BrokerUnreachable."""
        with Client(address) as client:
            return client.names()

    def facts(self, job: Job) -> CapturedFacts:
        """Captures a job. Raises ValueError for what cannot run."""
        return _facts(self._prepare(job))

    def submit(self, address: str, job: Job, folder: Path) -> tuple[Run, CapturedFacts]:
        """Submits a job whose outputs go to `folder`. Raises ValueError for what cannot run."""
        if address not in self._clients:
            self._clients[address] = self._open.enter_context(Client(address))
        rule, prepared = self.rule(job), self._prepare(job)
        run = self._clients[address].submit_prepared(prepared, folder)
        if rule is not None:
            run.select(rule, self._say)
        return run, _facts(prepared)

    def rule(self, job: Job) -> Rule | None:
        """The job's own rule for who is in a round; None: it has none. Raises ModelError."""
        return rule_of(job)

    def pack(self, job: Job) -> PackedJob:
        """The job for a world without a broker, with all its blobs in memory. Raises ValueError for
        what cannot run."""
        prepared = self._prepare(job)
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
        return PackedJob(spec=spec, blobs=blobs, facts=_facts(prepared))

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
            round_base(module, self._prepare(job).graph)
        with models.ready(module, job):
            yield module.train()

    def _prepare(self, job: Job) -> Prepared:
        """Captured once for all jobs whose graph, weights and data are the same."""
        train = job.train
        shape = (train.batch, train.microbatch)
        key = repr((plain(job.model), plain(job.data), job.folder, job.seed, shape))
        if key not in self._prepared:
            self._prepared[key] = self._open.enter_context(prepare(job, self._say))
        prepared = self._prepared[key]
        job = replace(job, data=prepared.job.data)  # which may say how many clients there are
        job = with_noise(resolved(job, prepared.manifest))
        return replace(prepared, job=with_matrices(job, prepared.graph, lambda line: None))


def _blobs() -> tuple[dict[str, bytes], Callable[[bytes], BlobRef]]:
    """Return blobs by SHA-256, none yet, and what adds one to them."""
    blobs: dict[str, bytes] = {}

    def store(data: bytes) -> BlobRef:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return BlobRef(hash=name, size_bytes=len(data))

    return blobs, store


def _facts(prepared: Prepared) -> CapturedFacts:
    return CapturedFacts(
        graph=prepared.graph,
        operators=len(prepared.graph.operators),
        parameters=sum(p.spec.elements for p in prepared.graph.parameters),
        tokens_per_step=prepared.tokens_per_step,
        random=any(takes_key(op.target) for op in prepared.graph.operators),
        manifest=prepared.manifest,
        shards=prepared.shards,
        job=prepared.job,
    )
