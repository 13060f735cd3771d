"""Lost stages made anew on a torch device (`dag/execute/neighbour.py`): what a holder gives of its
own for that, and what the peer with the lost ones makes of it.

    param:NAME  slot:NAME:PART      as in any snapshot, of what the means and copies are made from

Who gives and who takes come to the same recipe from plan and graph alone. States of codecs are not
among it: in a term with rebuilt stages every stream begins anew, at both ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...dag.execute.neighbour import BOOST, LEARNED, Rebuild, rebuild
from ...dag.ir.graph import Graph, GraphError
from ...dag.plan.cut import Stage
from ...dag.plan.plan import PeerId, Plan, PlanError
from ...dag.plan.routes import swaps
from ...dag.transforms.split_weights import weight_of
from ...net.blobs.client import BlobTransferError
from ..blobs.cache import BlobMismatchError
from ..core.snapshots import SnapshotError
from ..data.manifest import DataError
from .build import BuiltStages
from .order import BuildOrder, OfferError
from .records import Records

__all__ = ["RebuildError", "given_records", "on_snapshots", "rebuilt_records", "recipe"]


class RebuildError(ValueError):
    """A lost stage cannot be made from what the others have."""


_NOT_OF_SNAPSHOTS = (
    *(BlobMismatchError, BlobTransferError, DataError, GraphError, OfferError, PlanError),
    *(RebuildError, SnapshotError, MemoryError, OSError, torch.OutOfMemoryError),
)
"""Errors that say by themselves what they are about."""


@contextmanager
def on_snapshots(goes_on: bool) -> Iterator[None]:
    """Raise SnapshotError for what fails in here where a peer goes on from snapshots: others gave
    them, and whoever made one up would else have honest peers say that the run is broken."""
    try:
        yield
    except _NOT_OF_SNAPSHOTS:
        raise
    except Exception as error:  # whatever numbers, names and shapes of a stranger lead to
        if not goes_on:
            raise
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise SnapshotError(f"its snapshots cannot be gone on from: {said}") from error


def recipe(
    graph: Graph,
    stages: Sequence[Stage],
    plan: Plan,
    rebuilt: Collection[PeerId],
    lost: Iterable[int],
) -> Rebuild:
    """How the stages `lost` are made, by a plan in which `rebuilt` make all of theirs anew.
    `graph` is bound."""
    alive = [k for k, s in enumerate(plan.stages) if any(h not in rebuilt for h in s.holders)]
    return rebuild(graph, stages, tuple(lost), alive, swapped=swaps(plan, LEARNED))


def given_records(work: BuiltStages) -> dict[str, Tensor]:
    """Copies, on the host, of what this peer's stages have of all that is needed."""
    order, stages = work.order, work.flow.stages
    lost = [k for p in order.rebuilt for k in order.plan.stages_of(p)]
    wanted = recipe(work.graph, stages, order.plan, order.rebuilt, lost)
    whole, weighed = {*wanted.sources}, {*wanted.weighed}
    copied, found = {*wanted.copies}, dict[str, Tensor]()
    for held in work.held.values():
        parameters = held.parameters()
        found |= {f"param:{n}": parameters[n] for n in parameters if n in whole}
        strategy = held.strategy
        for name, tensor in (strategy.state_tensors() | strategy.own_tensors()).items():
            owner, _, part = name.rpartition(":")
            if owner in copied or (part == "square" and owner in weighed):
                found[f"slot:{name}"] = tensor
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in found.items()}


def rebuilt_records(order: BuildOrder, given: Records) -> Records:
    """What the stages of `order.peer` go on from, of all that the others gave. Raises RebuildError
    when something cannot be made."""
    graph, stages = order.divided()
    mine = order.plan.stages_of(order.peer)
    wanted = recipe(graph, stages, order.plan, order.rebuilt, mine)
    if wanted.lacking:
        raise RebuildError(
            f"stage {', '.join(map(str, mine))} cannot be made anew: {wanted.why_not}"
        )
    tensors = given.of("param:")
    if missing := [name for name in wanted.sources if name not in tensors]:
        raise RebuildError(f"{missing[0]} did not come from its holder: expected it of the plan")
    squares = {
        n.removesuffix(":square"): float(t)
        for n, t in given.of("slot:").items()
        if n.endswith(":square")
    }
    found: dict[str, Tensor] = {}
    for name, tensor in wanted.made(tensors, squares):
        found[f"param:{name}"] = tensor
        found[f"slot:{name}:boost"] = torch.tensor(BOOST, dtype=torch.float64)
    copied = {*wanted.copies}
    for name, tensor in given.tensors.items():
        kind, _, rest = name.partition(":")
        owner = rest.rpartition(":")[0] if kind == "slot" else rest
        if kind in ("param", "slot") and owner in copied:
            found[name] = tensor
    for k in mine:  # what nobody trains is as at the start
        for name in stages[k].parameters:
            if f"param:{name}" not in found and weight_of(name) == name:
                found[f"param:{name}"] = order.weights[name]
        found |= {f"buffer:{name}": order.weights[name] for name in stages[k].buffers}
    return Records(found)
