"""`--record` writes what the tests of this folder compare with, instead of comparing;
`--record-here` adds the bits of this kind of machine to the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.tests.sim.recorded.playing import Laboratories


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write records instead of comparing")
    parser.addoption("--record-here", action="store_true", help="add bits of this kind of machine")


@pytest.fixture(scope="session")
def records(request: pytest.FixtureRequest) -> str:
    """What is to be written: "anew" all of a record, "here" bits of this machine, "" nothing."""
    if request.config.getoption("--record"):
        return "anew"
    return "here" if request.config.getoption("--record-here") else ""


@pytest.fixture(scope="session")
def laboratories(
    laboratory: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Laboratories:
    return Laboratories(laboratory, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """A sum over threads has other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
