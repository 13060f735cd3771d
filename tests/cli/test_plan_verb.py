"""`shoal plan`: what it shows before anything runs, and what it says when there is no plan."""

from __future__ import annotations

import gc
import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.cli.base import few_collections
from shoal.client.show.preview import as_json, page
from shoal.client.submission import draft
from shoal.dag.plan.cut import cut, tied_groups
from shoal.dag.schedule.convert_plan import microbatches_of, plan_from_proto
from shoal.dag.schedule.flow import Flow
from shoal.dag.transforms.vocabulary import planned_graph
from shoal.job import Job
from shoal.proto.broker_pb2 import (
    PeerState,
    Plan,
    PlanReport,
    PreviewAnswer,
    Profile,
    StageSlot,
)
from shoal.sim.scenario.scenario import Scenario
from shoal.sim.simulate import preview_cluster

pytestmark = pytest.mark.usefixtures("captures_once")

JOB = """
version = 1
[model]
factory = "shoal.examples.gpt:gpt"
args = { layers = 2, width = 16, heads = 2, length = 16, dropout = 0.0 }
[data]
length = 16
[train]
steps = 5
batch = 8
microbatch = 2
"""

PEERS = """
version = 1
[[peers]]
name = "near-{1..2}"
place = "lab"
device = "rtx-3060"
[[peers]]
name = "far"
place = "home"
device = "rtx-3060"
up = "1Mbit"
[[links]]
from = "lab"
to = "home"
latency = "40ms"
bandwidth = "50Mbit"
"""


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("plan") / "small.toml"
    path.write_text(JOB)
    return path, draft(Job.from_toml(path))


def preview(drafted, cluster: str, **plan: object):
    path, (spec, graph) = drafted
    file = path.with_name("cluster.toml")
    file.write_text(cluster)
    job = json.loads(spec.job)
    job["plan"] |= plan
    changed = type(spec)()
    changed.CopyFrom(spec)
    changed.job = json.dumps(job)
    return preview_cluster(Scenario.from_toml(file, job=path), changed, graph)


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.output


def test_every_stage_peer_and_link_of_the_plan_is_shown(drafted) -> None:
    answer = preview(drafted, PEERS, stages=3, scheduler="uniform")
    plan, report = answer.plan, answer.report
    assert [list(s.holders) for s in plan.stages] == [["near-1"], ["near-2"], ["far"]]
    assert len(answer.operators) == 3
    assert sum(span.share for span in answer.operators) == pytest.approx(1)
    assert report.predicted.step_s > 0
    assert {p.peer for p in report.predicted.peers} == {"near-1", "near-2", "far"}
    assert all(0 <= p.bubble <= 1 and p.device_bytes for p in report.predicted.peers)
    pairs = {(x.source, x.destination) for x in report.predicted.links}
    assert ("near-2", "far") in pairs
    assert any("far" in text for text in report.predicted.bottlenecks)


def test_it_says_when_one_peer_alone_is_faster(drafted) -> None:
    answer = preview(drafted, PEERS, stages=3, scheduler="uniform")
    names = [a.name for a in answer.report.predicted.alternatives]
    assert "best single peer" in names
    assert "whole replicas" in names
    assert any("a pipeline over this network is the wrong choice" in n for n in answer.notes)


def of_kind(drafted, kind: str, cluster: str, **plan: object) -> PreviewAnswer:
    path, (spec, graph) = drafted
    job = json.loads(spec.job)
    job["sync"] |= {"kind": kind, "method": "", "every": "auto"}
    changed = type(spec)()
    changed.CopyFrom(spec)
    changed.job = json.dumps(job)
    return preview((path, (changed, graph)), cluster, **plan)


