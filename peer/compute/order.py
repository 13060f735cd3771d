"""An assignment as a device needs it: messages read and checked, blobs fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ...dag.cost.cost import cost
from ...dag.cost.memory import MemoryModel, live_moments
from ...dag.ir.convert import (
    MAX_GRAPH_BYTES,
    MAX_RECIPE_BYTES,
    graph_from_bytes,
    lowered_from_bytes,
)
from ...dag.ir.graph import Graph, Lowered
from ...dag.ir.recipe import Recipe
from ...dag.ir.rules.rules import check_graph
from ...dag.ir.validate import validate
from ...dag.plan.cut import Stage, cut
from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.plan.plan_slice import PlanSlice
from ...dag.schedule.convert_slice import slice_from_proto
from ...dag.schedule.flow import Flow, Transfer
from ...dag.transforms.vocabulary import planned_graph
from ...job import MOST_MANIFEST_BYTES, Training
from ...job.words import size_text
from ...net.links.frame import FrameKey
from ...proto import broker_pb2, common_pb2
from ..blobs.cache import BlobMismatchError
from ..blobs.read_ahead import Reading, alone
from ..blobs.starting import Starting, check_recipe
from ..blobs.weights import Read, Weights, WeightsFile, Whole
from ..core.assignment import STOP_AT
from ..core.snapshots import SnapshotError, SnapshotId
from ..data.manifest import Manifest

__all__ = [
    "BuildOrder",
    "OfferError",
    "check_host_memory",
    "check_memory",
    "order_from_assign",
    "resumed",
    "starting_weights",
]

# What the owner offers of the device's memory, against what an assignment will take.
#
# Whoever wrote a plan, the peer estimates its own stages before it builds any, by the formula that
# the broker judges plans with (`dag/cost/memory.py`) and from the same things: the plan, and the
# graph in its full form. So the broker's own plans are refused by no rounding. Only another torch
# on the peer could count temporaries or saved tensors otherwise: STOP_AT leaves room for that.


class OfferError(ValueError):
    """An assignment takes more memory than the owner offers; the text has both numbers."""


def check_memory(order: BuildOrder, graph: Graph, flow: Flow, of_rounds: int = 0) -> None:
    """Raises OfferError before anything is built. `graph` and `flow` are the order's, bound;
    `of_rounds`: elements of the run's vector that rounds keep on the device."""
    if not order.memory_bytes:
        return
    plan, held = order.plan, order.plan.stages_of(order.peer)
    has_backward = [s.has_backward for s in flow.stages]
    moments = tuple(
        m
        for kind in filter(None, (flow, flow.full))
        for m in live_moments(kind.actions(order.peer), held, has_backward)
    )
    train = order.training.train
    rounds = order.training.rounds if of_rounds else None
    meets = rounds.exchange_bytes if rounds else 0
    model = MemoryModel(graph, cost(graph), meets, in_8_bits=train.in_8_bits)
    most = model.peer_bytes(plan, held, moments, train.state_bytes)
    each = rounds.stepping_bytes + rounds.summed_bytes(len(plan.stages)) if rounds else 0
    most += each * of_rounds
    if most > STOP_AT * order.memory_bytes:
        raise OfferError(
            f"the stages of {order.peer} take about {size_text(most)} on the device, this peer "
            f"offers {size_text(order.memory_bytes)}: give it fewer operators, smaller "
            "microbatches, or recompute; or let its owner offer more memory"
        )


def check_host_memory(order: BuildOrder, of_rounds: int, free: int) -> None:
    """Raises OfferError where what rounds keep of so many elements beside a card is more than the
    `free` bytes of its host."""
    rounds = order.training.rounds
    needed = 0
    if rounds is not None:
        each = rounds.stepping_bytes + rounds.summed_bytes(len(order.plan.stages))
        needed = of_rounds * (each + rounds.exchange_bytes)
    if needed > free:
        raise OfferError(
            f"rounds of the stages of {order.peer} take about {size_text(needed)} of the host's "
            f"memory, beside the device, and {size_text(free)} are free: give it fewer operators"
        )


@dataclass(frozen=True, kw_only=True)
class BuildOrder:
    """What one peer is to build."""

    run: str
    term: int
    peer: PeerId
    slice: PlanSlice
    """What this peer needs of the plan."""
    graph: Graph
    """Full form as planned (`planned_graph`), for any microbatch size; the plan's intervals count
    its operators."""
    core: Lowered | None = None
    """The form that a peer with the core operator set runs, for the plan's microbatch size or for
    any; None: this peer runs the full form."""
    weights: Mapping[str, Tensor]
    """Starting value of every parameter and buffer by name; read once per name, only those that
    this peer holds."""
    manifest: Manifest
    training: Training
    shard: Callable[[str], Path]
    """Path of a data shard by hash, its content verified; may fetch it, and block."""
    private: bool = False
    """Whether data of it stays with its peers."""
    first_step: int = 0
    resumed: tuple[tuple[memoryview, ...], ...] = ()
    """Snapshots after `first_step` steps that it goes on from, in their parts."""
    anew: bool = False
    """Whether they are a checkpoint's: replicas begin with what they share, and nothing of their
    own."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Who takes the place of whom since they were taken."""
    lossless_snapshots: bool = False
    """Whether tensors of snapshots are coded, or written as they are."""
    rebuilt: tuple[PeerId, ...] = ()
    """Peers that make their stages anew: `resumed` is what others gave for that then, or what was
    in the stages."""
    memory_bytes: int = 0
    """That the owner offers on the device; 0: whatever there is."""
    reading: Reading = alone
    """Is told which shards of `weights` will be read inside of it, in their order."""

    @property
    def plan(self) -> Plan:
        """The part of the plan that this peer knows."""
        return self.slice.plan

    def divided(self) -> tuple[Graph, tuple[Stage, ...]]:
        """The graph for the plan's microbatch size, and its stages, of all peers. Raises PlanError
        and GraphError where one of them cannot be."""
        plan = self.slice.validate(len(self.graph.operators)).plan
        graph = self.graph.bind(plan.microbatch_size)
        check_graph(graph)
        return graph, cut(graph, [(s.start, s.stop) for s in plan.stages])

    def key(self, step: int, transfer: Transfer) -> FrameKey:
        """Return the name of the frame that carries a value of a step."""
        return FrameKey(self.run, self.term, step, *transfer)


