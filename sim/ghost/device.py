"""A ghost: a peer's device on which every tensor is a 64-bit hash (`hashes.py`).

It stands where `peer.device.TorchDevice` stands, under the same machine, and does the same actions
on the same transfers; a frame announces the codec, spec and bytes that its tensor would have, and
carries its hash. So a run of thousands of peers costs next to nothing, and still proves that each
sample of each step counted once, in the right step and against the right weights: losses and
exported hashes must be those of `hashes.expected`, which knows nothing of plans (I1, I2).

What a codec would lose is not there: a ghost is exact under any codec, and only weighs less.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import cast
from weakref import WeakValueDictionary

import numpy as np

from ...dag.cost.cost import OperatorCost, cost
from ...dag.execute.execute import TensorSpecError
from ...dag.ir.graph import Graph
from ...dag.plan.action import ROUNDS, Action, ExchangeContent, Kind
from ...dag.schedule.flow import Role
from ...net.links.frame import Arrived, FrameKey, Payload
from ...net.links.outbox import Pieces
from ...peer.compute.order import BuildOrder
from ...peer.compute.rebuilt import RebuildError
from ...peer.core.events import Built, Result
from ...peer.core.rounds.round_exchange import run_of
from ...peer.core.snapshots import PART_BYTES
from ...peer.rounds.work import RoundWork
from ...peer.sync.optimizer import learning_rate
from ...proto import broker_pb2
from .exchange import carry_out
from .hashes import MASK, Hash, figure, name_hash
from .plan import GhostPlan, Hollow
from .rounds import GhostVector
from .work import ActionTransfers, GhostAssignment, Store

__all__ = ["GhostDevice", "Ghosts", "hollow"]


def hollow(size_bytes: int) -> memoryview:
    """A receive buffer for ghosts; for `MemoryNetwork`."""
    return cast(memoryview, Hollow(size_bytes))


class Ghosts:
    """Makes the ghosts of one world: they share what an assignment says to all of them. `costs`:
    of a bound graph, by operator; memory is reckoned from them."""

    def __init__(self, costs: Callable[[Graph], Sequence[OperatorCost]] = cost) -> None:
        self._costs = costs
        # By (run, term), as long as some ghost works by it.
        self._plans: WeakValueDictionary[tuple[str, int], GhostPlan] = WeakValueDictionary()
        # By run and microbatch size, likewise.
        self._vectors: WeakValueDictionary[tuple[str, int], GhostVector] = WeakValueDictionary()

    def __call__(self, peer: object = None) -> GhostDevice:
        return GhostDevice(self)

    def plan(self, order: BuildOrder) -> GhostPlan:
        key = order.run, order.term
        known = self._plans.get(key)
        if known is None or (known.plan is not order.plan and known.plan != order.plan):
            known = self._plans[key] = GhostPlan(order, self._costs)
        return known

    def vector(self, order: BuildOrder) -> GhostVector | None:
        """What replicas exchange; None where a run has no rounds."""
        if order.training.rounds is None:
            return None
        key = run_of(order.run), order.plan.microbatch_size
        if (known := self._vectors.get(key)) is None:
            graph = order.graph.bind(order.plan.microbatch_size)
            known = self._vectors[key] = GhostVector(graph, order.training.rounds)
        return known


class GhostDevice:
    """A peer's device on which every tensor is a 64-bit hash; the methods are those of
    TorchDevice."""

    shares_plan = True
    """All ghosts work by one plan, in place of a slice each: what follows from it is found once."""
    allocate = staticmethod(hollow)
    """Makes the receive buffers of its frames."""
    pieces = Pieces(0.5, 1 << 40, 0.05, 0.05)
    """A piece of a frame costs the world as much as a whole one: ten times fewer of them, and a
    frame waits for up to half a second for one of another role, where peers wait for 0.05 s. For
    one of a snapshot peers wait for half of 0.025 s, a ghost for 0.025 s or, if that is more, a
    twentieth of the time since the last other frame on its link."""

    def __init__(self, shared: Ghosts) -> None:
        self.peak_bytes = 0
        self._shared = shared
        self._work: GhostAssignment | None = None

    # ------------------------------------------------------------ building

    def build(self, order: BuildOrder) -> Built:
        """As TorchDevice; neither weights nor data are read."""
        shared = self._shared.plan(order)
        self._work = work = GhostAssignment(order, shared)
        states: dict[str, int] = {}
        for parts in order.resumed:
            states |= json.loads(cast(Hollow, parts[0]).tag)
        if order.peer in order.rebuilt:
            states = _rebuilt(work, states)
        work.resume(states, self._shared.vector(order))
        self.peak_bytes = work.standing_bytes
        train = order.training.train
        return Built(
            run=order.run,
            term=order.term,
            flow=shared.flow,
            slots=tuple(shared.slots[order.peer]),
            device_bytes=work.standing_bytes,
            steps=train.steps or 0,
            eval_every=train.eval_every if shared.plan.evaluation_routes else 0,
            exports=tuple(k for k in work.held if work.first_of(k)),
            vector=work.rounds.vector if work.rounds else None,
        )

    def discard(self) -> None:
        self._work = None

    def prefetch(self, step: int) -> None:
        """Samples are hashes of their place: nothing is read."""

    # ------------------------------------------------------------ values

    def accept(self, arrived: Arrived) -> None:
        """Raises TensorSpecError when it is not what the plan says for its key."""
        work, key = self._now, arrived.key
        if key.role is Role.ROUND:
            self.rounds.frames.accept(arrived)
            return
        at = key[4:]
        wanted = work.coming.get(at)
        if wanted is None:
            raise TensorSpecError(f"{key}: the plan names no such transfer to {work.order.peer}")
        same = arrived.spec is wanted.spec or arrived.spec == wanted.spec
        if not same or arrived.codec != wanted.codec:
            raise TensorSpecError(
                f"{key}: expected {wanted.spec!r} by {wanted.codec}, got {arrived.spec!r} by "
                f"{arrived.codec!r}"
            )
        tag = cast(Hollow, arrived.data).tag
        value: Hash = int.from_bytes(tag, "little")
        if at in work.words:
            value = np.frombuffer(tag, np.uint64)
        work.store.setdefault(key.step, {})[at] = value

    def most_bytes(self, key: FrameKey) -> int | None:
        """Answer as TorchDevice does."""
        work = self._work
        if key.role is Role.ROUND:
            return work.rounds.frames.most_bytes(key) if work and work.rounds else None
        known = work is not None and (key.run, key.term) == (work.order.run, work.order.term)
        if work is None or not known or key.role is Role.PROBE:
            return None
        at = key[4:]
        return work.coming[at].size_bytes if at in work.coming else 0

    def payload(self, key: FrameKey) -> Payload:
        """The hash, announced as the tensor. Raises KeyError for a value that no action left."""
        work = self._now
        if key.role is Role.ROUND:
            return self.rounds.frames.payload(key)
        at = key[4:]
        value = work.store[key.step].pop(at)
        codec, spec, size = work.going[at]
        tag = value.to_bytes(8, "little") if isinstance(value, int) else value.tobytes()
        return Payload(codec, b"", spec, (cast(memoryview, Hollow(size, tag)),))

    def release(self, key: FrameKey) -> None:
        if (work := self._work) is not None and key.role is Role.ROUND and work.rounds:
            work.rounds.frames.early.pop(key)
        elif work is not None and (there := work.store.get(key.step)):
            there.pop(key[4:], None)

    # ------------------------------------------------------------ rounds

    @property
    def rounds(self) -> RoundWork[Hash]:
        """Rounds of the assignment. Raises TensorSpecError for a run without rounds."""
        if self._now.rounds is None:
            raise TensorSpecError(f"{self._now.order.run} has no rounds between replicas")
        return self._now.rounds

    # ------------------------------------------------------------ actions

    def compute(self, step: int, action: Action) -> Result:
        """Carry an action out. What it takes must be in the store; what it gives is there
        afterwards."""
        work = self._now
        if action.kind in ROUNDS:
            return Result(0.0, self.peak_bytes, round=self.rounds.carry_out(action.kind))
        part = work.part(step, action)
        store = work.store.setdefault(step, {})
        match action.kind:
            case Kind.FORWARD | Kind.EVALUATE:
                self._forward(work, step, action, part, store)
            case Kind.BACKWARD:
                self._backward(work, action, part, store)
            case Kind.WEIGHT:
                work.held[action.stage].backward_weight(action.microbatch)
            case Kind.UPDATE:
                for held in work.held.values():
                    held.update(work.total if work.clips else 0)
                if work.rounds is not None:
                    work.rounds.stepped(step)
                work.reported.clear()
                work.store.pop(step - 1, None)
            case _:
                store |= carry_out(work, action, part, store)
        self.peak_bytes = max(self.peak_bytes, work.live_bytes())
        ends = action.kind is Kind.TAKE and work.order.peer == work.shared.flow.hub
        outcome = self._outcome(step) if ends and action.content is ExchangeContent.NORM else None
        evaluation = (
            self._evaluation() if ends and action.content is ExchangeContent.SCORES else None
        )
        return Result(0.0, self.peak_bytes, outcome, evaluation)

    def _forward(
        self, work: GhostAssignment, step: int, action: Action, part: ActionTransfers, store: Store
    ) -> None:
        held, m = work.held[action.stage], action.microbatch
        training = action.kind is Kind.FORWARD
        ports = {t.value: cast(int, store[at]) for t, at in part.takes}
        at = work.place(step, m) if training else (-1, m)
        values = held.forward(m, ports, at, training=training)
        if held.linear.stage.makes_loss:
            mine = work.reported.setdefault((training, m), {})
            mine |= ports
            mine |= values
        for t, local in part.gives:
            store[local] = values[work.shared.flow.made(t)]

    def _backward(
        self, work: GhostAssignment, action: Action, part: ActionTransfers, store: Store
    ) -> None:
        held, m = work.held[action.stage], action.microbatch
        gradients = dict.fromkeys(held.linear.answers, 0)
        for t, at in part.takes:
            value = cast(int, store[at])
            if t.role is Role.ACTIVATION_GRAD:
                gradients[t.value] = (gradients[t.value] + value) & MASK
            else:  # a result made behind the loss
                work.reported[True, m][t.value] = value
        loss = 0
        if held.linear.stage.makes_loss:
            loss = work.shared.hashes.seed_gradient(work.reported[True, m])
        back = held.backward(m, gradients, loss, apart=action.stage in work.apart)
        for t, at in part.gives:
            store[at] = back[work.shared.flow.made(t)]

    # ------------------------------------------------------------ results

    def _outcome(self, step: int) -> broker_pb2.Outcome:
        work = self._now
        return broker_pb2.Outcome(
            loss=figure(work.total),
            weight=float(len(work.shared.plan.routes)),
            grad_norm=figure(work.total ^ MASK),
            lr=learning_rate(work.order.training.train, work.position(step)),
        )

    def _evaluation(self) -> broker_pb2.Evaluation:
        work = self._now
        held_out = float(len(work.shared.plan.evaluation_routes))
        return broker_pb2.Evaluation(loss=figure(work.total), weight=held_out)

    def snapshot(self, step: int) -> Callable[[], tuple[memoryview, ...]]:
        """As TorchDevice: parts that weigh what the tensors would; all hashes are in the first."""
        work, found = self._now, dict[str, int]()
        for held in work.held.values():
            found |= held.exported()
        of_rounds = work.rounds.state() if work.rounds else {}
        vector, size = self._shared.vector(work.order), work.snapshot_bytes
        size += vector.snapshot_bytes(of_rounds) if vector else 0
        data = json.dumps(found | of_rounds).encode()
        return lambda: _parts(data, size)

    def blocks(self) -> Callable[[], tuple[memoryview, ...]]:
        """Answer as TorchDevice does."""
        work, order, found = self._now, self._now.order, dict[str, int]()
        lost = [k for p in order.rebuilt for k in order.plan.stages_of(p)]
        wanted = work.recipe(lost)
        specs, size = work.shared.graph.spec, 0
        for held in work.held.values():
            mine = {n: s for n, s in held.exported().items() if n[6:] in wanted.sources}
            size += sum(specs[name].size_bytes for name in mine.keys() - found.keys())
            found |= mine
        data = json.dumps(found).encode()
        return lambda: _parts(data, size)

    def export(self) -> bytes:
        """The hashes of the parameters and buffers that this peer answers for, as JSON."""
        work, found = self._now, dict[str, int]()
        for name, stage in work.shared.owner.items():
            if stage in work.held and work.first_of(stage):
                held = work.held[stage]
                found[name] = int(held.state[held.linear.standing.index(name)])
            elif stage < 0 and 0 in work.held and work.first_of(0):
                found[name] = work.shared.hashes.start(name)
        return json.dumps(found, sort_keys=True).encode()

    @property
    def _now(self) -> GhostAssignment:
        assert self._work is not None, "no assignment is built"
        return self._work

    def __repr__(self) -> str:
        if self._work is None:
            return "<GhostDevice, nothing built>"
        return f"<GhostDevice, stages {[*self._work.held]}>"


def _parts(data: bytes, size_bytes: int) -> tuple[memoryview, ...]:
    """A snapshot as parts, each as large as one of tensors may be."""
    whole = Hollow(max(len(data), size_bytes), data)
    starts = range(0, len(whole), PART_BYTES)
    return tuple(cast(memoryview, whole[at : at + PART_BYTES]) for at in starts)


def _rebuilt(work: GhostAssignment, given: dict[str, int]) -> dict[str, int]:
    """As peer.rebuilt.rebuilt_records: what a parameter is made from is in its hash. Raises
    RebuildError."""
    wanted = work.recipe(tuple(work.held))
    if wanted.lacking:
        raise RebuildError(f"stage {[*work.held]} cannot be made anew: {wanted.why_not}")
    found = {f"param:{name}": given[f"param:{name}"] for name in wanted.copies}
    for name, origins in wanted.means.items():
        sources = (given[f"param:{source}"] for source, _ in origins)
        found[f"param:{name}"] = name_hash("mean", *sources)
    return found