def test_replicas_are_shown_beside_one_plan(drafted) -> None:
    answer = of_kind(drafted, "local", PEERS, replicas=2)
    found = answer.formation
    assert (found.kind, len(found.replicas)) == ("local", 2)
    assert sum(r.steps for r in found.replicas) == 2 * found.every == 100
    assert microbatches_of(answer.plan) == 4, "the plan beside it trains the whole batch"
    text = page(answer, "small")
    for words in (
        "small: 2 replicas",
        "recommended: 2 replicas that exchange every 50 steps",
        "replica 1: ",
        "between replicas: ",
        "bytes of a round and peer: at most ",
        "memory of rounds: ",
        "a round: 400 samples in ",
        "it hangs on ",
        "beside it: one replica: ",
        "beside it: all-reduce each step: ",
        "beside it: best single peer: ",
        "small: one replica with equal weights, ",
    ):
        assert words in text
    json.dumps(told := as_json(answer), allow_nan=False)
    assert [len(r["peers"]) for r in told["formation"]["replicas"]] == [1, 1]
    assert "formation" not in as_json(preview(drafted, PEERS))


def test_what_auto_takes_is_what_is_recommended(drafted) -> None:
    answer = of_kind(drafted, "auto", PEERS)
    now = answer.formation.every * answer.formation.batch
    now /= answer.formation.local_s + answer.formation.exposed_s
    rate = 8 / answer.report.predicted.step_s
    assert (answer.formation.kind == "local") == (0.95 * now > rate)


def test_a_replica_count_that_no_memory_allows_is_refused(drafted) -> None:
    small = PEERS.replace('device = "rtx-3060"', 'device = "rtx-3060"\nmemory = "200KiB"', 1)
    small = small.replace("near-{1..2}", "near-1")
    answer = of_kind(drafted, "local", small, replicas=2)
    print(answer.reason)
    assert answer.reason.code == "memory"
    assert "2 replicas hold the model 2 times" in answer.reason.text


def test_every_peer_that_is_left_out_has_a_reason(drafted) -> None:
    answer = preview(drafted, PEERS)
    used = {h for s in answer.plan.stages for h in s.holders}
    spares = {s.peer: s.reason for s in answer.report.spares}
    assert used | set(spares) == {"near-1", "near-2", "far"}
    assert all(spares.values())
    assert not used & set(spares)


@pytest.mark.parametrize("planner", ["uniform", "equal-compute", "op-fence", "auto"])
def test_no_feasible_plan_says_what_is_short_by_how_much_and_what_would_help(
    drafted, planner: str
) -> None:
    small = PEERS.replace('device = "rtx-3060"', 'device = "rtx-3060"\nmemory = "1KiB"')
    answer = preview(drafted, small, scheduler=planner)
    assert not answer.HasField("plan")
    assert "memory" in answer.reason.text
    assert "short by" in answer.reason.text
    assert answer.reason.code == "memory"


def test_the_verb_prints_tables_for_people_and_fields_for_programs(drafted) -> None:
    path, _ = drafted
    cluster = path.with_name("peers.toml")
    cluster.write_text(PEERS)
    code, text = call("plan", str(path), "--cluster", str(cluster), "--json")
    assert code == 0, text
    found = json.loads(text[text.index("{") :])
    assert found["plan"]["predicted"]["step_s"] > 0
    assert found["plan"]["microbatches"] == 4
    changes = ["--set", "train.batch=2", "--set", "train.microbatch=1"]
    code, text = call("plan", str(path), *changes, "--cluster", str(cluster), "--json")
    assert code == 0, text
    assert json.loads(text[text.index("{") :])["plan"]["microbatches"] == 2
    code, text = call("plan", str(path), "--cluster", str(cluster))
    assert code == 0, text
    for word in ("predicted", "bottleneck", "compared with", "stage", "bubble", "offered", "why"):
        assert word in text


