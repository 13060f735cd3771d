"""A job is read strictly: everything wrong is named with file, line, and what to write instead."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
import shoal.job
from shoal.job import Data, Job, PlanOptions, SettingsError, Train, Training, job_tables, tables
from shoal.job import spec as job_module
from shoal.job.settings import plain, read_toml
from shoal.job.units import ByteCount, Duration, Rate, UnitError
from shoal.job.words import ELSEWHERE

from .problems import HEAD, problem

# ---------------------------------------------------------------- files


def test_a_file_with_the_required_keys_only_works(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(HEAD + "[train]\nsteps = 3\n")
    job = Job.from_toml(path)
    assert (job.name, job.train.steps, job.train.batch) == ("small", 3, 32)
    assert job.folder == tmp_path


@pytest.mark.parametrize(
    ("body", "line", "says"),
    [
        ("[train]\nsteps = 3\nbacth = 3", 6, '`train.bacth` is not a known key; did you mean "bat'),
        ("[trian]\nsteps = 3", 4, 'did you mean "train"?'),
        ('[train]\nsteps = "3"', 5, '`train.steps` is "3": expected an integer'),
        ("[train]\nsteps = true", 5, "`train.steps` is true: expected an integer"),
        (
            '[train]\nsteps = 3\n[output]\nevery = "often"',
            7,
            '`output.every` is "often": expected an integer',
        ),
        (
            '[train]\nsteps = 3\n[output]\nformat = "pickle"',
            7,
            '`output.format` is "pickle": expected "safetensors" |',
        ),
        ("[train]\nsteps = 3\nlearning_rate = 1", 6, 'is not a known key; did you mean "lr"?'),
        (f"[train]\nsteps = 3\nbatch = {10**18}", 6, "expected at most 2147483648"),
        (f"[train]\nsteps = {10**18}", 5, "expected at most 9007199254740992"),
        (f"[train]\nsteps = {10**24}", 5, "`train.steps` is out of range"),
        ("[train]\nsteps = 3\nlr = inf", 6, "`train.lr` is inf: expected a finite number"),
        ("[train]\nsteps = 3\nzzz = 1", 6, "`train.zzz` is not a known key (known: "),
        (
            "[train]\nsteps = 3\ntokens = 4",
            6,
            "exactly one of steps, tokens, passes, rounds; got steps and",
        ),
        ("[train]\nbatch = 4", 4, "exactly one of steps, tokens, passes, rounds; got none"),
        ("[train]\nsteps = 0", 5, "`train.steps` is 0: expected 1 or more"),
        ("[train]\nsteps = 3\nlr = nan", 6, "`train.lr` is nan"),
        ("[train]\nsteps = 3\n\n# why\nmicrobatch = 7", 8, "batch = 32 is not divisible by it"),
        ("[train]\nsteps = 3\nbetas = [0.9]", 6, "`train.betas` is [0.9]"),
        ("[train]\nsteps = 3\nbetas = [\n  0.9,\n  3,\n]", 6, "`train.betas[1]` is 3.0"),
        ('[train]\nsteps = 3\nwarmup = "3"', 6, 'a share such as "3%"'),
        (
            "[train]\nsteps = 3\n[recovery]\nlease = 10",
            7,
            "10 has no unit: expected a time such as",
        ),
        ('[train]\nsteps = 3\n[recovery]\nlease = "1 pc"', 7, 'the unknown unit "pc"'),
        ('[train]\nsteps = 3\n[recovery]\nlease = "0s"', 7, "expected more than no time"),
        ("[train]\nsteps 3", 5, "not valid TOML"),
        (
            "[train]\noptimizer = adamw",
            5,
            'a text stands in quotes: optimizer = "adamw"',
        ),
        ("[train]\nsteps = 3\nlora_r = 8", 6, "what other programs call so is lora in [model]"),
        ("[train]\nsteps = 3\n[output]\nmerge_adapter = 1", 7, 'did you mean "format"?'),
        ("[train]\ngradient_accumulation_steps = 8", 5, 'did you mean "batch"?'),
        ("[train]\nsteps = 3\n[data]\nholdout = 1.0", 7, "expected a share in [0, 1)"),
        ('[train]\nsteps = 3\n[data]\nkind = "txt"', 7, '"text" | "tokens" | "arrays"'),
    ],
)
def test_what_is_wrong_is_named_with_its_line(
    tmp_path: Path, body: str, line: int, says: str
) -> None:
    message = problem(tmp_path, body)
    assert message.startswith(f"job.toml:{line}: ")
    assert says in message


def test_a_key_in_the_wrong_table_is_sent_to_the_right_one(tmp_path: Path) -> None:
    body = "[train]\nsteps = 3"
    message = problem(tmp_path, body, 'version = 1\nlr = 3.0\n[model]\nfactory = "a:b"\n')
    assert message == 'job.toml:2: `lr` is not a known key; did you mean "lr" in [train]?'


def test_missing_required_keys_are_named(tmp_path: Path) -> None:
    train = "[train]\nsteps = 3"
    assert "`version` is missing: expected 1" in problem(
        tmp_path, train, '[model]\nfactory="a:b"\n'
    )
    assert "`model` is missing" in problem(tmp_path, train, "version = 1\n")
    assert "`model.factory` is missing" in problem(tmp_path, train, "version = 1\n[model]\n")
    assert "`version` is 2" in problem(tmp_path, train, 'version = 2\n[model]\nfactory="a:b"\n')


@pytest.mark.parametrize(
    ("table", "line", "said"),
    [
        ("plan", "stage = 2", 'did you mean "stages"?'),
        ("plan", 'schedule = "zbv"', '"zero-bubble"'),
        ("codec", 'feedback = "ef22"', '"ahead"'),
        ("sync", 'method = "powersdg"', 'did you mean "powersgd"?'),
        ("sync", 'collectives = "ring"', 'did you mean "collective"?'),
        ("sync", "secures = true", 'did you mean "secure"?'),
        ("data", 'where = "url"', '"peer"'),
        ("data", 'kind = "module"', '"arrays"'),
    ],
)
def test_what_is_not_built_is_no_key_and_the_nearest_is_named(
    tmp_path: Path, table: str, line: str, said: str
) -> None:
    train = "[train]\nsteps = 3\n"
    body = f"{train}{line}" if table == "train" else f"{train}[{table}]\n{line}"
    message = problem(tmp_path, body)
    assert f"`{table}.{line.split(' =')[0]}`" in message
    assert said in message


def test_what_is_not_built_yet_is_refused_by_name(tmp_path: Path) -> None:
    body = '[train]\nsteps = 3\n[codec]\nsnapshot = "int8"'
    assert "`codec.snapshot` is not supported yet" in problem(tmp_path, body)


def test_a_default_written_out_is_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        HEAD + '[train]\nsteps = 3\n[codec]\ndefault = "none"\ngrad = "none"\n'
        '[sync]\ncollective = "auto"\n[plan]\nreplan = true\n'
    )
    assert Job.from_toml(path).codec.grad == "none"


def test_lines_are_found_behind_strings_that_look_like_keys(tmp_path: Path) -> None:
    head = 'version = 1\nname = """\n[train]\nbatch = 1 # [\n"""\n[model]\nfactory = "a:b"\n'
    message = problem(tmp_path, '[train] # "\nsteps = 3\n"batch" = "x]"', head)
    assert message.startswith("job.toml:10: `train.batch`")


