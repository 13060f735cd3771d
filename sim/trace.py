"""What a world records while it runs: what each peer did and when, and what happened to it.

One JSON line each in events.jsonl. Times are seconds of the world's clock where that is virtual,
else since the run began. Waiting is not recorded: it is what lies between the spans of a peer.
The digest of two runs of a deterministic world with one seed is the same (I6).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

__all__ = ["COMPUTE", "Kind", "Mark", "Span", "Total", "TotalKey", "Trace", "TraceError"]

Kind = Literal[
    "forward",
    "backward",
    "weight",
    "exchange",
    "update",
    "evaluate",
    "build",
    "send",
    "recover",
]
COMPUTE: frozenset[Kind] = frozenset(
    {"forward", "backward", "weight", "exchange", "update", "evaluate"}
)
"""What occupies the device in a run that goes on; no two of one peer overlap."""

_KINDS = frozenset(get_args(Kind))
_ENDLESS = float("inf")


class TraceError(ValueError):
    """A trace that cannot be: time that runs backwards, a line that is no record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One thing that a peer did, from `start_s` to `end_s`. -1 and "": does not apply."""

    start_s: float
    end_s: float
    peer: str
    kind: Kind
    step: int = -1
    microbatch: int = -1
    stage: int = -1
    to: str = ""
    """The receiver of a send. It lasts from when the frame is ready to when its last byte left."""
    size_bytes: int = 0
    """The bytes of a send, as encoded."""
    dense_bytes: int = 0
    """The bytes of a send, as the tensor has them."""
    role: str = ""
    codec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One moment: a fault, a join, a loss, a decision."""

    at_s: float
    who: str
    what: str
    """A word: "kill", "cut-off", "plan", "resumed", "loss", …"""
    text: str = ""


class TotalKey(NamedTuple):
    """What totals are kept apart by."""

    peer: str
    kind: Kind
    to: str
    role: str
    codec: str


@dataclass(slots=True)
class Total:
    """Sums over many spans, and how many these are."""

    count: int = 0
    seconds: float = 0.0
    size_bytes: int = 0
    dense_bytes: int = 0


class Trace:
    """Spans and marks in the order in which they were added.

    At most `most_spans` spans and `most_marks` marks are kept, the first ones; of the spans beyond,
    `beyond` keeps the sums by peer, kind and link, so that shares and bytes stay exact.
    """

    def __init__(self, *, most_spans: int = 500_000, most_marks: int = 100_000) -> None:
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.most_spans, self.most_marks = most_spans, most_marks
        self.beyond: dict[TotalKey, Total] = {}
        self.marks_left_out = 0
        self.end_s = 0.0
        """When the last span or mark ended, also of those left out."""

    @property
    def spans_left_out(self) -> int:
        return sum(total.count for total in self.beyond.values())

    def add(self, record: Span | Mark) -> None:
        """Raises TraceError for a time that is not finite, or a span that ends before it starts."""
        if isinstance(record, Mark):
            if not -_ENDLESS < record.at_s < _ENDLESS:
                raise TraceError(f"{record}: expected a finite time")
            self.end_s = max(self.end_s, record.at_s)
            if len(self.marks) < self.most_marks:
                self.marks.append(record)
            else:
                self.marks_left_out += 1
            return
        if not -_ENDLESS < record.start_s <= record.end_s < _ENDLESS:
            raise TraceError(f"{record}: expected finite times, and an end not before the start")
        if record.end_s > self.end_s:
            self.end_s = record.end_s
        if len(self.spans) < self.most_spans:
            self.spans.append(record)
        else:
            _count(self.beyond, record)

    def totals(self) -> dict[TotalKey, Total]:
        """Sums over all spans, also those that were left out."""
        sums = {part: replace(total) for part, total in self.beyond.items()}
        for span in self.spans:
            _count(sums, span)
        return sums

    def lines(self) -> Iterator[str]:
        """The trace as JSON, one record a line, keys sorted, without what has its default."""
        yield from map(_line, self.spans)
        for mark in self.marks:
            text = {"text": mark.text} if mark.text else {}
            yield _dump({"at_s": float(mark.at_s), "who": mark.who, "what": mark.what, **text})
        if self.beyond or self.marks_left_out:
            yield _dump({"left_out": self.spans_left_out, "marks": self.marks_left_out})
            yield _dump({"ended_s": self.end_s})
            for part, t in sorted(self.beyond.items()):
                yield _dump({**part._asdict(), **asdict(t)})

    def digest(self) -> str:
        """SHA-256 of the lines: the hash of the event log."""
        seen = hashlib.sha256()
        for line in self.lines():
            seen.update(line.encode() + b"\n")
        return seen.hexdigest()

    def write(self, path: Path) -> None:
        """The file is there whole or not at all."""
        new = path.with_name(f".{path.name}.new")
        with new.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in self.lines())
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> Trace:
        """What `write` wrote. Raises TraceError with file and line for anything else."""
        trace = cls()
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    trace._take(json.loads(line))
                except (TypeError, ValueError) as error:
                    raise TraceError(f"{path}:{number}: {error}") from None
        return trace

    def _take(self, record: Any) -> None:
        if not isinstance(record, dict):
            raise TraceError(f"expected an object, got {type(record).__name__}")
        if "left_out" in record:
            self.marks_left_out = int(record["marks"])
        elif "ended_s" in record:
            self.end_s = float(record["ended_s"])
        elif "count" in record:
            part = TotalKey(*(record.pop(name) for name in TotalKey._fields))
            self.beyond[part] = Total(**record)
        elif "at_s" in record:
            self.most_marks = max(self.most_marks, len(self.marks) + 1)
            self.add(Mark(**record))
        else:
            if record.get("kind") not in _KINDS:
                known = ", ".join(get_args(Kind))
                raise TraceError(f"kind is {record.get('kind')!r}: expected one of {known}")
            self.most_spans = max(self.most_spans, len(self.spans) + 1)
            self.add(Span(**record))


def _count(sums: dict[TotalKey, Total], span: Span) -> None:
    total = sums.setdefault(TotalKey(span.peer, span.kind, span.to, span.role, span.codec), Total())
    total.count += 1
    total.seconds += span.end_s - span.start_s
    total.size_bytes += span.size_bytes
    total.dense_bytes += span.dense_bytes


def _line(span: Span) -> str:
    """As `_dump` writes what is not default, an order faster: there are hundreds of thousands."""
    line = ""
    if span.codec:
        line += f'"codec":{_quoted(span.codec)},'
    if span.dense_bytes:
        line += f'"dense_bytes":{span.dense_bytes},'
    line += f'"end_s":{float(span.end_s)!r},"kind":"{span.kind}"'
    if span.microbatch != -1:
        line += f',"microbatch":{span.microbatch}'
    line += f',"peer":{_quoted(span.peer)}'
    if span.role:
        line += f',"role":{_quoted(span.role)}'
    if span.size_bytes:
        line += f',"size_bytes":{span.size_bytes}'
    if span.stage != -1:
        line += f',"stage":{span.stage}'
    line += f',"start_s":{float(span.start_s)!r}'
    if span.step != -1:
        line += f',"step":{span.step}'
    if span.to:
        line += f',"to":{_quoted(span.to)}'
    return f"{{{line}}}"


_quoted = lru_cache(maxsize=4096)(json.dumps)


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
