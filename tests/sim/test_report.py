"""The end of `shoal sim`: lines only for what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shoal.proto.broker_pb2 import CodecChoice, Plan, RunEvent
from shoal.sim.cluster import _follow
from shoal.sim.report import MOST_LINKS, Summary, render, write_json


def summary(**more: Any) -> Summary:
    given = {"loss_first": 5.0, "loss_last": 3.0, "step_s": 0.5, "bytes_on_wire": 3_000_000}
    return Summary(name="job", world="real processes", seed=1, **{**given, **more})


def link(**more: Any) -> dict[str, Any]:
    row = {"source": "a", "destination": "b", "role": "activation_grad", "codec": "int8"}
    figures = {"bytes": 10**6, "dense_bytes": 4 * 10**6, "saved_s": 0.0, "encode_s": 0.125}
    return {**row, **figures, "error": 0.0071, **more}


def line(text: str, word: str) -> str:
    return next(x for x in text.splitlines() if x.startswith(word))


def test_without_codecs_the_wire_is_dense() -> None:
    text = render(summary())
    assert line(text, "wire") == "wire     3.0 MB dense"
    assert "codec" not in text


def test_with_codecs_it_says_what_the_same_frames_take_dense_and_what_each_codec_did() -> None:
    text = render(summary(links=(link(), link(codec="raw/1", bytes=9, dense_bytes=9, error=0.0))))
    assert line(text, "wire") == (
        "wire     3.0 MB, 6.0 MB dense (2.00x) · codec error 0.0071 (the worst link)"
    )
    [found] = [x for x in text.splitlines() if "int8" in x]
    assert found.strip() == (
        "a -> b activation grad: int8, 1.0 of 4.0 MB, encoding 0.125 s, error 0.0071"
    )
    assert "saved 2 s [predicted]" in render(summary(links=(link(saved_s=2.0),)))


def test_many_links_are_cut_and_counted() -> None:
    text = render(summary(links=tuple(link() for _ in range(MOST_LINKS + 3))))
    assert text.count("a -> b") == MOST_LINKS
    assert "and 3 more" in text


def test_a_lossy_run_is_not_held_against_the_plain_loop() -> None:
    plain = summary(max_loss_difference=0.25, verified_against="single process", steps=9)
    assert "not meant to be equal" not in render(plain)
    plain.lossy, plain.loss_ratio = ("int8",), 1.012
    learned = line(render(plain), "learned")
    assert "max difference 2.5e-01 over 9 steps (not meant to be equal: int8)" in learned
    assert "the last tenth +1.2%" in learned


def test_encoded_bytes_are_not_called_dense() -> None:
    assert line(render(summary(codecs=("bf16",))), "wire") == "wire     3.0 MB encoded"


def test_only_codecs_that_change_bits_are_lossy() -> None:
    texts = ["lossless", "raw/1", "int8", "int8", "topk:ratio=100"]
    choices = [CodecChoice(source="a", destination="b", codec=t) for t in texts]
    event = RunEvent(plan=Plan(codecs=choices))
    found = summary()
    _follow(
        SimpleNamespace(watch=lambda: iter([event])),
        SimpleNamespace(check=lambda: None),
        found,
        print,
    )
    assert found.codecs == ("lossless", "raw/1", "int8", "topk:ratio=100")
    assert found.lossy == ("int8", "topk:ratio=100")


def test_the_summary_keeps_every_link(tmp_path: Path) -> None:
    write_json(summary(links=(link(),)), tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["links"] == [link()]
