"""A scenario under virtual time: the machines themselves over a modelled network, with real
tensors or with hashes in their place (virtual/, ghost/), from the job to the summary."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ...broker import events as b
from ...broker.candidates import Rule
from ...client.front import PackedJob, SimulationFront
from ...client.runs.selecting import rule_of
from ...client.show.wire import CompressionSums
from ...dag.ir.convert import graph_from_bytes
from ...dag.ir.graph import Graph
from ...dag.plan.cut import cut
from ...dag.plan.full_steps import FullSteps
from ...dag.plan.routes import Segment, segments
from ...dag.schedule.convert_plan import plan_from_proto
from ...job import Job
from ...proto import broker_pb2
from ..following import Following
from ..ghost.hashes import expected
from ..ghost.round_hashes import expected_gossip, expected_rounds
from ..live import LiveView
from ..monitor.violation import Violation, shortest
from ..options import Setting, SimOptions
from ..plain.round_log import committed_rounds
from ..report import Summary, unigram_entropy
from ..scenario.scenario import Scenario
from ..scenario.sentences import Fault
from ..trace import Trace
from ..verify import add_baselines, compare, one_thread, verify
from ..virtual.clock import Observed, StalledError
from .virtual_run import VirtualRun, run_virtual

__all__ = ["run_modelled", "shortened", "shorter"]

# A scenario that broke an invariant, played again and again with less, until little is left.

MOST_TRIES = 24
"""Each plays the scenario once more, most of them a part of it."""


def shortened(
    violation: Violation,
    scenario: Scenario,
    job: Job,
    submitted: broker_pb2.RunSpec,
    blobs: Mapping[str, bytes],
    folder: Path,
    *,
    ghost: bool = False,
    rule: Rule | None = None,
) -> Violation:
    """The violation of the fewest faults and steps of a virtual run with which there is one still;
    `violation` itself where there is none the second time. Churn stays as it is. The other
    arguments are those of `run_virtual`."""

    def fails(faults: tuple[Fault, ...], steps: int) -> Violation | None:
        less, spec = replace(scenario, faults=faults), shorter(submitted, steps)
        try:
            run_virtual(less, job, spec, blobs, folder, ghost=ghost, rule=rule)
        except Violation as found:
            return found
        return None

    try:
        return shortest(scenario.faults, submitted.steps, fails, MOST_TRIES)
    except ValueError:
        return violation


def shorter(spec: broker_pb2.RunSpec, steps: int) -> broker_pb2.RunSpec:
    """A copy of a run's spec with `steps` steps."""
    found = copy.deepcopy(spec)
    job = Job.from_json(spec.job)
    found.job, found.steps = replace(job, train=replace(job.train, steps=steps)).to_json(), steps
    return found


CHEAP = 500_000
"""Operators · microbatches · steps up to which a ghost run is compared without being asked."""


def run_modelled(
    setting: Setting,
    options: SimOptions,
    front: SimulationFront,
    folder: Path,
    summary: Summary,
    shown: LiveView,
) -> tuple[Trace, broker_pb2.PlanReport | None]:
    """Runs it and fills the summary; returns what happened, and the last plan's report. Raises
    ValueError for a job or a fault that cannot be, OSError for a churn trace that cannot be
    read."""
    scenario, ghost = setting.scenario, setting.world == "ghost"
    assert scenario is not None, "a modelled world without a scenario"
    for peer in scenario.peers:
        if peer.nat != "open":
            raise scenario.wrong(
                f"peers[{peer.entry}].nat",
                f'is "{peer.nat}": relays are not modelled; run it as real processes (--real)',
            )
    shown.say(f"capturing {setting.job.name}")
    packed, rule = front.pack(setting.job), rule_of(setting.job)
    facts = packed.facts
    summary.params, summary.operators = facts.parameters, len(facts.graph.operators)
    shown.view.tokens_per_step = facts.tokens_per_step
    names = {peer.name: peer.name for peer in scenario.peers}
    limits = {peer.name: int(peer.memory) for peer in scenario.peers}
    followed, trace = Following(summary, names, limits), Trace()
    wire = CompressionSums(lambda: names)
    summary.cores = 0  # of this machine, which has no part in any time

    def observe(seen: Observed) -> None:
        shown.view.clock_s = seen.now
        if isinstance(seen.record, b.Publish):
            shown.event(seen.record.event)

    shown.say(f"{setting.peers} peers in virtual time")
    try:
        with one_thread():
            found = run_virtual(
                scenario,
                setting.job,
                packed.spec,
                packed.blobs,
                folder,
                ghost=ghost,
                trace=trace,
                observe=observe,
                rule=rule,
                say=shown.say,
            )
    except Violation as error:
        shown.say(f"{error}\nlooking for the fewest faults and steps with which it is so")
        parts = scenario, setting.job, packed.spec, packed.blobs, folder
        least = shortened(error, *parts, ghost=ghost, rule=rule)
        summary.exit, summary.error, summary.violations = 1, str(least), 1
        return trace, None
    except StalledError as error:
        summary.exit, summary.error = 1, f"nothing happens any more: {error}"
        return trace, None
    for event in found.events:
        followed.see(event)
        wire.see(event)
    followed.finish(facts.tokens_per_step, facts.spent)
    _fill(summary, found, scenario)
    summary.links = tuple(wire.table())
    if ghost:
        _as_hashes(setting.job, followed, packed, options)
        return trace, followed.report
    if facts.manifest.kind == "text":
        summary.unigram_entropy = unigram_entropy(p.read_bytes() for p in facts.shards.values())
    if not summary.exit and followed.left_out and summary.eval_loss is not None:
        shown.say("evaluating the model without every second block")
        with one_thread():
            _half(setting.job, scenario, packed, found, front, folder, summary)
    if not summary.exit and (options.verify or scenario.expect.max_loss_difference is not None):

        def one_stage(alone: Job) -> Sequence[float]:
            calm = replace(scenario, faults=(), churn=type(scenario.churn)())
            again = front.pack(alone)
            return run_virtual(calm, alone, again.spec, again.blobs, folder).losses

        with one_thread():
            expected = scenario.expect.max_loss_difference
            verify(setting.job, followed, facts, front, one_stage, shown.say, expected)
    if not summary.exit and options.baselines is not None:
        with one_thread():
            add_baselines(setting.job, followed, facts, front, options.baselines, shown.say)
    return trace, followed.report


