"""What a reader of one round has to open: files of the rooms of rounds in which a function runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.tests.sim.played_rounds import Rounds, sites

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("broker/rounds", "dag/rounds", "peer/core/rounds", "peer/rounds")
MOST = 20
PAGE = ROOT / "docs" / "architecture.md"


def files_entered(rounds: Rounds, **tables: Any) -> set[str]:
    """Play a job on two peers; return the files of ROOMS in which a function ran, from the root of
    the repository."""
    found = set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        found.add(frame.f_code.co_filename)  # and no line of it is traced

    before = sys.gettrace()
    sys.settrace(note)
    try:
        rounds.play(sites(1e9, 1e9), **tables)
    finally:
        sys.settrace(before)
    inside = (Path(f).resolve() for f in found if not f.startswith("<"))
    names = [p.relative_to(ROOT).as_posix() for p in inside if p.is_relative_to(ROOT)]
    return {name for name in names if name.startswith(tuple(f"{room}/" for room in ROOMS))}


def test_a_round_of_diloco_enters_few_files_and_the_page_names_each(rounds: Rounds) -> None:
    """Masks, claims, clients, places and noise are entered by rounds that have some. The share of
    sums that are added up again is the default, and nothing is signed: so nothing is drawn."""
    sync, train = {"kind": "local", "method": "diloco"}, {"steps": 6}
    entered = files_entered(rounds, sync=sync, train=train)
    assert len(entered) <= MOST, "\n".join(["entered:", *sorted(entered)])
    [told] = re.findall(r"\*\*A round in ten lines\.\*\*.*?\n\n(.*?)\n\n", PAGE.read_text(), re.S)
    assert len(told.splitlines()) == 10
    assert entered <= {*re.findall(r"`([\w/]+\.py)`", told)}
