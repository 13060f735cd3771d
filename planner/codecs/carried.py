"""A plan's step with codecs on its links: what crosses, what that costs at both ends, how long the
step takes.

A lane is a directed pair of peers and a role, as in `dag/cost/program.py`, by its number there. On
a GPU what encodes and decodes runs beside the compute, on a stream of its own: it delays the
message only. On a CPU it takes the cores that compute, so it is work of the actions at its ends: it
delays the message, and what the peer computes next. So does, everywhere, encoding a sum of
gradients: who sends it goes on with what the others get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...compression.codec import RAW, is_stateful, parse
from ...compression.sparse.support import Support
from ...dag.cost.estimate import StepEstimate, summarize
from ...dag.cost.play import Coding, Timeline, play
from ...dag.cost.program import Program
from ...dag.plan.plan import CodecChoice, Plan
from ...dag.plan.report import NO_REPORT, CodecUse, Prediction
from ..base.interface import CODED_ROLES
from ..cost.cost_model import CostModel
from ..cost.predicted import predicted
from .carried_rows import rows_of, used
from .codec_table import cost_of

__all__ = ["Choice", "CodecLane", "CodedStepCost", "LaneLoad"]

Choice = Mapping[int, str]
"""By number of a lane, the text of its codec; lanes without one are raw."""


@dataclass(frozen=True, slots=True)
class CodecLane:
    """Messages from one peer to another under one role; positions are those of the plan's peers."""

    number: int
    source: int
    destination: int
    role: str
    dense_bytes: int
    """Per step, of the tensors that a codec may carry."""
    dense_s: float
    """Seconds of a step in which it carries them, alone on its link."""
    slow: bool
    """Whether that is longer than the busiest peer computes."""


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """What a codec makes of a lane, per step. `bytes`: of the tensors that it may carry."""

    bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class _Coded:
    """A message's tensors under codecs. `sizes`: bytes and dense bytes by the codec really used."""

    size: int
    sizes: tuple[tuple[str, int, int], ...]
    encode_s: float
    decode_s: float


