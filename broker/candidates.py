"""What a submitter's rule for who is in a round goes by: clients as a run's events show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dag.rounds.cohorts import cohort_of, places_of
from ..job import Job
from ..proto.broker_pb2 import (
    Cohort,
    RoundBegun,
    RoundDone,
    RunEvent,
    RunSpec,
)

__all__ = ["Candidates", "Clients", "Rule", "chosen_by"]


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """The clients of a run, one of which each array has an element for, when a round has begun and
    the next one's clients are to be chosen. Arrays are read-only."""

    round: int
    """The number of the round that is to be of those that are chosen, from 1."""
    per_round: int
    """How many clients the job wants in a round."""
    least: int
    """How many must be chosen at least."""
    most: int
    """How many may be chosen: `per_round`, or with `over_select` more."""
    seed: int
    """The run's."""
    sizes: npt.NDArray[np.int64]
    """Samples that a client trains on."""
    asked: npt.NDArray[np.int64]
    """How many rounds a client was asked in, that under way included."""
    last: npt.NDArray[np.int64]
    """The last round whose version a client is in; -1: none."""
    loss: npt.NDArray[np.float32]
    """The mean loss of a client's steps in that round; NaN: not known."""
    seconds: npt.NDArray[np.float32]
    """For how long its peer trained in that round, with all clients that it had; NaN: not known."""
    bytes: npt.NDArray[np.int64]
    """Of the client's update in that round, encoded; 0: not known."""
    reachable: npt.NDArray[np.bool_]
    """Whether somebody was there who could train the client when the round before began: of data
    that stays with its hosts, its host."""

    @property
    def clients(self) -> int:
        """How many there are, numbered from 0."""
        return len(self.sizes)


Rule = Callable[[Candidates], Sequence[int]]
"""Returns the numbers of the clients of `Candidates.round`."""


def chosen_by(rule: Rule, candidates: Candidates) -> Cohort:
    """Return what a rule chooses. Raises whatever it does, and TypeError and ValueError for what
    are no numbers of clients."""
    chosen = np.asarray([*rule(candidates)])  # of a set, too
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise TypeError(f"the rule returned {chosen!r:.80}: expected numbers of clients")
    if (chosen < 0).any():
        raise ValueError(f"the rule returned client {chosen.min()}: expected 0 or more")
    return Cohort(round=candidates.round, clients=chosen.tolist())


class Clients:
    """The clients of one run; `see` takes its events in their order. Those that are not kept any
    more are not counted."""

    def __init__(self, spec: RunSpec) -> None:
        """Raises ValueError for a run whose clients no rule chooses."""
        job = Job.from_json(spec.job)
        cohorts = job.rounds.cohorts if job.rounds is not None else None
        if cohorts is None or not cohorts.selected:
            raise ValueError(
                f"{spec.name} was submitted without a rule for who is in a round: expected one "
                "with sync.select, or client.submit(job, select=function)"
            )
        count, self._round, self._hosts = cohorts.clients, -1, job.data.where == "peer"
        self._now = Candidates(
            round=0,
            per_round=cohorts.per_round,
            least=cohorts.fewest,
            most=job.sync.asked(cohorts.per_round),
            seed=job.seed,
            sizes=np.array(spec.client_sizes, np.int64),
            asked=np.zeros(count, np.int64),
            last=np.full(count, -1),
            loss=np.full(count, np.nan, np.float32),
            seconds=np.full(count, np.nan, np.float32),
            bytes=np.zeros(count, np.int64),
            reachable=np.full(count, not self._hosts),
        )

    def see(self, event: RunEvent) -> Candidates | None:
        """Return the candidates for the next round when one has begun, unless that is the last."""
        match event.WhichOneof("kind"):
            case "round_begun" if event.round_begun.round > self._round:
                return self._begun(event.round_begun)
            case "round_done":
                self._done(event.round_done)
        return None

    def _begun(self, begun: RoundBegun) -> Candidates | None:
        now, self._round = self._now, begun.round
        for work in begun.work:
            places = places_of(work.cohort)
            now.asked[cohort_of(now.clients, now.seed, begun.round, places)] += 1
        if self._hosts:
            now.reachable[:] = False
            now.reachable[[*begun.reachable]] = True
        return None if any(w.final for w in begun.work) else self._candidates(begun.round + 1)

    def _done(self, done: RoundDone) -> None:
        now, told = self._now, done.clients
        at = np.array(told.clients, np.int64)
        now.last[at], now.bytes[at] = done.round, told.bytes
        now.loss[at], now.seconds[at] = told.losses, told.seconds

    def _candidates(self, number: int) -> Candidates:
        now = vars(self._now)
        arrays: dict[str, Any] = {n: a.copy() for n, a in now.items() if isinstance(a, np.ndarray)}
        for array in arrays.values():
            array.setflags(write=False)
        return replace(self._now, round=number, **arrays)
