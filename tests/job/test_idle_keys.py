"""A key that would change nothing beside the rest of the job is refused, not ignored."""

import pytest

from shoal.job import Job, SettingsError

IDLE = [
    ("train", {"optimizer": "sgd", "betas": [0.9, 0.99]}, "train.betas", 'optimizer = "sgd"'),
    ("train", {"optimizer": "lion", "eps": 1e-6}, "train.eps", 'optimizer = "lion"'),
    ("train", {"momentum": 0.5}, "train.momentum", 'optimizer = "adamw"'),
    ("train", {"no_muon": ["*"]}, "train.no_muon", 'optimizer = "adamw"'),
    ("train", {"schedule": "constant", "lr_final": 0.5}, "train.lr_final", "constant"),
    ("train", {"no_decay": ["*.a"], "weight_decay": 0.0}, "train.no_decay", "weight_decay = 0"),
    (
        "train",
        {"optimizer": "sgd", "momentum": 0.0, "state_dtype": "bf16"},
        "train.state_dtype",
        "without momentum",
    ),
    ("data", {"validation": "b", "holdout": 0.3}, "data.holdout", "data.validation"),
    ("data", {"kind": "arrays", "length": 64}, "data.length", 'kind = "arrays"'),
    ("output", {"every": 0, "keep": 5}, "output.keep", "no checkpoints"),
    ("codec", {"ratio": 20}, "codec.ratio", "adatopk"),
    ("codec", {"error_budget": 0.1}, "codec.error_budget", '"auto"'),
    ("codec", {"feedback": "ef21"}, "codec.feedback", 'codec.grad = "none"'),
    ("codec", {"sync": "int8"}, "codec.sync", "codec.grad is what"),
    ("recovery", {"ladder": [], "snapshot_every": 9}, "recovery.snapshot_every", "ladder without"),
    ("recovery", {"ladder": ["sibling"], "warm_spares": 2}, "recovery.warm_spares", "ladder"),
    ("sync", {"quorum": 1}, "sync.quorum", 'kind = "allreduce"'),
    ("sync", {"deadline": "3s"}, "sync.deadline", 'kind = "allreduce"'),
    ("train", {"eval_every": 5, "eval_batches": 0}, "train.eval_every", "eval_batches = 0"),
]
ONE = {"stages": 1, "pipelines": 1}
UNSHARED = [
    ({"stages": 1}, {"codec": {"activation": "int8"}}, "codec.activation", "plan.stages = 1, in"),
    ({"stages": 1}, {"codec": {"activation_grad": "int8"}}, "codec.activation_grad", "stages = 1"),
    (ONE, {"codec": {"grad": "int8"}}, "codec.grad", "nobody exchanges"),
    (ONE, {"codec": {"default": "int8", "feedback": "ef21"}}, "codec.feedback", "nobody exchanges"),
    (ONE, {"sync": {"collective": "ring"}}, "sync.collective", "nobody exchanges"),
    ({"pipelines": 1}, {"sync": {"method": "powersgd"}}, "sync.method", "no stage has a second"),
    (ONE, {"codec": {"default": "int8"}}, "codec.default", "nobody exchanges"),
    ({}, {"data": {"holdout": 0.0}, "train": {"eval_batches": 2}}, "train.eval_batches", "holdout"),
]


def test_one_holder_of_each_stage_exchanges_what_stages_share() -> None:
    codec = {"grad": "topk:ratio=50", "feedback": "none"}
    for plan in ({"pipelines": 1}, {"pipelines": 1, "stages": 3}):
        Job(model="a:b", steps=4, plan=plan, codec=codec).check_idle()


BESIDE = {"train": {"steps": 4}, "data": {"kind": "chat", "source": "a"}}


def job(table: str, keys: dict) -> Job:
    return Job(model="a:b", **BESIDE | {table: BESIDE.get(table, {}) | keys})


@pytest.mark.parametrize(("table", "keys", "key", "beside"), IDLE)
def test_a_key_of_which_nothing_would_come_is_refused(table, keys, key, beside) -> None:
    with pytest.raises(SettingsError) as caught:
        job(table, keys).check_idle()
    said = str(caught.value)
    assert said.startswith(f"`{key}` is ")
    assert "changes nothing with" in said
    assert beside in said


