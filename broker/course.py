"""The course of a run: what it had come to, and what that had taken, at every step or round."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

__all__ = ["Course"]


class Course:
    """Points of one run, made of its rows in the order in which they came: of its steps, or, of
    replicas that train apart, of its rounds. Rows have the names of metrics.jsonl and rounds.jsonl.

    `points`: step (that many are done), samples (committed; None where steps say it, each a batch),
    sent_bytes and seconds (of all until then), loss (of the step's batch, or the mean of a round's
    local steps; None: not known) and held_out (after it; None: not evaluated)."""

    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self._sent_bytes = 0
        self._seconds = 0.0
        self._apart: defaultdict[int, deque[int]] = defaultdict(deque)
        """By replica, what its local steps sent that stand in no round yet."""
        self._rounds: dict[int, dict[str, Any]] = {}

    def stepped(self, row: Mapping[str, Any], replica: int | None = None) -> None:
        """A step; of replicas that train apart, one that `replica` made for a round to come."""
        if replica is not None:
            self._apart[replica].append(int(row["sent_bytes"]))
            return
        self._sent_bytes += int(row["sent_bytes"])
        self._seconds += row["seconds"]
        self._add(row["step"] + 1, None, row["loss"], row.get("eval_loss"))

    def met(self, row: Mapping[str, Any]) -> None:
        """A round that was committed. What its local steps sent counts with it."""
        for one in (*row["members"], *row["left_out"]):
            waiting = self._apart[one["replica"]]
            for _ in range(min(len(waiting), one["steps"])):
                self._sent_bytes += waiting.popleft()
        self._sent_bytes += row["sent_bytes"]
        self._seconds += row["seconds"]
        self._add(row["step"], row["samples_committed"], row["loss"], None)
        self._rounds[row["round"]] = self.points[-1]

    def evaluated(self, round: int, held_out: float) -> None:
        """A version that was evaluated: the one that `round` begins from."""
        if (point := self._rounds.get(round - 1)) is not None:
            point["held_out"] = held_out
        elif not self.points:  # before all training
            self._add(0, 0, None, held_out)

    def _add(
        self, step: int | None, samples: int | None, loss: float | None, held_out: float | None
    ) -> None:
        self.points.append(
            {
                "step": step,
                "samples": samples,
                "sent_bytes": self._sent_bytes,
                "seconds": self._seconds,
                "loss": loss,
                "held_out": held_out,
            }
        )
