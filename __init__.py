"""Shoal: train one neural network on GPUs that nobody put in one room.

The root imports nothing when it is imported (PEP 562), so that `shoal --help` stays fast and a
checkout works from a folder of any name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .broker.candidates import Candidates
    from .client import Callback, Run, connect
    from .client.models.initialise import deferred_init, initialise
    from .job import Job
    from .peer.data.partition import Partition, partition
    from .sim.comparing import compare

__all__ = [
    "Callback",
    "Candidates",
    "Job",
    "Partition",
    "Run",
    "compare",
    "connect",
    "deferred_init",
    "initialise",
    "partition",
]

_HOME = {
    "Callback": "shoal.client",
    "Candidates": "shoal.broker.candidates",
    "Job": "shoal.job",
    "Partition": "shoal.peer.data.partition",
    "Run": "shoal.client",
    "compare": "shoal.sim.comparing",
    "connect": "shoal.client",
    "deferred_init": "shoal.client.models.initialise",
    "initialise": "shoal.client.models.initialise",
    "partition": "shoal.peer.data.partition",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shoal' has no attribute {name!r}; it has {', '.join(__all__)}")