@given(st.text(max_size=200))
def test_any_text_gives_a_job_or_one_clear_error(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(SettingsError):
            read_toml(Job, path)


ODD = (
    "0x" + "f" * 4000, "1" + "0" * 30, "-1" + "0" * 30, "1e308", "1e400", "inf", "-inf", "nan",
    "-1", "9223372036854775807", "2026-11-23", "2026-11-23T10:00:00", "10:00:00", "true",
    "[[[]]]", "{a = 1}", '"1e400 s"', '"1e999 GB"', '"nan s"', '""',
)  # fmt: skip
PLACES = [
    f"{table}.{f.name}"
    for table, kind in (
        ("train", Train), ("data", Data), ("plan", PlanOptions), ("codec", tables.Codec),
        ("recovery", tables.Recovery), ("output", tables.Output), ("model", tables.Model),
    )
    for f in fields(kind)
    if f.name != "factory"
] + ["model.args.a", "model.args.b.c"]  # fmt: skip


@settings(max_examples=400)
@given(
    st.sampled_from(PLACES), st.sampled_from(ODD), st.sampled_from(["{}", "[{}]", "[{{d = {}}}]"])
)
def test_an_odd_value_anywhere_is_an_error_or_survives_the_way_to_the_broker(
    place: str, odd: str, around: str
) -> None:
    import tempfile

    given = {"version": "1", "model.factory": '"a:b"', "train.steps": "3"}
    if place in ("train.tokens", "train.passes"):
        del given["train.steps"]
    given[place] = around.format(odd)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.toml"
        path.write_text("".join(f"{key} = {value}\n" for key, value in given.items()))
        try:
            job = Job.from_toml(path)
        except SettingsError:
            return
    assert Job.from_json(job.to_json()).to_json() == job.to_json()  # NaN is not equal to itself
    assert job.resolved(3).training.train.warmup_steps >= 0


def test_a_date_and_a_number_of_thousands_of_digits_are_named(tmp_path: Path) -> None:
    said = problem(tmp_path, "args = { since = [2026-11-23] }\n[train]\nsteps = 3")
    assert said.startswith(
        "job.toml:4: `model.args.since[0]` is a date (2026-11-23): expected text"
    )
    assert "is not readable: Exceeds" in problem(tmp_path, f"[train]\nsteps = {'9' * 5000}")
    said = problem(tmp_path, f"[train]\nsteps = 0x{'f' * 5000}")
    assert said == "job.toml:5: `train.steps` is out of range: expected a number of 64 bits"


# ---------------------------------------------------------------- Python and JSON


def test_the_same_fields_make_a_job_in_python() -> None:
    job = shoal.Job(model="file.py:fn", data="books/*.txt", steps=300, lr=1e-3, plan={"stages": 2})
    assert (job.data.source, job.train.steps, job.train.lr, job.plan.stages) == (
        "books/*.txt",
        300,
        1e-3,
        2,
    )
    assert (
        Job(model={"factory": "a:b"}, data=Data(length=9), train=Train(passes=1)).data.length == 9
    )


def test_a_live_module_is_kept_out_of_the_json() -> None:
    class Net:
        pass

    job = Job(model=Net(), steps=1)
    assert isinstance(job.module, Net)
    read = Job.from_json(job.to_json())
    assert read.module is None
    assert read.model.factory.startswith("live:")


def test_an_unknown_keyword_names_the_nearest_key() -> None:
    with pytest.raises(SettingsError, match=r'`learning_rate` .* did you mean "lr"'):
        Job(model="a:b", steps=1, learning_rate=1)
    with pytest.raises(SettingsError, match=r"call so is to in \[output\]"):
        Job(model="a:b", steps=1, output_dir="runs")
    with pytest.raises(SettingsError, match='`batches` is not a known key; did you mean "batch"'):
        Job(model="a:b", steps=1, batches=3)


def test_json_brings_back_the_same_job() -> None:
    job = Job(
        model={"factory": "a:b", "args": {"layers": 2}, "freeze": ["x.*"]},
        steps=7,
        recovery={"lease": "10s"},
        train={"microbatch": 8},
    )
    assert Job.from_table(plain(job)) == job
    assert Job.from_json(job.to_json()) == job.without_places()
    training = job.resolved(7).training
    assert Training.from_json(training.to_json()) == training


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "null", '{"version": 1}', '{"version": 1, "x": 2}', "9" * 5000, "[" * 10**5],
    ids=lambda text: text[:20],
)
def test_json_that_is_no_job_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        Job.from_json(text)


