"""What rounds between replicas come to with hashes: the rule, and the plain loop.

All numbers are modulo 2⁶⁴, c and a as in `hashes.py`. Piece i of an entry v of the run's vector
(`dag/rounds/vector.py`), of which replica r has the hash h_r(v) behind its local steps:

    contribution  g_r(v, i) = mix(c(v, i) + h_r(v) - h(v))
    mean          q(v, i)   = mix(Σ w_r · g_r(v, i) + a · Σ w_r)
    version       h(v)     <- mix(a · h(v) + Σ a(v, i) · q(v, i))

Where steps go on beside the exchange, h_r(v) <- h_r(v) + h(v) - what h_r(v) was, where it lands.

Where parts cut a piece, q(v, i) comes in each of them, and is what they all come to, or the version
is another one (`met`).

A sum has no order. One that lacks a contribution, has one twice, by another weight or of another
piece, changes q, and q changes the version. What a method keeps beside it (momentum) follows from
the versions before, all of which are in h(v); so one rule stands for all methods. In gossip, where
replicas have versions of their own, h(v) in the rule is 0, and a sum is that of a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...dag.ir.graph import Graph
from ...dag.rounds.vector import Entry, RunVector, VectorPiece
from ..plain.round_oracle import Round
from .hashes import MASK, Hashes, PlainLoop, Words, mix, mixed, name_hash, odd

__all__ = [
    "ExpectedRounds",
    "digest",
    "expected_gossip",
    "expected_rounds",
    "factor",
    "given",
    "mean",
    "met",
    "trained",
    "version",
]

_KEEP, _WEIGHT = odd("version"), odd("weights")


def factor(value: str, start: int) -> int:
    """c(v, i) and a(v, i) of the piece that begins at this element of the entry."""
    return odd("piece", value, start)


def given(factors: Words, moved: Words) -> Words:
    """g of many pieces; moved: h_r(v) - h(v) of each."""
    return mixed(factors + moved)


def mean(total: Words, weight: int) -> Words:
    """q of many pieces; total: Σ w_r · g_r."""
    return mixed(total + np.uint64(_WEIGHT * weight & MASK))


def met(means: Iterable[tuple[VectorPiece, int]]) -> int:
    """Σ a(v, i) · q(v, i) of an entry, by what came of each of its pieces, in order; of one that
    is cut, by the first of it, to which the others are equal."""
    found, firsts = 0, dict[int, int]()
    for p, q in means:
        first = firsts.setdefault(p.whole_start, q)
        found += factor(p.entry.value, p.start) * (q if p.start == p.whole_start else q - first)
    return found & MASK


def version(before: int, moved: int) -> int:
    """h(v) of the next version; moved: Σ a(v, i) · q(v, i)."""
    return mix((_KEEP * before + moved) & MASK)


def trained(value: str, round_: int, client: int) -> int:
    """What a client adds to h_r(v) in a round of federated training."""
    return name_hash("client", value, round_, client)


def digest(versions: Mapping[str, int]) -> int:
    """The hash of a version, or of a part of it: those of parts add up to that of the whole."""
    return sum(mix(name_hash("digest", v) ^ h) for v, h in versions.items()) & MASK


@dataclass
class ExpectedRounds:
    """versions: the hash of each round's, as it is committed. weights: those of the last one."""

    versions: list[int] = field(default_factory=list)
    weights: dict[str, int] = field(default_factory=dict)


def expected_rounds(
    graph: Graph,
    seed: int,
    rounds: Iterable[Round],
    microbatches: int,
    *,
    fragments: int = 1,
    clips: bool = True,
) -> ExpectedRounds:
    """The plain loop over the bound graph, of rounds in which all meet; `microbatches`: of one step
    of the run; `fragments`: of the model, one of which is exchanged in a round. `clips` as in
    `hashes.expected`."""
    hashes, vector = Hashes(graph, seed), RunVector.of(graph, fragments)
    loops: dict[int, PlainLoop] = {}
    start = PlainLoop(hashes).state
    now = {entry.value: start[entry.value] for entry in vector.entries}
    found, ended = ExpectedRounds(), dict[int, dict[str, int]]()
    last, versions = list(now), list[dict[str, int]]()
    """What the round before exchanged; `ended` has it of its members, as they came to its end."""
    for number, done in enumerate(rounds):
        moved: list[tuple[int, dict[str, int]]] = []
        versions.append(dict(now))
        for member in done.members:
            began = number - member.behind
            loop = loops.setdefault(member.replica, PlainLoop(hashes, clips=clips))
            if member.replica not in ended:  # it was in none, and took all
                loop.state |= now
            elif not member.late:
                loop.state |= {v: now[v] for v in last}
            for j in range(0 if member.clients else member.steps):
                loop.step([divmod(g, microbatches) for g in member.part(j)])
                if j + 1 == member.late and (was := ended.get(member.replica)):
                    loop.state |= {v: (loop.state[v] + now[v] - was[v]) & MASK for v in last}
            if member.behind:
                loop.state |= versions[began]
            for client in member.clients:
                loop.state |= {v: (loop.state[v] + trained(v, began, client)) & MASK for v in now}
            moved.append((member.weight, {v: loop.state[v] - versions[began][v] for v in now}))
        inside = [e for e in vector.entries if vector.is_in(e, done.fragment)]
        now |= {e.value: _next(e, now[e.value], moved, vector) for e in inside}
        last, counted = [e.value for e in inside], [m.replica for m in done.members if m.weight]
        ended = {n: {v: loops[n].state[v] for v in last} for n in counted}
        found.versions.append(digest(now))
    found.weights = start | now
    return found


def expected_gossip(
    graph: Graph,
    seed: int,
    rounds: Iterable[Round],
    microbatches: int,
    *,
    clips: bool = True,
) -> ExpectedRounds:
    """The plain loop of gossip, where each group of a round comes to a version of its own, in which
    all weigh alike. What a round is committed with is the sum of the hashes of all members that
    are still there."""
    hashes, vector = Hashes(graph, seed), RunVector.of(graph)
    loops: dict[int, PlainLoop] = {}
    start = PlainLoop(hashes).state
    found = ExpectedRounds()
    for done in rounds:
        for member in done.members:
            loop = loops.setdefault(member.replica, PlainLoop(hashes, clips=clips))
            for j in range(member.steps):
                loop.step([divmod(g, microbatches) for g in member.part(j)])
        versions: dict[int, int] = {}
        for group in done.groups:
            moved = [(1, loops[n].state) for n in group]
            made = {e.value: _next(e, 0, moved, vector) for e in vector.entries}
            for number in group:
                loops[number].state |= made
                versions[number] = digest(made)
        for number, source in done.joined:
            loop = loops.setdefault(number, PlainLoop(hashes, clips=clips))
            loop.state |= {e.value: loops[source].state[e.value] for e in vector.entries}
        there = [h for n, h in versions.items() if n not in done.gone]
        found.versions.append(there[0] if done.gathers else sum(there) & MASK)
        found.weights = start | made
    return found


def _next(
    entry: Entry, before: int, moved: Sequence[tuple[int, Mapping[str, int]]], vector: RunVector
) -> int:
    value, weight, all_of_it = entry.value, sum(w for w, _ in moved), 0
    for piece in vector.pieces((entry.start, entry.stop)):
        a = factor(value, piece.start)
        total = sum(w * mix((a + there[value]) & MASK) for w, there in moved)
        all_of_it += a * mix((total + _WEIGHT * weight) & MASK)
    return version(before, all_of_it & MASK)
