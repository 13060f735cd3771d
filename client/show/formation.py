"""The replicas of a run in lines for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite

from ...job.words import WRONG_CHOICE, count_of, size_text, some_of
from ...proto.broker_pb2 import Formation, FormedReplica

__all__ = ["formation_lines"]

MOST_NAMES = 8
MOST_LINES = 12
"""Replicas, and peers left out, that have a line of their own."""


def formation_lines(formation: Formation, names: Mapping[str, str]) -> list[str]:
    """`names`: of peers, for people; others are called by their ids."""
    return list(_lines(formation, names))


def _lines(formation: Formation, names: Mapping[str, str]) -> Iterator[str]:
    wrong = [reason for reason in formation.reasons[1:] if WRONG_CHOICE in reason]
    yield f"{'asked for' if wrong else 'recommended'}: {', '.join(formation.reasons[:1])}"
    yield from wrong
    for r, replica in enumerate(formation.replicas[:MOST_LINES]):
        yield f"replica {r}: {_replica(replica, names)}"
    yield from _more(len(formation.replicas), "replica")
    yield from _round(formation, names)
    for spare in formation.left_out[:MOST_LINES]:
        yield f"left out: {names.get(spare.peer, spare.peer)}, {spare.reason}"
    yield from _more(len(formation.left_out), "peer")
    round_s = formation.local_s + formation.exposed_s
    now = formation.every * formation.batch / round_s if round_s else 0.0
    for other in formation.alternatives:
        value = "-"
        if other.step_s:
            rate = formation.batch / other.step_s
            value = f"{rate:.4g} samples/s, {rate / now:.2f} times these" if now else f"{rate:.4g}"
        yield f"beside it: {other.name}: {value} ({other.text})"
    yield from (reason for reason in formation.reasons[1:] if reason not in wrong)


def _round(formation: Formation, names: Mapping[str, str]) -> Iterator[str]:
    if formation.peers:
        most = max(formation.peers, key=lambda p: (p.kept_bytes, p.peer))
        yield (
            f"memory of rounds: {size_text(most.kept_bytes)} at most, at "
            f"{names.get(most.peer, most.peer)}: the version, the method's state, and what an "
            "exchange takes (in the plans' memory)"
        )
    if len(formation.replicas) < 2:
        return
    yield (
        f"between replicas: {size_text(formation.contribution_bytes)} from each every "
        f"{formation.every} steps{_slowest(formation.slowest_link, '')}"
    )
    if formation.peers:
        most = max(formation.peers, key=lambda p: (p.bytes, p.peer))
        yield (
            f"bytes of a round and peer: at most {size_text(most.bytes)} each way, at "
            f"{names.get(most.peer, most.peer)}"
        )
    hidden = formation.exchange_s - formation.exposed_s
    yield (
        f"a round: {formation.every * formation.batch} samples in "
        f"{formation.local_s + formation.exposed_s:.4g} s, {formation.local_s:.4g} s of local work "
        f"and {formation.exchange_s:.3g} s of exchange"
        + (f", {hidden:.3g} s of it hidden" if hidden else "")
        + f"; it hangs on {formation.hangs_on}"
    )


def _replica(replica: FormedReplica, names: Mapping[str, str]) -> str:
    who = some_of([names.get(p, p) for p in replica.peers], MOST_NAMES)
    shape = f" in {count_of(replica.stages, 'stage')}" if replica.stages > 1 else ""
    rate = replica.samples / replica.step_s if replica.step_s else 0.0
    return (
        f"{who}{shape}: {rate:.4g} samples/s, {count_of(replica.steps, 'step')} of "
        f"{replica.samples} samples in a round, {replica.step_s:.3g} s each"
        f"{_slowest(replica.slowest_link, ' inside')}"
    )


def _slowest(rate: float, where: str) -> str:
    return f", the slowest link{where} {rate / 1e6:.4g} MB/s" if isfinite(rate) else ""


def _more(count: int, what: str) -> Iterator[str]:
    if count > MOST_LINES:
        yield f"and {count_of(count - MOST_LINES, what)} more"
