"""A job that is captured and read, with all that an upload, or a simulation, needs of it."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..dag.ir.graph import Graph, Lowered
from ..dag.ir.operators import takes_key
from ..dag.ir.recipe import Recipe
from ..job import Job
from ..peer.data.manifest import Manifest
from ..peer.data.reader import Reader
from .files.records import record_of, write_run
from .files.shards import Pretrained
from .privacy import spent_epsilon

__all__ = ["Prepared"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A job that is ready to be uploaded. `files` are in a folder that lives as long as `prepare`.

    local: as in JobData.
    core: the graph for peers with the core operator set; None where it has no core form.
    weights: the values that the model begins with, of all that neither the recipe makes nor files
    of their own have (`pretrained`), which are read when they are uploaded.
    microbatch_sizes: what the planner may take instead of the job's microbatch size; both forms are
    right for all of them. client_sizes, client_data: as in RunSpec.
    """

    job: Job
    graph: Graph
    core: Lowered | None
    manifest: Manifest
    shards: dict[str, Path]
    weights: Path
    sidecars: tuple[Path, ...]
    microbatch_sizes: tuple[int, ...] = ()
    local: tuple[str, ...] = ()
    recipe: Recipe | None = None
    pretrained: Pretrained | None = None
    client_sizes: tuple[int, ...] = ()
    client_data: tuple[Manifest, ...] = ()

    @property
    def tokens_per_step(self) -> int:
        """Positions, and samples of arrays."""
        return self.job.train.batch * self.job.data.positions

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
        return sum(p.spec.elements for p in self.graph.parameters)

    @property
    def random(self) -> bool:
        """Whether the graph draws masks."""
        return any(takes_key(op.target) for op in self.graph.operators)

    def reader(self, microbatches: int) -> Reader:
        """Return what reads the data, in steps of so many microbatches."""
        shards = self.shards.__getitem__
        return Reader(self.manifest, shards, seed=self.job.seed, microbatches=microbatches)

    def spent(self, sums: int) -> float:
        """Return the epsilon that so many noisy sums of the job come to; 0: it hides nobody."""
        privacy = self.job.sync.privacy
        return 0.0 if privacy is None else spent_epsilon(privacy, sums)

    def keep(self, folder: Path, run: str) -> None:
        """Leaves in the run's output folder what an export and the figures need later."""
        folder.mkdir(parents=True, exist_ok=True)
        for path in self.sidecars:
            (folder / "sidecars").mkdir(exist_ok=True)
            shutil.copyfile(path, folder / "sidecars" / path.name)
        data = hashlib.sha256(self.manifest.to_json().encode()).hexdigest()
        job = self.job
        write_run(folder, record_of(run, job, job.output.to, data, self.tokens_per_step))
