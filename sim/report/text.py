"""The end of a simulated run as text for people.

A line whose measurement does not exist is left out, never filled with a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...job.words import WRONG_CHOICE, count_of, counted_in
from ...planner.answers.preview import WORTH_SAYING
from ...planner.schedulers.alternatives import ALONE
from .summary import Summary, names_of
from .words import thousands

__all__ = ["MOST_LINKS", "against", "outrun", "own_step_s", "render"]

MOST_LINKS = 12
"""Lines of what codecs did."""
_SPARES = 3
"""Peers of the pool whose reasons are told; the page tells more."""


def render(s: Summary) -> str:
    """The report of the files page, as far as its lines were measured."""
    lines = [_head(s), *_outrun(s), *_model(s), *_learned(s), *_speed(s), *_against(s)]
    lines += [*_clients(s), *(_wire(s) if s.step_s else ()), *_rounds(s)]
    return "\n".join([*lines, *_faults(s), *_truth(s), _again(s)])


def _head(s: Summary) -> str:
    state = "OK" if s.exit == 0 else f"FAILED: {s.error}"
    run = f" · run {s.run}" if s.run else ""
    return f"{s.name} · seed {s.seed} · {s.world}{run} · {state}"


def outrun(s: Summary) -> str:
    """Sentence about a peer that would train faster alone than all these together; empty: none."""
    measured = ALONE in s.against_measured
    other = s.against_measured[ALONE] if measured else s.against.get(ALONE, 0.0)
    own = own_step_s(s, measured=measured)
    if not other or s.holders < 2 or own * WORTH_SAYING <= other:
        return ""
    mark = "measured here" if measured else "predicted"
    return (
        f"{'training in rounds' if s.rounds else 'a pipeline'} over this network is "
        f"{WRONG_CHOICE}: the best single peer is "
        f"{own / other:.3g} times faster [{mark}]"
    )


def own_step_s(s: Summary, *, measured: bool) -> float:
    """Seconds of a batch, to compare with what trains it in another way: of several replicas, with
    what is between their local steps. 0: not known."""
    if not s.rounds:
        return s.step_s if measured else s.predicted_step_s
    if not measured:
        return s.predicted_batch_s
    return sum(r["seconds"] for r in s.rounds) / s.steps if s.steps else 0.0


def _outrun(s: Summary) -> Iterator[str]:
    if said := outrun(s):
        yield f"choice   {said}"


def _model(s: Summary) -> Iterator[str]:
    if s.stages:
        yield (
            f"model    {thousands(s.params)} params, {s.operators} ops -> "
            f"{f'{s.replicas} replicas of ' * (s.replicas > 1)}{count_of(s.stages, 'stage')} "
            f"on {s.holders} of {count_of(s.peers, 'peer')}{_spares(s)}"
        )


def _spares(s: Summary) -> str:
    """Name the peers that hold no stage, and why: of a large pool the first few."""
    shown = "; ".join(s.spares[:_SPARES])
    more = f"; and {len(s.spares) - _SPARES} more" if len(s.spares) > _SPARES else ""
    return f"; in pool: {shown}{more}" if shown else ""


def _learned(s: Summary) -> Iterator[str]:
    parts = []
    if s.loss_last is not None:
        local = "local " if s.rounds else ""
        parts.append(f"{local}loss {s.loss_first:.3f} -> {s.loss_last:.3f}")
        if s.rounds:
            parts[0] += " (means of the first and the last round)"
    if s.eval_loss is not None:
        parts.append(f"held-out {s.eval_loss:.3f}")
    if not parts:
        return
    text = f"learned  {', '.join(parts)}"
    if s.eval_loss is not None and s.unigram_entropy is not None:
        side = "below" if s.eval_loss < s.unigram_entropy else "NOT below"
        text += f", {side} the text's unigram entropy {s.unigram_entropy:.3f}"
    if s.loss_scale or s.skipped_steps:
        text += f", {s.skipped_steps} steps skipped by overflow"
    if s.loss_scale:
        text += f" (loss scale {s.loss_scale:g})"
    if s.half_loss is not None:
        worse = f" ({s.half_loss / s.eval_loss - 1:+.1%})" if s.eval_loss else ""
        text += f", without {len(s.half_without)} blocks {s.half_loss:.3f}{worse}"
    elif s.half_missing:
        text += f", without every second block not evaluated: {s.half_missing}"
    if s.max_loss_difference is not None:
        text += (
            f" · vs {s.verified_against}: max difference {s.max_loss_difference:.1e} "
            f"over {s.steps} steps"
        )
    if s.loss_ratio is not None:
        text += (
            f" (not meant to be equal: {', '.join([*s.lossy, *_made_anew(s)])}); "
            f"the last tenth {s.loss_ratio - 1:+.1%}"
        )
    elif s.inexact_from or s.rerouted:
        text += f" · not exact: {'; '.join(_made_anew(s))}"
    yield text


def _clients(s: Summary) -> Iterator[str]:
    """What the last version that was evaluated comes to on clients' own samples."""
    for found in s.clients[-1:]:
        yield f"clients  {found['clients']} on their own samples: {_spread(found)}"
    for row in s.baselines:
        yield f"         {row['name']}, {row['clients']} of them: {_spread(row)}"


