"""What a trace says of a run: its steps, how busy peers and links were, and what was in vain."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ....dag.cost.network import Network
from ....dag.plan.action import TRAITS
from ...trace import COMPUTE, Span, Total, TotalKey, Trace
from .moments import disturbing

__all__ = ["Measured", "MeasuredLink", "MeasuredPeer", "MeasuredStep", "measure", "overlap"]

MOST_STEPS = 20
"""Steps over which shares are taken."""
BESIDE = frozenset({"snapshot", "probe", "round"})
"""Roles of frames that are no step's."""
VISITS = frozenset(traits.word for traits in TRAITS.values() if traits.of == "visit")
"""Words of what belongs to a stage and a microbatch."""
SLOW = 1.5
"""A step that takes longer than this times the median is not typical."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """From its first forward anywhere to the next one's."""

    number: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class MeasuredPeer:
    """Seconds of one peer in the typical steps."""

    name: str
    stages: tuple[int, ...] = ()
    compute_s: float = 0.0
    """Seconds of forwards, backwards, exchanges, updates and evaluations together."""
    send_s: float = 0.0
    """In which at least one frame of it was under way."""
    recover_s: float = 0.0
    step_s: float = 0.0
    """Seconds that it computes in a step of its own replica, the median; evaluations apart."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Seconds by kind of compute."""
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(slots=True)
class MeasuredLink:
    """One directed pair in the typical steps."""

    source: str
    destination: str
    size_bytes: int = 0
    step_bytes: float = 0.0
    """Bytes of a step's frames, the median."""
    busy_s: float = 0.0
    """In which at least one frame was under way."""
    rate: float = 0.0
    """Bytes/s that it can carry alone; 0: not known."""
    latency_s: float = 0.0


@dataclass
class Measured:
    """What `measure` found in a trace: steps, and the use of peers and links."""

    steps: tuple[MeasuredStep, ...]
    """All, by number; those done twice as they were the last time."""
    typical: tuple[MeasuredStep, ...]
    """Consecutive ones, of about the median length and without marks, where there are any."""
    peers: dict[str, MeasuredPeer]
    links: dict[tuple[str, str], MeasuredLink]
    up: dict[str, float]
    """Use of each uplink in the typical steps, 0 to 1, where its rate is known."""
    down: dict[str, float]
    totals: dict[TotalKey, Total]
    """The totals of the whole run (trace.py)."""
    step_s: float
    """Median length; 0 without steps."""
    goodput: float | None
    """Share of the time, from the first step's begin to the end, in which steps were done that
    were not done again later."""

    @property
    def span_s(self) -> float:
        """Length of the typical steps together."""
        return self.typical[-1].end_s - self.typical[0].start_s if self.typical else 0.0

    def share(self, seconds: float) -> float:
        """The share that `seconds` are of the typical steps' time, 0 to 1; 0 without steps."""
        return seconds / self.span_s if self.span_s else 0.0

    def use(self, link: MeasuredLink) -> float | None:
        """What crossed a link over what it can carry; None: its rate is not known."""
        if not link.rate or not self.span_s:
            return None
        return link.size_bytes / (link.rate * self.span_s)

    @property
    def bubble(self) -> float | None:
        """Mean over the peers that hold a stage of the share in which they do not compute."""
        holders = [p for p in self.peers.values() if p.stages]
        if not holders or not self.span_s:
            return None
        return sum(1 - self.share(p.compute_s) for p in holders) / len(holders)


def measure(trace: Trace, network: Network | None = None) -> Measured:
    """Measures everything that the trace keeps. `network`: what links can carry, by names of
    peers."""
    steps = _steps(trace.spans)
    typical = _typical(steps, disturbing(trace.marks))
    peers: dict[str, MeasuredPeer] = {}
    stages: defaultdict[str, set[int]] = defaultdict(set)
    for span in trace.spans:
        if span.peer not in peers:
            peers[span.peer] = MeasuredPeer(span.peer)
        if span.stage >= 0 and span.kind in ("forward", "backward"):
            stages[span.peer].add(span.stage)
    for name, held in stages.items():
        peers[name].stages = tuple(sorted(held))
    totals = trace.totals()
    links = _links(totals, network)
    found = Measured(
        steps=steps,
        typical=typical,
        peers=peers,
        links=links,
        up={},
        down={},
        totals=totals,
        step_s=median(s.end_s - s.start_s for s in steps) if steps else 0.0,
        goodput=_goodput(steps, trace.spans, bool(disturbing(trace.marks))),
    )
    _usual_steps(found, trace.spans)
    if typical:
        _fill(found, trace.spans, typical[0].start_s, typical[-1].end_s)
        _ends(found, network)
    return found


def _steps(spans: Sequence[Span]) -> tuple[MeasuredStep, ...]:
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    first: dict[tuple[int, int, int, str], float] = {}
    for span in spans:
        if span.step < 0 or span.kind not in COMPUTE:
            continue
        ends[span.step] = max(ends.get(span.step, span.end_s), span.end_s)
        if span.kind == "forward":
            visit = (span.step, span.microbatch, span.stage, span.peer)
            first[visit] = max(first.get(visit, span.start_s), span.start_s)
    for (step, *_), start_s in first.items():
        starts[step] = min(starts.get(step, start_s), start_s)
    found = []
    for number in sorted(starts):
        end_s = starts.get(number + 1, ends[number])
        found.append(MeasuredStep(number, starts[number], max(end_s, starts[number])))
    return tuple(found)