class CodedStepCost:
    """Computes how long a plan's step takes with given codecs on its links. The plan is one of the
    judge's request, by its peers' ids. `dense`: what it is expected to cost without codecs."""

    def __init__(
        self, judge: CostModel, plan: Plan, dense: Prediction = NO_REPORT.predicted
    ) -> None:
        self.judge, self.plan, self.dense = judge, plan, dense
        self.peers = [judge.place[p] for p in plan.peers]
        self.offers = [judge.offers[i] for i in self.peers]
        self.structure = judge.structure_of(replace(plan, evaluation_routes=(), evaluations=()))
        self.wiring = self.structure.wiring
        self.program: Program = self.wiring.program
        self.network = judge.network.part(self.peers)
        self._on_gpu = [o.threads == 0 for o in self.offers]
        self.hosts = judge.hosts(self.peers)
        self.played = 0
        """Steps calculated so far."""
        self._per_unit = judge.per_unit[self.peers]
        self._base_s = self.structure.row_seconds(self._per_unit)
        self._rows = rows_of(self.structure)
        self._messages = np.bincount(self.wiring.message_row, minlength=len(self._rows))
        self._of_lane: dict[int, list[int]] = {}
        self._decided: dict[int, list[int]] = {}
        self._lane_of = dict(zip(self.wiring.message_row, self.program.lane, strict=True))
        for r, row in enumerate(self._rows):
            self._of_lane.setdefault(self._lane_of[r], []).append(r)
            for lane in row.lanes:
                self._decided.setdefault(lane, []).append(r)
        self._known: dict[tuple[int, tuple[str, ...]], _Coded] = {}
        self._loads: dict[tuple[int, str], LaneLoad] = {}
        self.busiest_s = float(self._busy().max(initial=0.0))
        """Seconds that the busiest peer computes in a step without codecs."""
        self.lanes = {lane.number: lane for lane in self._read_lanes()}

    # ------------------------------------------------------------ what crosses

    def _read_lanes(self) -> list[CodecLane]:
        found = []
        for number, (a, b, role) in enumerate(self.program.lanes):
            dense = sum(
                int(self._messages[r]) * sum(t.whole.size_bytes for t in self._rows[r].tensors)
                for r in self._of_lane.get(number, ())
            )
            if dense and role.value in CODED_ROLES:
                rate = float(self.judge.rates[self.peers[a], self.peers[b]])
                slow = dense / rate > self.busiest_s
                found.append(CodecLane(number, a, b, role.value, dense, dense / rate, slow))
        return found

    def _busy(self) -> NDArray[np.float64]:
        each = np.array(self.judge.bare_seconds(self.structure, self.peers))
        return np.bincount(list(self.program.owner), each, len(self.peers)).astype(np.float64)

    # ------------------------------------------------------------ what a codec makes of it

    def load(self, lane: int, text: str) -> LaneLoad:
        """The bytes and coding times of a lane under a codec; sums go by that codec to
        everybody."""
        key = (lane, text)
        if key not in self._loads:
            size, encode, decode = 0, 0.0, 0.0
            for row in self._of_lane[lane]:
                count, coded = int(self._messages[row]), self._coded(row, (text,))
                size += count * coded.size
                encode += count * coded.encode_s
                decode += count * coded.decode_s
            self._loads[key] = LaneLoad(size, encode, decode)
        return self._loads[key]

    def _texts(self, row: int, choice: Choice) -> tuple[str, ...]:
        return tuple(dict.fromkeys(choice[n] for n in self._rows[row].lanes if n in choice))

    def _coded(self, row: int, texts: tuple[str, ...]) -> _Coded:
        """A message under the codecs of the lanes that decide."""
        if (row, texts) not in self._known:
            self._known[row, texts] = self._code(row, texts)
        return self._known[row, texts]

    def _code(self, row: int, texts: tuple[str, ...]) -> _Coded:
        a, b, _ = self.program.lanes[self._lane_of[row]]
        sizes: dict[str, list[int]] = {}
        seconds = [0.0, 0.0]
        for tensor in self._rows[row].tensors:
            text, codec, size = used(texts, tensor)
            sums = sizes.setdefault(codec.name, [0, 0])
            sums[0], sums[1] = sums[0] + size, sums[1] + tensor.whole.size_bytes
            if codec is RAW:
                continue
            coding = [self._coding_s(at, text, tensor.whole.size_bytes) for at in (a, b)]
            # A sum is encoded once for all, and decoded by who sends it, too.
            many = len(self._rows[row].lanes)
            seconds[0] += coding[0][0] if many == 1 else sum(coding[0]) / many
            seconds[1] += coding[1][1]
        total = sum(size for size, _ in sizes.values())
        return _Coded(total, tuple((n, x, y) for n, (x, y) in sizes.items()), *seconds)

    def _coding_s(self, peer: int, text: str, size: int) -> tuple[float, float]:
        """Seconds that a peer takes to encode and to decode a tensor of so many bytes."""
        offer = self.offers[peer]
        cost, pace = cost_of(text, gpu=offer.threads == 0), offer.pace
        moves_s, calls_s = size / pace.memory / pace.slowed, pace.call_s / pace.slowed
        fixed = cost.calls * calls_s
        return cost.encode * moves_s + fixed, cost.decode * moves_s + fixed

    # ------------------------------------------------------------ memory

    def state_bytes(self, choice: Choice) -> list[int]:
        """By peer, what its ends of stateful codecs keep on the device: for each tensor of a step
        one state and the one before it (`peer/compute/frame_codecs/`). Error feedback keeps a
        residual of the tensor's size where it is sent, other codecs what both ends have. `support`
        has no state of its own, but the positions of each live microbatch at both ends."""
        found = [0] * len(self.peers)
        for row in dict.fromkeys(r for lane in choice for r in self._decided[lane]):
            a, b, _ = self.program.lanes[self._lane_of[row]]
            texts, lanes = self._texts(row, choice), self._rows[row].lanes
            for tensor in self._rows[row].tensors:
                text, codec, _ = used(texts, tensor)
                if not is_stateful(codec):
                    continue
                count = int(self._messages[row])
                size = 2 * count * tensor.body.size_bytes
                if isinstance(codec, Support):
                    size = count * codec.state_bytes(tensor.body)
                found[a] += size // len(lanes)  # a sum is one stream at its sender
                if not text.startswith(("ef+", "efd+")):
                    found[b] += size
        return found

    def without_room(self, choice: Choice) -> frozenset[int]:
        """Positions of peers whose memory does not hold what their codecs keep. Nobody, where the
        plan predicts no memory."""
        known = {p.peer: p.device_bytes for p in self.dense.peers}
        return frozenset(
            i
            for i, (offer, size) in enumerate(
                zip(self.offers, self.state_bytes(choice), strict=True)
            )
            if size and known.get(offer.peer, -size) + size > offer.device_memory_bytes
        )

    def keeps(self, lane: int, text: str, peers: frozenset[int]) -> bool:
        """Whether a codec on a lane keeps anything at one of the peers."""
        ends = {self.lanes[lane].source, self.lanes[lane].destination}
        return bool(ends & peers) and is_stateful(parse(text))

    # ------------------------------------------------------------ time

    def seconds(self, choice: Choice) -> float:
        """The duration of a step; whether it fits into memory is not looked at."""
        sizes, seconds, coding = self._loaded(choice)
        self.played += 1
        if self.hosts is None:
            step_s, exact = self.wiring.unshared.step_s(
                sizes, seconds, self.judge.network, self.peers, self.judge.rates, coding
            )
            if exact:
                return step_s
        return self._play(sizes, seconds, coding).step_s

    def timeline(self, choice: Choice) -> Timeline:
        """When each action and message of the step begins and ends."""
        return self._play(*self._loaded(choice))

    def hang_s(self, choice: Choice) -> dict[int, float]:
        """By lane, the seconds of the step's longest chain that are spent on it, waiting for its
        turn included; 0 for one that the step does not hang on."""
        program, played = self.program, self.timeline(choice)
        found = dict.fromkeys(self.lanes, 0.0)
        at = max(range(len(program.actions)), key=lambda a: played.end[a])
        while True:
            message = played.cause[at]
            if message >= 0:
                giver, lane = program.giver[message], program.lane[message]
                if lane in found:
                    found[lane] += played.start[at] - played.end[giver]
                at = giver
            elif at > program.first[program.owner[at]]:
                at -= 1
            else:
                return found

    def _loaded(self, choice: Choice) -> tuple[tuple[int, ...], list[float], Coding | None]:
        """Bytes of every message, seconds of every action, and those of codecs beside them."""
        structure, wiring = self.structure, self.wiring
        row_bytes = list(structure.row_bytes)
        ends = np.zeros((2, len(row_bytes)))  # within the actions
        beside = np.zeros((2, len(row_bytes)))
        for row in dict.fromkeys(r for lane in choice for r in self._decided[lane]):
            coded = self._coded(row, self._texts(row, choice))
            row_bytes[row] = self._rows[row].rest_bytes + coded.size
            a, b, _ = self.program.lanes[self._lane_of[row]]
            alone = len(self._rows[row].lanes) == 1
            (beside if self._on_gpu[a] and alone else ends)[0, row] = coded.encode_s
            (beside if self._on_gpu[b] else ends)[1, row] = coded.decode_s
        each = self._base_s
        if choice:
            moved = wiring.ends(row_bytes) - structure.work[:, -1]
            action, message, share = wiring.end_rows
            half = len(message) // 2  # the givers' ends, then the takers'
            within = np.concatenate((ends[0, message[:half]], ends[1, message[half:]]))
            each = each + moved * self._per_unit[structure.work_owner, -1]
            each = each + np.bincount(action, share * within, len(each))
        by_row, at = each.tolist(), np.array(wiring.message_row, dtype=np.int64)
        coding = Coding(*(side[at].tolist() for side in beside)) if beside.any() else None
        return (
            tuple(row_bytes[r] for r in wiring.message_row),
            [by_row[r] for r in wiring.action_row],
            coding,
        )

    def _play(
        self, sizes: tuple[int, ...], seconds: list[float], coding: Coding | None
    ) -> Timeline:
        program = replace(self.program, size_bytes=sizes)
        return play(program, seconds, self.network, self.hosts, coding)

    # ------------------------------------------------------------ what it says

    def choices(self, choice: Choice) -> tuple[CodecChoice, ...]:
        """As the plan has them, in the order of the lanes."""
        peers = self.plan.peers
        return tuple(
            CodecChoice(peers[x.source], peers[x.destination], x.role, parse(choice[n]).name)
            for n, x in self.lanes.items()
            if n in choice
        )

    def of_plan(self, codecs: tuple[CodecChoice, ...]) -> dict[int, str]:
        """The choice that a plan has made, as far as its lanes are this plan's."""
        peers = self.plan.peers
        known = {(c.source, c.destination, c.role): c.codec for c in codecs}
        ends = {n: (peers[x.source], peers[x.destination], x.role) for n, x in self.lanes.items()}
        return {n: known[key] for n, key in ends.items() if key in known}

    def estimate(self, choice: Choice) -> StepEstimate:
        """In the ids of the plan's peers."""
        sizes, seconds, coding = self._loaded(choice)
        program = replace(self.program, size_bytes=sizes)
        return summarize(program, self._play(sizes, seconds, coding), self.network)

    def prediction(self, choice: Choice, errors: Mapping[str, float]) -> Prediction:
        """The plan's prediction with these codecs. `errors`: typical ones by text."""
        _, seconds, _ = self._loaded(choice)
        known = {p.peer: p for p in self.dense.peers}
        peers, states = self.plan.peers, self.state_bytes(choice)
        uses: dict[tuple[int, int], list[CodecUse]] = {}
        for lane in self.lanes.values():
            found = self._uses(lane, choice, errors)
            uses.setdefault((lane.source, lane.destination), []).extend(found)
        return predicted(
            self.estimate(choice),
            {o.peer: o for o in self.offers},
            owner=self.program.owner,
            bare=self.judge.bare_seconds(self.structure, self.peers),
            seconds=seconds,
            device_bytes=[known[p].device_bytes + states[i] for i, p in enumerate(peers)],
            host_bytes=[known[p].host_bytes for p in peers],
            alternatives=self.dense.alternatives,
            uses={(peers[a], peers[b]): tuple(x) for (a, b), x in uses.items()},
        )

    def _uses(self, lane: CodecLane, choice: Choice, errors: Mapping[str, float]) -> list[CodecUse]:
        """By codec that the tensors of a lane are really carried by: raw where it does not pay."""
        sizes: dict[str, list[int]] = {}
        coding_s = 0.0
        for row in self._of_lane[lane.number]:
            count, coded = int(self._messages[row]), self._coded(row, self._texts(row, choice))
            coding_s += count * (coded.encode_s + coded.decode_s)
            for name, size, dense in coded.sizes:
                sums = sizes.setdefault(name, [0, 0])
                sums[0], sums[1] = sums[0] + count * size, sums[1] + count * dense
        by_name = {parse(text).name: error for text, error in errors.items()}
        coded_bytes = sum(dense for name, (_, dense) in sizes.items() if name != RAW.name)
        byte_s = lane.dense_s / lane.dense_bytes
        return [
            CodecUse(
                lane.role,
                name,
                size,
                dense,
                max(0.0, (dense - size) * byte_s),
                0.0 if name == RAW.name else coding_s * dense / coded_bytes,
                by_name.get(name, 0.0),
            )
            for name, (size, dense) in sizes.items()
        ]
