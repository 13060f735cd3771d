"""The losses of a run against those of the plain loop, step by step (I1)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..job import Codec, Job
from ..peer.data.reader import Reader
from . import oracle
from .following import Following
from .front import Facts, Front
from .report import Summary

__all__ = ["compare", "verify"]


def verify(
    job: Job,
    followed: Following,
    facts: Facts,
    front: Front,
    one_stage: Callable[[Job], Sequence[float]],
    say: Callable[[str], None],
) -> None:
    """Trains the job once more in the boring way, and fills the summary with the difference.

    A graph that draws masks draws others than the native module does, so it is trained as one
    stage then: `one_stage` does that, and gives the losses of all steps.
    """
    if facts.random:
        say("training it once more as one stage")
        # Masks differ from microbatch to microbatch, so the batch must be divided as it was.
        train = replace(job.train, microbatch=followed.microbatch_size)
        plan = replace(job.plan, stages=1, pipelines=1)
        wanted = one_stage(replace(job, plan=plan, codec=Codec(), train=train))
        against = "one-stage run"
    else:
        say("training the plain loop")
        wanted, against = _plain(job, followed, facts, front), "single process"
    compare(followed.summary, followed.losses, wanted, against)


def compare(
    summary: Summary, losses: Sequence[float], wanted: Sequence[float], against: str
) -> None:
    """Fills the summary with the difference of two runs of equal length."""
    summary.verified_against = against
    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    # max() would pass over a NaN that does not come first.
    finite = all(map(math.isfinite, apart))
    summary.max_loss_difference = max(apart, default=0.0) if finite else math.inf
    if (summary.lossy or summary.inexact_from or summary.swapped) and losses:
        last = max(1, len(losses) // 10)
        summary.loss_ratio = statistics.mean(losses[-last:]) / statistics.mean(wanted[-last:])


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
