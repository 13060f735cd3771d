"""What a submitted run asks for, read once from its RunSpec and checked against itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from ...dag.plan.plan import PeerId, Plan
from ...dag.schedule.orders.schedules import interleaves
from ...job import Job
from ...job.clients.client_options import Cohorts
from ...job.methods import method_text
from ...job.refusals.of_clients import not_in_pipelines
from ...job.rounds import SUM_BYTES
from ...job.sync import Sync
from ...job.tables import Codec, Model, Output, Recovery
from ...job.training import Stop
from ...net.web.places import origin_of
from ...proto.broker_pb2 import Checkpoint, RunSpec
from ..base.interface import CodecOptions, PlannerOptions
from ..schedulers.swapped import LEAST as LEAST_SWAPPED
from .batchings import Batching, batchings
from .run_spec import RunSpecError, problems

__all__ = ["RunRequirements", "decided", "one_of_many", "read_spec"]

_Kind = TypeVar("_Kind")

MOST_ORIGINS = 16
"""Hosts on the web that the weights of one run are read from."""


@dataclass(frozen=True, slots=True)
class RunRequirements:
    """The part of a run's spec that the broker decides by.

    batchings: those that a plan may have, the default first. Not among them, be it the default,
    are those with fewer microbatches than plan.pipelines.
    wanted: peers that a hand-written plan names, in its order; empty: the broker plans.
    core: whether a peer with the core operator set can take part.
    data: name of the data set of a peer that it trains on; empty: its data lies with the broker.
    local: inputs of the model that only peers with that data may read.
    replicas: among so many a batch is divided. undecided: whether planning says what kind of
    training it is, or among how many; until then it has one. sync: what they exchange, and when.
    eval_every: steps between evaluations; 0: none. stop: what ends it early. cohorts: of federated
    training, who is in its rounds; None: replicas make steps. audit: share of the sums of rounds
    that are added up again.
    replan: whether its plan may change while it runs. recovery: what may be done after a loss.
    output: when checkpoints are made, and how many are kept.
    lossless_snapshots: whether they are coded, or written as they are.
    """

    priority: int
    options: PlannerOptions
    batchings: tuple[Batching, ...]
    training: str
    wanted: tuple[PeerId, ...]
    core: bool
    replan: bool = True
    recovery: Recovery = field(default_factory=Recovery)
    output: Output = field(default_factory=Output)
    lossless_snapshots: bool = False
    data: str = ""
    data_options: str = ""
    local: tuple[str, ...] = ()
    replicas: int = 1
    undecided: bool = False
    one_peer: str = ""
    """Of federated training: why no client is trained by a pipeline; empty: one may be."""
    eval_every: int = 0
    stop: Stop = field(default_factory=Stop)
    seed: int = 0
    sync: Sync = field(default_factory=Sync)
    cohorts: Cohorts | None = None
    audit: float = 0.0
    goes_whole: bool = False
    origins: tuple[str, ...] = ()
    """Of weights that peers read from the web themselves: scheme, host and port of each."""

    @property
    def has_rounds(self) -> bool:
        """Whether its replicas step apart, and meet in rounds."""
        return self.sync.kind not in ("allreduce", "auto")

    @property
    def forms(self) -> bool:
        """Whether its replicas are planned together before it begins."""
        return self.undecided or self.replicas > 1

    def evaluates_after(self, step: int, steps: int) -> bool:
        """Whether an evaluation is due after a step, from 0, of so many."""
        last = step + 1 == steps
        return self.eval_every > 0 and (last or (step + 1) % self.eval_every == 0)

    @property
    def deeper(self) -> PlannerOptions | None:
        """The options where a client is trained by a pipeline, as no peer has the memory for the
        whole model; None: it is not, or the job says so."""
        if self.cohorts is None or self.one_peer or self.options.stages != 1:
            return None
        kept = self.options.round_bytes + SUM_BYTES
        return replace(self.options, stages=None, round_bytes=kept)

    @property
    def least(self) -> int:
        """The fewest peers that it can start with."""
        options = self.options
        # An interleaved peer holds several stages, and so may one beside stages that are left out.
        several = interleaves(options.schedule) or options.reroutes
        stages = 1 if several else options.stages or 1
        if options.swaps:
            stages = max(stages, LEAST_SWAPPED)
        return stages * (options.pipelines or 1)

    def allows(self, plan: Plan) -> bool:
        """Whether the plan divides the batch as the run wants it."""
        had = (plan.microbatch_size, len(plan.routes))
        return any(had == (b.microbatch_size, b.microbatches) for b in self.batchings)


def read_spec(spec: RunSpec) -> RunRequirements:
    """Read what a run asks for from its spec. Raises RunSpecError."""
    for problem in problems(spec):
        raise RunSpecError(problem)
    try:
        job = Job.from_json(spec.job)
        job.sync.local.check_walked(spec.client_sizes, job.train.batch)
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise RunSpecError(f"the job of the run is not valid: {error}") from None
    if spec.local and job.data.where != "peer":
        raise RunSpecError(
            f"local of the run has {list(spec.local)}, and its job's data.where is "
            f'"{job.data.where}": expected "peer" where data stays with peers'
        )
    if spec.HasField("resumed"):
        _check_unchanged(spec.resumed, job)
    train = job.train
    for name, given, wanted in (
        ("steps", spec.steps, train.steps),
        ("microbatch_size", spec.microbatch_size, train.microbatch_size),
        ("microbatches", spec.microbatches, train.microbatches),
    ):
        if given != wanted:
            raise RunSpecError(f"{name} of the run is {given}, its job says {wanted}")
    cohorts = job.rounds.cohorts if job.rounds else None
    if job.sync.kind == "federated" and (
        cohorts is None or len(spec.client_sizes) != cohorts.clients
    ):
        expected = cohorts.clients if cohorts else "a data.partition that says for how many"
        raise RunSpecError(
            f"client_sizes of the run has {len(spec.client_sizes)} numbers: expected {expected}, "
            "one for each client"
        )
    one_peer = _why_one_peer(spec, job) if job.sync.kind == "federated" else ""
    return RunRequirements(
        priority=job.priority,
        options=_options(spec, job, one_peer),
        batchings=batchings(spec, job),
        training=job.training.to_json(),
        wanted=tuple(dict.fromkeys(PeerId(h) for stage in spec.plan.stages for h in stage.holders)),
        core=spec.HasField("core_graph"),
        # With other cuts other blocks would change places.
        replan=job.plan.replan and not job.recovery.swaps,
        recovery=job.recovery,
        output=job.output,
        lossless_snapshots=job.codec.snapshots == "lossless",
        data=job.data.source if job.data.where == "peer" else "",
        data_options=job.data.way if job.data.where == "peer" else "",
        local=tuple(spec.local),
        replicas=job.replicas,
        undecided=job.undecided,
        one_peer=one_peer,
        eval_every=train.eval_every if train.evaluated_batches else 0,
        stop=train.stop,
        seed=job.seed,
        sync=job.sync,
        cohorts=cohorts,
        audit=job.sync.audit if job.rounds is not None and job.rounds.adds_alike else 0.0,
        goes_whole=job.rounds is not None and job.rounds.goes_whole,
        origins=_origins(job.model) if job.model.where == "url" else (),
    )


def decided(spec: RunSpec, kind: Literal["allreduce", "local"], replicas: int) -> RunSpec:
    """The spec of a run of which that is decided."""
    found = RunSpec()
    found.CopyFrom(spec)
    found.job = Job.from_json(spec.job).decided(kind, replicas).to_json()
    return found


def one_of_many(spec: RunSpec) -> RunSpec:
    """The spec that each of a run's replicas is planned as. Of federated training on data of peers
    nothing is said of data: each client has one peer."""
    found = RunSpec()
    found.CopyFrom(spec)
    found.job = Job.from_json(spec.job).one_of_many.to_json()
    if spec.client_data:
        found.ClearField("local")
        found.ClearField("client_data")
        found.data.hash = "0" * 64
        if found.HasField("resumed"):
            found.resumed.data.CopyFrom(found.data)
    return found


def _options(spec: RunSpec, job: Job, one_peer: str) -> PlannerOptions:
    """Return what the job says of plans. `one_peer`: why clients cannot be trained by pipelines.
    Raises RunSpecError."""
    asked, train, alone = job.plan, job.train, job.sync.kind == "federated"
    stages = _unless_auto(asked.stages) or (1 if alone else None)
    if one_peer and stages is not None and stages > 1:
        raise RunSpecError(f"plan.stages of the job is {stages}: {one_peer}")
    full = asked.full_steps(spec.steps)
    return PlannerOptions(
        scheduler=asked.scheduler,
        stages=stages,
        pipelines=1 if alone else _unless_auto(asked.pipelines),
        schedule=asked.schedule,
        in_flight=_unless_auto(asked.in_flight),
        recompute=_unless_auto(asked.recompute),
        swaps=job.recovery.swaps,
        skip=_unless_auto(asked.skip),
        reorder=asked.reorder,
        full_steps=full if asked.reroutes and full != (0, spec.steps) else None,
        stochastic_depth=asked.skip_scaling == "stochastic-depth",
        optimizer_slots=train.optimizer_slots,
        whole_parameters=train.whole,
        state_bytes=train.state_bytes,
        in_8_bits=train.in_8_bits,
        # Of each trained number, what rounds keep while steps are made.
        round_bytes=(
            job.rounds.stepping_bytes + job.rounds.summed_bytes(stages or 1) if job.rounds else 0
        ),
        exchange_bytes=job.rounds.exchange_bytes if job.rounds else 0,
        norm=train.clip > 0 or job.recovery.rebuilds or job.training.scales_loss,
        collective=job.sync.collective,
        strategy=method_text(
            job.sync.within, job.sync.options if job.sync.kind == "allreduce" else {}
        ),
        codecs=_codecs(job.codec, encoded=job.sync.within != "exact"),
    )


def _unless_auto(value: _Kind | Literal["auto"]) -> _Kind | None:
    return None if value == "auto" else value


def _why_one_peer(spec: RunSpec, job: Job) -> str:
    """Say why clients of a run cannot be trained by pipelines; empty: they can."""
    if job.plan.stages == 1:
        return "plan.stages is 1"
    for key, instead in not_in_pipelines(job):
        return f"{key}: {instead}"
    size = spec.microbatch_size
    for client, samples in enumerate(spec.client_sizes):
        if samples % size:
            return (
                f"client {client} has {samples} samples, which microbatches of {size} do not "
                "divide; set train.microbatch = 1"
            )
    return ""


def _origins(model: Model) -> tuple[str, ...]:
    """Return the hosts that the model's weights are read from. Raises RunSpecError."""
    found: set[str] = set()
    for url in model.weight_names:
        if (origin := origin_of(url)) is None:
            raise RunSpecError(
                f"model.weights of the job has {url[:200]!r}: expected http(s)://HOST/…, without a "
                "user in it"
            )
        found.add(str(origin))
    if len(found) > MOST_ORIGINS:
        raise RunSpecError(
            f"model.weights of the job are on {len(found)} hosts: expected at most {MOST_ORIGINS}"
        )
    return tuple(sorted(found))


