"""How long threads waited for a core, from a made-up /proc and from the real one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from shoal.sim.shaped.contention import busy_share, contended, processor, snapshot, waited_s


class Proc:
    """A /proc in a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def thread(self, pid: int, tid: int, waited_ns: int, children: str = "") -> None:
        folder = self.root / str(pid) / "task" / str(tid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"123456 {waited_ns} 7\n")
        (folder / "children").write_text(children)


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def test_threads_of_a_process_and_of_all_below_it_count(proc: Proc) -> None:
    proc.thread(10, 10, 1_000, children="20 ")
    proc.thread(20, 20, 2_000, children="30")
    proc.thread(20, 21, 4_000)
    proc.thread(30, 30, 8_000)
    proc.thread(40, 40, 16_000)
    found = snapshot({"a": 10, "b": 40}, proc.root)
    assert found == {
        "a": {(10, 10): 1_000, (20, 20): 2_000, (20, 21): 4_000, (30, 30): 8_000},
        "b": {(40, 40): 16_000},
    }


def test_only_what_they_waited_in_between_counts(proc: Proc) -> None:
    proc.thread(10, 10, 5 * 10**9)
    before = snapshot({"a": 10}, proc.root)
    proc.thread(10, 10, 6 * 10**9)
    proc.thread(10, 11, 5 * 10**8)  # began meanwhile
    after = snapshot({"a": 10}, proc.root)
    assert waited_s(before, after) == {"a": pytest.approx(1.5)}
    assert contended(before, after, seconds=15.0) == ""
    assert "a waited for a core for 15% of the time" in contended(before, after, seconds=10.0)


def test_the_worst_is_named(proc: Proc) -> None:
    for pid in (10, 20, 30):
        proc.thread(pid, pid, 0)
    watched = {"a": 10, "b": 20, "c": 30}
    before = snapshot(watched, proc.root)
    for pid, waited in ((10, 2), (20, 9), (30, 4)):
        proc.thread(pid, pid, waited * 10**9)
    assert "threads of b waited" in contended(before, snapshot(watched, proc.root), seconds=10.0)


def test_where_nothing_is_known_nothing_is_a_measurement(proc: Proc) -> None:
    proc.thread(10, 10, 0)
    found = snapshot({"a": 10, "gone": 11}, proc.root)
    assert "gone" in contended(found, found, seconds=10.0)
    assert contended({}, {}, 1.0)


def test_the_share_of_the_cores_that_worked(tmp_path: Path) -> None:
    def stat(*ticks: int) -> tuple[int, int]:
        (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, ticks))}\ncpu0 1 2 3\n")
        return processor(tmp_path)

    # user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice
    before = stat(100, 10, 20, 1000, 50, 1, 2, 3, 90, 9)
    after = stat(130, 15, 30, 1020, 60, 2, 4, 25, 120, 12)
    assert busy_share(before, after) == pytest.approx((30 + 5 + 10 + 1 + 2 + 22) / 100)
    assert processor(tmp_path / "nowhere") == (0, 0)
    assert busy_share((0, 0), (0, 0)) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="schedstat is Linux's")
def test_the_kernel_counts_the_threads_of_this_process() -> None:
    with_thread = threading.Event()
    end = threading.Event()

    def run() -> None:
        with_thread.set()
        end.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with_thread.wait()
        found = snapshot({"me": os.getpid()})["me"]
        assert (os.getpid(), thread.native_id) in found
        assert all(waited >= 0 for waited in found.values())
    finally:
        end.set()
        thread.join()
