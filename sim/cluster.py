"""Real processes of this machine train a job: equal peers on loopback, or those of a scenario, far
apart (shaped/run.py). What is measured is what it took here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..client.front import SimulationFront
from ..client.prepared import Prepared
from ..client.runs.run import Run
from ..client.show.wire import CompressionSums
from ..job import Job
from ..proto import broker_pb2
from .following import Following
from .live import LiveView
from .options import Setting, SimOptions
from .processes import PATIENCE_S, ClusterError, LocalCluster
from .report import Summary, unigram_entropy
from .verify import verify

__all__ = ["ClusterRun", "evaluate_half", "run_cluster", "verify_beside"]


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """One run in a cluster, after its end."""

    followed: Following
    facts: Prepared
    handle: Run


def run_cluster(
    setting: Setting,
    options: SimOptions,
    front: SimulationFront,
    folder: Path,
    summary: Summary,
    shown: LiveView,
) -> None:
    """Trains the job on equal peers and fills the summary. Raises ClusterError for a process that
    ended, ConnectionError when the broker is gone."""
    job, threads = setting.job, max(1, summary.cores // setting.peers)
    shown.say(f"starting a broker and {setting.peers} peers")
    with ExitStack() as running:
        cluster = running.enter_context(
            LocalCluster(peers=setting.peers, threads=threads, folder=folder, secure=options.secure)
        )
        names = wait_for_peers(cluster, front, setting.peers)
        trained = train(cluster, front, job, folder, summary, shown, names)
        if summary.exit:
            return
        evaluate_half(trained, shown)
        if options.keep is not None:
            summary.weights = str(exported(trained.handle, setting.job, folder))
        if options.verify:
            verify_beside(cluster, front, job, folder, trained, names, shown, running)


def verify_beside(
    cluster: LocalCluster,
    front: SimulationFront,
    job: Job,
    folder: Path,
    trained: ClusterRun,
    names: Mapping[str, str],
    shown: LiveView,
    running: ExitStack,
    expected: float | None = None,
) -> None:
    """Compares a run with its plain loop (`verify`). `running`: ends the processes, once what it is
    compared with needs none."""

    def one_stage(alone: Job) -> Sequence[float]:
        return beside(cluster, front, alone, folder / "alone", names).losses

    if not trained.facts.random:
        running.close()
    verify(job, trained.followed, trained.facts, front, one_stage, shown.say, expected)


def train(
    cluster: LocalCluster,
    front: SimulationFront,
    job: Job,
    folder: Path,
    summary: Summary,
    shown: LiveView,
    names: Mapping[str, str],
    limit_s: float | None = None,
    see: Callable[[broker_pb2.RunEvent], None] = lambda event: None,
    limits: Mapping[str, int] | None = None,
    complete: bool = True,
) -> ClusterRun:
    """Submits a job, follows it to its end, and fills the summary with what its events say. `see`
    gets every event, too. `limits`: bytes of memory that peers may use, by name. `complete`: nobody
    else will join, so that waiting for memory is the end."""
    shown.say(f"submitting {job.name}")
    run, facts = front.submit(cluster.address, job, folder)
    summary.run, summary.params = run.id, facts.parameters
    summary.operators = len(facts.graph.operators)
    shown.view.names, shown.view.tokens_per_step = names, facts.tokens_per_step
    if facts.manifest.kind == "text":
        summary.unigram_entropy = unigram_entropy(p.read_bytes() for p in facts.shards.values())
    followed, wire = Following(summary, names, limits), CompressionSums(lambda: names)
    with _limited(run, limit_s) as late:
        for event in run.watch():
            followed.see(event)
            if followed.lacks and complete:
                run.cancel()
            wire.see(event)
            shown.event(event)
            see(event)
            cluster.check()
    followed.finish(facts.tokens_per_step, facts.spent)
    summary.links = tuple(wire.table())
    if late:
        summary.exit, summary.error = 1, f"not done within `limit`, {limit_s:g} s"
    return ClusterRun(followed=followed, facts=facts, handle=run)


def exported(run: Run, job: Job, folder: Path) -> Path:
    """Write the weights of a run that is over; return where: a file in `folder`, or in the run's
    own folder what its job wants to have."""
    one_file = job.output.format == "safetensors"
    return run.export(folder / "model.safetensors" if one_file else None)


def evaluate_half(trained: ClusterRun, shown: LiveView) -> None:
    """Fills the summary of a run whose microbatches left stages out with the held-out loss of its
    model without every second block that they may leave out, by the peers that are left, or with
    why they could not compute it."""
    summary = trained.followed.summary
    if not trained.followed.left_out or summary.eval_loss is None:
        return
    shown.say("evaluating the model without every second block")
    half = trained.handle.half_or_reason()
    if isinstance(half, str):
        summary.half_missing = half
    elif half is not None:
        summary.half_loss, summary.half_without = half.loss, half.left_out


def beside(
    cluster: LocalCluster, front: SimulationFront, job: Job, folder: Path, names: Mapping[str, str]
) -> Following:
    """Trains another job on the same peers, which nobody watches. Raises ClusterError when it does
    not reach its end."""
    run, facts = front.submit(cluster.address, job, folder)
    followed = Following(Summary(name=job.name, world="", seed=job.seed), names)
    for event in run.watch():
        followed.see(event)
        if followed.lacks:
            run.cancel()
        cluster.check()
    followed.finish(facts.tokens_per_step, facts.spent)
    if followed.summary.exit:
        raise ClusterError(f"the run beside it: {followed.summary.error}")
    return followed


def wait_for_peers(cluster: LocalCluster, front: SimulationFront, wanted: int) -> dict[str, str]:
    """Their names by id, once so many have joined. Raises ClusterError when they do not."""
    end = time.monotonic() + PATIENCE_S
    while len(found := front.names(cluster.address)) < wanted:
        cluster.check()
        if time.monotonic() > end:
            raise ClusterError(f"{len(found)} of {wanted} peers joined within {PATIENCE_S:.0f} s")
        time.sleep(0.1)  # people wait here, not a protocol
    return found


def shortened(job: Job, steps: int) -> Job:
    """The first steps of a job, without evaluations, and none of them full, as most are not."""
    length = replace(job.train.lasting(steps), eval_every=0)
    plan = replace(job.plan, skip_warmup=0, skip_fade_out=0)
    return replace(job, train=length, plan=plan)


@contextmanager
def _limited(run: Run, limit_s: float | None) -> Iterator[list[bool]]:
    """Cancels a run that is not done in time; the list has an entry then."""
    late: list[bool] = []

    def stop() -> None:
        late.append(True)
        run.cancel()

    timer = threading.Timer(limit_s or 0.0, stop)
    timer.daemon = True
    if limit_s is not None:
        timer.start()
    try:
        yield late
    finally:
        timer.cancel()
