"""What the floors above do for a simulation: submit a job as a client does, and build its module
for the plain loop. `client/front.py` does it; nothing here knows how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..job import Job
from ..proto import broker_pb2

if TYPE_CHECKING:
    from torch import nn

    from ..broker.candidates import Rule
    from ..dag.ir.graph import Graph
    from ..peer.data.manifest import Manifest

__all__ = ["Facts", "Front", "Half", "Packed", "RunHandle", "Wire"]


class Facts(Protocol):
    """Facts of a job once it is captured."""

    @property
    def graph(self) -> Graph: ...

    @property
    def operators(self) -> int:
        """Number of operators."""

    @property
    def parameters(self) -> int:
        """How many numbers."""

    @property
    def tokens_per_step(self) -> int: ...

    @property
    def random(self) -> bool:
        """Whether its graph draws masks."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the job's data."""

    @property
    def shards(self) -> Mapping[str, Path]:
        """The data, by hash; they live as long as the Front."""

    @property
    def job(self) -> Job:
        """As it is submitted: with its length, and the noise that hides clients, as numbers."""

    def spent(self, sums: int) -> float:
        """Return the epsilon that so many noisy sums of the job come to; 0: it hides nobody."""


class Packed(Protocol):
    """A job as a world takes it, without a broker to upload it to."""

    @property
    def spec(self) -> broker_pb2.RunSpec: ...

    @property
    def blobs(self) -> Mapping[str, bytes]:
        """By SHA-256: graphs, manifest, weights, shards."""

    @property
    def facts(self) -> Facts: ...


class RunHandle(Protocol):
    """A submitted run, as its client sees it."""

    id: str

    def watch(self) -> Iterator[broker_pb2.RunEvent]:
        """Every event, until the run has ended."""

    def cancel(self) -> broker_pb2.RunState:
        """End the run."""

    def export(self, path: Path | None) -> Path:
        """Writes the weights; None: where the run's format has them."""

    def half_or_reason(self) -> Half | str | None:
        """Without every second block that microbatches left out, or why that cannot be had; None
        where they left none."""


class Half(Protocol):
    """Half a model at the end of its run."""

    @property
    def left_out(self) -> tuple[str, ...]:
        """Names of the blocks that it lacks."""

    @property
    def loss(self) -> float:
        """On held-out data."""


class Wire(Protocol):
    """What compression did on the links of one run."""

    def see(self, event: broker_pb2.RunEvent) -> None:
        """Takes in one event of the run."""

    def table(self) -> Sequence[Mapping[str, Any]]:
        """By link, role and codec, as `Summary.links` states it; empty where nothing was
        compressed."""


class Front(Protocol):
    """What the rooms above do for a simulation: submit a job, and build its module for the plain
    loop. Jobs that differ in nothing but their plan, codecs and length are captured once."""

    def wire(self, names: Mapping[str, str]) -> Wire:
        """What sums up a run; `names` are the peers' by id."""

    def names(self, address: str) -> dict[str, str]:
        """The names, by id, of the peers of the broker at an address; raises ConnectionError
        without a broker."""

    def facts(self, job: Job) -> Facts:
        """Captures a job. Raises ValueError for what cannot run."""

    def submit(self, address: str, job: Job, folder: Path) -> tuple[RunHandle, Facts]:
        """Submits a job whose outputs go to `folder`. Raises ValueError for what cannot run."""

    def rule(self, job: Job) -> Rule | None:
        """Return the job's own rule for who is in a round; None: it has none. Raises ValueError for
        one that cannot be imported."""

    def pack(self, job: Job) -> Packed:
        """The job for a world without a broker. Raises ValueError for what cannot run."""

    def pack_half(
        self, before: broker_pb2.RunSpec, graph: Graph, weights: broker_pb2.Weights
    ) -> tuple[broker_pb2.RunSpec, Mapping[str, bytes], tuple[str, ...]]:
        """The run that evaluates the model of another one, whose graph this is, with its weights
        and without every second block that can be left out; the new blobs, and the names of the
        blocks. Raises ValueError where there is nothing to evaluate."""

    def module(self, job: Job) -> AbstractContextManager[nn.Module]:
        """The job's module with its starting weights, callable with a microbatch."""
