"""The losses of a run against those of the plain loop, step by step (I1)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..compression.sparse.masks import SharedMask
from ..dag.rounds.vector import PIECE
from ..job import Codec, Job
from ..peer.data.reader import Reader
from . import oracle, round_methods, round_oracle
from .following import Following
from .front import Facts, Front
from .report import Summary
from .round_log import committed_rounds

__all__ = ["METHODS", "TOLERANCE", "compare", "judge", "saps_mask", "verify"]

TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}
"""By `model.dtype`: how far a step's loss may be from the plain loop's, as a share of it, or alone
where the loss is below 1. A single step agrees to 1e-5 in fp32, and what rounding leaves grows over
the steps; the plain loop knows no bf16."""

METHODS: Mapping[str, Callable[..., round_oracle.PlainMethod]] = {
    "diloco": round_methods.DiLoCo,
    "average": round_methods.Average,
    "sparse-loco": lambda lr=1.0, decay=0.95, result_density=0.0, **wire: round_methods.SparseLoCo(
        lr,
        decay,
        round_methods.sparse_wire(**wire),
        round_methods.sparse_wire(**wire | {"density": result_density}) if result_density else None,
    ),
    "streaming-diloco": lambda bits=4, **options: round_methods.Streaming(**options),
    "random-pairs": round_methods.Saps,
    "ring": round_methods.Saps,
    "noloco": round_methods.NoLoCo,
    "saps-outer": lambda lr=0.7, momentum=0.5, **links: round_methods.NoLoCo(lr, momentum),
    "saps": lambda seed=0, keep=0.01, **links: round_methods.Saps(saps_mask(seed, keep)),
}
"""What the plain loop does between replicas, by [sync] method; called with its options, of saps
with the seed of the job, too."""


def saps_mask(seed: int, keep: float) -> Callable[[int, str, torch.Size], Tensor]:
    """The positions that a run of saps draws: of a round, in a parameter."""

    def mask(count: int, name: str, shape: torch.Size) -> Tensor:
        found = torch.zeros(shape.numel(), dtype=torch.bool)
        for start in range(0, shape.numel(), PIECE):
            shared = SharedMask(seed, count, keep)
            elements = min(PIECE, shape.numel() - start)
            found[start + shared.positions(f"param:{name}:{start}", elements)] = True
        return found.view(shape)

    return mask


def verify(
    job: Job,
    followed: Following,
    facts: Facts,
    front: Front,
    one_stage: Callable[[Job], Sequence[float]],
    say: Callable[[str], None],
    expected: float | None = None,
) -> None:
    """Trains the job once more in the boring way, and fills the summary with the difference. Where
    the run is meant to be exact and differs beyond TOLERANCE, it has failed; a scenario that
    expects something of the difference itself (`expected`) says so instead.

    A graph that draws masks draws others than the native module does, so it is trained as one
    stage then: `one_stage` does that, and gives the losses of all steps.
    """
    if followed.played.rows:
        _verify_rounds(job, followed, facts, front, say, expected)
        return
    if facts.random:
        say("training it once more as one stage")
        # Masks differ from microbatch to microbatch, so the batch must be divided as it was.
        train = replace(job.train, microbatch=followed.microbatch_size)
        job = job.decided("allreduce", 1)
        plan = replace(job.plan, stages=1, pipelines=1)
        wanted = one_stage(replace(job, plan=plan, codec=Codec(), train=train))
        against = "one-stage run"
    else:
        say("training the plain loop")
        wanted, against = _plain(job, followed, facts, front), "single process"
    compare(followed.summary, followed.losses, wanted, against)
    if expected is None:
        judge(job, followed.summary, followed.losses, wanted)


def compare(
    summary: Summary, losses: Sequence[float], wanted: Sequence[float], against: str
) -> None:
    """Fills the summary with the difference of two runs of equal length."""
    summary.verified_against = against
    summary.max_loss_difference = max(map(_apart, losses, wanted), default=0.0)
    if (summary.lossy or summary.inexact_from or summary.swapped) and losses:
        last = max(1, len(losses) // 10)
        plain = statistics.mean(wanted[-last:])
        summary.loss_ratio = statistics.mean(losses[-last:]) / plain if plain else None


def judge(job: Job, summary: Summary, losses: Sequence[float], wanted: Sequence[float]) -> None:
    """Fails a run that is meant to be exact, at its first loss beyond the tolerance."""
    if summary.lossy or summary.inexact_from or summary.swapped:
        return
    most = TOLERANCE[job.model.dtype]
    for step, (a, b) in enumerate(zip(losses, wanted, strict=True)):
        if _apart(a, b) > _allowed(most, b):
            summary.exit = 1
            summary.error = (
                f"--verify: the loss of step {step} is {a:.6g}, in the {summary.verified_against} "
                f"{b:.6g}: expected a difference of at most {most:g} of it (I1)"
            )
            return


def _allowed(most: float, wanted: float) -> float:
    return most * max(1.0, abs(wanted)) if math.isfinite(wanted) else 0.0


def _apart(a: float, b: float) -> float:
    """How far two losses are apart. A step without any weight has the loss NaN: it is equal to
    another one, and infinitely far from a number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else apart


