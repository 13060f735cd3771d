"""Rounds between replicas: what was learned in them, and what each took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...job.words import count_of
from .measures.verdict import Verdict
from .page import Section, table
from .pictures.charts import Series, curves
from .pictures.palette import SERIES
from .pictures.picture import Picture
from .summary import Summary, names_of
from .words import figure, percent, seconds, size

__all__ = ["baselines_of", "behind_rounds", "clients_of", "rounds_of"]

MOST_REPLICAS = 4
"""That have a line of their own."""
MOST_ROWS = 40
"""Rounds in the table, the newest; summary.json has all."""
_MOVES = ("each moved", "alike")
_SHOWN = (
    "Each moved: 2-norm of what a client moved away from the version, root mean square. Alike: how "
    "long the mean of these moves is by that; 100% where all moved the same way."
)
_HIDDEN = (
    "Sums: with noise, that were made until then, one for each attempt at an exchange. Epsilon: "
    "what these have spent of the budget, at its delta."
)
_SPREAD = {"least": "_least", "median": "_median", "most": "_most"}
"""How keys of clients' own numbers end."""


def rounds_of(s: Summary, pictures: dict[str, Picture]) -> list[Section]:
    """None where a run has one replica."""
    if not s.rounds:
        return []
    made = []
    lines = [
        Series(name=f"replica {n}", points=points, colour=colour, faint=True)
        for (n, points), colour in zip(s.local_losses.items(), SERIES, strict=False)
    ][:MOST_REPLICAS]
    if s.held_out:
        lines.append(Series(name="held-out", points=s.held_out, colour="accent", dots=True))
    if lines:
        marks = [float(r["samples_committed"]) for r in s.rounds]
        picture = curves(
            "loss by samples", lines, marks=marks, marked="faint", unit="samples", text=figure
        )
        pictures["rounds"] = picture
        more = len(s.local_losses) - MOST_REPLICAS
        note = "Local losses of each replica, over samples that are committed; a line down is where"
        note += " a round ends, and where the version was evaluated there is a point."
        note += f" Without a line: {count_of(more, 'replica')}." if more > 0 else ""
        made.append(Section("Loss in rounds, nats", picture.svg(), note=note))
    if any("clients_asked" in r for r in s.rounds):
        return [*made, _rounds_of_clients(s)]
    heads = ("round", "samples of each replica", "local loss", "drift", "sent")
    times = ("took", "waited", "exchange")
    rows = [_row(r) for r in s.rounds[-MOST_ROWS:]]
    note = "Sent: by all peers together, for the exchange. Waited: the longest that a replica did,"
    note += (
        " behind its last local step: for others that worked or evaluated, and for the exchange,"
    )
    note += " which began when all that meet were ready." + _before(s)
    body = table((*heads, *times), rows, (0, 2, 3, 4, 5, 6, 7))
    made.append(Section("Rounds", body, wide=True, note=note))
    return made


def _rounds_of_clients(s: Summary) -> Section:
    """The table of federated rounds."""
    hidden = any("epsilon" in r for r in s.rounds)
    own = ("sums", "epsilon") if hidden else _MOVES
    old = any("staleness" in r for r in s.rounds)
    age = ("clients by versions behind",) if old else ()
    ruled = any("chosen_by" in r for r in s.rounds)
    by = ("chosen by",) if ruled else ()
    heads = ("round", *by, "asked", "came", "lost", *own, "sent", "took", "exchange", *age)
    rows = []
    for r in s.rounds[-MOST_ROWS:]:
        counts = [str(r[f"clients_{what}"]) for what in ("asked", "came", "lost")]
        alike = "" if r["alike"] is None else percent(r["alike"])
        exchange = seconds(r["exchange_s"]) if r["exchange_s"] else ""
        moved = figure(r["clients_moved"]), alike
        if hidden:
            moved = str(r["noisy_sums"]), figure(r["epsilon"])
        times = size(r["sent_bytes"]), seconds(r["seconds"]), exchange
        behind = ", ".join(f"{s}: {clients}" for s, clients in r.get("staleness", ()))
        by = (r.get("chosen_by", ""),) if ruled else ()
        rows.append((str(r["round"]), *by, *counts, *moved, *times, *((behind,) if old else ())))
    note = "Clients that a round asked, whose work is in its version, and that were lost with their"
    note += " peer. "
    note += _HIDDEN if hidden else _SHOWN
    note += " Sent: by all peers together, for the exchange."
    if ruled:
        note += " Chosen by the rule that the job names, or by the run where that had said nothing."
    if old:
        note += " Versions behind: how many were made since a client began."
    body = table(heads, rows, range(len(heads)))
    return Section("Rounds", body, wide=True, note=note + _before(s))