def _spread(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {found[key]:.3f} (least {found[f'{key}_least']:.3f}, median "
        f"{found[f'{key}_median']:.3f}, most {found[f'{key}_most']:.3f})"
        for key, name in names_of(found).items()
    )


def _made_anew(s: Summary) -> Iterator[str]:
    if s.rerouted:
        often = " ".join(map(str, s.visits))
        yield f"microbatches leave stages out or change their order, visits by stage {often}"
    if s.inexact_from:
        yield f"before step {s.inexact_from} a lost stage was made anew, or routes changed"


def _speed(s: Summary) -> Iterator[str]:
    if not s.step_s:
        return
    parts = [f"{s.step_s:.3f} s/step, {thousands(s.tokens_per_s)} {counted_in(s.job)}/s"]
    if s.predicted_step_s:
        error = s.predicted_step_s / s.step_s - 1
        parts.append(f"predicted {s.predicted_step_s:.3f} (error {error:+.0%})")
    if s.bubble_measured is not None:
        parts.append(f"bubble {s.bubble_measured:.0%}{' within local steps' if s.rounds else ''}")
    elif s.predicted_step_s:
        parts.append(f"bubble {s.bubble:.0%} [predicted]")
    if s.compute_share:
        parts.append(f"computing {s.compute_share:.0%} of {count_of(s.cores, 'core')}")
    yield f"speed    {' · '.join(parts)}"
    if s.price is not None:
        each = f", {s.price / s.tokens * 1e6:.3g} a million tokens" if s.tokens else ""
        yield f"price    {s.price:.3g} for the peers' hours{each}"
    if s.held_back_by:
        yield f"hangs on {s.held_back_by} [measured here]"
    elif s.bottlenecks:
        yield f"hangs on {'; next '.join(s.bottlenecks[:2])} [predicted]"


def against(s: Summary) -> Iterator[tuple[str, str, str]]:
    """What the run is compared with: its name, the ratio of step times (measured over measured,
    predicted over predicted), and which of these it is."""
    for name in dict.fromkeys([*s.against_measured, *s.against]):
        measured = name in s.against_measured
        other = s.against_measured[name] if measured else s.against[name]
        own = own_step_s(s, measured=measured)
        mark = "measured here" if measured else "predicted"
        if other and own:
            yield name, f"{other / own:.2f}x", mark
        elif not other and not measured:
            yield name, "out of memory", mark


def _against(s: Summary) -> Iterator[str]:
    if parts := [f"{name} {ratio} [{mark}]" for name, ratio, mark in against(s)]:
        time = "time for a batch" if s.rounds else "step time"
        yield f"against  {' · '.join(parts)} (its {time} over this run's, both as marked)"


def _wire(s: Summary) -> Iterator[str]:
    """What crossed the links; with codecs also what they did on each."""
    tail = "".join(f" + {n / 1e6:.1f} MB of {role}s" for role, n in s.bytes_beside.items())
    if s.busiest_link_use is not None:
        tail += f" · busiest link {s.busiest_link} {s.busiest_link_use:.0%}"
    if s.retransmitted_bytes is not None:
        tail += f" · retransmitted {s.retransmitted_bytes / 1e6:.1f} MB"
    if not s.links:
        how = "encoded" if s.codecs else "dense"
        yield f"wire     {s.bytes_on_wire / 1e6:.1f} MB {how}{tail}"
        return
    dense = s.bytes_on_wire + sum(x["dense_bytes"] - x["bytes"] for x in s.links)
    worst = max(x["error"] for x in s.links)
    yield (
        f"wire     {s.bytes_on_wire / 1e6:.1f} MB, {dense / 1e6:.1f} MB dense "
        f"({dense / max(1, s.bytes_on_wire):.2f}x) · codec error {worst:.2g} (the worst link){tail}"
    )
    rows = [x for x in s.links if x["bytes"] != x["dense_bytes"]]
    for x in rows[:MOST_LINKS]:
        saved = f"saved {x['saved_s']:.3g} s [predicted], " if x["saved_s"] else ""
        yield (
            f"         {x['source']} -> {x['destination']} {x['role'].replace('_', ' ')}: "
            f"{x['codec']}, {x['bytes'] / 1e6:.1f} of {x['dense_bytes'] / 1e6:.1f} MB, {saved}"
            f"encoding {x['encode_s']:.3g} s, error {x['error']:.2g}"
        )
    if len(rows) > MOST_LINKS:
        yield f"         and {len(rows) - MOST_LINKS} more (--json FILE has all)"


def _rounds(s: Summary) -> Iterator[str]:
    """What meeting cost: of what each peer sent, and of the time between two versions."""
    if not s.rounds:
        return
    sent = sum(r["sent_bytes"] for r in s.rounds) / len(s.rounds) / max(1, s.holders)
    total = sum(r["seconds"] for r in s.rounds)
    waited = sum(r["waited_s"] for r in s.rounds)
    parts = [f"{len(s.rounds)}, {count_of(s.replicas, 'replica')}"]
    parts.append(f"{sent / 1e6:.2f} MB sent per peer and round")
    if total:
        parts.append(f"waited {waited / total:.0%} of the time")
        exchanges = [r["exchange_s"] for r in s.rounds]
        if all(exchanges):  # a broker that was started again does not know it
            parts[-1] += f", exchanges {sum(exchanges) / total:.0%}"
    again = sum(r["attempt"] > 1 for r in s.rounds)
    if again:
        parts.append(f"{again} in more than one attempt")
    if out := sum(len(r["left_out"]) for r in s.rounds):
        parts.append(f"{count_of(out, 'contribution')} left out")
    if "epsilon" in (last := s.rounds[-1]):
        parts.append(f"epsilon {last['epsilon']:.3g} spent by {last['noisy_sums']} noisy sums")
    yield f"rounds   {', '.join(parts)}"


def _faults(s: Summary) -> Iterator[str]:
    if s.faults_injected is None:
        return
    parts = [f"{s.faults_injected} injected, {s.faults_fired} fired"]
    times = (("detect", s.detect_s), ("restore", s.restore_s), ("replay", s.replay_s))
    if known := [f"{name} {t:.3g}" for name, t in times if t is not None]:
        parts.append(f"{', '.join(known)} s")
    samples = (("lost", s.samples_lost), ("doubled", s.samples_doubled))
    if counted := [f"{name} {n}" for name, n in samples if n is not None]:
        parts.append(f"samples {', '.join(counted)}")
    if s.goodput is not None:
        parts.append(f"goodput {s.goodput:.0%}")
    yield f"faults   {' · '.join(parts)}"


def _truth(s: Summary) -> Iterator[str]:
    """Whether the figures above can be believed."""
    parts = []
    if s.timing_valid is not None:
        text = count_of(s.cores, "core")
        if s.oversubscribed is not None:
            text += f", oversubscribed {s.oversubscribed:.2f}x"
        verdict = "VALID" if s.timing_valid else f"NOT A MEASUREMENT ({s.timing_reason})"
        parts.append(f"{text} -> timing {verdict}")
    if s.virtual_s is not None:
        parts.append(f"{s.virtual_s:.1f} s of virtual time in {s.seconds:.1f} s")
    if s.checks is not None:
        parts.append(
            f"invariants {count_of(s.checks, 'check')}, {count_of(s.violations, 'violation')}"
        )
    if s.event_log:
        parts.append(f"event log {s.event_log[:12]}")
    if parts:
        yield f"truth    {' · '.join(parts)}"


def _again(s: Summary) -> str:
    tail = f"again    {s.again}"
    if s.report:
        tail += f" · report {s.report}"
    if s.weights:
        tail += f" · weights {s.weights}"
    return tail
