"""Stretched compute, by clocks that the test holds in its hands."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.schedule.schedule import Action, Kind
from shoal.peer.compute.device import TorchDevice
from shoal.peer.compute.stretch import StretchedDevice
from shoal.peer.core.events import Result
from shoal.peer.host.profile import measure

ACTION = Action(Kind.FORWARD, 0, 0)


class Clocks:
    """The wall's and the thread's, and a wait that only turns the wall's on."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = 100.0, 7.0
        self.waited: list[float] = []

    def compute(self, cpu_s: float, lost_s: float = 0.0) -> None:
        self.cpu_s += cpu_s
        self.wall_s += cpu_s + lost_s

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.wall_s += seconds

    def device(self, stretch: float) -> StretchedDevice:
        return StretchedDevice(
            stretch=stretch, wall=lambda: self.wall_s, cpu=lambda: self.cpu_s, wait=self.wait
        )


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    """Every action takes 2 s of CPU, and 1 s in which another process has the core."""
    clocks = Clocks()

    def compute(self: TorchDevice, step: int, action: Action) -> Result:
        clocks.compute(2.0, lost_s=1.0)
        return Result(seconds=3.0, peak_bytes=5)

    monkeypatch.setattr(TorchDevice, "compute", compute)
    return clocks


def test_an_action_takes_its_cpu_time_times_the_stretch(clocks: Clocks) -> None:
    result = clocks.device(2.5).compute(0, ACTION)
    assert clocks.waited == [pytest.approx(2.5 * 2.0 - 3.0)]
    # What is reported is what it took, and the rest is the device's own result.
    assert result == Result(seconds=pytest.approx(5.0), peak_bytes=5)


def test_time_lost_to_others_is_not_stretched_and_never_made_up_for(clocks: Clocks) -> None:
    result = clocks.device(1.2).compute(0, ACTION)  # 2.4 s were over before it ended
    assert clocks.waited == []
    assert result.seconds == pytest.approx(3.0)


@given(stretch=st.floats(1.0, 50.0), cpu=st.floats(0.0, 10.0), lost=st.floats(0.0, 100.0))
def test_the_end_is_the_later_of_both_clocks(stretch: float, cpu: float, lost: float) -> None:
    clocks = Clocks()
    device = clocks.device(stretch)
    with device._stretched():
        clocks.compute(cpu, lost)
    assert clocks.wall_s - 100.0 == pytest.approx(max(stretch * cpu, cpu + lost), abs=1e-9)


def test_coding_is_stretched_and_an_error_comes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks()

    def code(self: TorchDevice, what: Any) -> str:
        clocks.compute(1.0)
        if what == "bad":
            raise KeyError(what)
        return f"coded {what}"

    monkeypatch.setattr(TorchDevice, "payload", code)
    monkeypatch.setattr(TorchDevice, "accept", code)
    device = clocks.device(3.0)
    assert device.payload("x") == "coded x"  # type: ignore[arg-type]
    device.accept("x")  # type: ignore[arg-type]
    assert clocks.waited == [pytest.approx(2.0)] * 2
    with pytest.raises(KeyError):
        device.payload("bad")  # type: ignore[arg-type]
    assert len(clocks.waited) == 2


def test_a_card_cannot_be_stretched() -> None:
    with pytest.raises(ValueError, match="cuda:0 cannot be stretched"):
        StretchedDevice("cuda:0", stretch=2.0)


def test_the_broker_learns_the_stretched_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.dag.cost.speed import Speeds
    from shoal.peer.host import speeds_file

    here = Speeds(
        product=8e10, convolution=4e10, attention=2e10, memory=1e10, special=5e9, call_s=1e-6,
        error=0.1, busy=0.6,
    )  # fmt: skip
    monkeypatch.setattr(speeds_file, "known_speeds", lambda *_, **__: here)
    plain, slow = measure("cpu", name="p"), measure("cpu", name="p", stretch=4.0)
    assert plain.flops_per_s == 8e10
    assert slow.flops_per_s == slow.speeds.product_flops_per_s == 2e10
    assert (slow.speeds.memory_bytes_per_s, slow.speeds.call_s) == (2.5e9, 4e-6)
    # It stands for a machine of its own, whose one core nobody else computes on.
    assert (slow.host, slow.cores, slow.speeds.busy) == ("", 1, 1.0)
    assert plain.host
    assert plain.speeds.busy == 0.6
