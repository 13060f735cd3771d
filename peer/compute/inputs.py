"""The samples that the stages of a peer read, looked at before any operator has them.

A row that a table lacks is an error of the data. On a card it would end the process, and on any
device whoever computes would seem to be at fault; here it is found on the host, and named.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...dag.analysis.lookups import Lookups, MissingRow
from ...dag.execute.execute import RowError
from ...dag.ir.graph import Graph
from ...dag.permutation import Indices
from ..data.manifest import DataError
from ..data.reader import Reader
from ..data.survey import refused

__all__ = ["CheckedReader"]


class CheckedReader:
    """Reads microbatches of a run for a bound graph. Steps and microbatches are the run's. Each
    call raises DataError for a sample that asks for a row that is not there, as far as what it
    reads says so; from any thread. `private`: errors do not quote the data."""

    def __init__(self, run: str, graph: Graph, reader: Reader, *, private: bool = False) -> None:
        self.run, self.graph, self.reader, self.private = run, graph, reader, private
        self.size = graph.batch or 1
        self._lookups: dict[tuple[str, ...], Lookups] = {}

    def train(self, step: int, microbatch: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of a training microbatch, by name."""
        return self._checked(self._trained(step, microbatch), names, f"in step {step}")

    def held_out(self, microbatch: int, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors of a held-out microbatch, by name."""
        at = self.reader.sampler.held_out(microbatch, self.size)
        return self._checked(at, names, "in an evaluation")

    @contextmanager
    def named(self, step: int, place: tuple[int, int] | None) -> Iterator[None]:
        """Around what runs operators: a row that only an operator saw to lack becomes a DataError
        with step and sample. place: (step, microbatch) of the run; None: not one of training."""
        try:
            yield
        except RowError as error:
            at = None if place is None else self._trained(*place)
            raise self._refused(error.missing, at, f"in step {step}", str(error)) from error

    def _trained(self, step: int, microbatch: int) -> Indices:
        return self.reader.sampler.train(step, microbatch, self.size)

    def _refused(
        self, missing: MissingRow | None, at: Indices | None, when: str, otherwise: str = ""
    ) -> DataError:
        item, what = None, otherwise
        if missing is not None:
            what = missing.lookup.refusal(None if self.private else missing.value)
            if at is not None and missing.sample is not None:
                item = int(at[missing.sample])
        return refused(what, item, self.reader.manifest.kind, f", {when} of run {self.run}")

    def _checked(self, at: Indices, names: Sequence[str], when: str) -> dict[str, Tensor]:
        batch, key = self.reader.samples(at, names), tuple(names)
        if key not in self._lookups:
            self._lookups[key] = Lookups(self.graph, [f"in:{name}" for name in names])
        lookups = self._lookups[key]
        if lookups.seen:
            with torch.no_grad():
                found = lookups.look({f"in:{name}": t for name, t in batch.items()}).missing
            if found is not None:
                raise self._refused(found, at, when)
        return batch
