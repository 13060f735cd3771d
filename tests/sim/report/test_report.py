"""The end of `shoal sim`: lines only for what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.proto.broker_pb2 import (
    CodecChoice,
    Outcome,
    PeerPrediction,
    Plan,
    PlanReport,
    Prediction,
    RunEvent,
    StepDone,
)
from shoal.sim.following import Following
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


def test_it_says_who_holds_stages_and_of_a_large_pool_the_first_three_why_not() -> None:
    spares = tuple(f"p{i}: slow" for i in range(20))  # of 24 peers two were away
    text = line(render(summary(stages=2, holders=2, peers=24, spares=spares)), "model")
    assert text.endswith("on 2 of 24 peers; in pool: p0: slow; p1: slow; p2: slow; and 17 more")
    text = line(render(summary(stages=2, holders=2, peers=3, spares=spares[:1])), "model")
    assert text.endswith("on 2 of 3 peers; in pool: p0: slow")


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
    Following(found, {}).see(event)
    assert found.codecs == ("lossless", "raw/1", "int8", "topk:ratio=100")
    assert found.lossy == ("int8", "topk:ratio=100")


def test_memory_is_what_was_predicted_and_the_most_that_was_reported() -> None:
    found = Summary(name="job", world="virtual", seed=1)
    followed = Following(found, {"1": "a", "2": "b"}, {"a": 100, "b": 50})
    predicted = [PeerPrediction(peer="1", device_bytes=70), PeerPrediction(peer="2")]
    followed.see(RunEvent(plan=Plan(), report=PlanReport(predicted=Prediction(peers=predicted))))
    for peak, again in ((60, 0), (80, 7)):
        step = StepDone(sent_bytes=1000, again_bytes=again)
        step.peaks.add(peer="1", device_bytes=peak)
        followed.see(RunEvent(step=step))
    followed.finish(1)
    assert found.memory == (
        {"peer": "a", "predicted_bytes": 70, "peak_bytes": 80, "limit_bytes": 100},
        {"peer": "b", "predicted_bytes": 0, "peak_bytes": 0, "limit_bytes": 50},
    )
    assert (found.bytes_on_wire, found.retransmitted_bytes) == (2000, 7)


def test_steps_that_overflow_skipped_are_counted() -> None:
    found = summary(eval_loss=4.0)
    followed = Following(found, {}, {})
    for scale, skipped in ((8.0, True), (4.0, True), (2.0, False)):
        followed.see(RunEvent(step=StepDone(outcome=Outcome(loss_scale=scale, skipped=skipped))))
    assert "2 steps skipped by overflow (loss scale 2)" in line(render(found), "learned")
    assert "skipped" not in render(summary(eval_loss=4.0))


def test_a_price_is_of_the_hours_and_of_what_was_trained_in_them() -> None:
    assert "price" not in render(summary(step_s=0.5))
    text = line(render(summary(step_s=0.5, price=1.5, tokens=3_000_000)), "price")
    assert text == "price    1.5 for the peers' hours, 0.5 a million tokens"


def test_the_summary_keeps_every_link(tmp_path: Path) -> None:
    write_json(summary(links=(link(),)), tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text())["links"] == [link()]


def test_a_summary_without_measurements_has_no_line_that_needs_one() -> None:
    text = render(Summary(name="job", world="virtual", seed=1, again="shoal sim"))
    assert text.splitlines() == ["job · seed 1 · virtual · OK", "again    shoal sim"]


@pytest.mark.parametrize(
    ("took", "step_s"),
    [
        ([(9, 0), (1, 0), (7, 1)], 1),
        ([(9, 0), (1, 0), (3, 0), (7, 1), (7, 1), (7, 1)], 2),
        ([(9, 0), (7, 1)], 9),
        ([(9, 1), (7, 1), (5, 1)], 6),
        ([(9, 1), (7, 1), (1, 0)], 1),
    ],
)
def test_a_step_s_time_is_that_of_steps_that_only_train(
    took: list[tuple[int, int]], step_s: float
) -> None:
    found = Summary(name="job", world="virtual", seed=1)
    followed = Following(found, {})
    for n, (seconds, evaluated) in enumerate(took):
        step = StepDone(step=n, seconds=seconds)
        if evaluated:
            step.evaluation.loss = 1.0
        followed.see(RunEvent(step=step))
    followed.finish(100)
    assert found.step_s == step_s


def test_half_a_model_is_told_with_its_loss_or_why_there_is_none() -> None:
    held_out = {"loss_first": 5.0, "loss_last": 4.0, "eval_loss": 4.0}
    text = render(summary(**held_out, half_loss=4.4, half_without=("blocks.1", "blocks.3")))
    assert ", without 2 blocks 4.400 (+10.0%)" in text
    text = render(summary(**held_out, half_missing="no peers were free"))
    assert ", without every second block not evaluated: no peers were free" in text
    assert "without" not in render(summary(**held_out)).split("learned")[1].split("\n")[0]


@pytest.mark.parametrize("lost", [0, 3])
def test_a_run_that_leaves_stages_out_says_how_often_each_was_visited(lost: int) -> None:
    text = render(summary(rerouted=True, visits=(8, 4, 8), inexact_from=lost))
    assert "not exact: microbatches leave stages out or change their order" in text
    assert "visits by stage 8 4 8" in text
    changed = "; before step 3 a lost stage was made anew, or routes changed"
    assert (changed in text) == bool(lost)
    assert "not exact" not in render(summary())


def test_every_ratio_says_whether_it_was_measured_here() -> None:
    found = summary(
        step_s=0.5,
        predicted_step_s=0.4,
        against={"best single peer": 0.8, "uniform split": 0.6, "whole replicas": 0.0},
        against_measured={"uniform split": 0.75},
    )
    assert line(render(found), "against") == (
        "against  uniform split 1.50x [measured here] · best single peer 2.00x [predicted] "
        "· whole replicas out of memory [predicted] (its step time over this run's, both as marked)"
    )


def test_faults_name_what_was_measured_of_them_only() -> None:
    assert "faults" not in render(summary())
    found = summary(faults_injected=2, faults_fired=1)
    assert line(render(found), "faults") == "faults   2 injected, 1 fired"
    found.detect_s, found.replay_s, found.samples_lost, found.samples_doubled = 1.5, 3.25, 0, 0
    found.goodput = 0.9
    assert line(render(found), "faults") == (
        "faults   2 injected, 1 fired · detect 1.5, replay 3.25 s · samples lost 0, doubled 0 "
        "· goodput 90%"
    )


def test_truth_tells_why_times_are_no_measurement() -> None:
    found = summary(cores=2, oversubscribed=1.5, timing_valid=False, timing_reason="waited 31%")
    assert line(render(found), "truth") == (
        "truth    2 cores, oversubscribed 1.50x -> timing NOT A MEASUREMENT (waited 31%)"
    )
    found.timing_valid, found.checks, found.violations = True, 812, 0
    assert line(render(found), "truth").endswith(
        "timing VALID · invariants 812 checks, 0 violations"
    )
    virtual = summary(virtual_s=3600.0, seconds=12.5, checks=1, violations=1, event_log="ab" * 32)
    assert line(render(virtual), "truth") == (
        "truth    3600.0 s of virtual time in 12.5 s · invariants 1 check, 1 violation "
        "· event log abababababab"
    )


def test_what_was_measured_takes_the_place_of_what_was_predicted() -> None:
    found = summary(predicted_step_s=0.5, bubble=0.4, bottlenecks=("a computes",))
    assert "bubble 40% [predicted]" in render(found)
    assert line(render(found), "hangs on") == "hangs on a computes [predicted]"
    found.bubble_measured, found.held_back_by = 0.25, "b computes 80% of the time"
    assert "bubble 25% ·" in line(render(found), "speed") + " ·"
    assert line(render(found), "hangs on") == "hangs on b computes 80% of the time [measured here]"
    found.busiest_link, found.busiest_link_use, found.retransmitted_bytes = "a -> b", 0.5, 0
    assert line(render(found), "wire").endswith("busiest link a -> b 50% · retransmitted 0.0 MB")
    found.report = "out/report.html"
    assert line(render(found), "again").endswith("report out/report.html")
