"""The losses of a run against those of the plain loop, step by step (I1); and what federated
training is held against, for the report of a simulation."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ..client.front import SimulationFront
from ..client.prepared import Prepared
from ..job import Codec, Job
from ..job.plan_options import PlanOptions
from ..job.sync import Sync
from ..job.tables import Recovery
from ..job.training import Stop
from .following import Following
from .plain import oracle
from .plain.client_baselines import client_baselines
from .plain.plain_cohorts import expected_versions
from .plain.plain_rounds import beside, train_rounds
from .plain.round_oracle import PlainResult
from .report import Summary

__all__ = ["TOLERANCE", "add_baselines", "as_one_stage", "compare", "judge", "one_thread", "verify"]

TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2, "fp16": 1e-2}
"""By `model.dtype`: how far a step's loss may be from the plain loop's, as a share of it, or alone
where the loss is below 1. A single step agrees to 1e-5 in fp32, and what rounding leaves grows over
the steps; the plain loop knows no bf16. Of fp16 it has torch's autocast on a CPU, which rounds
softmax and norms to float16 as well."""


def verify(
    job: Job,
    followed: Following,
    facts: Prepared,
    front: SimulationFront,
    one_stage: Callable[[Job], Sequence[float]],
    say: Callable[[str], None],
    expected: float | None = None,
) -> None:
    """Trains the job once more in the boring way, and fills the summary with the difference. Where
    the run is meant to be exact and differs beyond TOLERANCE, it has failed; a scenario that
    expects something of the difference itself (`expected`) says so instead.

    A graph that draws masks draws others than the native module does, so it is trained as one
    stage then: `one_stage` does that, and gives the losses of all steps. Of a run that ended before
    its length did (`train.stop`), its own steps are compared.
    """
    job = replace(job, train=replace(job.train, no_muon=facts.job.train.no_muon))
    found = _Verification(
        job=job, followed=followed, facts=facts, front=front, say=say, expected=expected
    )
    try:
        if job.sync.kind == "federated":
            found.cohorts()
        elif followed.played.rows:
            found.rounds()
        else:
            found.steps(one_stage)
    except oracle.HalfLossError as error:
        say(f"not verified: {error}, which no scale of {job.train.loss_scale.init_scale:g} is")


@contextmanager
def one_thread() -> Iterator[None]:
    """Operators of a job that fits a simulation are small: a second thread would only wait for
    them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_one_stage(job: Job, microbatch_size: int) -> Job:
    """Return the job on one peer, without what it says of planning, codecs, exchanges, losses of
    peers and an early end. Masks differ from microbatch to microbatch, so its batch is divided as
    it was."""
    single = job.decided("allreduce", 1)
    steps_itself = single.sync.within == "demo"
    return replace(
        single,
        sync=replace(single.sync, collective="auto") if steps_itself else Sync(),
        train=replace(job.train, microbatch=microbatch_size, stop=Stop()),
        plan=PlanOptions(stages=1, pipelines=1),
        codec=Codec(),
        recovery=Recovery(),
    )