def order_from_assign(
    peer: str,
    assign: broker_pb2.Assign,
    *,
    blob: Callable[[common_pb2.BlobRef], bytes],
    read: Read,
    shard: Callable[[str], Path],
    whole: Whole | None = None,
    parts: tuple[tuple[memoryview, ...], ...] = (),
    memory_bytes: int = 0,
    reading: Reading = alone,
) -> BuildOrder:
    """Reads an assignment. `blob` gives a whole verified blob, `read` a byte range of one, `whole`
    a shard of weights (None: `blob` does); all may fetch, and block. `parts`: of the snapshots to
    go on from (`resumed`). `memory_bytes`: what the owner offers on the device; 0: whatever there
    is. `reading`: as in the order.

    Raises ValueError (GraphError, PlanError, DataError, SettingsError) for anything
    that does not keep its rules.
    """

    def small(ref: common_pb2.BlobRef, most_bytes: int) -> bytes:
        if ref.size_bytes > most_bytes:
            raise BlobMismatchError(
                f"blob {ref.hash[:12]} has {ref.size_bytes} bytes: expected at most {most_bytes}"
            )
        return blob(ref)

    graph, core = graph_from_bytes(small(assign.full_graph, MAX_GRAPH_BYTES)), None
    validate(graph)
    if assign.graph.hash != assign.full_graph.hash:
        core = lowered_from_bytes(small(assign.graph, MAX_GRAPH_BYTES))
        validate(core.graph)
    mine = slice_from_proto(PeerId(peer), assign.slice)
    plan, training = mine.plan, Training.from_json(assign.training)
    if plan.microbatch_size * len(plan.routes) != training.batch:
        raise PlanError(
            f"the plan has {len(plan.routes)} microbatches of {plan.microbatch_size} samples: "
            f"expected {training.batch} samples in a step"
        )
    if core and plan.head_parts:
        raise PlanError(
            f"the plan has the head in {plan.head_parts} parts, and this peer gets the core form: "
            "expected peers with the full operator set"
        )
    recipe = None
    if assign.HasField("recipe"):
        recipe = Recipe.from_bytes(small(assign.recipe, MAX_RECIPE_BYTES))
        check_recipe(recipe, graph)
    return BuildOrder(
        run=assign.run,
        term=assign.term,
        peer=PeerId(peer),
        slice=mine,
        graph=planned_graph(graph, plan),
        core=core,
        weights=starting_weights(assign, read, recipe, whole or _shards_by(blob)),
        manifest=Manifest.from_json(small(assign.data, MOST_MANIFEST_BYTES)),
        training=training,
        shard=shard,
        private=bool(assign.local),
        first_step=assign.first_step,
        resumed=parts,
        anew=bool(assign.resume.files),
        renamed={r.old: r.to for r in assign.resume.renamed},
        lossless_snapshots=assign.lossless_snapshots,
        rebuilt=tuple(map(PeerId, assign.resume.rebuilt)),
        memory_bytes=memory_bytes,
        reading=reading,
    )


def starting_weights(
    assign: broker_pb2.Assign, read: Read, recipe: Recipe | None, whole: Whole
) -> Weights | Starting:
    """What the assignment begins with: `recipe` is the one that it names."""
    named = [WeightsFile(f.blob.hash, f.blob.size_bytes, f.sharded) for f in assign.weights]
    files = Weights(named, read, whole)
    return Starting(files, recipe) if recipe else files


def _shards_by(blob: Callable[[common_pb2.BlobRef], bytes]) -> Whole:
    return lambda shard: blob(common_pb2.BlobRef(hash=shard.hash, size_bytes=shard.size_bytes))


def resumed(
    assign: broker_pb2.Assign,
    snapshots: Iterable[SnapshotId],
    parts: Callable[[SnapshotId], tuple[memoryview, ...]],
    peer: str,
    file: Callable[[common_pb2.BlobRef], tuple[memoryview, ...]],
) -> tuple[tuple[memoryview, ...], ...]:
    """What an assignment of `peer` goes on from, unless that is in its stages. `snapshots`: of its
    set, those that lie here and have some of its stages; `parts` reads one. Of a checkpoint, `file`
    fetches what has some of them. Raises SnapshotError when there is none, or one is gone."""
    mine = [s for s in assign.slice.plan.stages if peer in s.holders]
    saved = (
        f.blob
        for f in assign.resume.files
        if any(a.start < s.stop and s.start < a.stop for a in f.spans for s in mine)
    )
    found = (*map(parts, snapshots), *map(file, saved))
    if assign.HasField("resume") and not assign.resume.live and not found:
        raise SnapshotError(
            f"no snapshot after {assign.first_step} steps of {assign.run} (term "
            f"{assign.resume.term}) lies here: expected those of this peer's stages"
        )
    return found
