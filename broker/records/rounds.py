"""What of a run's rounds outlives the broker: a ledger of versions, a ledger of work,
and where the state of clients is."""

from __future__ import annotations

from ...proto.broker_pb2 import Checkpoint, RoundPosition, RunEvent
from ...proto.journal_pb2 import RoundsKept
from .client_homes import ClientHomes
from .version_ledger import VersionLedger
from .work_ledger import WorkLedger

__all__ = ["RoundRecord"]

_KINDS = ("round_begun", "round_planned", "unmasked", "lie", "round_done", "finishing")
"""Of events that are for the ledgers; evaluations are not."""


class RoundRecord:
    """Changes by events only."""

    def __init__(
        self, versions: VersionLedger, work: WorkLedger, homes: ClientHomes | None = None
    ) -> None:
        """`homes`: of clients that have state."""
        self.versions, self.work, self.homes = versions, work, homes

    def begin_from(self, saved: Checkpoint) -> None:
        """The run goes on from the version of another one."""
        self.versions.first = self.versions.round = saved.rounds.round
        self.work.begin_from(saved)

    @property
    def position(self) -> RoundPosition:
        """Where it stands, between two rounds."""
        return self.work.position(self.versions.round)

    def apply(self, event: RunEvent) -> None:
        """Raises ValueError for what cannot have been."""
        kind, versions, work = event.WhichOneof("kind"), self.versions, self.work
        if kind not in _KINDS:
            return
        number = getattr(event, kind).round
        if number != versions.round:
            raise ValueError(f"an event of round {number}: expected round {versions.round}")
        match kind:
            case "round_begun":
                versions.begin(event.at_s)
                work.begin(event.round_begun)
                if self.homes is not None:
                    self.homes.begin(event.round_begun)
            case "round_planned":
                versions.planned(event.round_planned)
                work.planned()
            case "unmasked":
                versions.unmask(event.unmasked)
            case "lie":
                versions.proved(event.lie)
            case "finishing":
                work.finish()
            case "round_done":
                if self.homes is not None:
                    self.homes.done(event.round_done, work.given)
                work.done(event.round_done)
                versions.done(event.round_done, event.at_s)

    def kept(self) -> RoundsKept:
        """All ledgers, for `restore`."""
        found = self.versions.kept()
        found.MergeFrom(self.work.kept())
        if self.homes is not None:
            self.homes.keep(found)
        return found

    def restore(self, kept: RoundsKept) -> None:
        self.versions.restore(kept)
        self.work.restore(kept)
        if self.homes is not None:
            self.homes.restore(kept)
