"""[sync] of a job: each method has its kind and options of its own, and what the planner decides is
not asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.job import Job, SettingsError
from shoal.job.methods import method_text

from .problems import problem


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            '[codec]\nsync = "int8"',
            '`codec.sync` is "int8", and sync.method = "sparse-loco" writes',
        ),
        (
            "[sync.options]\ndensity = 2",
            "`sync.options.density` is 2.0: expected a number in (0, 1]",
        ),
        ("[sync.options]\nbits = 4", "`sync.options.bits` is 4: expected 2 or 32"),
        (
            "[sync.options]\nresult_density = 2",
            "`sync.options.result_density` is 2.0: expected a number in [0, 1]",
        ),
        ("[sync.options]\nmomentum = 0.9", "`sync.options.momentum` is not a known key"),
    ],
)
def test_sparse_loco_has_options_and_a_codec_of_its_own(
    tmp_path: Path, tables: str, said: str
) -> None:
    sync = '[sync]\nkind = "local"\nmethod = "sparse-loco"'
    assert said in problem(tmp_path, f"[train]\nsteps = 3\n{sync}\n{tables}")


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        (
            '[codec]\nsync = "int8"',
            '`codec.sync` is "int8", and sync.method = "streaming-diloco" writes',
        ),
        ("[sync.options]\nmix = 1", "`sync.options.mix` is 1.0: expected a number in [0, 1)"),
        ("[sync.options]\nbits = 2", "`sync.options.bits` is 2: expected 4 or 32"),
        ("[sync.options]\nfragments = 7", "`sync.options.fragments` is 7: expected at most one"),
        (
            "[sync.options]\noverlap = 3",
            "`sync.options.overlap` is 3: expected fewer steps than a round has, 3",
        ),
        (
            "[sync.options]\noverlap = -1",
            '`sync.options.overlap` is -1: expected 0, more, or "auto"',
        ),
    ],
)
def test_streaming_diloco_has_options_and_a_codec_of_its_own(
    tmp_path: Path, tables: str, said: str
) -> None:
    sync = '[sync]\nkind = "local"\nmethod = "streaming-diloco"\nevery = 6'
    assert said in problem(tmp_path, f"[train]\nsteps = 3\n{sync}\n{tables}")


@pytest.mark.parametrize(
    ("sync", "replicas", "said"),
    [
        ("", 1, '`plan.replicas` is 1 with sync.kind = "gossip", in which replicas meet in pairs'),
        ('method = "diloco"', 4, '`sync.method` is "diloco", of kind "local": expected, with kind'),
        ('method = "exact"', 4, '`sync.method` is "exact", of kind "allreduce": expected, with'),
        ("every = 0", 4, "`sync.every` is 0: expected 1 or more"),
        ("options = { lr = 0.7 }", 4, "`sync.options.lr` is not a known key"),
        ("options = { keep = 0 }", 4, "`sync.options.keep` is 0.0: expected a number in (0, 1]"),
        ("options = { threshold = 3 }", 4, "`sync.options.threshold` is not readable: 3 has no"),
        ("options = { recent = 0 }", 4, "`sync.options.recent` is 0: expected 1 or more"),
        ('method = "ring"\noptions = { keep = 1 }', 4, "`sync.options.keep` is not a known key"),
        ('method = "noloco"\noptions = { momentum = 1 }', 4, "expected a number in [0, 1)"),
        ('method = "saps-outer"\noptions = { lr = 0 }', 4, "is 0.0: expected more than 0"),
        ('[codec]\nsync = "bf16"', 4, 'and sync.method = "saps" writes'),
        ("[output]\nevery = 3", 4, 'not supported yet: with sync.kind = "gossip", only 0 is'),
    ],
)
def test_gossip_is_between_replicas_and_has_options_by_method(
    tmp_path: Path, sync: str, replicas: int, said: str
) -> None:
    train = "[train]\nsteps = 3\nbatch = 8\nmicrobatch = 1"
    tables = f'{train}\n[plan]\nreplicas = {replicas}\n[sync]\nkind = "gossip"\n{sync}'
    assert said in problem(tmp_path, tables)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            'method = "gtopk"\noptions = { ratoi = 3 }',
            "`sync.options.ratoi` is not a known key; did",
        ),
        ('method = "gtopk"\noptions = { rank = 3 }', "(known: ratio)"),
        ('method = "gtopk"\noptions = { ratio = 0 }', "`sync.options.ratio` is 0.0: expected 1"),
        ('method = "powersgd"\noptions = { rank = 1.5 }', "is 1.5: expected an integer"),
        ("options = { rank = 1 }", "`sync.options.rank` is not a known key"),
        ('method = "gtopk"\ncollective = "ring"', "`sync.collective` is not supported yet"),
        ('method = "lags"\n[codec]\ngrad = "bf16"', "`codec.grad` is not supported yet"),
        ('method = "lags"\n[codec]\nfeedback = "ahead"', "`codec.feedback` is not supported yet"),
        ('[codec]\nfeedback = "dgc"', "`codec.feedback` is not supported yet"),
        ('method = "demo"', "`train.optimizer` is not supported yet"),
        ('method = "demo"\noptions = { decay = 1.0 }', "expected a share in [0, 1)"),
    ],
)
def test_methods_are_read_strictly(tmp_path: Path, body: str, says: str) -> None:
    assert says in problem(tmp_path, f"[train]\nsteps = 3\n[sync]\n{body}")


def test_a_method_has_its_options_by_name_in_plans() -> None:
    assert method_text("exact", {}) == "mean"
    assert method_text("powersgd", {"rank": 2}) == "powersgd:rank=2,saving=2"
    assert method_text("gtopk", {"ratio": 12345678.5}) == "gtopk:ratio=12345678.5"


@pytest.mark.parametrize(
    ("changes", "kind", "options", "every"),
    [
        (["sync.method=diloco"], "local", {"lr": 0.5}, 4),
        (["sync.method=saps-outer"], "gossip", {"threshold": "20Mbit", "lr": 0.5}, 4),
        (["sync.method=saps"], "gossip", {"threshold": "20Mbit"}, 4),
        (["sync.options={momentum=0.5}", "sync.method=diloco"], "local", {"momentum": 0.5}, 4),
        (["sync.method=exact", "plan.replicas=1"], "allreduce", {}, "auto"),
    ],
)
def test_a_method_brings_its_kind_along(
    changes: list[str], kind: str, options: dict[str, Any], every: object
) -> None:
    own = {"threshold": "20Mbit", "lr": 0.5}
    sync = {"kind": "gossip", "method": "saps-outer", "every": 4, "options": own}
    found = Job(model="a:b", steps=8, plan={"replicas": 4}, sync=sync).with_changes(changes).sync
    assert (found.kind, dict(found.options), found.every) == (kind, options, every)


def test_a_kind_that_is_said_beside_the_method_is_taken_at_its_word() -> None:
    job = Job(model="a:b", steps=8)
    with pytest.raises(SettingsError, match=r'`sync.method` is "diloco", of kind "local"'):
        job.with_changes(["sync.method=diloco", "sync.kind=gossip"])
    with pytest.raises(SettingsError, match=r'`sync.method` is "dilco"'):
        job.with_changes(["sync.method=dilco"])


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ('method = "diloco"', '`sync.method` is given with kind = "auto"'),
        ("options = { lr = 0.5 }", '`sync.options` is given with kind = "auto"'),
        ("[plan]\nreplicas = 2", '`plan.replicas` is not supported yet: "auto" is'),
        ("[output]\nevery = 5", "`output.every` is not supported yet"),
        ('[recovery]\nladder = ["neighbour"]', "`recovery.ladder` is not supported yet"),
    ],
)
def test_what_is_chosen_is_not_asked_for(tmp_path: Path, tables: str, says: str) -> None:
    assert says in problem(tmp_path, f'[train]\nsteps = 3\n[sync]\nkind = "auto"\n{tables}')


def test_what_is_decided_is_a_job_of_that_kind() -> None:
    job = Job(model="m.py:f", steps=3, batch=8, microbatch=2, sync={"kind": "auto", "every": 7})
    assert job.undecided
    assert job.rounds is None
    apart, equal = job.decided("local", 2), job.decided("allreduce", 1)
    assert apart.rounds is not None
    assert (apart.rounds.method, apart.replicas, apart.sync.steps) == ("diloco", 2, 7)
    assert (equal.sync.within, equal.replicas, equal.sync.steps) == ("exact", 1, 1)
    assert not apart.undecided
    assert not equal.undecided
