"""Scenario files that tests write: pieces of them, and how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.job import SettingsError
from shoal.sim.scenario.scenario import Scenario

HEAD = 'version = 1\njob = "job.toml"\n'
TWO = '[[peers]]\nname = "a"\nplace = "eu"\n[[peers]]\nname = "b"\nplace = "us"\n'  # 6 lines
LINK = '[[links]]\nfrom = "eu"\nto = "us"\nlatency = "50ms"\nbandwidth = "20Mbit"\n'


def read(tmp_path: Path, body: str, head: str = HEAD) -> Scenario:
    path = tmp_path / "home.toml"
    path.write_text(head + body)
    return Scenario.from_toml(path)


def problem(tmp_path: Path, body: str, head: str = HEAD) -> str:
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, body, head)
    return str(caught.value).removeprefix(str(tmp_path) + "/")


def link(a: str, b: str, latency: str, bandwidth: str = "20Mbit", both: bool = True) -> str:
    more = "" if both else "both = false\n"
    ends = f'[[links]]\nfrom = "{a}"\nto = "{b}"\n'
    return f'{ends}latency = "{latency}"\nbandwidth = "{bandwidth}"\n{more}'


def fault(do: str, more: str = "at_step = 3", who: str = 'who = ["a"]') -> str:
    return f'[[faults]]\ndo = "{do}"\n{who}\n{more}\n'
