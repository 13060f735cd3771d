"""The disk of one peer is full: that costs the run this peer, and nothing else.

The oracle is the same world with room on every disk: losses and weights must be the same, bit for
bit. Where every disk is full the run ends, and says why.
"""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from shoal.proto.broker_pb2 import DONE, FAILED
from shoal.sim.monitor.monitor import Monitor
from shoal.tests.sim.played import Played

from .test_recovery import Lab


@pytest.fixture(scope="module")
def lab(laboratory: Any, plans_once: None) -> Lab:
    return Lab(laboratory)


def fill(world: Any, name: str, what: str, step: int) -> list[str]:
    """From a step on, what a device does with the disk fails; returns the calls that did."""
    device, failed = world.peers[name].device, []
    real = getattr(device, what)

    def full(*arguments: Any) -> Any:
        if what == "prefetch" and arguments[0] < step:
            return real(*arguments)
        failed.append(what)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    setattr(device, what, full)
    return failed


def play(lab: Lab, names: tuple[str, ...], what: str) -> tuple[Played, list[str]]:
    world = lab.laboratory.world(3, log=False)
    world.orders = lab.orders
    monitor = Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    failed: list[str] = []
    for name in names:
        failed = fill(world, name, what, step=2)
    run = world.submit(lab.spec)
    monitor.finish(run)
    return Played(world, run), failed


@pytest.mark.parametrize("what", ["build", "prefetch", "export"])
def test_another_takes_the_part_of_one_whose_disk_is_full(lab: Lab, what: str) -> None:
    played, failed = play(lab, ("p1",), what)
    assert failed, "the disk was never needed"
    assert "No space left on device; stage 1 -> p2" in played.notes
    assert played.end.phase == DONE
    lab.assert_same(played)  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["build", "prefetch", "export"])
def test_a_disk_that_is_full_everywhere_ends_the_run_with_the_reason(lab: Lab, what: str) -> None:
    played, failed = play(lab, ("p0", "p1", "p2"), what)
    assert failed, "the disk was never needed"
    assert played.end.phase == FAILED
    assert "No space left on device" in played.end.reason.text
    assert "was tried 5 times at this step" in played.end.reason.text
