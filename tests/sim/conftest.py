"""A job in the simulated world, and the same job as a plain loop."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
from safetensors.torch import load
from torch import Tensor, nn

from shoal.broker.events import FormReplicas, MakePlan
from shoal.client.models import models
from shoal.client.prepared import Prepared
from shoal.client.submission import prepare
from shoal.compression.sparse.masks import SharedMask
from shoal.dag.ir.convert import graph_to_bytes, lowered_to_bytes
from shoal.dag.ir.graph import Graph
from shoal.dag.ir.recipe import Recipe, make
from shoal.dag.plan.plan import Plan
from shoal.dag.schedule.convert_plan import plan_to_proto
from shoal.job import Job
from shoal.peer.data.reader import Reader
from shoal.proto import broker_pb2, common_pb2
from shoal.sim.plain import oracle
from shoal.sim.virtual import broker_shell
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import merge_blocks
from shoal.tests.sim.played_rounds import Rounds


@dataclass
class Trained:
    """What a run came to: losses and norms by step, weights under the user's names."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    evaluations: list[float]
    log: list[str]
    scales: list[float] = field(default_factory=list)
    """Of losses, of the plain loop under fp16."""


class Laboratory:
    """One captured job that can be trained in any world, under any plan, or by the plain loop."""

    def __init__(self, job: Job, prepared: Prepared, module: nn.Module) -> None:
        self.job, self.prepared, self.module = prepared.job, prepared, module
        self.blobs: dict[str, bytes] = {}
        self.spec = broker_pb2.RunSpec(
            version=1,
            name=job.name,
            job=self.job.to_json(),
            graph=self._blob(graph_to_bytes(prepared.graph)),
            core_graph=self._blob(lowered_to_bytes(prepared.core)) if prepared.core else None,
            data=self._blob(prepared.manifest.to_json().encode()),
            weights=[broker_pb2.WeightFile(blob=self._blob(prepared.weights.read_bytes()))],
            recipe=self._blob(prepared.recipe.to_bytes()) if prepared.recipe else None,
            microbatches=self.job.train.microbatches,
            microbatch_size=self.job.train.microbatch_size,
            microbatch_sizes=prepared.microbatch_sizes,
            steps=self.job.train.steps or 0,
            client_sizes=prepared.client_sizes,
            update_elements=prepared.graph.trained_elements,
        )
        for path in prepared.shards.values():
            self._blob(path.read_bytes())

    def _blob(self, data: bytes) -> common_pb2.BlobRef:
        name = hashlib.sha256(data).hexdigest()
        self.blobs[name] = data
        return common_pb2.BlobRef(hash=name, size_bytes=len(data))

    @property
    def graph(self) -> Graph:
        return self.prepared.graph

    def world(self, peers: int | list[PeerSpec] = 4, **options: Any) -> World:
        if isinstance(peers, int):
            peers = [PeerSpec(name=f"p{i}") for i in range(peers)]
        return World(peers, blobs=self.blobs, folder=self.prepared.weights.parent, **options)

    def train(self, world: World, plan: Plan | None = None) -> Trained:
        """Runs the job to its end in a world."""
        spec = broker_pb2.RunSpec()
        spec.CopyFrom(self.spec)
        if plan is not None:
            spec.plan.CopyFrom(plan_to_proto(plan))
        return self.finish(world, world.submit(spec))

    def finish(self, world: World, run: str) -> Trained:
        """Waits for the end of a run; each step was committed once."""
        events = world.finish(run)
        last = events[-1].state
        assert last.phase == broker_pb2.DONE, last.reason.text
        steps = [e.step for e in events if e.HasField("step")]
        assert [s.step for s in steps] == list(range(last.steps))
        exported = [e.weights for e in events if e.HasField("weights")][-1]
        weights: dict[str, Tensor] = {}
        for file in exported.files:
            tensors = load(world.blobs[file.blob.hash])
            assert not weights.keys() & tensors.keys(), "a name is exported twice"
            weights |= tensors
        return Trained(
            [s.outcome.loss for s in steps],
            [s.outcome.grad_norm for s in steps],
            self._with_tied(self._begun(exported) | merge_blocks(weights)),
            [s.evaluation.loss for s in steps if s.HasField("evaluation")],
            world.log,
        )

    def _begun(self, exported: broker_pb2.Weights) -> dict[str, Tensor]:
        """What is as it was at the start for good, so that no export has it."""
        found: dict[str, Tensor] = {}
        if exported.HasField("recipe"):
            recipe = Recipe.from_bytes(self.blobs[exported.recipe.hash])
            found |= {n: make(i, recipe.seed) for n, i in recipe.tensors.items()}
        for file in exported.starting:
            found |= load(self.blobs[file.blob.hash])
        lasting = {b.name for b in self.graph.buffers if not b.persistent}
        return {n: t for n, t in found.items() if n not in lasting}

    def _with_tied(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        for p in self.graph.parameters:
            found |= {alias: found[p.name] for alias in p.tied if p.name in found}
        return found

    def plain(self) -> Trained:
        """The oracle: the same job as one loop over the same microbatches."""
        module, train = copy.deepcopy(self.module), self.job.train
        reader = self.reader()
        with models.ready(module, self.job):
            seen = oracle.train(
                module,
                lambda step, m: reader.batch(step, m, train.microbatch_size),
                train,
                steps=train.steps or 0,
                microbatches=train.microbatches,
                fp16=self.job.model.dtype == "fp16",
            )
        return Trained(
            seen.losses, seen.norms, dict(module.state_dict()), [], [], scales=seen.scales
        )

    def reader(self) -> Reader:
        return Reader(
            self.prepared.manifest,
            self.prepared.shards.__getitem__,
            seed=self.job.seed,
            microbatches=self.job.train.microbatches,
        )


@pytest.fixture(scope="session")
def laboratory(captures: Any) -> Iterator[Callable[[Job], Laboratory]]:
    """Makes a Laboratory for a job; one per name, model and session."""
    made: dict[str, Laboratory] = {}
    with ExitStack() as open_jobs:

        def make(job: Job) -> Laboratory:
            if job.plan.scheduler == "auto":
                # Tiny models are best trained by one peer, and these tests are about several.
                job = replace(job, plan=replace(job.plan, scheduler="uniform"))
            key = f"{job.name} {job.model}"
            if key not in made:
                module = models.build(job)
                with captures.shared():
                    prepared = open_jobs.enter_context(prepare(job))
                made[key] = Laboratory(job, prepared, module)
            return made[key]

        yield make


@pytest.fixture(scope="module")
def rounds(laboratory: Callable[[Job], Laboratory]) -> Rounds:
    return Rounds(laboratory)


@pytest.fixture(scope="module")
def plans_once() -> Iterator[None]:
    """A plan that was asked for in the same words before is not made again."""
    with pytest.MonkeyPatch.context() as patch:

        def once(answer: Callable[..., Any]) -> Callable[..., Any]:
            known: dict[Any, Any] = {}

            def answered(ask: MakePlan | FormReplicas, graph: bytes) -> Any:
                words = ask.spec.SerializeToString(deterministic=True)
                key = ask.replica, ask.version, words, ask.peers, getattr(ask, "before", None)
                if key not in known:
                    known[key] = answer(ask, graph)
                return known[key]

            return answered

        for name in ("plan_answer", "form_answer"):
            patch.setattr(broker_shell, name, once(getattr(broker_shell, name)))
        yield


@pytest.fixture(scope="module")
def masks_once() -> Iterator[None]:
    """Positions of a mask are not drawn again: all members ask for the same ones, and often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMask, "positions", cache(SharedMask.positions))
        yield


def assert_equal_training(got: Trained, wanted: Trained, *, loss: float = 1e-5) -> None:
    """I1: losses agree to a relative 1e-5, weights to a relative 1e-5 together and 1e-3 each."""
    for step, (a, b) in enumerate(zip(got.losses, wanted.losses, strict=True)):
        assert abs(a - b) <= loss * abs(b), f"step {step}: loss {a}, the plain loop has {b}"
    assert got.weights.keys() >= wanted.weights.keys()  # a graph has buffers that no state dict has
    apart = scale = 0.0
    for name, b in wanted.weights.items():
        a = got.weights[name]
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        difference, norm = float((a - b).double().norm()), float(b.double().norm())
        assert difference <= 1e-3 * norm + 1e-7, f"{name}: {difference} of {norm}"
        apart, scale = apart + difference**2, scale + norm**2
    assert apart <= (1e-5) ** 2 * scale, f"weights differ by {(apart / scale) ** 0.5:.1e}"


@pytest.fixture(scope="session")
def equal_training() -> Callable[..., None]:
    return assert_equal_training