def _before(s: Summary) -> str:
    """A sentence about rounds that the table has no room for."""
    more = len(s.rounds) - MOST_ROWS
    return f" {count_of(more, 'round')} before these: see summary.json." if more > 0 else ""


def clients_of(s: Summary, pictures: dict[str, Picture]) -> list[Section]:
    """Curves of what versions come to on clients' own samples, one picture for each number; none
    where nobody holds samples out."""
    made: list[Section] = []
    for key, name in names_of(s.clients[-1]).items() if s.clients else ():
        lines = [
            Series(
                name=what,
                points=[(r["round"], r[f"{key}{end}"]) for r in s.clients if f"{key}{end}" in r],
                colour=colour,
                dots=True,
            )
            for (what, end), colour in zip({"all": "", **_SPREAD}.items(), SERIES, strict=False)
        ]
        picture = curves(f"{name} of clients by round", lines, unit="round", text=figure)
        pictures[f"clients-{len(made)}"] = picture
        note = f"Each version on the samples that {s.clients[-1]['clients']} clients hold out:"
        note += " over all of these, and the least, the median and the most of a client."
        made.append(Section(f"Clients' {name}", picture.svg(), note=note))
    return made


def baselines_of(s: Summary) -> list[Section]:
    """A table of what federated training is held against; none where nobody asked."""
    if not s.baselines:
        return []
    keys = names_of(s.baselines[0])
    heads = ["", *(f"{n} {what}" for n in keys.values() for what in ("mean", *_SPREAD))]
    rows = [
        [
            str(r["name"]),
            *(figure(float(r[k + end])) for k in keys for end in ("", *_SPREAD.values())),
        ]
        for r in s.baselines
    ]
    note = f"On what {s.baselines[0]['clients']} clients hold out. Pooled: one model on the samples"
    note += " of all clients, for as many steps. Local only: each client alone, for the steps that"
    note += " it made in the run. Plain loops, on one machine."
    return [Section("Baselines", table(heads, rows, range(1, len(heads))), wide=True, note=note)]


def behind_rounds(verdict: Verdict, s: Summary) -> Verdict:
    """The verdict on local steps, of a run with rounds said as such: what replicas wait behind
    them is no part of it."""
    took = sum(r["seconds"] for r in s.rounds)
    if not took or not verdict.text:
        return verdict
    waited = percent(sum(r["waited_s"] for r in s.rounds) / took)
    text = f"Replicas wait up to {waited} of the time behind their local steps. Within these: "
    short = f"within local steps, behind which replicas wait up to {waited} of the time: "
    return replace(verdict, text=text + verdict.text, short=short + verdict.short)


def _row(r: Mapping[str, Any]) -> Sequence[str]:
    who = ", ".join(f"{m['replica']}: {m['samples']}" for m in r["members"])
    who += "".join(f"; {m['replica']} left out" for m in r["left_out"])
    who += "".join(f"; {n} took the version" for n in r["joined"])
    if sent := r.get("uploads"):
        ratios = f"{percent(sent['least_ratio'])} to {percent(sent['most_ratio'])}"
        who += f"; clients sent {ratios}, {size(sent['bytes'])}"
    who += f"; attempt {r['attempt']}" if r["attempt"] > 1 else ""
    share = f" ({percent(r['waited_s'] / r['seconds'])})" if r["seconds"] else ""
    loss = "" if r["loss"] is None else f"{r['loss']:.4f}"
    exchange = seconds(r["exchange_s"]) if r["exchange_s"] else ""
    took = seconds(r["seconds"]), seconds(r["waited_s"]) + share, exchange
    return str(r["round"]), who, loss, figure(r["drift"]), size(r["sent_bytes"]), *took
