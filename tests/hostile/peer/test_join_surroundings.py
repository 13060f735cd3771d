"""What `shoal join` leaves around it: a secret for its children, and starts without end."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli.admission import read_token
from shoal.cli.base import REFUSED, UNREACHABLE, WRONG

UNITS = Path(shoal.__file__).parent / "docs" / "deploy"


def service(name: str) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(UNITS / name)
    return unit["Service"]


@pytest.mark.parametrize("given", [None, "shl1.other"])
def test_no_process_that_is_started_later_has_the_token(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("SHOAL_TOKEN", "shl1.secret")
    assert read_token(given, None) == (given or "shl1.secret")
    code = "import os; print('SHOAL_TOKEN' in os.environ)"
    told = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {}, capture_output=True, text=True
    )
    assert told.stdout.strip() == "False"


def test_a_peer_that_was_kicked_is_not_started_again_for_ever() -> None:
    ended = {int(n) for n in service("shoal-peer.service")["RestartPreventExitStatus"].split()}
    assert ended == {WRONG, REFUSED}
    assert UNREACHABLE not in ended, "a broker that is away comes back"


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_a_daemon_that_cannot_start_is_tried_ever_more_rarely(unit: str) -> None:
    assert int(service(unit)["RestartMaxDelaySec"]) > int(service(unit)["RestartSec"])
    assert int(service(unit)["RestartSteps"]) > 0
