"""Where the state of clients is that goes on from round to round: with the replica that trained a
client last, in a committed round."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ...dag.rounds.cohorts import cohort_of, places_of, state_number
from ...proto.broker_pb2 import RoundBegun, RoundDone, RoundWork
from ...proto.journal_pb2 import RoundsKept

__all__ = ["ClientHomes"]


class ClientHomes:
    """Changes by events only. lost: whether some client had state that nobody has any more."""

    def __init__(self, clients: int, seed: int) -> None:
        """`seed`: the run's."""
        self._seed, self.lost = seed, False
        self._trained: npt.NDArray[np.int64] = np.zeros(clients, np.int64)
        """By client, the number of its state, of the last committed round that it was in; 0: it has
        none."""
        self._replica: npt.NDArray[np.int32] = np.full(clients, -1, np.int32)

    @property
    def known(self) -> bool:
        """Whether some client has state."""
        return bool(self._trained.any())

    def trained(self, client: int) -> int:
        """Return the number of a client's state; 0: it has none."""
        return int(self._trained[client])

    def replica(self, client: int) -> int | None:
        """Return the replica that has a client's state; None: it has none."""
        return int(self._replica[client]) if self._trained[client] else None

    def begin(self, begun: RoundBegun) -> None:
        """Replicas have got work, or are found not to have what it takes."""
        if any(work.afresh for work in begun.work):
            self._trained[:], self._replica[:], self.lost = 0, -1, False
        self.lost = self.lost or any(work.lost for work in begun.work)

    def done(self, done: RoundDone, work: Mapping[int, RoundWork]) -> None:
        """A round is committed. `work`: of it, by replica."""
        for member in done.members:
            places, number = places_of(work[member.replica].cohort), member.replica
            for client in cohort_of(len(self._trained), self._seed, done.round, places):
                self._trained[client] = state_number(done.round, member.term)
                self._replica[client] = number

    def kept(self) -> RoundsKept:
        """All of it, for `restore`."""
        (stateful,) = np.nonzero(self._trained)
        return RoundsKept(
            stateful=stateful.tolist(),
            homes=self._replica[stateful].tolist(),
            trained=self._trained[stateful].tolist(),
            states_lost=self.lost,
        )

    def restore(self, kept: RoundsKept) -> None:
        """Take what `kept` gave."""
        stateful = np.array(kept.stateful, np.int64)
        self._replica[stateful], self._trained[stateful] = kept.homes, kept.trained
        self.lost = kept.states_lost
