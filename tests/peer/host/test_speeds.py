"""Speeds from timed work: the fit, the samples, and the file that keeps them."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.dag.cost.speed import Speeds, Work
from shoal.peer.core.events import SpeedsMeasured
from shoal.peer.host.calibrate import REPEATS, Bench, samples
from shoal.peer.host.fit import fit
from shoal.peer.host.profile import speeds_to_proto
from shoal.peer.host.speeds_file import GOOD_S, POOR_S, known_speeds, newer_speeds
from shoal.peer.shell import measuring
from shoal.peer.shell.measuring import measure_again
from shoal.proto.broker_pb2 import Profile

CPU = torch.device("cpu")
TRUTH = Speeds(
    product=8e10, convolution=7e10, attention=4e10, memory=3e10, special=8e9, call_s=5e-6
)


@pytest.fixture(scope="module")
def works() -> list[Work]:
    return Bench(CPU).works


def seconds_of(works: list[Work], speeds: Speeds) -> list[float]:
    return [speeds.seconds(work) for work in works]


def test_the_samples_resolve_every_class(works: list[Work]) -> None:
    found = fit(works, seconds_of(works, TRUTH))
    assert np.allclose(found.per_unit, TRUTH.per_unit, rtol=1e-6)
    assert found.error < 1e-6
    assert len({sample.name for sample in samples()}) == len(samples())


@settings(max_examples=20)
@given(
    speed=st.tuples(*(st.floats(1e8, 1e15) for _ in range(5))),
    call_s=st.floats(0, 1e-3),
    noise=st.integers(0, 2**32 - 1),
)
def test_a_fit_is_positive_and_close_under_noise(
    works: list[Work], speed: tuple[float, ...], call_s: float, noise: int
) -> None:
    names = ("product", "convolution", "attention", "memory", "special")
    truth = Speeds(**dict(zip(names, speed, strict=True)), call_s=call_s)
    factors = np.random.default_rng(noise).uniform(0.9, 1.1, len(works))
    times = np.array(seconds_of(works, truth)) * factors
    found = fit(works, list(times))
    assert (found.per_unit[:5] > 0).all()  # and so no prediction is negative
    assert found.call_s >= 0
    ratios = np.array(seconds_of(works, found)) / times
    assert np.median(np.abs(ratios - 1)) < 0.12


def test_one_disturbed_sample_moves_a_fit_little(works: list[Work]) -> None:
    times = seconds_of(works, TRUTH)
    for i in range(len(times)):
        found = fit(works, [t * (10 if j == i else 1) for j, t in enumerate(times)])
        assert np.median(np.abs(found.per_unit / TRUTH.per_unit - 1)) < 0.1


def test_times_and_classes_that_cannot_be_fitted_are_refused(works: list[Work]) -> None:
    with pytest.raises(ValueError, match="expected positive"):
        fit(works, [0.0, *seconds_of(works, TRUTH)[1:]])
    with pytest.raises(ValueError, match="convolution"):
        fit([Work(product=1, attention=1, memory=1, special=1, calls=1)], [1.0])


def test_a_bench_times_each_sample_in_each_round(works: list[Work]) -> None:
    bench = Bench(CPU)
    assert bench.works == works  # counting depends on nothing that ran before
    for _ in range(2):
        bench.round()
    assert {len(times) for times in bench.times} == {2 * (REPEATS - 1)}
    assert bench.speeds().product > 1e6


class Stopwatch:
    """Stands for the measurement; counts how often it was asked."""

    def __init__(self, error: float = 0.1) -> None:
        self.asked = 0
        self.error = error

    def __call__(self, device: torch.device) -> Speeds:
        self.asked += 1
        return Speeds(
            product=1e9 * self.asked,
            convolution=1e9,
            attention=1e9,
            memory=1e9,
            special=1e9,
            error=self.error,
        )


@pytest.mark.parametrize(("error", "lasts_s"), [(0.1, GOOD_S), (0.5, POOR_S)])
def test_speeds_are_measured_again_when_they_are_old(
    tmp_path: Path, error: float, lasts_s: float
) -> None:
    watch, path, now = Stopwatch(error), tmp_path / "deep" / "speeds.json", [1000.0]

    def ask(model: str = "cpu x") -> Speeds:
        return known_speeds(CPU, model, path, watch, lambda: now[0], load=lambda: 0.0)

    first = ask()
    assert ask() == first
    assert watch.asked == 1
    assert ask("cpu y").product == 2e9  # another device
    now[0] += lasts_s - 1
    assert ask() == first
    now[0] += 2
    assert ask().product == 3e9
    assert ask().product == 3e9
    assert sorted(p.name for p in path.parent.iterdir()) == ["speeds.json", "speeds.json.lock"]


@pytest.mark.parametrize(
    ("then", "now", "after_s", "asked"),
    [
        (1.2, 0.1, 60.0, 2),  # measured while it was busy, and idle by now
        (1.2, 1.1, 60.0, 1),  # busy as before
        (1.2, 1.1, POOR_S + 1, 2),
        (0.1, 1.1, POOR_S + 1, 1),  # what was measured idle holds
        (0.1, 0.1, POOR_S + 1, 1),
    ],
)
def test_a_device_measured_on_a_busy_host_is_measured_again(
    tmp_path: Path, then: float, now: float, after_s: float, asked: int
) -> None:
    watch, path = Stopwatch(), tmp_path / "speeds.json"
    known_speeds(CPU, "x", path, watch, lambda: 0.0, load=lambda: then)
    known_speeds(CPU, "x", path, watch, lambda: after_s, load=lambda: now)
    assert watch.asked == asked


@pytest.mark.parametrize("text", ["", "[]", '{"KEY": 3}', '{"KEY": {"at": 0, "speeds": {"a": 1}}}'])
def test_a_damaged_file_costs_a_measurement(tmp_path: Path, text: str) -> None:
    watch, path = Stopwatch(), tmp_path / "speeds.json"
    known_speeds(CPU, "x", path, watch, lambda: 0.0)
    (key,) = json.loads(path.read_text())
    path.write_text(text.replace("KEY", key))
    assert known_speeds(CPU, "x", path, watch, lambda: 0.0).product == 2e9
    assert known_speeds(CPU, "x", path, watch, lambda: 0.0).product == 2e9


def test_a_folder_that_cannot_be_written_costs_a_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    watch = Stopwatch()
    assert known_speeds(CPU, "x", tmp_path / "file" / "speeds.json", watch).product == 1e9


def test_who_waits_for_another_peers_measurement_does_something_else_meanwhile(
    tmp_path: Path,
) -> None:
    path, done = tmp_path / "speeds.json", list[str]()
    found = TRUTH

    def meanwhile() -> None:
        done.append("else")
        free.set()

    def measured(_: torch.device) -> Speeds:  # by the first; the second comes in the middle of it
        other = threading.Thread(
            target=lambda: known_speeds(CPU, "x", path, refuse, lambda: 0.0, meanwhile)
        )
        other.start()
        others.append(other)
        assert free.wait(30)
        return found

    def refuse(_: torch.device) -> Speeds:
        raise AssertionError("the second one measures nothing")

    others, free = list[threading.Thread](), threading.Event()
    known_speeds(CPU, "x", path, measured, lambda: 0.0, lambda: done.append("first"))
    others[0].join(30)
    assert done == ["else"]


@pytest.mark.parametrize(
    ("rounds", "agree"),
    [
        ([1.0, 1.0], False),
        ([1.0, 1.01, 0.99], True),
        ([2.0, 1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.2], False),
    ],
)
def test_a_measurement_is_over_when_three_rounds_took_as_long(
    rounds: list[float], agree: bool
) -> None:
    bench = Bench.__new__(Bench)
    bench.times = [[0.25 * r for r in rounds], [0.75 * r for r in rounds]]
    assert bench.agrees == agree


def test_a_pool_peer_takes_newer_speeds_once_its_host_is_idle(tmp_path: Path) -> None:
    watch, path, load = Stopwatch(), tmp_path / "speeds.json", [1.2]

    def newer() -> Speeds | None:
        return newer_speeds(CPU, "x", path, watch, lambda: 0.0, load=lambda: load[0])

    load[0] = 0.1
    assert newer() is None, "it never measured"
    known_speeds(CPU, "x", path, watch, lambda: 0.0, load=lambda: 1.2)
    load[0] = 1.1
    assert newer() is None, "busy still"
    load[0] = 0.1
    found = newer()
    assert found is not None
    assert found.product == 2e9
    assert newer() == found, "what was measured idle holds"
    assert watch.asked == 2
    assert newer_speeds(CPU, "x", None) is None


async def test_new_speeds_are_told_once_and_from_the_pool_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, told, free = [TRUTH, replace(TRUTH, product=9e10)], list[float](), [False]
    looks, seen = 0, threading.Event()

    def newer(*_: object) -> Speeds | None:
        nonlocal looks
        looks += 1
        if looks == 6:
            seen.set()
        if looks == 2:
            return None
        return found[looks > 3]

    def is_free() -> bool:
        free[0] = not free[0] or looks > 0
        return free[0]

    def tell(event: SpeedsMeasured) -> None:
        told.append(event.speeds.product_flops_per_s)

    monkeypatch.setattr(measuring, "newer_speeds", newer)
    profile = Profile(device="x", speeds=speeds_to_proto(replace(TRUTH, product=1e9)))
    task = asyncio.create_task(measure_again(CPU, profile, None, tell, is_free, looked_s=0.0))
    assert await asyncio.to_thread(seen.wait, 30)
    task.cancel()
    assert told == [8e10, 9e10]
