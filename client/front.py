"""What a simulation needs of the floors above it: submitting through a real client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ..dag.operators import takes_key
from ..job import Job
from . import models
from .session import Client, Run
from .submission import prepare
from .wire import Wire

__all__ = ["SimulationFront"]


class SimulationFront:
    """`sim.cluster.Front` by the Python client. `close` ends its connections."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def close(self) -> None:
        self._open.close()

    def peers(self, address: str) -> int:
        """How many peers have joined. Raises BrokerUnreachable."""
        with Client(address) as client:
            return len(client.describe().peers)

    def wire(self, address: str) -> Wire:
        """What sums up a run of the broker at an address."""

        def names() -> dict[str, str]:
            with Client(address) as client:
                return client.names()

        return Wire(names)

    def submit(self, address: str, job: Job, folder: Path) -> tuple[Run, Mapping[str, Any]]:
        """Submits a job whose outputs, and copies of whose data shards, go to `folder`."""
        client = self._open.enter_context(Client(address))
        kept = folder / "data"
        kept.mkdir(parents=True, exist_ok=True)
        with prepare(job) as prepared:
            shards = {
                name: Path(shutil.copyfile(path, kept / name))
                for name, path in prepared.shards.items()
            }
            facts = {
                "operators": len(prepared.graph.operators),
                "parameters": sum(p.spec.elements for p in prepared.graph.parameters),
                "tokens_per_step": prepared.tokens_per_step,
                "random": any(takes_key(op.target) for op in prepared.graph.operators),
                "manifest": prepared.manifest,
                "shards": shards,
            }
            return client.submit_prepared(prepared, folder), facts

    @contextmanager
    def module(self, job: Job) -> Iterator[nn.Module]:
        """The job's module with its starting weights, in train mode, with its loss."""
        module = models.build(job)
        with models.ready(module, job):
            yield module.train()
