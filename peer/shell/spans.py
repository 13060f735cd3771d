"""What this peer did and when, as JSON lines in a file: for timelines of several processes.

The first line of a start says who writes: {"peer": ID, "name": NAME}. Every other is a span, with
`start_s` and `end_s` of `time.time()`, so that files of one host fit together:

    build, forward, backward, exchange, update, evaluate   an action, from begin to end of its work
    send   a frame, from when it is ready to be encoded to when its receiver acknowledged it; with
           `to`, `role`, `hop`, `codec`, and its bytes as encoded and as the tensor has them
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from ...dag.plan.action import ROUNDS, TRAITS
from ...dag.schedule.schedule import VISITS, Action
from ...net.links.frame import FrameKey, Payload
from ..core.events import Result

__all__ = ["Spans"]


@dataclass(slots=True)
class _Sending:
    ready_s: float
    size_bytes: int = 0
    dense_bytes: int = 0
    codec: str = ""


class Spans:
    """Writes what this peer did, and when, as JSON lines to a file; without a path it writes
    nothing. Safe to use from several threads. A line is in the file once the call returns: a
    process that is killed leaves what it did."""

    def __init__(
        self, path: str, peer: str, name: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sending: dict[FrameKey, _Sending] = {}
        self._file = _opened(Path(path)) if path else None
        self._write(peer=peer, name=name)

    def compute(
        self,
        work: Callable[[int, Action], Result],
        run: str,
        step: int,
        action: Action,
    ) -> Result:
        """Does the work of an action, and writes how long it took, also when it raises."""
        visit = (
            {"microbatch": action.microbatch, "stage": action.stage}
            if action.kind in VISITS
            else {}
        )
        if action.kind not in ROUNDS:  # whose number is that of the round
            visit["step"] = step
        with self.span(TRAITS[action.kind].word, run, **visit):
            return work(step, action)

    @contextmanager
    def span(self, kind: str, run: str, **more: int) -> Iterator[None]:
        """Writes how long the block took."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._write(kind=kind, run=run, start_s=start_s, end_s=self._clock(), **more)

    def ready(self, key: FrameKey) -> None:
        """A frame is to be encoded and sent."""
        if self._file is not None:
            self._sending[key] = _Sending(self._clock())

    def sent(self, key: FrameKey, payload: Payload) -> None:
        """Note that a frame was encoded, and the transport has it."""
        if (sending := self._sending.get(key)) is not None:
            sending.size_bytes, sending.codec = payload.size_bytes, payload.codec
            sending.dense_bytes = 0 if payload.absent else payload.spec.size_bytes

    def acknowledged(self, key: FrameKey) -> None:
        """The receiver has it."""
        if (sending := self._sending.pop(key, None)) is not None:
            self._write(
                kind="send",
                run=key.run,
                start_s=sending.ready_s,
                end_s=self._clock(),
                step=key.step,
                microbatch=key.microbatch,
                hop=key.hop,
                to=key.destination,
                role=key.role.value,
                size_bytes=sending.size_bytes,
                dense_bytes=sending.dense_bytes,
                codec=sending.codec,
            )

    def forget(self, peer: str) -> None:
        """Frames to this peer will not be acknowledged."""
        self._sending = {k: v for k, v in self._sending.items() if k.destination != peer}

    def close(self) -> None:
        """Idempotent; what comes later is not written."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, **record: Any) -> None:
        with self._lock:
            if self._file is not None:
                self._file.write(json.dumps(record, separators=(",", ":")) + "\n")


def _opened(path: Path) -> TextIO:
    """To be written behind what an earlier start left; a line that it did not finish is removed."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
    return path.open("a", buffering=1, encoding="utf-8")