def _half(
    job: Job,
    scenario: Scenario,
    packed: PackedJob,
    found: VirtualRun,
    front: SimulationFront,
    folder: Path,
    summary: Summary,
) -> None:
    """Half the model at the end, by the same peers in a world where nothing happens."""
    weights = [e.weights for e in found.events if e.HasField("weights")][-1]
    spec, blobs, names = front.pack_half(packed.spec, packed.facts.graph, weights)
    calm = replace(scenario, faults=(), churn=type(scenario.churn)())
    there = {f.blob.hash: found.world.blobs[f.blob.hash] for f in weights.files}
    alone = run_virtual(calm, job, spec, {**packed.blobs, **blobs, **there}, folder, check=False)
    made = [e.step.evaluation for e in alone.events if e.HasField("step")]
    if not made:
        summary.exit, summary.error = 1, f"half the model: {alone.state.reason.text}"
        return
    summary.half_loss, summary.half_without = made[-1].loss, names


def _fill(summary: Summary, found: VirtualRun, scenario: Scenario) -> None:
    """What the world knows beside the run's events."""
    summary.run, summary.virtual_s = found.run, found.now
    summary.price = scenario.price(found.now)
    summary.checks, summary.event_log = found.checks, found.digest
    if found.late:
        summary.exit, summary.error = 1, f"not done within `limit`, {scenario.limit}"
    found.faults.fill(summary)


def _as_hashes(job: Job, followed: Following, packed: PackedJob, options: SimOptions) -> None:
    """Losses of ghosts are hashes: they say nothing, but must be those of the plain loop; of
    replicas that train apart, the versions must."""
    summary, rows = followed.summary, followed.played.rows
    steps = len(followed.losses) or len(rows)  # clients of rounds tell no losses
    work = summary.operators * followed.microbatches * steps
    if steps and (options.verify or work <= CHEAP):
        graph = graph_from_bytes(packed.blobs[packed.spec.graph.hash])
        graph = graph.bind(followed.microbatch_size)
        (_versions if rows else _losses)(job, graph, followed)
        if summary.max_loss_difference:
            summary.exit = 1
            summary.error = summary.error or "samples were lost, doubled or came too late (I1, I2)"
    summary.loss_first = summary.loss_last = summary.eval_loss = None
    summary.losses = summary.evaluations = summary.held_out = ()
    summary.local_losses = {}
    summary.rounds = tuple({**row, "loss": None} for row in summary.rounds)
    nothing = {"loss": None, "held_out": None}
    summary.course = tuple({**point, **nothing} for point in summary.course)


def _losses(job: Job, graph: Graph, followed: Following) -> None:
    summary, losses = followed.summary, followed.losses
    orders: list[Sequence[Segment]] = []
    full: FullSteps | None = None
    if summary.rerouted and followed.first_plan is not None:
        plan = plan_from_proto(followed.first_plan)
        stages = cut(graph, [(s.start, s.stop) for s in plan.stages])
        orders, full = [segments(stages, route) for route in plan.routes], plan.full
    exact = losses[: summary.inexact_from or len(losses)]  # no loop does what comes behind
    clips = job.train.clip > 0
    loop = expected(
        graph,
        job.seed,
        len(exact),
        followed.microbatches,
        orders=orders,
        clips=clips,
        full=lambda step: full is not None and full.has(step),
    )
    compare(summary, exact, loop.losses, "plain loop of hashes")


def _versions(job: Job, graph: Graph, followed: Following) -> None:
    """Also where a replica was lost or left out: the loop does what was committed."""
    settings = job.training.rounds
    cohorts = settings.cohorts if settings else None
    count = followed.microbatches * followed.summary.replicas  # of a step of the run
    gossip, clips = job.sync.kind == "gossip", job.train.clip > 0
    rounds = committed_rounds(
        followed.events,
        microbatches=1 if cohorts else count,
        microbatch_size=1,
        gossip=gossip,
        clients=cohorts.clients if cohorts else 0,
        seed=job.seed,
    )
    if gossip:
        loop = expected_gossip(graph, job.seed, rounds, count, clips=clips)
    else:
        fragments = settings.fragments if settings else 1
        loop = expected_rounds(graph, job.seed, rounds, count, fragments=fragments, clips=clips)
    wanted = loop.versions
    made = [e.round_done.hash for e in followed.events if e.HasField("round_done")]
    wrong = [float(a != b) for a, b in zip(made, wanted, strict=True)]
    compare(followed.summary, wrong, [0.0] * len(wrong), "plain loop of hashes")
