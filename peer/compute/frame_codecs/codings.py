"""Which codec carries a transfer. Both ends find the same, from the plan and the graph alone.

- What `Flow.is_coded` says is carried by the codec that the plan names for link and role, where
  that pays (`compression.codec.fitting`): a value, its gradient, and the gradients that holders
  exchange each with each. Norms, scores and batch statistics are small and must be exact: they go
  raw, and so do gradients that many holders exchange in rows.
- In a vector of gradients, the flags that say which parameters have one, and the padding, stay
  exact (`Vectors.tensor`): a codec that loses something gets what is before them.
- A sum that goes to several peers has one codec for all: of those of its links, the one that makes
  the fewest bytes. So it is encoded once, and all holders get the same bits (`streams.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ....compression.codec import RAW, AnyCodec, fitting, is_exact, parse, typical_bytes
from ....compression.sparse.support import Support
from ....compression.sparse.topk import TopK
from ....dag.cost.pace import Vectors
from ....dag.ir.graph import TensorSpec
from ....dag.plan.plan import CodecChoice
from ....dag.schedule.flow import Role, Transfer
from ..exchange import TransferSpecs

__all__ = ["Codings", "TransferCodec"]


@dataclass(frozen=True, slots=True)
class TransferCodec:
    """How a transfer is written: `body` by the codec, the elements of `tail` after it raw."""

    codec: AnyCodec
    whole: TensorSpec
    body: TensorSpec
    tail: TensorSpec | None = None
    exact: bool = True
    """Whether every tensor arrives bit for bit as it was sent."""

    @property
    def size_bytes(self) -> int:
        """The most that it can take on the wire."""
        return self.codec.size_bytes(self.body) + (self.tail.size_bytes if self.tail else 0)


class Codings:
    """Finds the codec that carries a transfer; both ends find the same. `choices` are the plan's.
    Safe to read from several threads."""

    def __init__(self, wire: TransferSpecs, choices: Iterable[CodecChoice]) -> None:
        """Raises CodecError for a choice that names no codec."""
        self.flow, self._wire = wire.flow, wire
        flow = wire.flow
        self._vectors = Vectors(flow.plan, flow.stages, flow.tied, wire.graph)
        self._chosen = {(c.source, c.destination, c.role): parse(c.codec) for c in choices}
        self._found: dict[Transfer, TransferCodec] = {}

    def of(self, transfer: Transfer) -> TransferCodec:
        """Raises KeyError or AssertionError for what is no transfer of the plan."""
        found = self._found.get(transfer)
        if found is None:
            found = self._found[transfer] = self._find(transfer)
        return found

    def alike(self, transfer: Transfer) -> tuple[Transfer, ...]:
        """The transfers to other peers that carry the same sum, in the plan's order; of anything
        else only itself."""
        return self.flow.alike(transfer)

    def answered_on_support(self, transfer: Transfer) -> bool:
        """Whether the gradient of this value comes back where the value is not 0 only."""
        if transfer.role is not Role.ACTIVATION or transfer.port.startswith("eval:"):
            return False
        back = transfer.destination, transfer.source, Role.ACTIVATION_GRAD.value
        return isinstance(self._chosen.get(back), Support)

    def _find(self, transfer: Transfer) -> TransferCodec:
        whole = self._wire.spec(transfer)
        if not self.flow.is_coded(transfer):
            return TransferCodec(RAW, whole, whole)
        body, tail = whole, None
        synced = transfer.role is Role.SYNC
        exact = self._vectors.tensor(*self.flow.hops[transfer])[1] if synced else 0
        if exact:
            body = TensorSpec((whole.elements - exact,), whole.dtype)
            tail = TensorSpec((exact,), whole.dtype)
        options = [
            fitting(self._chosen.get((t.source, t.destination, t.role.value), RAW), body)
            for t in self.alike(transfer)
        ]
        codec = min(options, key=lambda c: typical_bytes(c, body))
        if isinstance(codec, Support) and not self._is_sparse(transfer, body):
            return TransferCodec(RAW, whole, whole)
        if codec is RAW or is_exact(codec, body):
            return TransferCodec(codec, whole, whole)
        return TransferCodec(codec, whole, body, tail, exact=False)

    def _is_sparse(self, gradient: Transfer, spec: TensorSpec) -> bool:
        """Whether the value of a gradient travelled through a codec of the same ratio."""
        there = gradient.destination, gradient.source
        value = fitting(self._chosen.get((*there, Role.ACTIVATION.value), RAW), spec)
        back = self._chosen[gradient.source, gradient.destination, gradient.role.value]
        return isinstance(value, TopK) and value.ratio == getattr(back, "ratio", None)
