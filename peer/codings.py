"""Which codec carries a transfer. Both ends find the same, from the plan and the graph alone.

- A value, its gradient, and the gradients that holders exchange are carried by the codec that the
  plan names for link and role, where it pays (`compression.codec.fitting`). Norms, scores and batch
  statistics are small and must be exact: they go raw.
- In a vector of gradients, the flags that say which parameters have one, and the padding, stay
  exact: a codec that loses something gets what is before them.
- A sum that goes to several peers has one codec for all: of those of its links, the one that makes
  the fewest bytes. So it is encoded once, and all holders get the same bits (`streams.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..compression.codec import RAW, AnyCodec, fitting, parse, typical_bytes
from ..compression.stream import is_exact
from ..dag.flow import Role, Transfer
from ..dag.graph import TensorSpec
from ..dag.plan import CodecChoice
from .exchange import Wire

__all__ = ["Coding", "Codings", "carried", "is_sum"]


def is_sum(transfer: Transfer) -> bool:
    """Whether it is a sum of gradients on its way back: every destination gets the same tensor."""
    port = transfer.port
    return transfer.role is Role.SYNC and (
        port.endswith("+grad") or (port[0] == "T" and port[-1] == "+")
    )


def carried(transfer: Transfer) -> bool:
    """Whether the codec of its link and role carries it, rather than raw."""
    if transfer.role in (Role.ACTIVATION, Role.ACTIVATION_GRAD):
        return True
    port = transfer.port
    parts = transfer.role is Role.SYNC and (
        port.endswith(">grad") or (port[0] == "T" and ">" in port)
    )
    return parts or is_sum(transfer)


@dataclass(frozen=True, slots=True)
class Coding:
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
    """See the module. `choices` are the plan's. Safe to read from several threads."""

    def __init__(self, wire: Wire, choices: Iterable[CodecChoice]) -> None:
        """Raises CodecError for a choice that names no codec."""
        self.flow, self._wire = wire.flow, wire
        self._chosen = {(c.source, c.destination, c.role): parse(c.codec) for c in choices}
        self._found: dict[Transfer, Coding] = {}

    def of(self, transfer: Transfer) -> Coding:
        """Raises KeyError or AssertionError for what is no transfer of the plan."""
        found = self._found.get(transfer)
        if found is None:
            found = self._found[transfer] = self._find(transfer)
        return found

    def alike(self, transfer: Transfer) -> tuple[Transfer, ...]:
        """The transfers to other peers that carry the same sum, in the plan's order; of anything
        else only itself."""
        if not is_sum(transfer):
            return (transfer,)
        gives = self.flow.gives(transfer.source, self.flow.given_by[transfer])
        return tuple(t for t in gives if t.port == transfer.port)

    def _find(self, transfer: Transfer) -> Coding:
        whole = self._wire.spec(transfer)
        if not carried(transfer):
            return Coding(RAW, whole, whole)
        body, tail = whole, None
        if transfer.role is Role.SYNC:
            exact = self._wire.exact_tail(transfer)
            body = TensorSpec((whole.elements - exact,), whole.dtype)
            tail = TensorSpec((exact,), whole.dtype) if exact else None
        options = [
            fitting(self._chosen.get((t.source, t.destination, t.role.value), RAW), body)
            for t in self.alike(transfer)
        ]
        codec = min(options, key=lambda c: typical_bytes(c, body))
        if codec is RAW or is_exact(codec, body):
            return Coding(codec, whole, whole)
        return Coding(codec, whole, body, tail, exact=False)
