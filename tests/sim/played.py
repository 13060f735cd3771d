"""A run that was played in a world, how one asks for something, and what must not differ between
two of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.broker import events as b
from shoal.dag.transforms.split_weights import block_of
from shoal.peer.blobs.weights import spec_of, split_names
from shoal.proto.broker_pb2 import DONE, BrokerMessage, PeerMessage, RunEvent, RunState
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import World


def ask(world: World, run: str, wanted: Any) -> b.Answer | b.Reject:
    """What a person asks of a run: "pause", "resume", "cancel", "recall"."""
    return world.broker.ask(lambda request: b.RunAsked(request, b.RunId(run), wanted))


def kind_of(seen: Observed) -> str:
    """Kind of a moment: whose record it is, of which type, and of which action, frame or message,
    whatever the step."""
    record = seen.record
    detail = str(getattr(record, "action", ""))
    if (key := getattr(record, "key", None)) is not None:
        detail = f"{key.role.value} {key.microbatch} {key.source}-{key.destination}"
    message = getattr(record, "message", None)
    if isinstance(message, BrokerMessage | PeerMessage):
        detail = message.WhichOneof("kind") or ""
    return f"{seen.who} {type(record).__name__} {detail}".rstrip()


def sampled_by_kind(kinds: Sequence[str], count: int, turn: int = 0) -> list[int]:
    """Indices, in order, of about so many moments of these kinds: of each kind in proportion, as
    far from each other as they can be, and one at least. Each `turn` begins elsewhere."""
    places: dict[str, list[int]] = {}
    for i, kind in enumerate(kinds):
        places.setdefault(kind, []).append(i)
    found: set[int] = set()
    for k, those in enumerate(places.values(), turn):
        n = len(those)
        some = min(n, max(1, round(count * n / len(kinds))))
        found |= {those[(k + i * n // some) % n] for i in range(some)}
    print(f"{len(found)} of {len(kinds)} moments, of {len(places)} kinds")
    return sorted(found)


@dataclass
class Played:
    """`records`: how many were observed, events and instructions of all machines, from the
    submission on; `begun`: the one at which what a test looks at began."""

    world: World
    run: str
    records: int = 0
    begun: int = 0

    @property
    def events(self) -> list[RunEvent]:
        return self.world.events(self.run)

    @property
    def steps(self) -> list[tuple[Any, ...]]:
        """Step, outcome and evaluation of each committed step, to the bit."""
        done = [e.step for e in self.events if e.HasField("step")]
        return [(s.step, s.outcome.SerializeToString(), s.evaluation.loss) for s in done]

    @property
    def weights(self) -> list[Any]:
        return [list(e.weights.files) for e in self.events if e.HasField("weights")]

    @property
    def notes(self) -> str:
        return "\n".join(e.note or e.state.reason.text for e in self.events)

    @property
    def end(self) -> RunState:
        return self.world.broker.ended[self.run]

    def assert_like(self, calm: Played, where: str = "") -> None:
        """It is done, with the steps and weights of a run that nothing happened to."""
        assert self.end.phase == DONE, f"{where}: {self.end.reason.text}"
        assert self.steps == calm.steps, f"{where}: a step is lost, doubled or different"
        assert self.weights == calm.weights, f"{where}: other weights"


def merge_blocks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of an export under the user's names: the blocks of a split parameter become one
    tensor again, all others stay. Raises WeightError when a block is missing or does not fit."""
    found = {name: tensor for name, tensor in tensors.items() if block_of(name) is None}
    for name, blocks in split_names({n: spec_of(tensors, n) for n in tensors}):
        found[name] = torch.cat([tensors[block] for block in blocks])
    return found


def read_export(files: Iterable[bytes]) -> dict[str, int]:
    """What the exports of all peers say together. Raises ValueError for a name that two have."""
    found: dict[str, int] = {}
    for data in files:
        mine = json.loads(data)
        twice = found.keys() & mine.keys()
        if twice:
            raise ValueError(f"{min(twice)} is exported twice: expected one answer for each name")
        found |= mine
    return found
