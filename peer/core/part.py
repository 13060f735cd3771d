"""What one assignment holds, how the broker is told of it, and how it ends: its phases stand in
`assignment.py`. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from enum import Enum

from ...dag.plan.plan import PeerId
from ...dag.schedule.flow import Role
from ...net.links.frame import FrameKey
from ...proto import broker_pb2, common_pb2
from . import events as e
from .keeping.snapshot_manager import SnapshotManager
from .options import Timeouts
from .reports import Reports
from .rounds.round_exchange import run_of
from .rounds.rounds import Rounds
from .run_links import RunLinks
from .step import Steps
from .weights_export import WeightsExport

__all__ = ["Part", "Phase"]

_MOST_TEXT = 2000
"""Characters of a fault's reason, as the broker keeps them."""


class Phase(Enum):
    BUILDING = "building"
    WARM = "warm"
    READY = "ready"
    RUNNING = "running"
    EXPORTING = "exporting"
    FINISHED = "finished"
    FAILED = "failed"


class Part:
    """State of this peer's part in one term of one run."""

    def __init__(
        self,
        peer: PeerId,
        assign: broker_pb2.Assign,
        memory_bytes: int,
        patience: Timeouts,
        most_reports: int,
        keeping: SnapshotManager | None = None,
    ) -> None:
        self.run: str = assign.run
        self.term: int = assign.term
        self.phase = Phase.BUILDING
        self.why = ""
        """Why it failed; empty in every other phase."""
        self.steps: Steps | None = None
        """Set from READY on."""
        self.rounds: Rounds | None = None
        """The same, of a run with rounds between replicas."""
        self.dropped = 0
        """Frames that were late or doubled."""
        self.reports = Reports(most_reports)
        self.keeping = keeping if keeping is not None else SnapshotManager(peer)
        """The peer's snapshots, which outlive this."""
        self.peer = peer
        self._assign = assign
        self._memory_bytes = memory_bytes
        self._patience = patience
        holders = dict.fromkeys(
            PeerId(h) for slot in assign.slice.plan.stages for h in slot.holders
        )
        self._holds = peer in holders
        self.peers = tuple(p for p in holders if p != peer) if self._holds else ()
        """Whom it has links with: the holders that its slice names, in order of their first stage,
        and from `begin` on who gives it snapshots, or gets some."""
        self._near = self.peers
        """Holders alone: who only keeps snapshots may be in another replica later."""
        self._links = RunLinks(self.run, self.term, patience.link_s)
        self._awaits = False
        """Snapshots, before it can build."""
        self._exports = self._partial = False
        self._export = WeightsExport(self.run, self.term, patience)
        self._data_waits: int | None = None
        """The step whose data could not be had while the broker was away."""
        self._sent_bytes = self._again_bytes = 0
        self._last_step_s = 0.0
        self._watched = -1
        """`Steps.progress` when the stall watch was set."""

    @property
    def step(self) -> int:
        """The step that it is in, for the broker."""
        return self.steps.step if self.steps else int(self._assign.first_step)

    @property
    def place(self) -> tuple[int, int]:
        """The step and the round that it is in: clients that train side by side make no step."""
        start = self.rounds.start if self.rounds is not None else None
        return self.step, -1 if start is None else int(start.round)

    @property
    def alive(self) -> bool:
        return self.phase is not Phase.FAILED

    def matches(self, run: str, term: int) -> bool:
        """Whether an answer or frame of this run and term still has an effect."""
        return term == self.term and run == self.run and self.phase is not Phase.FAILED

    def takes(self, key: FrameKey) -> bool:
        """Whether a frame is of this assignment, or of its run's rounds."""
        if key.role is Role.ROUND:
            return self.alive and key.run == run_of(self.run)
        return self.matches(key.run, key.term)

    def has(self, updates: int, *, codecs: bool = True) -> bool:
        """Whether just so many updates are in the stages and, with `codecs`, in their states."""
        steps, resume = self.steps, self._assign.resume
        if self.phase is Phase.BUILDING:  # what was in the stages stays until it is in these
            live = resume.live and self._holds and self.peer not in resume.rebuilt
            return live and self._assign.first_step == updates
        if not self.alive or steps is None or steps.updates != updates:
            return False
        if self.rounds is not None and not self.rounds.settled:
            return False
        return steps.unchanged if codecs else steps.unapplied

    def _tell(self, message: broker_pb2.PeerMessage) -> e.Tell:
        self.reports.keep(message)
        return e.Tell(message)

    # ------------------------------------------------------------ ends

    def fail(self, code: str, text: str) -> list[e.Instruction]:
        """Gives the run up here, once: the broker knows why, nothing of it stays."""
        self.why = text
        fault = self._fault(code, text)
        gone = self.end()
        self.phase = Phase.FAILED
        return [fault, *gone]

    def end(self) -> list[e.Instruction]:
        """What frees everything that this assignment holds; nothing, when it failed before."""
        if not self.alive:
            return []
        gone = self.keeping.end() + ([] if self.rounds is None else self.rounds.exchange.end())
        return [*(e.HangUp(p) for p in self.peers), e.Discard(self.run, self.term), *gone]

    def _fault(self, code: str, text: str, about: str = "") -> e.Tell:
        fault = broker_pb2.Fault(
            run=self.run,
            term=self.term,
            step=self.step,
            reason=common_pb2.Reason(code=code, text=text[:_MOST_TEXT]),
            about=about,
        )
        return self._tell(broker_pb2.PeerMessage(fault=fault))

    def __repr__(self) -> str:
        where = f" {self.steps!r}" if self.phase is Phase.RUNNING else ""
        return f"<{self.run} term {self.term} {self.phase.value}{where}>"

    def validate(self) -> None:
        """Raises AssertionError when the state contradicts the rules of this module."""
        if self.phase in (Phase.READY, Phase.RUNNING, Phase.EXPORTING, Phase.FINISHED):
            assert self.steps is not None
        if self.steps is not None and self.alive:
            self.steps.validate()
            assert not self.steps.in_flight or self.phase is Phase.RUNNING
        self._links.validate()
        assert bool(self.why) == (self.phase is Phase.FAILED)