def test_every_setting_says_what_it_is() -> None:
    import ast

    nodes = [
        (module, node)
        for module in (job_module, job_tables, tables)
        for node in ast.parse(Path(module.__file__).read_text()).body
    ]
    for module, node in nodes:
        if isinstance(node, ast.ClassDef) and is_dataclass(getattr(module, node.name)):
            names = getattr(module, node.name).__annotations__.keys() - {
                "OURS",
                "OF_JOB",
                "OF_ANOTHER",
            }
            pairs = zip(node.body, node.body[1:], strict=False)
            said = {
                a.target.id
                for a, b in pairs
                if isinstance(a, ast.AnnAssign)
                and isinstance(a.target, ast.Name)
                and isinstance(b, ast.Expr)
            }
            assert names <= said, f"{node.name}: {names - said} have no docstring"


# ---------------------------------------------------------------- what follows from the keys


@pytest.mark.parametrize(
    ("batch", "size"), [(32, 8), (16, 4), (64, 8), (6, 1), (8, 2), (1, 1), (3, 1), (36, 6), (7, 1)]
)
def test_auto_takes_the_largest_microbatch_that_leaves_four(batch: int, size: int) -> None:
    train = Train(steps=1, batch=batch)
    assert train.microbatch_size == size
    assert train.microbatches * size == batch