@pytest.mark.parametrize("codec", ["", "int8"])
def test_the_step_is_shown_as_the_plan_lists_and_predicts_it(drafted, codec: str) -> None:
    path, (spec, graph) = drafted
    changed = type(spec)()
    changed.CopyFrom(spec)
    if codec:
        job = json.loads(spec.job)
        job["codec"]["default"] = codec
        changed.job = json.dumps(job)
    answer = preview((path, (changed, graph)), PEERS, stages=3, pipelines=1)
    assert bool(answer.plan.codecs) == bool(codec)
    ends = [row.end_s[-1] for row in answer.step]
    assert max(ends) == pytest.approx(answer.report.predicted.step_s, rel=1e-9)
    plan = plan_from_proto(answer.plan)
    form = planned_graph(graph.bind(plan.microbatch_size), plan)
    stages = cut(form, [(s.start, s.stop) for s in plan.stages])
    flow = Flow(plan, stages, tied_groups(form, stages))
    assert {r.peer: tuple(r.actions) for r in answer.step} == {
        p: tuple(map(str, flow.actions(p))) for p in plan.peers
    }
    computed = {p.peer: p.compute_s for p in answer.report.predicted.peers}
    for row in answer.step:
        spans = list(zip(row.start_s, row.end_s, strict=True))
        assert all(a <= b for a, b in spans)
        assert all(one[1] <= two[0] for one, two in pairwise(spans)), "one action at a time"
        assert sum(b - a for a, b in spans) == pytest.approx(computed[row.peer])


def test_the_planned_step_is_drawn_into_a_file(drafted, tmp_path: Path) -> None:
    path, _ = drafted
    cluster, file = path.with_name("peers.toml"), tmp_path / "step.png"
    cluster.write_text(PEERS)
    code, text = call("plan", str(path), "--cluster", str(cluster), "--picture", str(file))
    assert code == 0, text
    assert str(file) in text
    assert file.read_bytes().startswith(b"\x89PNG")
    nowhere = tmp_path / "none" / "step.png"
    code, text = call("plan", str(path), "--cluster", str(cluster), "--picture", str(nowhere))
    assert code != 0
    assert str(nowhere) in text
    assert "Traceback" not in text


def test_one_peer_alone_is_compared_under_the_batching_that_suits_it(drafted) -> None:
    path, (spec, graph) = drafted
    free = type(spec)()
    free.CopyFrom(spec)
    free.microbatch_sizes[:] = [8]
    answer = preview((path, (free, graph)), PEERS, stages=1, pipelines=1)
    alone = {a.name: a for a in answer.report.predicted.alternatives}["best single peer"]
    assert answer.plan.microbatch_size == 8
    assert alone.step_s == pytest.approx(answer.report.predicted.step_s)
    assert "1 microbatch of 8" in alone.text
    assert not any("wrong choice" in n for n in answer.notes)


def test_a_speed_that_no_device_has_is_clamped_and_shown(drafted) -> None:
    table = '{ flops = 1e30, memory_bandwidth = "900GB/s", overhead = "10us" }'
    answer = preview(drafted, PEERS.replace('"rtx-3060"', table, 1))
    assert any("near-1 reports" in n and "clamped" in n for n in answer.notes)
    assert "clamped" in page(answer, "small")


def test_json_has_every_field_and_its_numbers_are_numbers(drafted) -> None:
    found = as_json(preview(drafted, PEERS, stages=3, scheduler="uniform"))
    json.dumps(found, allow_nan=False)
    first = found["plan"]["stages"][0]
    assert first["start"] == 0
    assert first["recompute"] is False
    assert all(type(x["bytes"]) is int for x in found["plan"]["predicted"]["links"])
    assert type(found["peers"][0]["profile"]["device_memory_bytes"]) is int
    assert found["peers"][0]["profile"]["speeds"]["product_flops_per_s"] > 0
    assert "reason" not in found
    assert "report" not in found, "what is said of the plan stands in it"
    assert found["plan"]["reasons"]
    found = as_json(PreviewAnswer(plan=Plan(), report={"predicted": {"step_s": float("nan")}}))
    assert found["plan"]["predicted"]["step_s"] is None


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_page_keeps_to_the_terminal_and_loses_no_word(drafted, width: int) -> None:
    answer = preview(drafted, PEERS, stages=2, pipelines=1, scheduler="op-fence")
    narrow, whole = page(answer, "small", width), page(answer, "small")
    assert max(map(len, narrow.splitlines())) <= width
    for texts in (answer.notes, answer.report.reasons, [s.reason for s in answer.report.spares]):
        for text in texts:
            assert text in whole
            assert text in " ".join(narrow.split())
    assert "1 microbatches" not in whole


