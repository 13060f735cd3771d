"""What compression does on every link: as planned, and as the steps of a run measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.client.show.preview import page
from shoal.client.show.progress import _show_wire
from shoal.client.show.wire import CompressionSums, planned, sentence
from shoal.proto.broker_pb2 import (
    CodecUse,
    LinkPrediction,
    LinkUse,
    PeerState,
    Plan,
    PlanReport,
    PreviewAnswer,
    Profile,
    StageSlot,
)

NAMES = {"p-1": "home", "p-2": "lab"}


def report(*uses: CodecUse) -> PlanReport:
    found = PlanReport()
    found.predicted.step_s = 2.0
    link = LinkPrediction(source="p-1", destination="p-2", bytes=5 << 20, busy_s=1.0, codecs=uses)
    found.predicted.links.append(link)
    return found


def use(role: str = "activation", codec: str = "int8", **more: Any) -> CodecUse:
    return CodecUse(role=role, codec=codec, bytes=1 << 20, dense_bytes=4 << 20, **more)


def answer(found: PlanReport) -> PreviewAnswer:
    plan = Plan(stages=[StageSlot(start=0, stop=1, holders=["p-1"])], microbatch_size=1)
    peers = [PeerState(peer=p, profile=Profile(name=n)) for p, n in NAMES.items()]
    return PreviewAnswer(plan=plan, report=found, peers=peers)


class Event:
    """A run's event with a plan or a step, as far as it is read."""

    def __init__(self, **kind: Any) -> None:
        self._kind = kind
        self.__dict__.update(kind)

    def HasField(self, name: str) -> bool:  # noqa: N802 (protobuf's name)
        return name in self._kind


def step(*uses: LinkUse) -> Event:
    return Event(step=SimpleNamespace(links=uses))


def measured(codec: str = "int8", role: str = "activation", error: float = 0.0) -> LinkUse:
    return LinkUse(
        source="p-1",
        destination="p-2",
        role=role,
        codec=codec,
        bytes=10,
        dense_bytes=40,
        encode_s=0.25,
        decode_s=0.5,
        error=error,
    )


def wire(*events: Any, names: Mapping[str, str] = NAMES) -> CompressionSums:
    found = CompressionSums(lambda: names)
    for event in events:
        found.see(event)
    return found


def test_a_plan_without_codecs_shows_what_it_always_showed() -> None:
    bare = page(answer(report()), "job", 120)
    assert planned(report(), NAMES) == []
    assert planned(report(use(codec="raw/1")), NAMES) == []
    assert page(answer(report(use(codec="raw/1"))), "job", 120) == bare
    for word in ("codec", "saves", "encoding", "error"):
        assert word not in bare


def test_a_plan_with_codecs_shows_each_by_link_and_role() -> None:
    made = report(use(saved_s=0.75, encode_s=0.002, error=0.007), use("activation_grad", "raw/1"))
    rows = planned(made, NAMES)
    assert [(r.source, r.destination, r.role, r.codec) for r in rows] == [
        ("home", "lab", "activation", "int8"),
        ("home", "lab", "activation_grad", "raw/1"),
    ]
    text = page(answer(made), "job", 120)
    [head] = [line for line in text.splitlines() if line.startswith("link") and "codec" in line]
    for word in ("role", "bytes", "dense", "saves", "encoding", "error"):
        assert word in head
    [row] = [line for line in text.splitlines() if "int8" in line]
    for word in ("home -> lab", "1 MiB", "4 MiB", "0.75 s", "2 ms", "0.007"):
        assert word in row


@pytest.mark.parametrize("width", [40, 80, 99, 120])
def test_codecs_keep_to_the_terminal_and_lose_no_word(width: int) -> None:
    made = report(use(codec="ef+topk/1:ratio=100.0,values=bf16,select=exact", saved_s=0.75))
    text = page(answer(made), "job", width)
    assert max(map(len, text.splitlines())) <= width
    joined = text.replace("\n", "").replace(" ", "")
    if width < 100:
        assert sentence(planned(made, NAMES)[0]).replace(" ", "") in joined


def test_steps_are_summed_by_link_role_and_codec() -> None:
    rows = wire(
        Event(plan=None, report=report(use(saved_s=0.5))),
        step(measured(error=0.1), measured(role="activation_grad", codec="bf16")),
        step(measured(error=0.3), measured(codec="lossless")),
        step(measured()),
    ).rows()
    first = rows[0]
    assert (first.source, first.destination, first.codec) == ("home", "lab", "int8")
    assert (first.bytes, first.dense_bytes, first.steps) == (30, 120, 3)
    assert first.encode_s == pytest.approx(2.25)
    assert first.saved_s == pytest.approx(1.5)
    assert first.error == pytest.approx(0.2)  # a 0 is a step without a sample
    assert {(r.role, r.codec) for r in rows[1:]} == {
        ("activation_grad", "bf16"),
        ("activation", "lossless"),
    }


def test_what_both_ends_tell_of_a_link_is_one_step() -> None:
    sender = LinkUse(source="p-1", destination="p-2", role="sync", codec="int8", bytes=10)
    sender.dense_bytes, sender.encode_s = 40, 0.25
    receiver = LinkUse(source="p-1", destination="p-2", role="sync", codec="int8", decode_s=0.5)
    [row] = wire(
        Event(plan=None, report=report(use("sync", saved_s=2.0))), step(sender, receiver)
    ).rows()
    assert (row.steps, row.bytes, row.dense_bytes) == (1, 10, 40)
    assert (row.saved_s, row.encode_s) == (2.0, 0.75)


def test_what_was_sent_as_it_is_saved_nothing() -> None:
    rows = wire(
        Event(plan=None, report=report(use(saved_s=2.0))), step(measured(), measured("raw/1"))
    ).rows()
    assert {r.codec: r.saved_s for r in rows} == {"int8": 2.0, "raw/1": 0.0}


def test_a_run_without_codecs_has_nothing_to_show_and_asks_for_no_names() -> None:
    def never() -> Mapping[str, str]:
        raise AssertionError("asked")

    found = CompressionSums(never)
    assert found.rows() == []
    found.see(step(measured(codec="raw/1")))
    assert found.rows() == []
    assert found.table() == []


def test_a_peer_that_has_left_is_called_by_its_id() -> None:
    [row] = wire(step(measured()), names={}).table()
    assert (row["source"], row["destination"]) == ("p-1", "p-2")


def test_the_end_of_a_run_tells_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    seen = wire(step(measured(error=0.25)))
    _show_wire(seen, json=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0] == "codecs, in 1 step"
    assert err.splitlines()[1].startswith("  home -> lab activation: int8, 10 B of 40 B (4x)")
    _show_wire(seen, json=True)
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["links"] == seen.table()
    for how in (True, False):
        _show_wire(wire(step(measured("raw/1"))), json=how)
        assert capsys.readouterr() == ("", "")
