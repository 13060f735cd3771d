"""The page: everything in one HTML file, without a script and without the network.

Whatever comes from names, reasons or errors goes through `escape`; pictures escape their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from importlib.resources import files

from ...job.words import count_of, counted_in
from .measures.measure import Measured
from .pictures import palette
from .summary import Summary
from .tables import Row
from .text import outrun
from .words import figure, percent, plain, seconds, size

__all__ = ["Section", "page", "tiles"]

OFF = 0.15
"""An error of a prediction from which it stands out."""


class Section:
    """A box with a heading. `wide`: over both columns. `note`: one sentence below."""

    def __init__(self, title: str, body: str, *, wide: bool = False, note: str = "") -> None:
        self.title, self.body, self.wide, self.note = title, body, wide, note

    def html(self) -> str:
        note = f'<p class="note">{escape(self.note)}</p>' if self.note else ""
        return f"<section><h2>{escape(self.title)}</h2>{self.body}{note}</section>"


def tiles(s: Summary, found: Measured) -> list[tuple[str, str]]:
    """The figures that people look for first: (figure, what it is), of a summary that has what was
    found."""
    made: list[tuple[str, str]] = []
    step_s = s.step_s or found.step_s
    if step_s:
        made.append((seconds(step_s), "a step, in the median"))
    if s.tokens_per_s:
        made.append((figure(s.tokens_per_s), f"{counted_in(s.job)} per second"))
    if s.loss_last is not None and s.loss_first is not None:
        made.append((f"{s.loss_last:.3f}", f"nats, loss at the end; {s.loss_first:.3f} at first"))
    if s.eval_loss is not None:
        made.append((f"{s.eval_loss:.3f}", "nats, held-out loss"))
    if s.half_loss is not None:
        made.append((f"{s.half_loss:.3f}", "nats, without every second block"))
    if s.bubble_measured is not None:
        made.append((percent(s.bubble_measured), "bubble: a peer does not compute"))
    if s.goodput is not None:
        made.append((percent(s.goodput), "goodput: time for steps that counted"))
    if s.bytes_on_wire:
        made.append((size(s.bytes_on_wire), "on the wire"))
    if s.faults_injected is not None:
        made.append((f"{s.faults_fired} of {s.faults_injected}", "faults fired"))
    if s.checks is not None:
        made.append((f"{s.violations}", f"violations in {figure(s.checks)} checks"))
    return made


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    figures: Sequence[int] = (),
    off: Collection[int] = (),
) -> str:
    """Cells are text. `figures`: columns that stand at the right; `off`: rows whose last one stands
    out."""

    def cells(tag: str, row: Sequence[str], last: str = "n") -> str:
        made = []
        for i, cell in enumerate(row):
            kind = last if i + 1 == len(row) else "n"
            place = f' class="{kind}"' if i in figures else ""
            made.append(f"<{tag}{place}>{escape(cell)}</{tag}>")
        return f"<tr>{''.join(made)}</tr>"

    body = "".join(cells("td", row, "n off" if n in off else "n") for n, row in enumerate(rows))
    return f'<div class="wide"><table>{cells("th", heads)}{body}</table></div>'


def compared(rows: Sequence[Row]) -> str:
    """Predicted against measured; what is far off stands out."""
    errors = ["" if row.error is None else f"{row.error:+.0%}" for row in rows]
    errors = [error.replace("-0%", "0%").replace("+0%", "0%") for error in errors]
    cells = [(r.what, r.predicted, r.measured, e) for r, e in zip(rows, errors, strict=True)]
    off = [n for n, row in enumerate(rows) if row.error is not None and abs(row.error) > OFF]
    return table(("", "predicted", "measured", "error"), cells, (1, 2, 3), off)


def bullets(texts: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(plain(t))}</li>' for t in texts)}</ul>"


def page(
    s: Summary, verdict: str, figures: Sequence[tuple[str, str]], sections: Sequence[Section]
) -> str:
    """The whole file."""
    title = plain(f"{s.name} · seed {s.seed}")
    about = plain(" · ".join(filter(None, (s.world, s.run and f"run {s.run}", _peers(s)))))
    style = palette.css() + files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="about">{escape(about)}</p>']
    if s.exit:
        parts.append(f'<p class="verdict failed">FAILED: {escape(plain(s.error))}</p>')
    if s.timing_valid is False:
        reason = escape(plain(s.timing_reason))
        parts.append(f'<p class="verdict failed">Times are NOT A MEASUREMENT: {reason}</p>')
    if said := outrun(s):
        parts.append(f'<p class="verdict failed">{escape(plain(said))}.</p>')
    if verdict:
        parts.append(f'<p class="verdict">{escape(verdict)}.</p>')
    cells = "".join(
        f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in figures
    )
    parts.append(f'<div class="tiles">{cells}</div>')
    narrow: list[str] = []
    for section in sections:
        if section.wide and narrow:
            parts.append(f'<div class="two">{"".join(narrow)}</div>')
            narrow = []
        (parts if section.wide else narrow).append(section.html())
    if narrow:
        parts.append(f'<div class="two">{"".join(narrow)}</div>')
    parts.append(f"<footer>{_foot(s)}</footer>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';'
        " style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _peers(s: Summary) -> str:
    stages = f", {count_of(s.stages, 'stage')}" if s.stages else ""
    return count_of(s.peers, "peer") + stages if s.peers else ""


def _foot(s: Summary) -> str:
    again = f"again: <code>{escape(plain(s.again))}</code>" if s.again else ""
    log = f"event log <code>{escape(s.event_log)}</code>" if s.event_log else ""
    return " · ".join(filter(None, (again, log)))
