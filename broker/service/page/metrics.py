"""What Prometheus reads. Counters begin at 0 with each start of the broker, as it expects them to.

docs/deploy.md lists the names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ....net.identity.names import Party
from ....proto.broker_pb2 import Phase, RunState
from .digest import Digest, MetricTotals
from .seen import Look

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("pool", "assigned", "draining", "resting")
_ENDED = ("done", "failed", "cancelled")

Refusals = Callable[[], Mapping[str, Counter[str]]]
"""By where ("port", "call", "stream"), how many, by the reason."""


class Metrics:
    """`text(seen, viewer)` is what a scrape gets; `viewer` as in Look."""

    def __init__(self, totals: MetricTotals, refusals: Refusals) -> None:
        self._totals, self._refusals = totals, refusals
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def text(self, seen: Look, viewer: Party) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Once(self._collect(seen, viewer)))
        return generate_latest(registry) + generate_latest(self._process)

    def _collect(self, seen: Look, viewer: Party) -> Iterable[Metric]:
        found, totals = seen.description, self._totals
        states = Counter(p.membership for p in found.peers)
        peers = GaugeMetricFamily("shoal_peers", "Peers that are joined.", labels=["state"])
        for state in _STATES:
            peers.add_metric([state], states[state])
        yield peers
        phases = Counter(_phase(r) for r in found.runs)
        runs = GaugeMetricFamily("shoal_runs", "Runs that the broker remembers.", labels=["phase"])
        for name in (name.lower() for name, number in Phase.items() if number):
            runs.add_metric([name], phases[name])
        yield runs
        yield from self._of_runs(seen, seen.of(viewer))
        yield _counter("shoal_steps", "Steps that were committed.", totals.steps)
        text = "Positions of text, or samples, of committed steps."
        yield _counter("shoal_tokens", text, totals.tokens)
        text = "Encoded bytes of frames that committed steps took."
        yield _by("shoal_frame_bytes", text, "role", totals.sent_bytes)
        text = "Bytes of frames that were sent once more, because connections broke."
        yield _counter("shoal_frame_again_bytes", text, totals.again_bytes)
        yield _counter("shoal_rounds", "Rounds that were committed.", totals.rounds)
        text = "Encoded bytes of frames that committed rounds took."
        yield _counter("shoal_round_bytes", text, totals.round_bytes)
        text = "How often runs lost somebody, who left or failed in their part, by the cause."
        yield _by("shoal_recoveries", text, "cause", totals.recoveries)
        refusals = CounterMetricFamily(
            "shoal_refusals",
            "Refused: connections at the port, calls, and streams of peers.",
            labels=["where", "reason"],
        )
        for where, reasons in self._refusals().items():
            for reason, count in reasons.items():
                refusals.add_metric([where, reason], count)
        yield refusals

    def _of_runs(self, seen: Look, digests: Mapping[str, Digest]) -> Iterable[Metric]:
        labels = ["run", "name"]
        step = GaugeMetricFamily("shoal_run_step", "Committed steps of a run.", labels=labels)
        loss = GaugeMetricFamily("shoal_run_loss", "Loss of its newest step.", labels=labels)
        text = "Seconds of a step, mean of the newest ones."
        step_s = GaugeMetricFamily("shoal_run_step_seconds", text, labels=labels)
        text = "Positions of text, or samples, per second, now."
        tokens = GaugeMetricFamily("shoal_run_tokens_per_second", text, labels=labels)
        text = "Versions that its replicas have made together."
        rounds = GaugeMetricFamily("shoal_run_round", text, labels=labels)
        for run in seen.description.runs:
            if _phase(run) in _ENDED:
                continue  # a gauge of what is over would stay for ever
            of, digest = [run.run, run.name], digests.get(run.run)
            step.add_metric(of, run.step)
            if len(run.replicas) > 1:
                rounds.add_metric(of, run.round)
            if digest is None:
                continue
            if math.isfinite(digest.loss):
                loss.add_metric(of, digest.loss)
            if digest.step_s:
                step_s.add_metric(of, digest.step_s)
                tokens.add_metric(of, digest.tokens_per_s)
        yield from (step, loss, step_s, tokens, rounds)


def _phase(run: RunState) -> str:
    return Phase.Name(run.phase).lower()


class _Once(Collector):
    """Metrics that were made for one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    found = CounterMetricFamily(name, text, labels=[label])
    for value, count in sorted(values.items()):
        found.add_metric([value], count)
    return found
