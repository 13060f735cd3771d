"""The weights of one assignment on their way to the broker: in mid-run, when somebody asks for
them, and at the end. Pure: no I/O, no clock, no threads."""

from __future__ import annotations

from . import events as e
from .options import Timeouts

__all__ = ["WeightsExport"]


class WeightsExport:
    """Uploads of one assignment's weights. In mid-run they are copied after the update of the step,
    and a failed upload is tried again after the next one. At the end it is tried `export_tries`
    times; an upload that fails while the broker is away waits for it."""

    def __init__(self, run: str, term: int, patience: Timeouts) -> None:
        self._run, self._term, self._patience = run, term, patience
        self.asked = False
        """Whether somebody wants them as after the present step."""
        self._updates = self._tries = 0
        self._waits = False

    def stepped(self, updates: int) -> list[e.Instruction]:
        """Upload the weights with so many updates, if somebody asked for them."""
        asked, self.asked = self.asked, False
        return [e.UploadWeights(self._run, self._term, updates)] if asked else []

    def end(self, updates: int) -> list[e.Instruction]:
        """The last update is in the weights."""
        self._updates = updates
        return self.again()

    def again(self) -> list[e.Instruction]:
        """Upload the weights of the end."""
        self._waits = False
        return [e.UploadWeights(self._run, self._term, self._updates)]

    def broker_back(self) -> list[e.Instruction]:
        """Try again what failed while the broker was away."""
        return self.again() if self._waits else []

    def failed(self, now: float, *, away: bool) -> list[e.Instruction] | None:
        """The upload of the end has failed; None: once too often."""
        if away:
            self._waits = True
            return []
        self._tries += 1
        if self._tries >= self._patience.export_tries:
            return None
        return [e.SetTimer("export", now + self._patience.export_retry_s)]