def _typical(steps: Sequence[MeasuredStep], marks: Sequence[float]) -> tuple[MeasuredStep, ...]:
    """The longest run of steps that are alike, at most MOST_STEPS from its middle. The first step,
    in which everything is slower, counts only where there is nothing else."""
    if len(steps) > 1:
        steps = steps[1:]
    if not steps:
        return ()
    usual = median(s.end_s - s.start_s for s in steps)
    runs: list[list[MeasuredStep]] = [[]]
    for step in steps:
        fits = step.end_s - step.start_s <= SLOW * usual
        quiet = not any(step.start_s < at_s < step.end_s for at_s in marks)
        if runs[-1] and step.number != runs[-1][-1].number + 1:
            runs.append([])
        if fits and quiet:
            runs[-1].append(step)
        elif runs[-1]:
            runs.append([])
    longest = max(runs, key=len) or [min(steps, key=lambda s: abs(s.end_s - s.start_s - usual))]
    cut = max(0, len(longest) - MOST_STEPS) // 2
    return tuple(longest[cut : cut + MOST_STEPS])


def _links(
    totals: Iterable[TotalKey], network: Network | None
) -> dict[tuple[str, str], MeasuredLink]:
    """Every pair that carried something at any time."""
    pairs = sorted({(p.peer, p.to) for p in totals if p.kind == "send"})
    links = {pair: MeasuredLink(*pair) for pair in pairs}
    if network is not None:
        index = {str(name): i for i, name in enumerate(network.peers)}
        for (source, destination), link in links.items():
            if source in index and destination in index:
                i, k = index[source], index[destination]
                rate = min(network.bandwidth[i, k], network.up[i], network.down[k])
                link.rate = float(rate) if rate < float("inf") else 0.0
                link.latency_s = float(network.latency_s[i, k])
    return links


def _usual_steps(found: Measured, spans: Iterable[Span]) -> None:
    """Medians over the steps of each peer and link, its first one apart where there are others.
    Replicas count steps of their own, so nothing is divided by the number of all."""
    computed: defaultdict[str, Counter[int]] = defaultdict(Counter)
    sent: defaultdict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for span in spans:
        if span.step < 0 or span.role in BESIDE:
            continue
        if span.kind == "send":
            sent[span.peer, span.to][span.step] += span.size_bytes
        elif span.kind in COMPUTE and span.kind != "evaluate":
            computed[span.peer][span.step] += span.end_s - span.start_s  # type: ignore[assignment]
    for name, seconds in computed.items():
        found.peers[name].step_s = _median_behind_first(seconds)
    for pair, sizes in sent.items():
        found.links[pair].step_bytes = _median_behind_first(sizes)


def _median_behind_first(by_step: Mapping[int, float]) -> float:
    return median([by_step[n] for n in sorted(by_step)][1:] or by_step.values())


def _fill(found: Measured, spans: Iterable[Span], start_s: float, end_s: float) -> None:
    """Sums over what lies between two times; of what sticks out, the part that lies inside."""
    sends: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        inside = min(span.end_s, end_s) - max(span.start_s, start_s)
        if inside <= 0 and not (inside == 0 and start_s < span.end_s <= end_s):
            continue
        peer = found.peers[span.peer]
        if span.kind in COMPUTE:
            peer.compute_s += inside
            peer.kinds[span.kind] += inside  # type: ignore[assignment]
        elif span.kind == "recover":
            peer.recover_s += inside
        elif span.kind == "send":
            whole = span.end_s - span.start_s
            size = round(span.size_bytes * (inside / whole if whole else 1.0))
            link = found.links[span.peer, span.to]
            link.size_bytes += size
            peer.sent_bytes += size
            if span.to in found.peers:
                found.peers[span.to].received_bytes += size
            sends[span.peer, span.to].append((span.start_s, span.end_s))
    by_peer: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for pair, parts in sends.items():
        found.links[pair].busy_s = overlap(parts, start_s, end_s)
        by_peer[pair[0]] += parts
    for name, parts in by_peer.items():
        found.peers[name].send_s = overlap(parts, start_s, end_s)


def _ends(found: Measured, network: Network | None) -> None:
    if network is None:
        return
    for i, name in enumerate(network.peers):
        if (peer := found.peers.get(name)) is not None:
            for uses, size, rate in (
                (found.up, peer.sent_bytes, network.up[i]),
                (found.down, peer.received_bytes, network.down[i]),
            ):
                if rate < float("inf"):
                    uses[name] = float(size / (rate * found.span_s))


def _goodput(steps: Sequence[MeasuredStep], spans: Sequence[Span], disturbed: bool) -> float | None:
    """Fault-free time of the steps over the time that they took: where something happened, or was
    done again, a slow step counts as a usual one. None: nothing was computed."""
    computing = [s for s in spans if s.step >= 0 and s.kind in COMPUTE]
    if not computing or not steps:
        return None
    whole_s = max(s.end_s for s in computing) - min(s.start_s for s in computing)
    if whole_s <= 0:
        return None
    visits = [
        (s.peer, s.kind, s.step, s.microbatch, s.stage) for s in computing if s.microbatch >= 0
    ]
    times = [s.end_s - s.start_s for s in steps]
    if disturbed or len(set(visits)) < len(visits):
        usual = median(times)
        times = [usual if t > SLOW * usual else t for t in times]
    return min(1.0, sum(times) / whole_s)


def overlap(parts: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Length of what intervals cover together between two times."""
    covered, reached = 0.0, start_s
    for a, b in sorted(parts):
        a, b = max(a, reached), min(b, end_s)
        if b > a:
            covered += b - a
            reached = b
    return covered


def by_stage(peers: Mapping[str, MeasuredPeer]) -> list[str]:
    """Names in the order of the pipeline; those without a stage last."""
    return [p.name for p in sorted(peers.values(), key=lambda p: (p.stages or (1 << 30,), p.name))]
