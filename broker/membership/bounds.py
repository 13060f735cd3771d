"""Numbers that peers say of themselves, made possible at the door: behind it, every number is one
that planning can reckon with.

A number beyond what any device or line has is clamped, one that is none counts as not said; people
are told of either. What a step or a round came to is bounded likewise, with the names of metrics.
Speeds have bounds of their own (`speeds.py`), and what is said of links (`broker/links/links.py`).
Nothing here is refused: a wrong number of an honest peer must not keep
it out, and of a hostile one harms nobody once it is bounded.
"""

from __future__ import annotations

import math

from ...net.printable import printable
from ...proto.broker_pb2 import Evaluation, Outcome, Profile, RoundReport, StepReport

__all__ = [
    "LEAST_CAP",
    "MOST_CAP",
    "MOST_CORES",
    "MOST_MEASURED",
    "MOST_MEMORY_BYTES",
    "MOST_METRICS",
    "MOST_NAME",
    "sound",
    "sound_report",
    "sound_round",
]

MOST_MEMORY_BYTES = 2**46
"""64 TiB, the most that one machine addresses today. Sums over 10,000 peers fit into 63 bits."""
MOST_CORES = 4096
LEAST_CAP = 1e3
"""Bytes/s of an owner's cap: under a modem's there is nothing to plan with."""
MOST_CAP = 1e12
MOST_S = 10 * 365 * 86_400.0
"""Of staying, and of any duration in a report: ten years."""
MOST_BYTES = 2**60
"""Sent or received in a step, or in a month."""
MOST_SKIPPED = 2**48
"""Steps of the clients of a round."""
MOST_MEASURED = 3.5e38
"""Of a loss, a norm or a metric: no float32 is larger. Sums of such numbers, each times a count of
samples, stay far below the largest float64."""
MOST_METRICS = 256
"""Numbers that a model's forward returns beside its loss."""
MOST_NAME = 200
"""Characters of the name of one."""

_WHOLE = (
    ("device_memory_bytes", MOST_MEMORY_BYTES, "device memory"),
    ("host_memory_bytes", MOST_MEMORY_BYTES, "host memory"),
    ("cores", MOST_CORES, "cores"),
    ("threads", MOST_CORES, "threads"),
    ("monthly_bytes", MOST_BYTES, "traffic in a month"),
)
_REAL = (
    ("up_bytes_per_s", LEAST_CAP, MOST_CAP, "bytes/s of uplink"),
    ("down_bytes_per_s", LEAST_CAP, MOST_CAP, "bytes/s of downlink"),
    ("stay_s", 0.0, MOST_S, "s of staying"),
)


def sound(profile: Profile) -> tuple[str, ...]:
    """Bounds the numbers of a profile in place; a sentence for each that was changed."""
    who, notes = named(profile), list[str]()
    for key, highest, what in _WHOLE:
        if (count := getattr(profile, key)) > highest:
            setattr(profile, key, highest)
            notes.append(f"{who} reports {count} of {what}: clamped to {highest}")
    for key, least, most, what in _REAL:
        value = getattr(profile, key)
        said = f"{who} reports {value:g} {what}"
        if (taken := bounded(value, least, most, said, notes)) != value:
            setattr(profile, key, taken)
    return tuple(notes)


def named(profile: Profile) -> str:
    """Return whom a note for people is about."""
    return f"peer {profile.name}" if profile.name else "the peer"


def bounded(value: float, least: float, most: float, said: str, notes: list[str]) -> float:
    """Return a number as it is taken: 0 where it was not said, or is none. A sentence is added to
    `notes` where that is another one, by how it was `said`."""
    taken = min(max(value, least), most) if math.isfinite(value) and value > 0 else 0.0
    if taken != value:
        notes.append(f"{said}: {f'clamped to {taken:g}' if taken else 'not taken'}")
    return taken


def sound_report(report: StepReport) -> None:
    """Bounds what a step took and what came of it, in place. Losses and norms that are no numbers
    stay so: a run diverged."""
    for key in ("sent_bytes", "again_bytes"):
        setattr(report, key, min(getattr(report, key), MOST_BYTES))
    report.peak_bytes = min(report.peak_bytes, MOST_MEMORY_BYTES)
    report.compute_s, report.update_s = _seconds(report.compute_s), _seconds(report.update_s)
    for stage in report.stages:
        stage.forward_s, stage.backward_s = _seconds(stage.forward_s), _seconds(stage.backward_s)
    if report.HasField("outcome"):
        outcome = report.outcome
        outcome.grad_norm, outcome.lr = _measured(outcome.grad_norm), _measured(outcome.lr)
        outcome.loss_scale = _measured(outcome.loss_scale)
        _sound_results(outcome)
    if report.HasField("evaluation"):
        _sound_results(report.evaluation)


def sound_round(report: RoundReport) -> None:
    """Bounds what a round took and what came of it, in place."""
    for part in ("drift", "clients_moved", "mean_moved"):
        setattr(report, part, _measured(getattr(report, part)))
    report.waited_s, report.upload_s = _seconds(report.waited_s), _seconds(report.upload_s)
    report.sent_bytes = min(report.sent_bytes, MOST_BYTES)
    report.skipped = min(report.skipped, MOST_SKIPPED)
    report.upload_bytes = min(report.upload_bytes, MOST_BYTES)
    if report.HasField("evaluation"):
        _sound_results(report.evaluation)


def _sound_results(found: Outcome | Evaluation) -> None:
    """Bounds losses and metrics. A metric's name is one printable line; of two with one name the
    first counts."""
    found.loss, found.weight = _measured(found.loss), _measured(found.weight)
    metrics: dict[str, float] = {}
    for metric in found.metrics[:MOST_METRICS]:
        metrics.setdefault(printable(metric.name, MOST_NAME), _measured(metric.value))
    del found.metrics[:]
    for name, value in metrics.items():
        found.metrics.add(name=name, value=value)
    if isinstance(found, Evaluation):
        del found.clients[MOST_METRICS:]
        for number in found.clients:
            number.name = printable(number.name, MOST_NAME)
            for part in ("mean", "least", "median", "most"):
                setattr(number, part, _measured(getattr(number, part)))


def _measured(said: float) -> float:
    """A number that a device made; beyond all of float32 it counts as infinite."""
    return math.copysign(math.inf, said) if abs(said) > MOST_MEASURED else said


def _seconds(said: float) -> float:
    return min(said, MOST_S) if said >= 0 else 0.0  # NaN neither
