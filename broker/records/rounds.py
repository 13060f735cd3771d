"""What of a run's rounds outlives the broker: a ledger of versions, a ledger of work, where the
state of clients is, and how fast hosts sent."""

from __future__ import annotations

from ...proto.broker_pb2 import Checkpoint, RoundPosition, RunEvent
from ...proto.journal_pb2 import RoundsKept
from .client_homes import ClientHomes
from .host_lines import HostLines
from .version_ledger import VersionLedger
from .work_ledger import WorkLedger

__all__ = ["OF_ROUNDS", "RoundRecord"]

OF_ROUNDS = (
    *("round_begun", "round_planned", "unmasked", "lie", "round_done", "finishing", "chosen"),
)
"""Events that change the ledgers."""


class RoundRecord:
    """Changes by events only."""

    def __init__(
        self, versions: VersionLedger, work: WorkLedger, homes: ClientHomes | None = None
    ) -> None:
        """`homes`: of clients that have state."""
        self.versions, self.work, self.homes = versions, work, homes
        self.lines = HostLines()
        every: list[VersionLedger | WorkLedger | HostLines] = [versions, work, self.lines]
        self._ledgers = [*every, *([homes] if homes is not None else [])]

    def begin_from(self, saved: Checkpoint) -> None:
        """The run goes on from the version of another one."""
        self.versions.first = self.versions.round = saved.rounds.round
        self.work.begin_from(saved)

    @property
    def next(self) -> int:
        """The number of the next round that is to begin."""
        return self.versions.round + self.work.begun

    @property
    def position(self) -> RoundPosition:
        """Where it stands, between two rounds."""
        return self.work.position(self.versions.round)

    def apply(self, event: RunEvent) -> None:
        """Raises ValueError for what cannot have been."""
        kind, versions, work = event.WhichOneof("kind"), self.versions, self.work
        if kind not in OF_ROUNDS:
            return
        number = getattr(event, kind).round
        expected = self.next if kind == "chosen" else versions.round
        if number != expected:
            raise ValueError(f"an event of round {number}: expected round {expected}")
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
            case "chosen":
                work.chosen = event.chosen
            case "round_done":
                if self.homes is not None:
                    self.homes.done(event.round_done, work.given)
                self.lines.done(event.round_done)
                work.done(event.round_done)
                versions.done(event.round_done, event.at_s)

    def kept(self) -> RoundsKept:
        """All ledgers, for `restore`."""
        found = RoundsKept()
        for ledger in self._ledgers:
            found.MergeFrom(ledger.kept())
        return found

    def restore(self, kept: RoundsKept) -> None:
        for ledger in self._ledgers:
            ledger.restore(kept)