def _check_unchanged(found: Checkpoint, job: Job) -> None:
    """Raises RunSpecError for a job that cannot go on from a checkpoint of another one."""
    try:
        before = Job.from_json(found.job)
    except (ValueError, RecursionError) as error:
        raise RunSpecError(f"the checkpoint of the run has no valid job: {error}") from None
    if found.HasField("rounds") and job.rounds is None:
        raise RunSpecError(
            f'sync.kind of the job is "{job.sync.kind}", and its checkpoint was made by replicas '
            "that train apart: it may not change"
        )
    for key, had, has in (
        ("seed", before.seed, job.seed),
        ("train.batch", before.train.batch, job.train.batch),
        ("train.optimizer", before.train.optimizer, job.train.optimizer),
        ("train.no_muon", before.train.no_muon, job.train.no_muon),
    ):
        if had != has:
            raise RunSpecError(
                f"{key} of the job is {has!r}, and its checkpoint was made with {had!r}: it may "
                "not change"
            )


def _codecs(asked: Codec, *, encoded: bool) -> CodecOptions:
    """`encoded`: what gradients go through is the method's, no codec's. Raises RunSpecError for the
    text of a codec that there is not, or that cannot be there."""
    texts = {role: _codec(asked, role) for role in ("activation", "activation_grad", "grad")}
    for role, text in texts.items():
        if text.partition(":")[0].partition("/")[0] == "support":
            _check_support(role, text, texts["activation"])
    return CodecOptions(
        activation=texts["activation"],
        activation_grad=texts["activation_grad"],
        sync="none" if encoded else texts["grad"],
        ratio=asked.ratio,
        error_budget=asked.error_budget,
        feedback=asked.feedback,
    )


def _codec(asked: Codec, role: str) -> str:
    text = asked.of(role)
    if text in ("none", "adatopk", "auto"):
        return text
    from ...compression.codec import parse  # imports torch: only where a codec is asked for

    try:
        parse(text)
    except ValueError as error:
        key = role if getattr(asked, role) is not None else "default"
        raise RunSpecError(
            f'codec.{key} of the job is not "none", "lossless", "adatopk", "auto" or the text of a '
            f"codec: {error}"
        ) from None
    return text


def _check_support(role: str, text: str, activation: str) -> None:
    """Raises RunSpecError unless the values of which gradients go by `support` are sparse."""
    from ...compression.codec import parse
    from ...compression.sparse.topk import TopK

    ratio = getattr(parse(text), "ratio")  # noqa: B009  # of codecs with one
    there = None if activation in ("none", "adatopk", "auto") else parse(activation)
    if role != "activation_grad" or not isinstance(there, TopK) or there.ratio != ratio:
        raise RunSpecError(
            f'codec.{role} of the job is "{text}", which sends the gradient of a value only where '
            f"top-k kept the value: expected it as codec.activation_grad, beside "
            f'codec.activation = "topk:ratio={ratio:g}", which is "{activation}"'
        )