@pytest.mark.parametrize(("plan", "tables", "key", "beside"), UNSHARED)
def test_what_is_said_of_links_that_no_plan_has_is_refused(plan, tables, key, beside) -> None:
    tables = {"train": {}, "plan": plan, **tables}
    tables["train"] = {"steps": 4, **tables["train"]}
    with pytest.raises(SettingsError, match=f"`{key}` is .* changes nothing with .*{beside}"):
        Job(model="a:b", **tables).check_idle()
    Job(model="a:b", **tables | {"plan": {}, "data": {"holdout": 0.1}}).check_idle()


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("train", {"optimizer": "muon", "betas": [0.9, 0.99], "eps": 1e-6, "momentum": 0.95}),
        ("train", {"optimizer": "adamw8bit", "betas": [0.9, 0.99], "eps": 1e-6}),
        ("data", {"validation": "b", "holdout": 0.0}),
        ("data", {"length": 64}),
        ("train", {"no_decay": ["*.a"]}),
        ("train", {"optimizer": "sgd", "state_dtype": "bf16"}),
        ("output", {"every": 5, "keep": 5}),
        ("train", {"momentum": 0.0, "schedule": "constant", "lr_final": 1.0}),
        ("codec", {"activation": "adatopk", "ratio": 20, "feedback": "none"}),
        ("codec", {"default": "topk:ratio=20", "feedback": "ef21"}),
        ("sync", {"kind": "auto", "quorum": 1, "deadline": "3s"}),
        ("recovery", {"ladder": [], "warm_spares": 0}),
    ],
)
def test_one_that_says_what_is_done_is_taken(table, keys) -> None:
    job(table, keys).check_idle()


@pytest.mark.parametrize(("table", "keys"), [idle[:2] for idle in IDLE])
def test_what_a_broker_has_taken_once_it_takes_again(table, keys) -> None:
    """A journal is read by a broker that refuses more than the one that wrote it."""
    made = job(table, keys)
    found = Job.from_json(made.to_json())
    assert (found.train, found.codec, found.sync) == (made.train, made.codec, made.sync)
    assert (found.output.keep, found.output.every) == (made.output.keep, made.output.every)


def test_a_time_between_evaluations_of_nothing_is_refused() -> None:
    def asked(every: int, **data) -> Job:
        return Job(model="a:b", data=data, steps=9, eval_every=every)

    with pytest.raises(SettingsError, match=r"`train.eval_every` is 5.*data.holdout = 0"):
        asked(5, holdout=0.0).check_idle()
    for taken in (asked(5), asked(0, holdout=0.0), asked(100, holdout=0.0)):
        taken.check_idle()
    asked(5, kind="chat", source="a", holdout=0.0, validation="b").check_idle()
    asked(5, where="peer", source="a", holdout=0.0).check_idle()


@pytest.mark.parametrize("name", ["n" * 201, "two\nlines", "a\udcff"])
def test_a_name_that_no_broker_takes_is_refused_before_anything_is_captured(name: str) -> None:
    with pytest.raises(SettingsError, match=r"`name` is .* at most 200 printable"):
        Job(model="a:b", name=name, steps=1)
    assert Job(model="a:b", name="n" * 200, steps=1).name


def test_what_the_planner_decides_leaves_no_idle_key() -> None:
    asked = {"sync": {"kind": "auto", "quorum": 1, "deadline": "3s"}, "codec": {"sync": "int8"}}
    found = Job(model="a:b", steps=4, **asked)
    assert found.decided("local", 2).codec.sync == "int8"
    alike = found.decided("allreduce", 1)
    assert (alike.codec.sync, alike.sync.quorum, alike.sync.deadline) == ("none", "100%", "auto")


def test_a_quorum_is_exact_and_wants_no_more_than_there_are() -> None:
    def found(quorum: int | str) -> Job:
        sync, plan = {"kind": "local", "quorum": quorum}, {"replicas": 4}
        return Job(model="a:b", steps=4, sync=sync, plan=plan)

    wanted = {"12.5%": 1, "12.6%": 2, "33.3%": 3, "0.1%": 1, "100%": 8, 9: 8, 3: 3}
    assert {q: found(q).sync.needed(8) for q in wanted} == wanted
    for wrong in ("half", "0%", "100.1%", 0, -1):
        with pytest.raises(SettingsError, match=r"sync\.quorum"):
            found(wrong)
    found(4).check_idle()
    with pytest.raises(SettingsError, match=r"`sync\.quorum` is 5, .* with 4 replicas"):
        found(5).check_idle()


def test_a_change_of_the_method_leaves_no_idle_key() -> None:
    table = {"kind": "local", "every": 2, "quorum": "50%", "deadline": "3s"}
    found = Job(model="a:b", steps=4, sync=table, codec={"sync": "int8"})
    changed = found.with_changes(["sync.method=powersgd"])
    said = changed.codec.sync, changed.sync.quorum, changed.sync.deadline
    assert said == ("none", "100%", "auto")