def _plain(job: Job, followed: Following, facts: Facts, front: Front) -> list[float]:
    reader = Reader(
        facts.manifest,
        facts.shards.__getitem__,
        seed=job.seed,
        microbatches=followed.microbatches,
    )
    with front.module(job) as module:
        return oracle.train(
            module,
            lambda step, m: reader.batch(step, m, followed.microbatch_size),
            job.train,
            steps=len(followed.losses),
            microbatches=followed.microbatches,
        ).losses


# Runs whose replicas train apart: the plain loop is fed with the rounds that were committed.


def _verify_rounds(
    job: Job,
    followed: Following,
    facts: Facts,
    front: Front,
    say: Callable[[str], None],
    expected: float | None,
) -> None:
    """As `verify`, of every local step of every replica. Where a replica was lost or left out, or
    the graph draws masks, nothing is compared."""
    rows, summary = followed.played.rows, followed.summary
    lost = next((r for r in rows if r.left_out or r.joined or r.attempt > 1), None)
    if lost is not None or facts.random:
        why = "the graph draws masks, and a plain loop draws others"
        if lost is not None:
            why = f"in round {lost.round} a replica was lost, left out, or came late"
        say(f"not verified: {why}")
        return
    say("training the plain loop, of every replica")
    wanted = _rounds(job, followed, facts, front)
    got = [
        (r.round, m.replica, j, x) for r in rows for m in r.members for j, x in enumerate(m.losses)
    ]
    plain = [wanted[n][k][j] for n, k, j, _ in got]
    losing = job.codec.sync
    if job.sync.chosen == "streaming-diloco" and job.sync.options.get("bits", 4) == 4:
        losing = "e3m0"
    summary.lossy += (losing,) if losing != "none" and losing not in summary.lossy else ()
    compare(summary, [x for *_, x in got], plain, "plain loop of rounds")
    if expected is None and not (summary.lossy or summary.inexact_from or summary.swapped):
        most = TOLERANCE[job.model.dtype]
        for (n, k, j, a), b in zip(got, plain, strict=True):
            if _apart(a, b) > _allowed(most, b):
                summary.exit = 1
                summary.error = (
                    f"--verify: in round {n} the loss of replica {k} in its step {j} is {a:.6g}, "
                    f"in the plain loop {b:.6g}: expected a difference of at most {most:g} of it"
                )
                return


def _rounds(
    job: Job, followed: Following, facts: Facts, front: Front
) -> list[dict[int, list[float]]]:
    """By round and replica, the losses of local steps."""
    size = followed.microbatch_size
    count = followed.microbatches * followed.summary.replicas  # of a step of the run
    seed = job.seed
    reader = Reader(facts.manifest, facts.shards.__getitem__, seed=seed, microbatches=count)

    def batches(samples: Sequence[int]) -> dict[str, Tensor]:
        numbers = [s // size for s in samples[::size]]
        each = [reader.batch(g // count, g % count, size) for g in numbers]
        return {name: torch.cat([e[name] for e in each]) for name in each[0]}

    gossip = job.sync.kind == "gossip"
    played = committed_rounds(
        followed.events, microbatches=count, microbatch_size=size, gossip=gossip
    )
    sync = job.decided("local", followed.summary.replicas).sync
    options: dict[str, Any] = dict(sync.options)
    options.pop("overlap", None)
    if sync.chosen == "saps":
        options["seed"] = seed
    method = METHODS[sync.chosen](**options)
    if sync.overlap and not isinstance(method, round_methods.Streaming):
        method = round_methods.Overlapped(method)
    with front.module(job) as module:
        steps = job.train.steps or followed.summary.steps
        return round_oracle.train(module, played, batches, job.train, method, steps=steps).losses
