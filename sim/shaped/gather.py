"""One trace from what several processes of this host wrote (`shoal join --trace FILE`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..trace import Span, Trace, TraceError

__all__ = ["gather"]

_FIELDS = frozenset(f.name for f in fields(Span))


def gather(files: Iterable[Path], origin_s: float, *, run: str = "") -> Trace:
    """The spans of `files` (written as peer/shell/spans.py says) in order of time, with times
    counted from `origin_s` of `time.time()`, and peers under their names instead of their ids.

    `run`: only what was done for it; empty: everything. What ended before the origin is left out,
    and so is the last line of a file that a killed process left unfinished. Raises TraceError, with
    file and line, for any other line that is no span.
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for path in files:
        own = ""
        for where, record in _records(path):
            if "name" in record:
                own = names[record["peer"]] = record["name"]
            elif not run or record.get("run") == run:
                found.append({**record, "peer": own, "where": where})
    trace = Trace()
    spans = (_span(record, origin_s, names) for record in found)
    kept = (span for span in spans if span.end_s >= 0)
    for span in sorted(kept, key=lambda s: (s.start_s, s.end_s, s.peer, s.kind, s.to)):
        trace.add(span)
    return trace


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # behind the last newline stands what was cut off
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{where}: {error}") from None
        if not isinstance(record, dict) or not {"name", "kind"} & record.keys():
            raise TraceError(f"{where}: expected a span or who writes, got {record!r}")
        yield where, record


def _span(record: dict[str, Any], origin_s: float, names: dict[str, str]) -> Span:
    try:
        own = {name: value for name, value in record.items() if name in _FIELDS}
        own["start_s"] -= origin_s
        own["end_s"] -= origin_s
        own["to"] = names.get(own.get("to", ""), own.get("to", ""))
        return Span(**own)
    except (KeyError, TypeError) as error:
        raise TraceError(f"{record['where']}: {error!r} is missing or wrong") from None