def compare(
    summary: Summary, losses: Sequence[float], wanted: Sequence[float], against: str
) -> None:
    """Fills the summary with the difference of two runs of equal length."""
    summary.verified_against = against
    summary.max_loss_difference = max(map(_apart, losses, wanted), default=0.0)
    if (summary.lossy or summary.inexact_from or summary.rerouted) and losses:
        last = max(1, len(losses) // 10)
        plain = statistics.mean(wanted[-last:])
        summary.loss_ratio = statistics.mean(losses[-last:]) / plain if plain else None


def judge(job: Job, summary: Summary, losses: Iterable[tuple[str, float, float]]) -> None:
    """Fails a run that is meant to be exact, at its first loss beyond the tolerance. `losses`:
    which one, what it is, and what it should be."""
    if summary.lossy or summary.inexact_from or summary.rerouted:
        return
    most = TOLERANCE[job.model.dtype]
    for which, got, wanted in losses:
        allowed = most * max(1.0, abs(wanted)) if math.isfinite(wanted) else 0.0
        if _apart(got, wanted) > allowed:
            summary.exit = 1
            summary.error = (
                f"--verify: the {which} is {got:.6g}, in the {summary.verified_against} "
                f"{wanted:.6g}: expected a difference of at most {most:g} of it (I1)"
            )
            return


def _apart(a: float, b: float) -> float:
    """How far two losses are apart. A step without any weight has the loss NaN: it is equal to
    another one, and infinitely far from a number."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    apart = abs(a - b)
    return math.inf if math.isnan(apart) else apart


@dataclass(frozen=True, kw_only=True)
class _Verification:
    """One run, and what its plain loop is made from. Methods raise HalfLossError."""

    job: Job
    followed: Following
    facts: Prepared
    front: SimulationFront
    say: Callable[[str], None]
    expected: float | None

    def steps(self, one_stage: Callable[[Job], Sequence[float]]) -> None:
        """Every step of a run whose holders have equal weights after each."""
        job, followed = self.job, self.followed
        if self.facts.random:
            self.say("training it once more as one stage")
            whole = one_stage(as_one_stage(job, followed.microbatch_size))
            wanted: Sequence[float] = whole[: len(followed.losses)]
            against = "one-stage run"
        else:
            self.say("training the plain loop")
            wanted, against = self._plain(), "single process"
        compare(followed.summary, followed.losses, wanted, against)
        both = zip(followed.losses, wanted, strict=True)
        self._judge((f"loss of step {k}", a, b) for k, (a, b) in enumerate(both))

    def rounds(self) -> None:
        """Every local step of every replica that trains apart: the plain loop is fed with the
        rounds that were committed. Where the graph draws masks, nothing is compared."""
        job, summary = self.job, self.followed.summary
        if self._draws_masks():
            return
        self.say("training the plain loop, of every replica")
        steps = [*beside(self.followed.played.rows, self._plain_rounds())]
        losing = job.codec.sync
        if job.sync.chosen == "streaming-diloco" and job.sync.options.get("bits", 4) == 4:
            losing = "e3m0"
        summary.lossy += (losing,) if losing != "none" and losing not in summary.lossy else ()
        got, plain = [s[-2] for s in steps], [s[-1] for s in steps]
        compare(summary, got, plain, "plain loop of rounds")
        where = "loss of round {}, replica {}, in its step {}"
        self._judge((where.format(*at), a, b) for *at, a, b in steps)

    def cohorts(self) -> None:
        """The held-out loss of each version that was evaluated: clients train by themselves, and
        nobody says what their steps came to."""
        facts, followed, summary = self.facts, self.followed, self.followed.summary
        if self._draws_masks():
            return
        if facts.job.sync.privacy is not None and summary.virtual_s is None:
            why = "peers keep no key of the noise that they add; --virtual has known ones"
            self.say(f"not verified: {why}")
            return
        self.say("training the plain loop, of every client")
        size = followed.microbatch_size
        with self.front.module(self.job) as module:
            try:
                reader = self.facts.reader(1)
                wanted = expected_versions(module, facts.job, followed.events, reader, size=size)
            except oracle.HalfLossError:
                raise
            except ValueError as error:  # of a model with running statistics
                self.say(f"not verified: {error}")
                return
        evaluated = (e.evaluated for e in followed.events if e.HasField("evaluated"))
        got = {e.step: e.evaluation.loss for e in evaluated}
        losing = self.job.codec.sync
        if losing != "none" and losing not in summary.lossy:
            summary.lossy += (losing,)
        rounds = sorted(got)
        if not rounds:
            self.say("not verified: no version was evaluated (train.eval_every, data.holdout)")
            return
        plain = [wanted[n] for n in rounds]
        compare(summary, [got[n] for n in rounds], plain, "plain loop of clients")
        self._judge((f"held-out loss after {n} rounds", got[n], wanted[n]) for n in rounds)

    def _draws_masks(self) -> bool:
        """Whether the graph draws masks, which is said."""
        if self.facts.random:
            self.say("not verified: the graph draws masks, and a plain loop draws others")
        return self.facts.random

    def _judge(self, losses: Iterable[tuple[str, float, float]]) -> None:
        if self.expected is None:
            judge(self.job, self.followed.summary, losses)

    def _plain(self) -> list[float]:
        job, followed = self.job, self.followed
        reader = self.facts.reader(followed.microbatches)
        with self.front.module(job) as module:
            return oracle.train(
                module,
                lambda step, m: reader.batch(step, m, followed.microbatch_size),
                job.train,
                steps=len(followed.losses),
                microbatches=followed.microbatches,
                lasting=self.facts.job.train.steps or 0,
                fp16=job.model.dtype == "fp16",
            ).losses

    def _plain_rounds(self) -> PlainResult:
        job, followed = self.job, self.followed
        replicas = followed.summary.replicas
        count = followed.microbatches * replicas  # of a step of the run
        with self.front.module(job) as module:
            return train_rounds(
                module,
                job.decided("local", replicas),
                followed.events,
                self.facts.reader(count),
                microbatches=count,
                microbatch_size=followed.microbatch_size,
                steps=job.train.steps or followed.summary.steps,
            )


def add_baselines(
    job: Job,
    followed: Following,
    facts: Prepared,
    front: SimulationFront,
    most: int,
    say: Callable[[str], None],
) -> None:
    """Train the baselines of a federated run, and put them into its summary. `most`: as in
    `client_baselines`."""
    if facts.random:
        say("no baselines: the graph draws masks, and a plain loop draws others")
        return
    say("training the baselines: the run once more, one model of all samples, clients alone")
    with front.module(job) as module:
        try:
            rows = client_baselines(module, facts.job, followed.events, facts.reader(1), most)
        except ValueError as error:  # of a model with running statistics
            say(f"no baselines: {error}")
            return
    followed.summary.baselines = tuple(rows)
