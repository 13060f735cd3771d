"""`shoal sim`: a broker and peers as real processes of this machine train a job, then a report.

The floors above hand in what only they can do (`Front`): submit a job as a client does, and build
its module for the plain loop.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..compression.codec import parse
from ..dag.graph import TensorSpec
from ..job import Codec, Job
from ..peer.data.reader import Reader
from ..proto import broker_pb2
from . import oracle
from .processes import PATIENCE_S, ClusterError, LocalCluster, uninterrupted
from .report import Summary, render, unigram_entropy, write_json

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Front", "RunHandle", "SimOptions", "simulate"]

BUILTIN = Path(__file__).parent / "builtin.toml"


class RunHandle(Protocol):
    """A submitted run, as its client sees it."""

    id: str

    def watch(self) -> Iterator[broker_pb2.RunEvent]:
        """Every event, until the run has ended."""

    def export(self, path: Path) -> Path:
        """Writes the weights."""


class Wire(Protocol):
    """What compression did on the links of one run."""

    def see(self, event: broker_pb2.RunEvent) -> None:
        """Takes in one event of the run."""

    def table(self) -> Sequence[Mapping[str, Any]]:
        """By link, role and codec, as `Summary.links` states it; empty where nothing was
        compressed."""


class Front(Protocol):
    """What the floors above do for a simulation."""

    def wire(self, address: str) -> Wire:
        """What sums up a run of the broker at an address."""

    def peers(self, address: str) -> int:
        """How many peers the broker at an address has; raises ConnectionError without a broker."""

    def submit(self, address: str, job: Job, folder: Path) -> tuple[RunHandle, Mapping[str, Any]]:
        """Submits a job whose outputs go to `folder`. The facts about it: `operators` and
        `parameters` (how many), `tokens_per_step`, `random` (whether its graph draws masks),
        `manifest` (the data's), and `shards` (paths by hash, in `folder`)."""

    @contextmanager
    def module(self, job: Job) -> Iterator[nn.Module]:
        """The job's module with its starting weights, callable with a microbatch."""


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """What `shoal sim` was asked for."""

    peers: int = 4
    steps: int | None = None
    """Steps instead of the job's."""
    seed: int | None = None
    job: Path | None = None
    """None: the built-in job."""
    json: Path | None = None
    verify: bool = False
    keep: Path | None = None
    """Where logs, state and outputs stay; None: in a temporary folder that is removed."""
    quiet: bool = False


def simulate(options: SimOptions, front: Front) -> int:
    """Runs it and prints the report; returns the exit code. Leaves no process and no file behind
    but what was asked for, also when KeyboardInterrupt ends it. Raises ValueError for a job that
    cannot run, OSError for a file that cannot be read or written."""
    job = Job.from_toml(options.job or BUILTIN)
    if options.steps is not None:
        train = replace(job.train, steps=options.steps, tokens=None, passes=None)
        job = replace(job, train=train)
    if options.seed is not None:
        job = replace(job, seed=options.seed)
    if options.job is None:
        # One peer alone would be the best plan for a model this small; it is here to be shared.
        job = replace(job, plan=replace(job.plan, stages=options.peers, pipelines=1))
    summary = Summary(
        name=job.name,
        world="real processes, loopback",
        seed=job.seed,
        peers=options.peers,
        cores=os.cpu_count() or 1,
        again=_again(options),
    )
    began = time.monotonic()
    say = _quiet if options.quiet else _say
    if options.json is not None:  # better now than after the run
        _check_writable(options.json)
    with ExitStack() as cleanup:
        folder = options.keep
        if folder is None:
            with uninterrupted():
                folder = Path(tempfile.mkdtemp(prefix="shoal-sim-"))
                cleanup.callback(_remove, folder)
        try:
            _run(job, options, front, folder, summary, say)
        except (ClusterError, ConnectionError) as error:
            summary.exit, summary.error = 1, str(error)
    summary.seconds = time.monotonic() - began
    print(render(summary))
    if options.json is not None:
        write_json(summary, options.json)
    return summary.exit


def _run(
    job: Job,
    options: SimOptions,
    front: Front,
    folder: Path,
    summary: Summary,
    say: Callable[[str], None],
) -> None:
    threads = max(1, summary.cores // options.peers)
    say(f"starting a broker and {options.peers} peers")
    with LocalCluster(peers=options.peers, threads=threads, folder=folder) as cluster:
        _wait_for_peers(cluster, front, options.peers)
        say(f"submitting {job.name}")
        run, facts = front.submit(cluster.address, job, folder)
        summary.run, summary.params = run.id, facts["parameters"]
        summary.operators = facts["operators"]
        if facts["manifest"].kind == "text":
            summary.unigram_entropy = unigram_entropy(
                p.read_bytes() for p in facts["shards"].values()
            )
        wire = front.wire(cluster.address)
        losses, (size, microbatches) = _follow(run, cluster, summary, say, wire)
        summary.links = tuple(wire.table())
        if summary.step_s:
            summary.tokens_per_s = facts["tokens_per_step"] / summary.step_s
        if summary.exit:
            return
        if options.keep is not None:
            summary.weights = str(run.export(folder / "model.safetensors"))
        if not options.verify:
            return
        if facts["random"]:
            # Native dropout draws other masks than ours: one stage is the boring version then.
            say("training it once more as one stage")
            # Masks differ from microbatch to microbatch, so the batch must be divided as it was.
            alone = replace(
                job,
                plan=replace(job.plan, stages=1),
                codec=Codec(),
                train=replace(job.train, microbatch=size),
            )
            again, _ = front.submit(cluster.address, alone, folder / "alone")
            beside = Summary(name="", world="", seed=0)
            wanted, _ = _follow(again, cluster, beside, _quiet)
            if beside.exit:
                raise ClusterError(f"the one-stage run beside it: {beside.error}")
            summary.verified_against = "one-stage run"
    if not facts["random"]:
        say("training the plain loop")
        reader = Reader(
            facts["manifest"],
            facts["shards"].__getitem__,
            seed=job.seed,
            microbatches=microbatches,
        )
        with front.module(job) as module:
            wanted = oracle.train(
                module,
                lambda step, m: reader.batch(step, m, size),
                job.train,
                steps=len(losses),
                microbatches=microbatches,
            ).losses
        summary.verified_against = "single process"
    apart = [abs(a - b) for a, b in zip(losses, wanted, strict=True)]
    # max() would pass over a NaN that does not come first.
    summary.max_loss_difference = max(apart) if all(map(math.isfinite, apart)) else math.inf
    if summary.lossy:
        last = max(1, len(losses) // 10)
        summary.loss_ratio = statistics.mean(losses[-last:]) / statistics.mean(wanted[-last:])


def _loses(codec: str) -> bool:
    """Whether what comes back may differ from what went in."""
    return parse(codec).error_bound(TensorSpec((1024, 1024), "float32")) > 0


def _wait_for_peers(cluster: LocalCluster, front: Front, wanted: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while (found := front.peers(cluster.address)) < wanted:
        cluster.check()
        if time.monotonic() > end:
            raise ClusterError(f"{found} of {wanted} peers joined within {PATIENCE_S:.0f} s")
        time.sleep(0.1)  # people wait here, not a protocol


def _follow(
    run: RunHandle,
    cluster: LocalCluster,
    summary: Summary,
    say: Callable[[str], None],
    wire: Wire | None = None,
) -> tuple[list[float], tuple[int, int]]:
    """Watches a run to its end and fills the summary; returns the loss of every step, and the size
    and number of the microbatches that its plan divides a batch into (0 without a plan)."""
    losses: list[float] = []
    batching = (0, 0)
    times: list[float] = []
    compute_s = 0.0
    for event in run.watch():
        kind = event.WhichOneof("kind")
        if wire is not None:
            wire.see(event)
        if kind == "plan":
            summary.codecs = tuple(dict.fromkeys(c.codec for c in event.plan.codecs))
            summary.lossy = tuple(filter(_loses, summary.codecs))
            summary.stages = len(event.plan.stages)
            predicted = event.plan.predicted
            summary.predicted_step_s = predicted.step_s
            bubbles = [p.bubble for p in predicted.peers]
            summary.bubble = sum(bubbles) / max(1, len(bubbles))
            summary.bottlenecks = tuple(predicted.bottlenecks)
            summary.against = {a.name: a.step_s for a in predicted.alternatives}
            batching = (event.plan.microbatch_size, len(event.plan.routes))
            summary.spares = tuple(f"{s.peer}: {s.reason}" for s in event.plan.spares)
            for reason in event.plan.reasons:
                say(f"plan: {reason}")
        elif kind == "step":
            step = event.step
            losses.append(step.outcome.loss)
            times.append(step.seconds)
            compute_s += step.compute_s
            summary.bytes_on_wire += step.sent_bytes
            text = f"step {step.step}: loss {step.outcome.loss:.3f}"
            if step.HasField("evaluation"):
                summary.eval_loss = step.evaluation.loss
                text += f", held-out {step.evaluation.loss:.3f}"
            if step.HasField("evaluation") or step.step % 50 == 0:
                say(text)
        elif kind == "state":
            state = event.state
            summary.steps = state.step
            if state.phase in (broker_pb2.FAILED, broker_pb2.CANCELLED):
                summary.exit, summary.error = 1, state.reason.text
            elif state.phase == broker_pb2.WAITING and state.reason.text:
                say(f"waiting: {state.reason.text}")
        cluster.check()
    if losses:
        summary.loss_first, summary.loss_last = losses[0], losses[-1]
    if len(times) > 1:
        summary.step_s = statistics.median(times[1:])
        summary.compute_share = compute_s / (sum(times) * summary.cores)
    return losses, batching


def _again(options: SimOptions) -> str:
    words = ["shoal sim"]
    if options.job is not None:
        words.append(f"--job {options.job}")
    words.append(f"--peers {options.peers}")
    if options.steps is not None:
        words.append(f"--steps {options.steps}")
    if options.seed is not None:
        words.append(f"--seed {options.seed}")
    return " ".join(words)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _quiet(line: str) -> None:
    pass


def _check_writable(path: Path) -> None:
    """Raises OSError when no file can be written there; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    problem = errno.EISDIR if path.is_dir() else errno.EACCES
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(problem, os.strerror(problem), str(path))


def _remove(folder: Path) -> None:
    with uninterrupted():
        shutil.rmtree(folder, ignore_errors=True)
