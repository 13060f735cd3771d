"""The end of a simulated run: one summary, as text for people and as JSON for programs.

A line whose measurement does not exist is left out, never filled with a guess.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Summary", "render", "unigram_entropy", "write_json"]

MOST_LINKS = 12
"""Lines of what codecs did."""


@dataclass(kw_only=True)
class Summary:
    """What one run measured. Losses in nats per token, times in seconds, sizes in bytes."""

    name: str
    world: str
    """In which world it ran, e.g. "real processes, loopback"."""
    seed: int
    run: str = ""
    exit: int = 0
    error: str = ""
    peers: int = 0
    stages: int = 0
    spares: tuple[str, ...] = ()
    params: int = 0
    operators: int = 0
    steps: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    eval_loss: float | None = None
    unigram_entropy: float | None = None
    max_loss_difference: float | None = None
    """Largest |loss - loss of the plain loop| over all steps; None when not verified."""
    verified_against: str = ""
    codecs: tuple[str, ...] = ()
    """Of the plan, each once."""
    lossy: tuple[str, ...] = ()
    """Codecs of the plan that do not give back every bit: with them the losses are not meant to
    equal those of the plain loop."""
    loss_ratio: float | None = None
    """With lossy codecs and verified: mean loss of the last tenth of the steps over that of the
    plain loop."""
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    """Median over all steps but the first."""
    cores: int = 0
    compute_share: float = 0.0
    """Computing time of all peers over cores times elapsed time, between 0 and 1."""
    predicted_step_s: float = 0.0
    """What the plan expected of a step; 0: nothing."""
    bubble: float = 0.0
    """Mean over peers of the share of a step in which they do not compute, as the plan expected."""
    bottlenecks: tuple[str, ...] = ()
    """What the predicted step hangs on, the heaviest first."""
    against: dict[str, float] = field(default_factory=dict)
    """Predicted step seconds of what the plan was compared with, by name."""
    bytes_on_wire: int = 0
    """Encoded bytes of all frames between peers, the whole run."""
    links: tuple[Mapping[str, Any], ...] = ()
    """What compression did, by link, role and codec, what saved most first: source, destination,
    role, codec, bytes, dense_bytes (the whole run), saved_s (as predicted), encode_s (of both
    ends), error (relative L2, the mean of the samples). Empty: nothing was compressed."""
    seconds: float = 0.0
    """From the first process's start to the last one's end."""
    again: str = ""
    weights: str = ""


def unigram_entropy(pieces: Iterable[bytes]) -> float:
    """Entropy in nats of the byte frequencies: what a model without context reaches at best."""
    counts: Counter[int] = Counter()
    for piece in pieces:
        counts.update(piece)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values())


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _si(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"


def render(s: Summary) -> str:
    """The report of the files page, as far as its lines were measured."""
    state = "OK" if s.exit == 0 else f"FAILED: {s.error}"
    lines = [
        f"{s.name} · seed {s.seed} · {s.world}"
        + (f" · run {s.run}" if s.run else "")
        + f" · {state}"
    ]
    if s.stages:
        spare = f"; in pool: {'; '.join(s.spares)}" if s.spares else ""
        lines.append(
            f"model    {_si(s.params)} params, {s.operators} ops -> {_count(s.stages, 'stage')} "
            f"on {s.peers - len(s.spares)} of {_count(s.peers, 'peer')}{spare}"
        )
    if s.loss_last is not None:
        text = f"learned  loss {s.loss_first:.3f} -> {s.loss_last:.3f}"
        if s.eval_loss is not None:
            text += f", held-out {s.eval_loss:.3f}"
            if s.unigram_entropy is not None:
                side = "below" if s.eval_loss < s.unigram_entropy else "NOT below"
                text += f", {side} the text's unigram entropy {s.unigram_entropy:.3f}"
        if s.max_loss_difference is not None:
            text += (
                f" · vs {s.verified_against}: max difference {s.max_loss_difference:.1e} "
                f"over {s.steps} steps"
            )
        if s.loss_ratio is not None:
            text += (
                f" (not meant to be equal: {', '.join(s.lossy)}); "
                f"the last tenth {s.loss_ratio - 1:+.1%}"
            )
        lines.append(text)
    if s.step_s:
        text = f"speed    {s.step_s:.3f} s/step, {_si(s.tokens_per_s)} tok/s"
        if s.predicted_step_s:
            error = s.predicted_step_s / s.step_s - 1
            text += f" · predicted {s.predicted_step_s:.3f} (error {error:+.0%})"
            text += f" · bubble {s.bubble:.0%} [predicted]"
        lines.append(f"{text} · computing {s.compute_share:.0%} of {s.cores} cores")
        if s.bottlenecks:
            lines.append(f"hangs on {'; next '.join(s.bottlenecks[:2])} [predicted]")
        if s.against and s.predicted_step_s:
            ratios = [f"{n} {t / s.predicted_step_s:.2f}x" for n, t in s.against.items() if t]
            lines.append(
                f"against  {' · '.join(ratios)} [predicted, its step time over this one's]"
            )
        lines += _wire(s)
    tail = f"again    {s.again}"
    if s.weights:
        tail += f" · weights {s.weights}"
    lines.append(tail)
    return "\n".join(lines)


def _wire(s: Summary) -> Iterator[str]:
    """What crossed the links; with codecs also what they did on each."""
    if not s.links:
        how = "encoded" if s.codecs else "dense"
        yield f"wire     {s.bytes_on_wire / 1e6:.1f} MB {how}"
        return
    dense = s.bytes_on_wire + sum(x["dense_bytes"] - x["bytes"] for x in s.links)
    worst = max(x["error"] for x in s.links)
    yield (
        f"wire     {s.bytes_on_wire / 1e6:.1f} MB, {dense / 1e6:.1f} MB dense "
        f"({dense / max(1, s.bytes_on_wire):.2f}x) · codec error {worst:.2g} (the worst link)"
    )
    for x in s.links[:MOST_LINKS]:
        saved = f"saved {x['saved_s']:.3g} s [predicted], " if x["saved_s"] else ""
        yield (
            f"         {x['source']} -> {x['destination']} {x['role'].replace('_', ' ')}: "
            f"{x['codec']}, {x['bytes'] / 1e6:.1f} of {x['dense_bytes'] / 1e6:.1f} MB, {saved}"
            f"encoding {x['encode_s']:.3g} s, error {x['error']:.2g}"
        )
    if len(s.links) > MOST_LINKS:
        yield f"         and {len(s.links) - MOST_LINKS} more (--json has all)"


def write_json(s: Summary, path: Path) -> None:
    """The same figures as one JSON object; the file is there whole or not at all."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(json.dumps(asdict(s), indent=1) + "\n")
    new.replace(path)
