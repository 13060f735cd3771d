"""A plan's step with codecs on its links: what crosses, what that costs at both ends, how long the
step takes.

    carried = Carried(judge, plan)
    carried.lanes                          what may be encoded, by link and role
    carried.seconds({lane: "int8"})        of a step, by the judge's own calculation

A lane is a directed pair of peers and a role, as in `dag/program.py`, by its number there. What
encodes and decodes is work of the actions at its ends: it delays the message, and what the peer
computes next. On a GPU, where codecs run beside the compute, that is more than it costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...compression.codec import RAW, AnyCodec, fitting, parse
from ...dag.estimate import Estimate, summarize
from ...dag.flow import Role, Transfer
from ...dag.graph import TensorSpec
from ...dag.pace import encodable, specs_of
from ...dag.plan import CodecChoice, CodecUse, Plan, Prediction
from ...dag.play import Played, play
from ...dag.program import FRAME_BYTES, Program
from .codec_costs import cost_of
from .interface import CODED_ROLES
from .judge import Judge
from .predicted import predicted, pure_shares

__all__ = ["Carried", "Choice", "Lane", "Load"]

Choice = Mapping[int, str]
"""By number of a lane, the text of its codec; lanes without one are raw."""


@dataclass(frozen=True, slots=True)
class Lane:
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
class Load:
    """What a codec makes of a lane, per step. `bytes`: of the tensors that it may carry."""

    bytes: int
    encode_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class _Row:
    """One message of a row of the wiring: what its raw tensors and frames take, and the others."""

    raw_bytes: int
    specs: tuple[tuple[TensorSpec, bool], ...]
    """With whether a codec that loses something may carry it."""


class Carried:
    """See the module. The plan is one of the judge's request, by its peers' ids."""

    def __init__(self, judge: Judge, plan: Plan) -> None:
        self.judge, self.plan = judge, plan
        index = {o.peer: i for i, o in enumerate(judge.offers)}
        self.peers = [index[p] for p in plan.peers]
        self.offers = [judge.offers[i] for i in self.peers]
        self.structure = judge.structure_of(replace(plan, evaluation_routes=()))
        self.wiring = self.structure.wiring
        self.program: Program = self.wiring.program
        self.network = judge.network.part(self.peers)
        self.hosts = judge.hosts(self.peers)
        self.played = 0
        """Steps calculated so far."""
        self._per_unit = judge.per_unit[self.peers]
        self._base_s = self.structure.row_seconds(self._per_unit)
        self._rows = self._read_rows()
        self._messages = np.bincount(self.wiring.message_row, minlength=len(self._rows))
        self._of_lane: dict[int, list[int]] = {}
        lane_of = dict(zip(self.wiring.message_row, self.program.lane, strict=True))
        for row in range(len(self._rows)):
            self._of_lane.setdefault(lane_of[row], []).append(row)
        self._known: dict[tuple[int, str], tuple[int, int, int]] = {}
        self._loads: dict[tuple[int, str], Load] = {}
        self.busiest_s = float(self._busy().max(initial=0.0))
        """Seconds that the busiest peer computes in a step without codecs."""
        self.lanes = {lane.number: lane for lane in self._read_lanes()}

    # ------------------------------------------------------------ what crosses

    def _read_rows(self) -> list[_Row]:
        structure, graph = self.structure, self.judge.request.graph
        spec = specs_of(structure.plan, structure.stages, structure.tied, graph)

        def tensor(transfer: Transfer) -> TensorSpec:
            # Wirings are shared: their values have the names of another structure.
            if transfer.role is Role.SYNC:
                return spec(transfer)
            stage, port = self.wiring.port[transfer.value]
            return structure.stages[stage].sends[port].spec

        found = []
        for row, size in zip(self.wiring.rows, structure.row_bytes, strict=True):
            coded = [t for t in row if encodable(t, lossless=True)]
            specs = tuple((tensor(t), encodable(t, lossless=False)) for t in coded)
            whole = size - FRAME_BYTES * len(row)
            dense = whole if len(coded) == len(row) else sum(s.size_bytes for s, _ in specs)
            rest = max(0, whole - dense) + FRAME_BYTES * len(row)
            found.append(_Row(rest, specs))
        return found

    def _read_lanes(self) -> list[Lane]:
        found = []
        for number, (a, b, role) in enumerate(self.program.lanes):
            dense = sum(
                int(self._messages[r]) * sum(s.size_bytes for s, _ in self._rows[r].specs)
                for r in self._of_lane.get(number, ())
            )
            if dense and role.value in CODED_ROLES:
                rate = float(self.judge.rates[self.peers[a], self.peers[b]])
                slow = dense / rate > self.busiest_s
                found.append(Lane(number, a, b, role.value, dense, dense / rate, slow))
        return found

    def _busy(self) -> NDArray[np.float64]:
        each = np.array(self.judge.bare_seconds(self.structure, self.peers))
        return np.bincount(list(self.program.owner), each, len(self.peers)).astype(np.float64)

    # ------------------------------------------------------------ what a codec makes of it

    def load(self, lane: int, text: str) -> Load:
        """Of a lane under a codec."""
        key = (lane, text)
        if key not in self._loads:
            size, encode, decode = 0, 0.0, 0.0
            for row in self._of_lane[lane]:
                count = int(self._messages[row])
                one, coded, tensors = self._message(row, text)
                a, b = self._ends(lane, text, coded, tensors)
                size += count * one
                encode, decode = encode + count * a, decode + count * b
            self._loads[key] = Load(size, encode, decode)
        return self._loads[key]

    def _message(self, row: int, text: str) -> tuple[int, int, int]:
        """Bytes of a message's tensors under a codec; bytes and number of those that it changes."""
        if (row, text) not in self._known:
            codec = parse(text)
            total = changed = count = 0
            for spec, lossy in self._rows[row].specs:
                used = _used(codec, spec, lossy)
                total += used.size_bytes(spec)
                if used is not RAW:
                    changed, count = changed + spec.size_bytes, count + 1
            self._known[row, text] = total, changed, count
        return self._known[row, text]

    def _ends(self, lane: int, text: str, size: int, tensors: int) -> tuple[float, float]:
        """Seconds to encode and to decode so many bytes of so many tensors."""
        a, b, _ = self.program.lanes[lane]
        found = []
        for at, end in ((a, 0), (b, 1)):
            offer = self.offers[at]
            cost, pace = cost_of(text, gpu=offer.threads == 0), offer.pace
            calls = cost.calls * tensors * pace.call_s
            found.append((cost[end] * size / pace.memory + calls) / pace.slowed)
        return found[0], found[1]

    # ------------------------------------------------------------ time

    def seconds(self, choice: Choice) -> float:
        """Of a step; memory is not looked at."""
        sizes, seconds = self._loaded(choice)
        self.played += 1
        if self.hosts is None:
            step_s, exact = self.wiring.unshared.step_s(
                sizes, seconds, self.judge.network, self.peers, self.judge.rates
            )
            if exact:
                return step_s
        return self._play(sizes, seconds).step_s

    def hang_s(self, choice: Choice) -> dict[int, float]:
        """By lane, the seconds of the step's longest chain that are spent on it, waiting for its
        turn included; 0 for one that the step does not hang on."""
        program, played = self.program, self._play(*self._loaded(choice))
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

    def _loaded(self, choice: Choice) -> tuple[tuple[int, ...], list[float]]:
        """Bytes of every message and seconds of every action."""
        structure, wiring = self.structure, self.wiring
        row_bytes = list(structure.row_bytes)
        ends = np.zeros((2, len(row_bytes)))
        for lane, text in choice.items():
            for row in self._of_lane[lane]:
                size, coded, tensors = self._message(row, text)
                row_bytes[row] = self._rows[row].raw_bytes + size
                ends[:, row] = self._ends(lane, text, coded, tensors)
        each = self._base_s
        if choice:
            moved = wiring.ends(row_bytes) - structure.work[:, -1]
            action, message, share = wiring.end_rows
            half = len(message) // 2  # the givers' ends, then the takers'
            coding = np.concatenate((ends[0, message[:half]], ends[1, message[half:]]))
            each = each + moved * self._per_unit[structure.work_owner, -1]
            each = each + np.bincount(action, share * coding, len(each))
        by_row = each.tolist()
        return (
            tuple(row_bytes[r] for r in wiring.message_row),
            [by_row[r] for r in wiring.action_row],
        )

    def _play(self, sizes: tuple[int, ...], seconds: list[float]) -> Played:
        program = replace(self.program, size_bytes=sizes)
        return play(program, seconds, self.network, self.hosts)

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

    def estimate(self, choice: Choice) -> Estimate:
        """In the ids of the plan's peers."""
        sizes, seconds = self._loaded(choice)
        program = replace(self.program, size_bytes=sizes)
        return summarize(program, self._play(sizes, seconds), self.network)

    def prediction(self, choice: Choice, errors: Mapping[str, float]) -> Prediction:
        """The plan's prediction with these codecs. `errors`: typical ones by text."""
        _, seconds = self._loaded(choice)
        known = {p.peer: p for p in self.plan.predicted.peers}
        peers = self.plan.peers
        uses: dict[tuple[int, int], list[CodecUse]] = {}
        for number, lane in self.lanes.items():
            found = self._uses(lane, choice.get(number, "raw"), errors)
            uses.setdefault((lane.source, lane.destination), []).extend(found)
        return predicted(
            self.estimate(choice),
            {o.peer: o for o in self.offers},
            pure=pure_shares(
                self.program.owner,
                self.judge.bare_seconds(self.structure, self.peers),
                seconds,
                len(peers),
            ),
            device_bytes=[known[p].device_bytes for p in peers],
            host_bytes=[known[p].host_bytes for p in peers],
            alternatives=self.plan.predicted.alternatives,
            uses={(peers[a], peers[b]): tuple(x) for (a, b), x in uses.items()},
        )

    def _uses(self, lane: Lane, text: str, errors: Mapping[str, float]) -> list[CodecUse]:
        """By codec that the tensors of a lane are really carried by: raw where it does not pay."""
        codec = parse(text)
        sizes: dict[str, list[int]] = {}
        for row in self._of_lane[lane.number]:
            for spec, lossy in self._rows[row].specs:
                used = _used(codec, spec, lossy)
                sums = sizes.setdefault(used.name, [0, 0])
                sums[0] += int(self._messages[row]) * used.size_bytes(spec)
                sums[1] += int(self._messages[row]) * spec.size_bytes
        load = self.load(lane.number, text)
        rate_s = lane.dense_s / lane.dense_bytes
        return [
            CodecUse(
                lane.role,
                name,
                size,
                dense,
                max(0.0, (dense - size) * rate_s),
                0.0 if name == RAW.name else load.encode_s + load.decode_s,
                0.0 if name == RAW.name else errors.get(text, 0.0),
            )
            for name, (size, dense) in sizes.items()
        ]


def _used(codec: AnyCodec, spec: TensorSpec, lossy: bool) -> AnyCodec:
    """What really carries a tensor, as both of its ends decide."""
    if not lossy and codec.error_bound(spec) > 0:
        return RAW
    return fitting(codec, spec)
