"""What a peer writes of its own doing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.dag.schedule.schedule import Action
from shoal.net.links.frame import FrameKey, Payload
from shoal.peer.core.events import Result
from shoal.peer.entry.supervisor import peer_configs
from shoal.peer.host.config import JoinConfig
from shoal.peer.shell.spans import Spans

KEY = FrameKey("r", 1, 3, Role.ACTIVATION, 2, 1, "x", "p-1", "p-2")
PAYLOAD = Payload("half", b"", TensorSpec((4,), "float32"), (memoryview(bytes(8)),))


@pytest.fixture
def clock() -> Callable[[], float]:
    """Goes on by one second each time that it is read."""
    ticks: Iterator[int] = iter(range(100, 1000))
    return lambda: float(next(ticks))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_action_is_written_with_what_it_was(tmp_path: Path, clock: Callable[[], float]) -> None:
    with closing(Spans(str(tmp_path / "a"), "p-1", "p", clock)) as spans:
        result = Result(seconds=5)
        seen = []

        def work(step: int, action: Action) -> Result:
            seen.append((step, str(action)))
            return result

        for text in ("F2@1", "B0@1", "E3@1", ">@grad1", "+1@norm", "U"):
            assert spans.compute(work, "r", 7, Action.parse(text)) is result
        assert seen == [(7, text) for text in ("F2@1", "B0@1", "E3@1", ">@grad1", "+1@norm", "U")]
        head, *found = lines(tmp_path / "a")
        assert head == {"peer": "p-1", "name": "p"}
        assert found[0] == {
            "kind": "forward",
            "run": "r",
            "start_s": 100.0,
            "end_s": 101.0,
            "step": 7,
            "microbatch": 2,
            "stage": 1,
        }
        kinds = ["forward", "backward", "evaluate", "exchange", "exchange", "update"]
        assert [x["kind"] for x in found] == kinds
        assert "stage" not in found[3]  # of T it would be a group's number


def test_an_action_that_raises_is_written_too(tmp_path: Path) -> None:
    with closing(Spans(str(tmp_path / "a"), "p-1", "p")) as spans:

        def work(step: int, action: Action) -> Result:
            raise RuntimeError("no memory")

        with pytest.raises(RuntimeError, match="no memory"):
            spans.compute(work, "r", 0, Action.parse("F0@0"))
        assert [x.get("kind") for x in lines(tmp_path / "a")] == [None, "forward"]


def test_a_frame_lasts_until_it_is_acknowledged(tmp_path: Path, clock: Callable[[], float]) -> None:
    with closing(Spans(str(tmp_path / "a"), "p-1", "p", clock)) as spans:
        spans.ready(KEY)
        spans.sent(KEY, PAYLOAD)
        assert len(lines(tmp_path / "a")) == 1
        spans.acknowledged(KEY)
        spans.acknowledged(KEY)  # a second one is no frame
        [_, found] = lines(tmp_path / "a")
        assert found == {
            "kind": "send",
            "hop": 1,
            "run": "r",
            "start_s": 100.0,
            "end_s": 101.0,
            "step": 3,
            "microbatch": 2,
            "to": "p-2",
            "role": "activation",
            "size_bytes": 8,
            "dense_bytes": 16,
            "codec": "half",
        }


def test_frames_to_a_peer_that_is_gone_are_forgotten(tmp_path: Path) -> None:
    with closing(Spans(str(tmp_path / "a"), "p-1", "p")) as spans:
        other = KEY._replace(destination="p-3")
        for key in (KEY, other):
            spans.ready(key)
            spans.sent(key, PAYLOAD)
        spans.forget("p-2")
        spans.acknowledged(KEY)
        spans.acknowledged(other)
        assert [x["to"] for x in lines(tmp_path / "a")[1:]] == ["p-3"]


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    spans = Spans("", "p-1", "p")
    assert spans.compute(lambda step, action: Result(seconds=1), "r", 0, Action.parse("U")) == (
        Result(seconds=1)
    )
    spans.ready(KEY)
    spans.sent(KEY, PAYLOAD)
    spans.acknowledged(KEY)
    spans.close()
    assert list(tmp_path.iterdir()) == []


def test_a_restart_goes_on_in_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        spans = Spans(str(tmp_path / "a"), "p-1", "p")
        spans.close()
        spans.close()
        spans.compute(lambda step, action: Result(), "r", 0, Action.parse("U"))  # too late
        with (tmp_path / "a").open("a") as file:
            file.write('{"kind":"forw')  # killed while it wrote
    Spans(str(tmp_path / "a"), "p-1", "p").close()
    assert lines(tmp_path / "a") == 3 * [{"peer": "p-1", "name": "p"}]


def test_each_device_has_its_file(tmp_path: Path) -> None:
    config = JoinConfig(
        broker="127.0.0.1:1", insecure=True, state=tmp_path, trace=tmp_path / "t.jsonl"
    )
    [alone] = peer_configs(config, ["cpu"])
    assert alone.trace == str(tmp_path / "t.jsonl")
    several = peer_configs(config, ["cuda:0", "cuda:1"])
    assert [Path(c.trace).name for c in several] == ["t-cuda-0.jsonl", "t-cuda-1.jsonl"]
    [without] = peer_configs(replace(config, trace=None), ["cpu"])
    assert without.trace == ""