def test_auto_leaves_the_planner_the_other_divisors() -> None:
    assert Train(steps=1, batch=32).microbatch_choices == (1, 2, 4, 16, 32)
    assert Train(steps=1, batch=7).microbatch_choices == (7,)
    assert Train(steps=1, batch=32, microbatch=8).microbatch_choices == ()


def test_the_choices_are_few_enough_and_no_evaluation_is_cut_too_small() -> None:
    many = Train(steps=1, batch=720_720, eval_every=0)  # 240 divisors
    found = many.microbatch_choices
    assert len(found) == len(set(found)) == 64
    assert many.microbatch_size not in found
    assert (found[0], found[-1]) == (11, 720_720)  # 65,520 microbatches, and one
    assert all(720_720 % size == 0 for size in found)
    assert min(Train(steps=1, batch=65_536, eval_batches=8).microbatch_choices) == 16


def test_warmup_is_steps_or_a_share() -> None:
    assert Train(steps=200).warmup_steps == 6
    assert Train(steps=200, warmup=5).warmup_steps == 5
    assert Train(steps=200, warmup="0%").warmup_steps == 0


def test_evaluation_counts_microbatches() -> None:
    assert Train(steps=1, batch=32, eval_batches=2).evaluation_microbatches == 8
    assert Train(steps=1, eval_every=0).evaluation_microbatches == 0


def test_a_resolved_job_has_numbers_only() -> None:
    train = Job(model="a:b", tokens=1000).resolved(12).train
    assert (train.steps, train.tokens, train.microbatch) == (12, None, 8)


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Duration, "30ms", 0.03),
        (Duration, "10min", 600.0),
        (Duration, "1.5 h", 5400.0),
        (ByteCount, "8GiB", 8 * 2**30),
        (ByteCount, "2MB", 2_000_000),
        (Rate, "20Mbit", 2.5e6),
        (Rate, "1Gbit", 1.25e8),
    ],
)
def test_quantities_are_read_into_base_units(kind: Any, text: str, value: float) -> None:
    assert kind(text) == pytest.approx(value)
    assert kind(str(kind(text))) == kind(text)


@pytest.mark.parametrize("text", [10, 1.5, "10", "ms", "-3s", "3 furlongs", "", None, "1e999999x"])
def test_a_quantity_without_a_good_unit_is_refused(text: Any) -> None:
    with pytest.raises(UnitError):
        Duration(text)


def test_a_job_needs_no_torch() -> None:
    code = "import sys, shoal.job; assert not {'torch', 'grpc', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_of_a_peer_has_a_name_and_only_it_can_be_kept_there(tmp_path: Path) -> None:
    said = problem(tmp_path, '[train]\nsteps = 3\n[data]\nwhere = "peer"')
    assert "`data.source` is empty: " in said
    assert "the name of a data set of a peer" in said
    said = problem(tmp_path, '[train]\nsteps = 3\n[data]\nkeep_local = "labels"')
    assert 'job.toml:7: `data.keep_local` is "labels" with where = "submitter"' in said


def test_what_others_call_our_keys_are_keys_of_ours() -> None:
    job = plain(Job(model={"factory": "a:b"}, train={"steps": 1}))
    for elsewhere, ours in ELSEWHERE.items():
        table, key = ours.split(".")
        assert key in job[table], ours
        assert elsewhere not in job[table], elsewhere
