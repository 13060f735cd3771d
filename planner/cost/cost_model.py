"""What a candidate costs: the one judge of all planners.

A candidate's structure (cuts, who shares a peer, microbatches, schedule) is compiled once and
played for every choice of peers, so that a search over peers costs little.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...dag.cost.estimate import StepEstimate, summarize
from ...dag.cost.memory import MemoryModel
from ...dag.cost.pace import IntervalWork
from ...dag.cost.play import Hosts, Timeline, play
from ...dag.cost.speed import FLOPS_PER_BYTE
from ...dag.exchange.rows import MOST_ALL_TO_ALL, even_rows
from ...dag.plan.cut import Cutter, Stage, tied_groups
from ...dag.plan.plan import PeerId, Plan, StageExchange
from ...dag.plan.report import Alternative, PlanReport, PlanWithReport, Prediction, Spare
from ...dag.plan.strategies import parse_strategy
from ...dag.schedule.schedule import with_visits
from ..base.interface import PlanRequest
from .candidate import Candidate, to_plan
from .partition import IntervalMemory, OperatorChain
from .predicted import predicted
from .structure import Structure, Wiring, units, wiring_key

__all__ = ["CostModel", "Structure"]

_MOST_STRUCTURES = 4096


class CostModel:
    """Computes what candidate plans of one request cost: step time and memory. Pure: equal requests
    give equal answers."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.offers = request.offers
        self.place = {o.peer: i for i, o in enumerate(self.offers)}
        """By peer, the number of its offer."""
        self.costs = request.costs
        self.operators = len(self.costs)
        self.totals = IntervalWork(self.costs)
        self.network = request.network
        self.rates = self.network.rates()
        self.per_unit = np.array([units(o.pace, o.threads > 0) for o in self.offers])
        self.forward_s, self.backward_s = self.totals.seconds([o.pace for o in self.offers])
        self.both_s = self.forward_s + self.backward_s
        self.chain = OperatorChain(request.graph, self.costs)
        self._structures: dict[Candidate, Structure] = {}
        self._wirings: dict[tuple[Hashable, ...], Wiring] = {}
        options = request.options
        self.memory = MemoryModel(
            request.graph, self.costs, options.exchange_bytes, in_8_bits=options.in_8_bits
        )
        self._cutter = Cutter(request.graph)
        # Before there is a plan, which says it itself (dag/cost/memory.py).
        self._state = request.options.standing_bytes, parse_strategy(self.strategy).traits.copies
        self._needs: dict[int, IntervalMemory] = {}
        self.may_have = np.array([o.peer in request.holders for o in self.offers], dtype=bool)
        """By offer, whether it may run the operators beside the data."""
        stays = np.zeros(self.operators + 1, dtype=np.int64)
        stays[np.array(request.beside, dtype=np.int64) + 1] = 1
        self._stays = np.cumsum(stays)
        self._last: tuple[Candidate, StepEstimate] | None = None
        self.judged = 0  # event calculations so far

    def with_microbatches(self, count: int) -> CostModel:
        """The judge of the same request with another number of microbatches. Both share what they
        know: no structure depends on anything but its candidate."""
        found = copy(self)
        found.request = replace(self.request, microbatches=count, known_costs=self.costs)
        return found

    # ------------------------------------------------------------ structure

    def knows(self, candidate: Candidate) -> bool:
        """Whether its structure is compiled."""
        return self.form(candidate) in self._structures

    def form(self, candidate: Candidate) -> Candidate:
        """Return it with its peers numbered in their order: equal ones have one structure."""
        place = {p: i for i, p in enumerate(candidate.peers)}
        return replace(
            candidate.with_peers(place),
            sums=tuple(
                replace(
                    s,
                    holders=tuple(place[p] for p in s.holders),
                    groups=tuple(tuple(place[p] for p in g) for g in s.groups),
                )
                for s in candidate.sums
                if place.keys() >= {*s.holders}
            ),
        )

    def cuttable(self, candidate: Candidate) -> bool:
        """Whether the graph can be cut so: an updated buffer belongs to one stage."""
        return self._cutter.can([(start, stop) for start, stop, _, _ in candidate.slots()])

    def rows(self, holders: int) -> int:
        """In how many rows so many holders of a stage exchange gradients; 0: each with each. What
        goes in rows goes raw, so where gradients are to be compressed each exchanges with each."""
        options = self.request.options
        fixed = parse_strategy(self.strategy).traits.collective
        free = options.collective in ("auto", "two-level") and not fixed
        raw = options.codecs.sync == "none" and free
        return len(even_rows(range(holders))) if raw and holders > MOST_ALL_TO_ALL else 0

    def exchange(
        self, stage: int, holders: Sequence[int], names: Sequence[PeerId]
    ) -> StageExchange:
        """By what the holders of a stage exchange while plans are searched: it depends on nothing
        but their number, so that equal forms have equal structures."""
        if (named := self.request.options.collective) != "auto":
            return StageExchange(stage, named)
        return StageExchange(stage, "two-level" if self.rows(len(holders)) else "all-to-all")

    @property
    def strategy(self) -> str:
        """What holders of a stage make of their gradients. None of those that exchange updates
        knows the weights of its microbatches' losses."""
        if (named := self.request.options.strategy) != "mean":
            return named
        codecs = self.request.options.codecs
        if codecs.sync != "none" and codecs.feedback == "dgc":
            return "dgc"
        return "ahead" if self._ahead_asked and not self.request.graph.weight else "mean"

    @property
    def _ahead_asked(self) -> bool:
        codecs = self.request.options.codecs
        return codecs.sync != "none" and codecs.feedback == "ahead"

    def structure(self, candidate: Candidate) -> Structure:
        form = self.form(candidate)
        if form not in self._structures:
            if len(self._structures) >= _MOST_STRUCTURES:
                self._structures.pop(next(iter(self._structures)))
            names = [PeerId(f"p{i}") for i in range(len(form.peers))]
            self._structures[form] = self.structure_of(self.bare_plan(form, names))
        return self._structures[form]

    def bare_plan(self, candidate: Candidate, names: Sequence[PeerId], **told: Any) -> Plan:
        """The plan of a candidate by the request, its visits not listed yet. Of a lost holder,
        siblings go on only from a step that all have ended, so where there are some, and no update
        needs the norm, all wait for it even so."""
        request = self.request
        plan = to_plan(
            candidate,
            names,
            request.microbatch_size,
            exchange=self.exchange,
            strategy=self.strategy,
            **told,
        )
        shared = any(len(s.holders) > 1 for s in plan.stages)
        waits = request.options.norm or shared or bool(request.graph.weight)
        return plan if waits else replace(plan, without_norm=True)

    def stages(self, plan: Plan) -> tuple[Stage, ...]:
        """The stages of a plan of the request's graph."""
        return self._cutter.cut([(s.start, s.stop) for s in plan.stages])

    def structure_of(self, plan: Plan) -> Structure:
        """The structure of a plan of the request's graph; its evaluation does not count."""
        graph, stages = self.request.graph, self.stages(plan)
        tied = tied_groups(graph, stages)
        key = wiring_key(plan, stages, tied)
        if key not in self._wirings:
            if len(self._wirings) >= _MOST_STRUCTURES:
                self._wirings.pop(next(iter(self._wirings)))
            self._wirings[key] = Wiring.of(plan, stages, tied)
        slots = self.request.options.optimizer_slots
        return Structure(plan, stages, tied, self._wirings[key], graph, self.totals, slots)

    # ------------------------------------------------------------ memory

    def device_bytes(self, candidate: Candidate) -> dict[int, int]:
        """Peak bytes on the device of every peer of the candidate: all its stages stand and keep,
        and one of them computes (dag/cost/memory.py)."""
        return dict(zip(candidate.peers, self._bytes(self.structure(candidate)), strict=True))

    def plan_bytes(self, plan: Plan) -> dict[PeerId, int]:
        """Return the peak bytes of every peer of a plan of the request's graph, whoever made it."""
        return dict(zip(plan.peers, self._bytes(self.structure_of(plan)), strict=True))

    def _bytes(self, structure: Structure) -> list[int]:
        """By peer of the structure."""
        wiring, state_bytes = structure.wiring, self.request.options.standing_bytes
        return [
            self.memory.peer_bytes(structure.plan, held, moments, state_bytes)
            for held, moments in zip(wiring.held, wiring.moments, strict=True)
        ]

    def stage_bytes(
        self, start: int, stop: int, live: int, shared: int | bool = 0, recompute: bool = False
    ) -> int:
        """Peak bytes of one stage alone on its peer, with `live` microbatches between forward and
        backward. `shared`: whether it has other holders."""
        state_bytes, copies = self._state
        found = self.memory.stage(start, stop, recompute)
        return found.peak(state_bytes, live, bool(shared), copies)

    def needs(self, positions: int) -> IntervalMemory:
        """`stage_bytes` of all intervals between about so many positions at most."""
        if positions not in self._needs:
            at = self.chain.positions(positions)
            self._needs[positions] = IntervalMemory(self.memory, at, *self._state)
        return self._needs[positions]

    def bound_to_data(self, candidate: Candidate) -> list[bool]:
        """By peer of the candidate, whether it has operators that must run beside the data."""
        bound = dict.fromkeys(candidate.peers, False)
        for pipeline in candidate.pipelines:
            for s in pipeline:
                bound[s.peer] |= bool(self._stays[s.stop] > self._stays[s.start])
        return list(bound.values())

    def misplaced(self, candidate: Candidate) -> int:
        """Peers that would have to read data that they do not have."""
        if not self.request.beside:
            return 0
        bound = zip(candidate.peers, self.bound_to_data(candidate), strict=True)
        return sum(needs and not self.may_have[p] for p, needs in bound)

    def fits(self, candidate: Candidate) -> bool:
        """Whether every peer has the memory that it needs, and the data."""
        if self.misplaced(candidate) or self._is_hopeless(candidate):
            return False
        return all(
            size <= self.offers[p].device_memory_bytes
            for p, size in self.device_bytes(candidate).items()
        )

    def _is_hopeless(self, candidate: Candidate) -> bool:
        """Whether a stage does not even fit alone, with one microbatch: told without compiling a
        structure for it."""
        return any(
            self.stage_bytes(start, stop, 1, len(holders) > 1, recompute)
            > min(self.offers[p].device_memory_bytes for p in holders)
            for start, stop, holders, recompute in candidate.slots()
        )

    # ------------------------------------------------------------ time

    def seconds(self, candidate: Candidate) -> float:
        """The duration of a step; inf when the candidate does not fit into memory."""
        if not self.fits(candidate):
            return float("inf")
        self.judged += 1
        return self.step_s(self.structure(candidate), list(candidate.peers))

    def step_s(self, structure: Structure, peers: list[int]) -> float:
        """The duration of a step of a structure with these peers, by number."""
        if self.hosts(peers) is None:
            step_s, exact = self._unshared(structure, peers)
            if exact:
                return step_s
        return self.played(structure, peers).step_s

    def bound(self, candidate: Candidate) -> float:
        """A lower bound of `seconds`, memory left out: nothing is shared. Often equal to it."""
        return self._unshared(self.structure(candidate), list(candidate.peers))[0]

    def _unshared(self, structure: Structure, peers: list[int]) -> tuple[float, bool]:
        seconds = structure.seconds(self.per_unit[peers])
        return structure.wiring.unshared.step_s(
            structure.size_bytes, seconds, self.network, peers, self.rates
        )

    def bound_many(self, form: Candidate, peers: NDArray[np.int64]) -> NDArray[np.float64]:
        """`bound` for N choices of peers: row n of `peers` (N, K) says who takes the part of each
        of `form.peers`. Shape (N,)."""
        structure = self.structure(form)
        wiring = structure.wiring
        ends = wiring.unshared.ends
        a, b = peers[:, ends[:, 0]], peers[:, ends[:, 1]]  # (N, lanes)
        lane_of_row = np.zeros(len(wiring.rows), dtype=np.int64)
        lane_of_row[list(wiring.message_row)] = wiring.program.lane
        size = np.array(structure.row_bytes, dtype=np.float64)
        return wiring.unshared.many(
            (size / self.rates[a, b][:, lane_of_row]).T,
            wiring.message_row,
            structure.row_seconds(self.per_unit[peers]).T,
            wiring.action_row,
            self.network.latency_s[a, b].T,
        )

    def play(self, candidate: Candidate) -> tuple[Structure, Timeline]:
        """The event calculation, whether or not it fits."""
        self.judged += 1
        structure = self.structure(candidate)
        return structure, self.played(structure, list(candidate.peers))

    def played(self, structure: Structure, peers: list[int]) -> Timeline:
        """The event calculation of a structure with these peers, by number."""
        seconds = structure.seconds(self.per_unit[peers])
        return play(structure.program, seconds, self.network.part(peers), self.hosts(peers))

    def hosts(self, peers: Sequence[int]) -> Hosts | None:
        """Machines that several of the peers share; None: there is none.

        Of what peers say of one machine the most cores count, and nobody has more threads than
        that: who lies on a machine takes from the others as much as one who computes there, at
        most. A peer whose device is another one keeps a core busy with handing it work."""
        named: dict[str, int] = {}
        host: list[int] = []
        cores: list[float] = []
        busy: list[float] = []  # share that a thread keeps while all cores compute
        feeding: dict[str, int] = {}
        for p in peers:
            offer = self.offers[p]
            shared = bool(offer.host and offer.threads and offer.cores)
            key = f"host {offer.host}" if shared else f"peer {offer.peer}"
            if offer.host and not offer.threads:
                feeding[f"host {offer.host}"] = feeding.get(f"host {offer.host}", 0) + 1
            if key not in named:
                named[key] = len(cores)
                cores.append(0.0)
                busy.append(0.0)
            host.append(named[key])
            if shared:
                cores[named[key]] = max(cores[named[key]], offer.cores)
                busy[named[key]] = max(busy[named[key]], offer.pace.busy)
        if not any(cores):
            return None
        threads = [
            min(offer.threads, max(1, round(cores[h] / busy[h]))) if cores[h] else offer.threads
            for h, offer in zip(host, (self.offers[p] for p in peers), strict=True)
        ]
        for key, count in feeding.items():
            if key in named:
                most = cores[named[key]]
                cores[named[key]] = max(most - count, min(most, 1.0))
        whole = [c / b if b else 0.0 for c, b in zip(cores, busy, strict=True)]
        return Hosts(tuple(host), tuple(threads), tuple(cores), tuple(whole))

    def crossing_bytes(self, position: int) -> int:
        """Bytes of the values that are made before a position and read behind it."""
        return self.chain.crossing_bytes(position)

    def even_cuts(self, parts: int) -> list[int]:
        """Positions that cut the operators into that many parts of about equal work."""
        work = self.totals.forward + self.totals.backward
        flops = work[:, :3].sum(1) + FLOPS_PER_BYTE * work[:, 3:5].sum(1)
        cuts = [0]
        for i in range(1, parts):
            at = int(np.searchsorted(flops, flops[-1] * i / parts))
            cuts.append(min(max(at, cuts[-1] + 1), self.operators - (parts - i)))
        return [*cuts, self.operators]

    # ------------------------------------------------------------ plans

    def estimate(self, candidate: Candidate) -> StepEstimate:
        """With the names of the plan: peers `p0`, `p1`, … stand for `candidate.peers`."""
        if self._last is None or self._last[0] != candidate:
            structure, played = self.play(candidate)
            part = self.network.part(list(candidate.peers))
            self._last = candidate, summarize(structure.program, played, part)
        return self._last[1]

    def bare_seconds(self, structure: Structure, peers: Sequence[int]) -> list[float]:
        """The duration of every action, without what frames cost."""
        bare = np.array([units(self.offers[p].pace, False) for p in peers])
        return structure.seconds(bare)

    def plan(
        self,
        candidate: Candidate,
        *,
        reasons: Sequence[str] = (),
        spares: Sequence[Spare] = (),
        alternatives: Sequence[Alternative] = (),
    ) -> PlanWithReport:
        """The plan of a candidate with what it is expected to cost."""
        structure = self.structure(candidate)
        plan = self.bare_plan(
            candidate,
            [*self.place],
            evaluation_microbatches=self.request.evaluation_microbatches,
            head_parts=self.request.head_parts,
        )
        plan = with_visits(plan, structure.stages, structure.wiring.visits)
        shared = any(len(s.holders) > 1 for s in plan.stages)
        if self._ahead_asked and shared and not plan.exchanges_updates:
            why = (
                'no stepping ahead, error feedback alone: feedback = "ahead" takes pipelines that '
                "share no peer, and a model that does not weigh its losses"
            )
            reasons = (*reasons, why)
        expected = self.prediction(
            structure, list(candidate.peers), self.estimate(candidate), alternatives
        )
        return PlanWithReport(plan, PlanReport(expected, tuple(reasons), tuple(spares)))

    def prediction(
        self,
        structure: Structure,
        peers: list[int],
        estimate: StepEstimate,
        alternatives: Sequence[Alternative],
    ) -> Prediction:
        """Return what is expected of a structure with these peers, by number. `estimate`: of its
        step."""
        edge, crossing = [0] * len(peers), self.chain.crossing_bytes
        for (i, k), live in structure.peak_live.items():
            slot = structure.plan.stages[k]
            edge[i] += 2 * (crossing(slot.start) + crossing(slot.stop)) * live
        offers = (self.offers[p] for p in peers)
        return predicted(
            estimate,
            dict(zip(structure.program.peers, offers, strict=True)),
            owner=structure.program.owner,
            bare=self.bare_seconds(structure, peers),
            seconds=structure.seconds(self.per_unit[peers]),
            device_bytes=self._bytes(structure),
            host_bytes=edge,
            alternatives=alternatives,
        )
