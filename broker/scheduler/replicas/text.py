"""A formation in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite

from ....dag.plan.plan import PeerId
from ....job.words import count_of, size_text, some_of
from .formation import Formation, FormedReplica

__all__ = ["formation_lines"]

MOST_NAMES = 8
MOST_LINES = 12
"""Replicas, and peers left out, that have a line of their own."""


def formation_lines(formation: Formation, names: Mapping[PeerId, str]) -> list[str]:
    """`names`: of peers, for people."""
    return list(_lines(formation, names))


def _lines(formation: Formation, names: Mapping[PeerId, str]) -> Iterator[str]:
    replicas, round_ = formation.replicas, formation.round
    yield f"recommended: {formation.reasons[0]}"
    for r, replica in enumerate(replicas[:MOST_LINES]):
        yield f"replica {r}: {_replica(replica, names)}"
    yield from _more(len(replicas), "replica")
    if len(replicas) > 1:
        least = (
            f", the slowest link {_rate(round_.slowest_link)}"
            if isfinite(round_.slowest_link)
            else ""
        )
        yield (
            f"between replicas: {size_text(round_.contribution_bytes)} from each every "
            f"{round_.every} steps{least}"
        )
        most, size = max(round_.peer_bytes, key=lambda x: (x[1], x[0]))
        yield f"bytes of a round and peer: at most {size_text(size)} each way, at {names[most]}"
        hidden = f", {round_.hidden_s:.3g} s of it hidden" if round_.hidden_s else ""
        yield (
            f"a round: {round_.samples} samples in {round_.seconds:.4g} s, {round_.local_s:.4g} s "
            f"of local work and {round_.exchange_s:.3g} s of exchange{hidden}; it hangs on "
            f"{round_.hangs_on}"
        )
    for spare in formation.left_out[:MOST_LINES]:
        yield f"left out: {names[spare.peer]}, {spare.reason}"
    yield from _more(len(formation.left_out), "peer")
    now = round_.batch / formation.samples_per_s
    for other in formation.alternatives:
        value = "-"
        if other.step_s:
            rate = round_.batch / other.step_s
            value = f"{rate:.4g} samples/s, {now / other.step_s:.2f} times these"
        yield f"beside it: {other.name}: {value} ({other.text})"
    yield from formation.reasons[1:]


def _replica(replica: FormedReplica, names: Mapping[PeerId, str]) -> str:
    plan = replica.made.plan
    who = _who([names[p] for p in replica.peers])
    link = (
        f", the slowest link inside {_rate(replica.slowest_link)}"
        if isfinite(replica.slowest_link)
        else ""
    )
    shape = f" in {count_of(len(plan.stages), 'stage')}" if len(plan.stages) > 1 else ""
    return (
        f"{who}{shape}: {replica.samples_per_s:.4g} samples/s, {count_of(replica.steps, 'step')} "
        f"of {replica.samples} samples in a round, {replica.step_s:.3g} s each{link}"
    )


def _who(names: Sequence[str]) -> str:
    return some_of(names, MOST_NAMES)


def _rate(rate: float) -> str:
    return f"{rate / 1e6:.4g} MB/s"


def _more(count: int, what: str) -> Iterator[str]:
    if count > MOST_LINES:
        yield f"and {count_of(count - MOST_LINES, what)} more"
