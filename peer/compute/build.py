"""Building an assignment on a device: the stages of one peer with their weights, and what of them
it exports. Everything that plan, graph, weights and data could contradict each other in is checked
here, before anything runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from ...dag.exchange.wiring import shares_gradient
from ...dag.execute.execute import StageExecutor, TensorSpecError
from ...dag.execute.stage_visits import StageVisits
from ...dag.ir.graph import Graph, TensorSpec
from ...dag.plan.action import Action, ExchangeContent, Kind
from ...dag.plan.cut import Stage, tied_groups
from ...dag.plan.plan import PlanError
from ...dag.plan.strategies import parse_strategy
from ...dag.plan.visit_lists import halved
from ...dag.rounds.noise import StreamKey, secret_key
from ...dag.rounds.vector import RunVector
from ...dag.schedule.flow import Flow
from ...dag.transforms.evaluation import evaluation
from ...dag.transforms.split_weights import grouped, scale_name, weight_of
from ...job import SettingsError
from ...net.identity.statements import MemberOfNetwork
from ...net.links.buffers import trim_heap
from ...proto.broker_pb2 import Evaluation, NamedNumber, Outcome
from ..blobs.starting import ByGraph, Starting
from ..blobs.weights import has_start
from ..core.rounds.round_exchange import run_of
from ..data.reader import Reader
from ..federated.client_states import ClientStates
from ..host.profile import available_host_bytes
from ..optimizers.loss_scaler import LossScaler
from ..rounds.client_tensors import ClientTensors
from ..rounds.local import LocalSteps
from ..rounds.tensors import TensorAlgebra
from ..rounds.work import RoundWork
from ..secure.attempt_receipts import AttemptReceipts, ReceiptsOf
from ..secure.masked_sums import MaskedSums, MemberOf
from ..sync.gradient_vector import parts_of
from ..sync.optimizer import StageOptimizer, learning_rate
from ..sync.strategies import STRATEGIES
from ..sync.strategy import Holder, Strategy
from .exchange import Exchanges, LocalStage, TransferSpecs
from .frame_codecs.codings import Codings
from .frame_codecs.streams import Streams
from .graph_checks import check_specs, checked_core
from .inputs import CheckedReader
from .local_job import local_steps, trains_in_steps
from .order import BuildOrder, check_host_memory, check_memory
from .store import Store

__all__ = ["BuiltStages", "Inputs", "build_work"]

Inputs = dict[str, Tensor]


@dataclass(eq=False)
class BuiltStages:
    """Everything of one assignment on its device."""

    order: BuildOrder
    graph: Graph
    """Full form, bound."""
    flow: Flow
    wire: TransferSpecs
    held: dict[int, LocalStage]
    """This peer's stages by index."""
    exchange: Exchanges
    streams: Streams
    data: CheckedReader
    unread: dict[str, Tensor]
    """Exported here, though no operator reads them."""
    files: Mapping[str, Tensor]
    """The weights files of the run, whatever it goes on from."""
    rounds: RoundWork[Tensor] | None
    """What it does between replicas, where the run has rounds."""
    store: Store = field(default_factory=Store)
    inputs: dict[tuple[int, int, int], Inputs] = field(default_factory=dict)
    """Prefetched data by (step, microbatch, stage)."""

    @cached_property
    def reading(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """The stages here that read data, with the names of what they read."""
        return tuple((k, h.stage.inputs) for k, h in self.held.items() if h.stage.inputs)

    def place(self, step: int, microbatch: int) -> tuple[int, int]:
        """(step, microbatch) of the run that one of this plan is: what its samples and masks are
        functions of."""
        return self.rounds.local.place(step, microbatch) if self.rounds else (step, microbatch)

    def position(self, step: int) -> float:
        """Where in the learning rate's schedule a step of this plan stands."""
        return self.rounds.local.position(step) if self.rounds else step

    def ran(self, step: int, stage: int) -> tuple[int, ...]:
        """The microbatches that go through a stage here, ascending."""
        return self.wire.microbatches(self.order.peer, stage, full=self.flow.at(step).is_full)

    @cached_property
    def held_out_needs(self) -> tuple[str, ...]:
        """Hashes of the shards that an evaluation reads here: the same in each."""
        size, found = self.order.plan.microbatch_size, dict[str, None]()
        for stage, names in self.reading:
            ran = self.wire.microbatches(self.order.peer, stage, training=False)
            found |= dict.fromkeys(self.data.reader.needs_held_out(ran, size, names))
        return tuple(found)

    @cached_property
    def standing_bytes(self) -> int:
        """Parameters, their gradients, buffers, and what strategies keep; on a CPU with what rounds
        do."""
        here = self.rounds and self.exchange.device.type == "cpu"
        total = self.rounds.size_bytes if self.rounds and here else 0
        for held in self.held.values():
            executor = held.executor
            tensors = [*executor.parameters.values(), *executor.buffers.values()]
            tensors += [p for p in executor.parameters.values() if p.requires_grad]  # gradients
            total += sum(t.numel() * t.element_size() for t in tensors)
            total += held.strategy.size_bytes
        return total

    def kept_bytes(self, stage: int) -> int:
        """What a live microbatch keeps there: what autograd saved; with recomputation what came
        and the data."""
        held = self.held[stage]
        if not held.executor.recompute:
            return held.executor.saved_bytes
        came = sum(port.spec.size_bytes for port in held.stage.receives)
        return came + sum(self.graph.spec[f"in:{n}"].size_bytes for n in held.stage.inputs)

    def live_bytes(self) -> int:
        """What all microbatches keep that wait for a backward, or for its second half."""
        return sum(
            len(held.executor.live) * self.kept_bytes(k)
            + len(held.executor.waiting) * held.executor.apart_bytes
            for k, held in self.held.items()
        )

    def backward_bytes(self, stage: int) -> int:
        """With recomputation: what a backward held of its microbatch and no longer does at its end,
        what autograd saved in the second forward with it."""
        executor = self.held[stage].executor
        return self.kept_bytes(stage) + executor.saved_bytes if executor.recompute else 0

    @cached_property
    def unchanged(self) -> frozenset[str]:
        """Names of what is for ever as the weights files have it: frozen parameters, and buffers
        that no step updates. Whoever needs one takes it from there, so neither a snapshot nor an
        export brings it. What a recipe makes is in no file that a user has; of weights in 8 bits
        it is made again all the same, as an export has them as they were before."""
        names = self.graph.parameter_bytes
        narrow = {n for n in names if scale_name(weight_of(n)) in names}  # scales, too
        files = self.files.files if isinstance(self.files, Starting) else self.files
        still = {p.name: (p.name, *p.tied) for p in self.graph.parameters if not p.trainable}
        still |= {b.name: (b.name,) for b in self.graph.buffers if b.update is None}
        executors = [held.executor for held in self.held.values()]
        here = {n for e in executors for n in (*e.parameters, *e.buffers)} | {*self.unread}
        return frozenset(
            name
            for name in here & still.keys()
            if any(has_start(self.files if name in narrow else files, n) for n in still[name])
        )

    def exported(self) -> dict[str, Tensor]:
        """What this peer exports, under the graph's names, without what is `unchanged`. Over all
        peers every other parameter and persistent buffer is there exactly once: the first holder
        of the lowest stage that has a tensor gives it; the first stage those that no stage has."""
        found = {name: t for name, t in self.unread.items() if name not in self.unchanged}
        for value, stage in _owners(self.graph, self.flow).items():
            held, (kind, _, name) = self.held.get(stage), value.partition(":")
            first = self.order.plan.stages[stage].holders[:1]
            if held is None or first != (self.order.peer,) or name in self.unchanged:
                continue
            buffers = held.executor.buffers
            found[name] = held.exported()[name] if kind == "param" else buffers[name]
        return found

    def outcome(self, step: int) -> Outcome:
        """Return what a step came to, at the hub."""
        total = self.exchange.total
        assert total is not None, "no outcome before the norm"
        return Outcome(
            loss=total.loss,
            weight=total.weight,
            grad_norm=total.norm,
            lr=learning_rate(self.order.training.train, self.position(step)),
            metrics=self._metrics(total.metrics),
            loss_scale=self.exchange.scale if self.exchange.scaler else 0.0,
            skipped=self.exchange.overflowed,
        )

    def evaluation(self) -> Evaluation:
        """Return what an evaluation came to, at the hub."""
        total = self.exchange.total
        assert total is not None, "no evaluation before its scores"
        self.exchange.clear()
        return Evaluation(
            loss=total.loss,
            weight=total.weight,
            metrics=self._metrics(total.metrics),
            clients=self.rounds.local.evaluate() if self.rounds else (),
        )

    def _metrics(self, values: tuple[float, ...]) -> list[NamedNumber]:
        names = [name for name, _ in self.graph.metrics]
        return [
            NamedNumber(name=name, value=value) for name, value in zip(names, values, strict=True)
        ]


def build_work(
    order: BuildOrder,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    files: Mapping[str, Tensor] | None = None,
    noise_key: StreamKey = secret_key,
    member_of: MemberOf | None = None,
    states: ClientStates | None = None,
    identity_of: MemberOfNetwork | None = None,
) -> BuiltStages:
    """Raises ValueError (PlanError, GraphError, TensorSpecError, WeightError, CodecError) when the
    parts of the order do not fit together, OfferError when they take too much memory. `clock` gives
    the seconds of codecs; `files` are the weights files, where the order's weights are more;
    `noise_key` is of noise in sums that hide clients, `member_of` makes this peer's part in sums
    that are masked. `states`: where clients' is kept from round to round; None: in memory.
    `identity_of`: of this peer, that signs what it gives in rounds; None: it signs nothing."""
    plan, (graph, stages) = order.plan, order.divided()
    flow = Flow.of_slice(order.slice, stages, tied_groups(graph, stages))
    mine = [stages[k] for k in plan.stages_of(order.peer)]
    settings = order.training.rounds
    vector = RunVector.of(graph, settings.fragments) if settings else RunVector(())
    of_rounds = sum(e.elements for e in _entries_of(vector, mine).values())
    on_cpu = device.type == "cpu"
    check_memory(order, graph, flow, of_rounds if on_cpu else 0)
    if not on_cpu:
        check_host_memory(order, of_rounds, available_host_bytes())
    _check_norm(graph, order)
    if order.training.scales_loss:
        _check_scaled(order)
    _check_data(graph, order, {name for stage in mine for name in stage.inputs})
    weights = ByGraph(order.weights, graph)
    core = checked_core(order.core, graph) if order.core else None
    firsts = _firsts(graph)
    wire = TransferSpecs(flow, graph)
    streams = Streams(
        order.peer,
        Codings(wire, plan.codecs),
        seed=order.training.seed,
        device=device,
        clock=clock,
    )
    held: dict[int, LocalStage] = {}
    apart = halved(order.slice.visits)
    of_run = order.training.train.batch // plan.microbatch_size
    reader = Reader(order.manifest, order.shard, seed=order.training.seed, microbatches=of_run)
    local: LocalSteps | None = None
    names = [name for stage in mine for name in (*stage.parameters, *stage.buffers)]
    with order.reading(weights.shards(names)):
        for stage in mine:
            within = (stage.start, stage.stop)
            if core:
                within = (core.start[stage.start], core.start[stage.stop])
            form = core.graph if core else graph
            check_specs(form, within)
            executor = StageExecutor(
                core.graph if core else graph,
                stage,
                weights,
                device=device,
                seed=order.training.seed,
                operators=within,
                evaluation=(evaluation(core.graph), within) if core else None,
                recompute=plan.stages[stage.index].recompute,
                split=stage.index in apart,
            )
            local = local or local_steps(order, reader, executor, of_run, states)
            strategy = _strategy(order, stage, executor, firsts, wire, streams, local)
            scaling, k = order.training.skip_scaling, stage.index
            visits, in_full = (
                StageVisits.of(graph, stage, f.visited(k), f.plan.routes, order.peer, scaling)
                for f in (flow, flow.full or flow)
            )
            held[k] = LocalStage(stage, executor, strategy, visits, in_full, plan.full)
    assert local is not None, f"{order.peer} has no stage"
    trim_heap()
    unread: dict[str, Tensor] = {}
    if plan.stages[0].holders[:1] == (order.peer,):
        owners = _owners(graph, flow)
        lost = [p.name for p in graph.parameters if f"param:{p.name}" not in owners]
        lost += [b.name for b in graph.buffers if b.persistent and f"buffer:{b.name}" not in owners]
        unread = {name: weights[name] for name in lost}
    scaler = LossScaler(order.training.train.loss_scale) if order.training.scales_loss else None
    exchange = Exchanges(order.peer, wire, held, device, local.counts, scaler)
    files = order.weights if files is None else files
    rounds: RoundWork[Tensor] | None = None
    if settings:
        signs = None if identity_of is None else _receipts_of(order, identity_of)
        rounds = _rounds(order, vector, local, held, noise_key, member_of, signs)
    data = CheckedReader(order.run, graph, reader, private=order.private)
    return BuiltStages(
        order, graph, flow, wire, held, exchange, streams, data, unread, files, rounds
    )


def _entries_of(vector: RunVector, stages: Sequence[Stage]) -> dict[str, TensorSpec]:
    """Entries of the run's vector that are in these stages, copies of tied ones too."""
    here = {f"param:{name}" for s in stages for name in s.trainable}
    here |= {f"buffer:{name}" for s in stages for name in s.updates}
    return {e.value: e.spec for e in vector.entries if e.value in here}


def _rounds(
    order: BuildOrder,
    vector: RunVector,
    local: LocalSteps,
    held: Mapping[int, LocalStage],
    noise_key: StreamKey,
    member_of: MemberOf | None,
    receipts: ReceiptsOf | None,
) -> RoundWork[Tensor]:
    """Make what rounds need. Raises CodecError, SettingsError."""
    assert order.training.rounds is not None, "a run without rounds has no work of them"
    stages = [h.stage for h in held.values()]
    tensors: dict[str, list[Tensor]] = {v: [] for v in _entries_of(vector, stages)}
    for at in held.values():
        named: dict[str, Tensor] = {f"param:{n}": p for n, p in at.executor.parameters.items()}
        named |= {f"buffer:{name}": b for name, b in at.executor.buffers.items()}
        for value in named.keys() & tensors.keys():
            tensors[value].append(named[value])
    settings, cohorts = order.training.rounds, order.training.rounds.cohorts
    of, masks = (vector, settings, order.run), None
    algebra = TensorAlgebra(*of) if cohorts is None else ClientTensors(*of, noise_key)
    if cohorts is not None and cohorts.secure:
        if member_of is None:
            raise SettingsError(
                "sync.secure",
                f"is true, and {order.peer} has no certificate to sign keys with: expected a "
                "network without --insecure",
            )
        masks = MaskedSums(order.peer, run_of(order.run), member_of, cohorts.fewest)
    return RoundWork(
        algebra,
        settings,
        local,
        peer=order.peer,
        stages=stages,
        copies=tensors,
        masks=masks,
        receipts=receipts,
    )


def _receipts_of(order: BuildOrder, identity_of: MemberOfNetwork) -> ReceiptsOf:
    """Return what makes the receipts of an attempt, by the certificate that the peer has then."""
    peer, run = order.peer, run_of(order.run)
    return lambda plan: AttemptReceipts(identity_of(peer), run, plan)


def _strategy(
    order: BuildOrder,
    stage: Stage,
    executor: StageExecutor,
    firsts: Mapping[str, int],
    wire: TransferSpecs,
    streams: Streams,
    local: LocalSteps,
) -> Strategy:
    """That of the plan for a stage; the plain mean for one whose holders share no gradients, or
    that has one which can step alone as it is. Raises TensorSpecError for a model that it is not
    for, ValueError for a stage."""
    k, plan, weight = stage.index, order.plan, wire.graph.weight
    choice, holders = plan.strategy(k), plan.stages[k].holders
    if not shares_gradient(stage) or (len(holders) == 1 and not choice.traits.alone):
        choice = parse_strategy("mean")
    train = order.training.train
    optimizer = StageOptimizer(
        replace(train, momentum=0.0) if choice.traits.own_momentum else train,
        executor.parameters,
        weighs=order.training.rebuilds,
        seed=order.training.seed,
        firsts=firsts,
        position=local.position if order.training.rounds else float,
    )
    if weight and choice.traits.updates:
        raise TensorSpecError(
            f"the strategy of stage {k} is {choice.word!r}, and the model weighs its losses by "
            f"{weight!r}: holders of a stage do not know the weights of their microbatches; "
            'expected "mean" (codec.feedback "ef")'
        )

    def unsent() -> Mapping[str, Tensor]:
        action = Action(Kind.GIVE, stage=k, content=ExchangeContent.DELTA)
        gives = wire.flow.gives(order.peer, action)
        left = streams.unsent(next(t for t in gives if not t.is_local))
        return {} if left is None else parts_of(wire.layouts[k], left)

    return STRATEGIES[choice.word](
        Holder(
            layout=wire.layouts[k],
            parameters=executor.parameters,
            optimizer=optimizer,
            own=len(wire.microbatches(order.peer, k)),
            count=len(plan.routes),
            unsent=unsent,
            peer=order.peer,
            holders=holders,
            tied=frozenset(g.parameter for g in wire.flow.tied),
            choice=choice,
            momentum=train.momentum,
            seed=order.training.seed,
            device=executor.device,
        )
    )


def _firsts(graph: Graph) -> dict[str, int]:
    """By block of a split parameter: the number of its first element in the whole parameter."""
    found: dict[str, int] = {}
    sizes = {p.name: p.spec.elements for p in graph.parameters}
    for parts in grouped(sizes).values():
        at = 0
        for block in parts:
            found[str(block)] = at
            at += sizes[str(block)]
    return found


def _owners(graph: Graph, flow: Flow) -> dict[str, int]:
    """The lowest stage that has a parameter or a persistent buffer, by value name."""
    persistent = {b.name for b in graph.buffers if b.persistent}
    found: dict[str, int] = {}
    for stage in flow.stages:
        for name in stage.parameters:
            found.setdefault(f"param:{name}", stage.index)
        for name in stage.buffers:
            if name in persistent:
                found.setdefault(f"buffer:{name}", stage.index)
    return found


def _check_norm(graph: Graph, order: BuildOrder) -> None:
    """Raises PlanError where updates would need a norm or weight that the plan does not bring."""
    plan, clip = order.plan, order.training.train.clip
    clips = clip and not all(plan.strategy(k).traits.updates for k in range(len(plan.stages)))
    if plan.without_norm and (clips or graph.weight):
        raise PlanError(
            f"the plan has no norm, and gradients are clipped to {clip}: expected one with"
            if clips
            else f"the plan has no norm, and the model weighs its losses by {graph.weight!r}: "
            "expected one with"
        )


def _check_scaled(order: BuildOrder) -> None:
    """Raises PlanError where not every holder would come to know whether scaled gradients of a step
    overflowed before anything changes by them."""
    plan = order.plan
    found = {plan.strategy(k).word for k in range(len(plan.stages))} - {"mean"}
    found |= {"updates that wait for no norm"} if plan.without_norm else set()
    found |= {"clients in a pipeline"} if trains_in_steps(order) else set()
    if found:
        raise PlanError(
            f"losses are scaled (fp16), and the plan has {', '.join(sorted(found))}: expected one "
            'with the norm, and the strategy "mean" for all stages'
        )


def _check_data(graph: Graph, order: BuildOrder, names: set[str]) -> None:
    """Raises TensorSpecError when the data is not what the stages here read."""
    fields, size = order.manifest.fields, order.plan.microbatch_size
    for given in graph.inputs:
        if given.name not in names:
            continue
        if given.name not in fields:
            raise TensorSpecError(
                f"the model reads {given.name!r}, the data has {sorted(fields)}: "
                "name its tensors with inputs and targets"
            )
        sample = fields[given.name]
        got = TensorSpec((size, *sample.shape), sample.dtype)
        if got != given.spec:
            raise TensorSpecError(
                f"data {given.name!r}: the model expects {given.spec!r}, got {got!r}"
            )