def test_names_from_the_network_write_no_control_characters() -> None:
    peers = [PeerState(peer="p", profile=Profile(name="\x1b[31mred [bold]"))]
    plan = Plan(stages=[StageSlot(start=0, stop=1, holders=["p"])], microbatch_size=1)
    report = PlanReport()
    report.predicted.peers.add(peer="p", compute_s=2500.0)
    text = page(PreviewAnswer(plan=plan, report=report, peers=peers), "job", 80)
    assert "\x1b" not in text
    assert "[bold]" in text
    assert "2500 s" in text


CODEC = '[job_overrides.plan]\nstages = 3\nscheduler = "uniform"\n[job_overrides.codec]\n'


def test_codecs_of_a_clusters_job_are_shown_for_each_link(drafted) -> None:
    path, _ = drafted
    cluster = path.with_name("codecs.toml")
    cluster.write_text(PEERS + CODEC + 'activation = "bf16"\n')
    code, text = call("plan", str(path), "--cluster", str(cluster), "--json")
    assert code == 0, text
    links = json.loads(text[text.index("{") :])["plan"]["predicted"]["links"]
    [use] = [
        use
        for link in links
        if (link["source"], link["destination"]) == ("near-2", "far")
        for use in link["codecs"]
        if use["role"] == "activation"
    ]
    assert use["codec"].startswith("bf16")
    assert use["dense_bytes"] == 2 * use["bytes"] > 0
    assert use["saved_s"] > 0
    assert use["error"] > 0
    code, text = call("plan", str(path), "--cluster", str(cluster))
    assert code == 0, text
    shown = [line for line in text.splitlines() if line.startswith("near-2 -> far")]
    assert any("bf16" in line and "activation" in line for line in shown)


def test_overrides_are_for_the_job_that_the_cluster_names(drafted) -> None:
    path, _ = drafted
    cluster = path.with_name("overrides.toml")
    overrides = PEERS + "[job_overrides.train]\nmicrobatch = 4\n"
    other = path.with_name("other.toml")
    other.write_text(JOB)
    for named, microbatches in (("small.toml", 2), ("other.toml", 4), ("", 2)):
        job = f'job = "{named}"\n' if named else ""
        cluster.write_text(overrides.replace("version = 1\n", f"version = 1\n{job}", 1))
        code, text = call("plan", str(path), "--cluster", str(cluster), "--json")
        assert code == 0, text
        assert json.loads(text[text.index("{") :])["plan"]["microbatches"] == microbatches
        assert ("without job_overrides of overrides" in text) == (named == "other.toml")


def test_a_codec_that_there_is_not_is_wrong_input(drafted) -> None:
    path, _ = drafted
    cluster = path.with_name("codecs.toml")
    cluster.write_text(PEERS + CODEC + 'default = "zip"\n')
    code, text = call("plan", str(path), "--cluster", str(cluster))
    assert code == 2, text
    assert "zip" in text
    assert "Traceback" not in text


def test_wrong_input_is_said_in_one_line(drafted, tmp_path: Path) -> None:
    path, _ = drafted
    cluster = tmp_path / "peers.toml"
    cluster.write_text(PEERS.replace("rtx-3060", "rtx-3061"))
    code, text = call("plan", str(path), "--cluster", str(cluster))
    assert code == 2
    assert "rtx-3061" in text
    assert "rtx-3060" in text
    assert "Traceback" not in text
    code, text = call("plan", str(path), "--cluster", str(cluster), "--broker", "127.0.0.1:1")
    assert code == 2
    assert "one of --cluster, --broker" in text


def test_a_verb_that_collects_seldom_leaves_the_collector_as_it_was() -> None:
    before = gc.get_threshold()
    inside = []

    def interrupted() -> None:
        with few_collections():
            inside.append((gc.isenabled(), gc.get_threshold()[0] > before[0]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert inside == [(True, True)]
    assert gc.get_threshold() == before
