"""The page and its pictures, of runs that never took place but could have."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.dag.cost.network import Network
from shoal.dag.plan.plan import PeerId
from shoal.proto import broker_pb2
from shoal.sim.report import Summary, write_report
from shoal.sim.trace import Mark, Span, Trace


@dataclass(kw_only=True)
class Pretended:
    """A pipeline played by hand: all forwards of a step, then all backwards, per pipeline; frames
    of one link one after another. `slow`: factors of compute by peer; `rates`: bytes/s by pair."""

    pipelines: int = 1
    stages: int = 4
    microbatches: int = 4
    steps: int = 8
    forward_s: float = 0.1
    slow: dict[str, float] = field(default_factory=dict)
    rates: dict[tuple[str, str], float] = field(default_factory=dict)
    rate: float = 1e8
    latency_s: float = 0.01
    size_bytes: int = 1_000_000
    names: Sequence[str] = ()

    def __post_init__(self) -> None:
        many = self.pipelines * self.stages
        self.names = self.names or [f"peer-{i + 1}" for i in range(many)]

    def name(self, pipeline: int, stage: int) -> str:
        return self.names[pipeline * self.stages + stage]

    def trace(self) -> Trace:
        trace, free = Trace(), dict.fromkeys(self.names, 0.0)
        links: dict[tuple[str, str], float] = {}

        def send(a: str, b: str, at_s: float, step: int, m: int, role: str) -> float:
            pair = (a, b)
            begin_s = max(at_s, links.get(pair, 0.0))
            end_s = links[pair] = begin_s + self.size_bytes / self.rates.get(pair, self.rate)
            codec = "int8" if role == "activation" else "raw/1"
            dense = self.size_bytes * (4 if codec == "int8" else 1)
            trace.add(
                Span(
                    start_s=at_s,
                    end_s=end_s,
                    peer=a,
                    kind="send",
                    to=b,
                    step=step,
                    microbatch=m,
                    role=role,
                    codec=codec,
                    size_bytes=self.size_bytes,
                    dense_bytes=dense,
                )
            )
            return end_s + self.latency_s

        def work(name: str, kind: Any, at_s: float, step: int, m: int, stage: int) -> float:
            times = {"forward": 1.0, "backward": 2.0, "update": 0.3}[kind]
            begin_s = max(at_s, free[name])
            end_s = free[name] = begin_s + self.forward_s * times * self.slow.get(name, 1.0)
            trace.add(
                Span(
                    start_s=begin_s,
                    end_s=end_s,
                    peer=name,
                    kind=kind,
                    step=step,
                    microbatch=m,
                    stage=stage,
                )
            )
            return end_s

        for step in range(self.steps):
            for p in range(self.pipelines):
                for role, kind, order in (
                    ("activation", "forward", list(range(self.stages))),
                    ("activation_grad", "backward", list(reversed(range(self.stages)))),
                ):
                    for m in range(self.microbatches):
                        there = 0.0
                        for i, stage in enumerate(order):
                            me = self.name(p, stage)
                            end_s = work(me, kind, there, step, m, stage)
                            if i + 1 < len(order):
                                to = self.name(p, order[i + 1])
                                there = send(me, to, end_s, step, m, role)
                for stage in range(self.stages):
                    work(self.name(p, stage), "update", 0.0, step, -1, -1)
            reached = max(free.values())  # an update waits for all: the global norm
            for name in free:
                free[name] = reached
        return trace

    def network(self) -> Network:
        n = len(self.names)
        index = {name: i for i, name in enumerate(self.names)}
        bandwidth = np.full((n, n), self.rate)
        for (a, b), rate in self.rates.items():
            bandwidth[index[a], index[b]] = rate
        ends = np.full(n, 4 * self.rate)
        peers = tuple(PeerId(x) for x in self.names)
        return Network(peers, np.full((n, n), self.latency_s), bandwidth, ends, ends)

    def report(self) -> broker_pb2.PlanReport:
        report = broker_pb2.PlanReport(reasons=["four stages: one peer cannot hold the model"])
        for stage in range(self.stages):
            holders = [self.name(p, stage) for p in range(self.pipelines)]
            for holder in holders:
                share = self.forward_s * (3 * self.microbatches + 0.3)
                report.predicted.peers.add(
                    peer=holder, compute_s=share, device_bytes=10**9 * (1 + stage % 3), bubble=0.4
                )
                if stage + 1 < self.stages:
                    to = self.name(holders.index(holder), stage + 1)
                    size = self.microbatches * self.size_bytes
                    report.predicted.links.add(source=holder, destination=to, bytes=size)
        return report

    def summary(self, **more: Any) -> Summary:
        n, sites = len(self.names), max(2, min(12, len(self.names) // 3))
        rng = np.random.default_rng(1)
        losses = 2 + 3 * np.exp(-np.arange(self.steps * 20) / 60)
        losses = losses + rng.normal(0, 0.1, losses.size)
        places = tuple(
            {"name": name, "at": at, "peers": list(self.names[i::sites])}
            for i, (name, at) in enumerate(list(EARTH.items())[:sites])
        )
        given: dict[str, Any] = {
            "name": "two regions",
            "world": "virtual",
            "seed": 7,
            "run": "r-3f2",
            "peers": n,
            "stages": self.stages,
            "loss_first": 5.0,
            "loss_last": 2.1,
            "eval_loss": 2.3,
            "losses": tuple(losses),
            "evaluations": tuple((i, float(losses[i]) + 0.2) for i in range(0, losses.size, 40)),
            "step_s": 3.2,
            "tokens_per_s": 12_345.0,
            "predicted_step_s": 2.9,
            "bubble": 0.4,
            "bytes_on_wire": 3 * 10**9,
            "against": {"best single peer": 6.5, "uniform split": 4.4},
            "against_measured": {"dense wire": 7.1},
            "places": places,
            "memory": tuple(
                {
                    "peer": name,
                    "predicted_bytes": 2e9,
                    "peak_bytes": 1.2e9 + 3e8 * (i % 5),
                    "limit_bytes": 4e9,
                }
                for i, name in enumerate(self.names)
            ),
            "again": "shoal sim two-regions.toml --seed 7",
            "checks": 81_234,
            "faults_injected": 2,
            "faults_fired": 2,
        }
        return Summary(**{**given, **more})


EARTH = {
    "frankfurt": (50.1, 8.7),
    "oregon": (45.6, -121.2),
    "tokyo": (35.7, 139.7),
    "sao-paulo": (-23.5, -46.6),
    "virginia": (39.0, -77.5),
    "london": (51.5, -0.1),
    "zurich": (47.4, 8.5),
    "sydney": (-33.9, 151.2),
    "mumbai": (19.1, 72.9),
    "cape-town": (-33.9, 18.4),
    "stockholm": (59.3, 18.1),
    "singapore": (1.35, 103.8),
}


class Checked(HTMLParser):
    """Every element is closed, none runs a program or loads anything, and text is kept."""

    VOID = frozenset({"meta", "rect", "circle", "polyline", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in ("src", "href", "xlink:href"), (tag, name, value)
        if tag not in self.VOID or (tag != "meta" and self.get_starttag_text()[-2:] != "/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def report(folder: Path, world: Pretended, trace: Trace | None = None, **more: Any) -> str:
    trace = trace or world.trace()
    write_report(folder, world.summary(**more), trace, world.report(), world.network())
    return (folder / "report.html").read_text()


@pytest.mark.parametrize("pipelines", [1, 12, 20])
def test_the_page_stands_by_itself(tmp_path: Path, pipelines: int) -> None:
    text = report(tmp_path, Pretended(pipelines=pipelines, steps=4))
    page = Checked(text)
    assert not page.tags & {"script", "img", "link", "iframe", "object"}
    assert "url(" not in text
    assert "@import" not in text
    for title in ("Timeline", "The whole run", "Loss", "Tokens per second", "Links", "Places"):
        assert any(t.startswith(title) for t in page.text), title
    for title in ("Bytes by role and codec", "Memory", "Predicted and measured", "Why this plan"):
        assert any(t.startswith(title) for t in page.text), title
    pictures = {p.stem for p in tmp_path.glob("*.png")}
    assert pictures == {"timeline", "overview", "loss", "speed", "links", "map", "bytes", "memory"}
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert Trace.read(tmp_path / "events.jsonl").spans
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["event_log"] == Trace.read(tmp_path / "events.jsonl").digest()
    assert summary["goodput"] == pytest.approx(1.0)


def test_names_cannot_become_elements(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "a&b\"'", "\x1b[31mred", "</title></svg>"]
    world = Pretended(names=names)
    trace = world.trace()
    trace.add(Mark(at_s=1, who="<img src=x>", what="kill", text="<b onclick=x>"))
    text = report(
        tmp_path,
        world,
        trace,
        name="<script>",
        error="<script>",
        exit=1,
        again="<i>",
        spares=("<script>x",),
        timing_valid=False,
        timing_reason="<script>",
    )
    page = Checked(text)
    assert not page.tags & {"script", "img", "b onclick", "i"}
    assert "\x1b" not in text
    assert any("<script>alert(1)</script> computes" in t for t in page.text)


def test_a_page_of_nothing_measured_has_no_sections(tmp_path: Path) -> None:
    write_report(tmp_path, Summary(name="job", world="virtual", seed=1), Trace())
    page = Checked((tmp_path / "report.html").read_text())
    assert "section" not in page.tags
    assert not list(tmp_path.glob("*.png"))
    assert not (tmp_path / "events.jsonl").exists()
    assert "event log" not in (tmp_path / "report.html").read_text()


def test_losses_that_are_no_numbers_are_left_out_of_the_picture(tmp_path: Path) -> None:
    text = report(tmp_path, Pretended(), losses=(3.0, math.nan, math.inf, 2.0))
    Checked(text)
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text).lower().replace("finan", "")


def test_every_picture_fits_its_frame(tmp_path: Path) -> None:
    long = [f"a-volunteer-with-a-name-that-does-not-end-{i}-{'x' * 40}" for i in range(48)]
    text = report(tmp_path, Pretended(pipelines=12, names=long, steps=4))
    for box, inside in re.findall(r'<svg viewBox="0 0 ([^"]*)"(.*?)</svg>', text, re.S):
        width, height = map(float, box.split())
        for x, y, w, h in re.findall(
            r'<rect [^>]*x="([-\d.]+)" y="([-\d.]+)" width="([-\d.]+)" height="([-\d.]+)"', inside
        ):
            assert float(x) >= -0.5
            assert float(x) + float(w) <= width + 1
            assert float(y) >= -0.5
            assert float(y) + float(h) <= height + 1
        for x, y, size, rest, label in re.findall(
            r'<text [^>]*x="([-\d.]+)" y="([-\d.]+)" font-size="([\d.]+)"([^>]*)>'
            r"(?:<title>[^<]*</title>)?([^<]*)",
            inside,
        ):
            wide = 0.5 * float(size) * len(unescape(label))
            left = float(x) - wide * ("end" in rest) - wide / 2 * ("middle" in rest)
            assert left >= -2, label
            assert left + wide <= width + 2, label
            assert 0 < float(y) <= height + 1, label
