"""Why links of a plan are compressed, or not. Every number comes from the judge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..base.interface import CodecOptions
from ..cost.predicted import seconds_text
from .carried import Choice, CodecLane, CodedStepCost
from .codec_table import Rung

__all__ = ["saved_s", "why"]

MOST_LINES = 12
"""Links that are named one by one."""
MOST_PLAIN = 4
"""The same of those that stay uncompressed."""


def saved_s(carried: CodedStepCost, lane: int, text: str) -> float:
    """Seconds of a step by which the lane is busy for less time."""
    found = carried.lanes[lane]
    return found.dense_s * (1 - carried.load(lane, text).bytes / found.dense_bytes)


def why(
    carried: CodedStepCost,
    options: CodecOptions,
    choice: Choice,
    errors: Mapping[str, float],
    ladders: Mapping[int, tuple[Rung, ...]],
    *,
    seconds: float,
    dense_s: float,
) -> Iterator[str]:
    """One line for all, then one for each link and role, those that save most first. `ladders`:
    what "auto" could take; `seconds`, `dense_s`: of a step with and without codecs."""
    saved = {n: saved_s(carried, n, text) for n, text in choice.items()}
    if choice:
        yield f"codecs: {seconds:.4g} s for a step with them, {dense_s:.4g} s without"
    ranked = sorted(choice, key=lambda n: (-saved[n], n))
    for n in ranked[:MOST_LINES]:
        lane, load = carried.lanes[n], carried.load(n, choice[n])
        error, coding = errors[choice[n]], seconds_text(load.encode_s + load.decode_s)
        yield (
            f"{_link(carried, lane)}: {choice[n]}, {lane.dense_bytes / load.bytes:.1f}x fewer "
            f"bytes, {seconds_text(saved[n])} less on the link, {coding} to encode and decode, "
            + (f"error {100 * error:.2g} %" if error else "nothing is lost")
        )
    if len(ranked) > MOST_LINES:
        yield f"{len(ranked) - MOST_LINES} more links and roles are compressed, which save less"
    plain = [
        lane
        for n, lane in carried.lanes.items()
        if n not in choice and options.of(lane.role) != "none"
    ]
    plain.sort(key=lambda lane: -lane.dense_s)
    for lane in plain[:MOST_PLAIN]:
        because = _why_not(carried, options, lane, ladders.get(lane.number, ()))
        yield f"{_link(carried, lane)}: uncompressed, {because}"
    if len(plain) > MOST_PLAIN:
        yield f"{len(plain) - MOST_PLAIN} more links and roles stay uncompressed"


def _why_not(
    carried: CodedStepCost, options: CodecOptions, lane: CodecLane, rungs: tuple[Rung, ...]
) -> str:
    match options.of(lane.role):
        case "auto" if rungs:
            return f"the step is not shorter with {rungs[-1].codec}"
        case "auto":
            return (
                f"no codec for a {'slow' if lane.slow else 'fast'} link with an error of at most "
                f"{100 * options.error_budget:.2g} % makes it smaller"
            )
        case "adatopk":
            most = max(x.dense_s for x in carried.lanes.values() if x.role == lane.role)
            return (
                f"it carries that for {seconds_text(lane.dense_s)} of a step, the slowest link for "
                f"{seconds_text(most)}: its ratio is 1"
            )
        case text:
            return f"{text} does not make it smaller, or there is no memory for what it keeps"


def _link(carried: CodedStepCost, lane: CodecLane) -> str:
    names = [str(carried.offers[i]) for i in (lane.source, lane.destination)]
    return f"{' -> '.join(names)} {lane.role}"
