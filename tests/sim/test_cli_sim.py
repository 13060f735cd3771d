"""The verb `sim`: which world it runs, what it says, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.job import Job, SettingsError
from shoal.sim.ghost import rounds
from shoal.sim.options import Setting, SimOptions
from shoal.sim.plain import oracle
from shoal.sim.report import Summary
from shoal.sim.scenario.catalogue import DEFAULT, catalogue, find
from shoal.sim.scenario.mishaps import Expectations
from shoal.sim.scenario.scenario import SCENARIOS, Scenario
from shoal.sim.shaped.staging import check_real
from shoal.sim.simulate import missed
from shoal.sim.trace import Trace

pytestmark = pytest.mark.usefixtures("captures_once")

NET = """
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Embedding(256, 8)
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 256)

    def forward(self, x, y):
        return F.cross_entropy(self.two(self.one(self.inner(x)).tanh()).flatten(0, 1), y.flatten())

def net():
    return Net()
"""
JOB = """
version = 1
[model]
factory = "net.py:net"
[data]
source = "text.bin"
length = 8
[train]
steps = 4
batch = 8
microbatch = 2
eval_every = 0
[plan]
stages = 2
pipelines = 1
"""
SCENARIO = """
version = 1
job = "job.toml"
mode = "virtual"
seed = 3
[[peers]]
name = "a{1..2}"
place = "eu"
[[peers]]
name = "b"
place = "us"
[[links]]
from = "eu"
to = "us"
latency = "40ms"
bandwidth = "20Mbit"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "text.bin").write_bytes(bytes(range(256)) * 4)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "home.toml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["sim", *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def summary_of(*words: str) -> dict[str, Any]:
    code, output = call(*words, "--quiet", "--json", "out.json")
    found: dict[str, Any] = json.loads(Path("out.json").read_text())
    assert code == found["exit"], output
    return found


def test_json_is_printed_where_the_file_is_a_dash(folder: Path) -> None:
    result = CliRunner().invoke(cli.app, ["sim", "home.toml", "--ghost", "--json", "-"])
    assert json.loads(result.stdout)["exit"] == result.exit_code == 0
    listed = CliRunner().invoke(cli.app, ["sim", "--list", "--json", "-"])
    assert "two-regions" in {entry["name"] for entry in json.loads(listed.stdout)}


# ---------------------------------------------------------------- the worlds


def test_a_scenario_runs_in_virtual_time_and_equals_the_plain_loop(folder: Path) -> None:
    found = summary_of("home.toml", "--verify", "--report", "out")
    assert (found["exit"], found["steps"], found["peers"], found["stages"]) == (0, 4, 3, 2)
    assert found["max_loss_difference"] < 1e-5
    assert found["verified_against"] == "single process"
    assert found["checks"] > 0
    assert found["violations"] == 0
    assert found["virtual_s"] > 4 * 2 * 0.04  # a step crosses the ocean, or a place, twice
    assert found["again"] == "shoal sim home.toml --verify"
    assert Trace.read(folder / "out" / "events.jsonl").digest() == found["event_log"]
    assert json.loads((folder / "out" / "summary.json").read_text())["losses"] == found["losses"]
    assert (folder / "out" / "report.html").stat().st_size > 1000


def test_a_run_that_is_not_the_plain_loops_ends_with_code_1(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = oracle.learning_rate
    monkeypatch.setattr(oracle, "learning_rate", lambda *args: 20 * rate(*args))
    found = summary_of("home.toml", "--verify")
    assert found["exit"] == 1
    assert "--verify: the loss of step " in found["error"]
    assert "expected a difference of at most 0.001 of it" in found["error"]
    # The scenario's own word counts instead.
    (folder / "home.toml").write_text(SCENARIO + "[expect]\nmax_loss_difference = 10\n")
    assert summary_of("home.toml", "--verify")["exit"] == 0


def test_the_same_seed_gives_the_same_events(folder: Path) -> None:
    (folder / "home.toml").write_text(SCENARIO + 'jitter = "9ms"\nloss = 0.05\n')
    one, two, other = (
        summary_of("home.toml", "--ghost", "--seed", seed)["event_log"] for seed in ("5", "5", "6")
    )
    assert one == two != other


def test_a_ghost_run_is_compared_with_the_plain_loop_of_hashes(folder: Path) -> None:
    found = summary_of("home.toml", "--ghost", "--steps", "3")
    assert (found["exit"], found["steps"]) == (0, 3)
    assert found["verified_against"] == "plain loop of hashes"
    assert found["max_loss_difference"] == 0
    assert found["loss_last"] is None  # a hash says nothing about learning


@pytest.mark.parametrize(("kind", "method"), [("local", "diloco"), ("gossip", "saps-outer")])
def test_versions_of_ghosts_are_compared_with_a_plain_loop_of_rounds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, method: str
) -> None:
    sync = f'[sync]\nkind = "{kind}"\nmethod = "{method}"\nevery = 2\n'
    (folder / "job.toml").write_text(JOB.replace("stages = 2", "replicas = 2") + sync)
    (folder / "home.toml").write_text(SCENARIO + "[expect]\nloss_below = 0.5\n")
    found = summary_of("home.toml", "--ghost")
    assert (found["exit"], len(found["rounds"])) == (0, 2)
    assert found["verified_against"] == "plain loop of hashes"
    assert found["max_loss_difference"] == 0
    assert (found["loss_last"], found["local_losses"]) == (None, {})
    mean = rounds.mean  # of the ghosts, who count a contribution twice
    monkeypatch.setattr(rounds, "mean", lambda total, weight: mean(total + total, weight))
    found = summary_of("home.toml", "--ghost")
    assert (found["exit"], found["max_loss_difference"]) == (1, 1)
    assert "samples were lost, doubled" in found["error"]


def test_a_method_that_sends_less_is_not_held_to_the_losses_of_a_plain_loop(folder: Path) -> None:
    method = '[sync]\nmethod = "gtopk"\noptions = { ratio = 20 }\n'
    replicated = JOB.replace("stages = 2\npipelines = 1", "stages = 1\npipelines = 2")
    (folder / "job.toml").write_text(replicated + method)
    found = summary_of("home.toml", "--verify")
    assert found["exit"] == 0, found["error"]
    assert found["lossy"] == ["gtopk:ratio=20"]
    assert found["max_loss_difference"] > 1e-4
    assert found["loss_ratio"] is not None


def test_an_expectation_that_is_missed_ends_with_code_1(folder: Path) -> None:
    (folder / "home.toml").write_text(SCENARIO + "[expect]\nloss_below = 0.5\n")
    found = summary_of("home.toml")
    assert found["exit"] == 1
    assert found["error"] == f"[expect] loss_below = 0.5, and it came to {found['loss_last']:.4g}"


def test_a_fault_that_did_not_happen_ends_with_code_1(folder: Path) -> None:
    fault = '[[faults]]\ndo = "slow"\nwho = ["b"]\nfactor = 3\nat_step = '
    (folder / "home.toml").write_text(SCENARIO + fault + "99\n")
    found = summary_of("home.toml", "--ghost")
    assert found["exit"] == 1
    assert "did not happen" in found["error"]
    (folder / "home.toml").write_text(SCENARIO + fault + "1\n")
    found = summary_of("home.toml", "--ghost")
    assert (found["exit"], found["faults_injected"], found["faults_fired"]) == (0, 1, 1)


def test_a_run_whose_peers_are_all_lost_waits_until_its_limit(folder: Path) -> None:
    fault = '[[faults]]\ndo = "kill"\nwho = ["*"]\nat_step = 1\n'
    (folder / "home.toml").write_text(SCENARIO + fault)
    code, output = call("home.toml", "--ghost", "--quiet")
    assert code == 1, output
    assert "1 injected, 1 fired" in output
    assert "FAILED: not done within `limit`, 600.0s" in output


# ---------------------------------------------------------------- what is run


def test_the_command_to_do_it_again_keeps_every_flag_that_matters() -> None:
    options = SimOptions(
        scenario="my file.toml",
        world="ghost",
        steps=3,
        seed=4,
        job=Path("job.toml"),
        verify=True,
        compare=True,
        json=Path("x"),
        quiet=True,
    )
    assert options.again() == (
        "shoal sim 'my file.toml' --ghost --job job.toml --steps 3 --seed 4 --verify --compare"
    )
    assert SimOptions(peers=2, verify=True).again() == "shoal sim --peers 2 --verify"
    help_text = CliRunner().invoke(cli.app, ["sim", "--help"]).output
    for word in shlex.split(options.again()):
        assert not word.startswith("--") or word in help_text


def test_flags_take_the_place_of_what_the_files_say(folder: Path) -> None:
    (folder / "home.toml").write_text(SCENARIO.replace('mode = "virtual"', "time_scale = 3.0"))
    setting = Setting.of(SimOptions(scenario="home.toml", world="ghost", seed=9, steps=2))
    assert setting.scenario is not None
    assert (setting.world, setting.seed, setting.scenario.seed, setting.job.seed) == (
        "ghost", 9, 9, 9,
    )  # fmt: skip
    assert setting.job.train.steps == 2
    assert setting.scenario.time_scale == 1.0  # it slows what is real only
    plain = Setting.of(SimOptions(scenario="home.toml"))
    assert plain.scenario is not None
    assert (plain.world, plain.seed, plain.scenario.time_scale) == ("real", 3, 3.0)


def test_without_arguments_it_is_the_built_in_wan_with_its_comparisons_measured() -> None:
    options = SimOptions(steps=5).completed()
    assert options.again() == "shoal sim --steps 5"  # with the same end of its comparisons
    assert SimOptions(world="ghost").completed().again() == "shoal sim --ghost"
    asked_for = SimOptions(compare=True).completed()
    assert asked_for.again() == f"shoal sim {DEFAULT} --compare"
    assert asked_for.compare_s == float("inf")
    for asked in (SimOptions(peers=2), SimOptions(job=Path("j")), SimOptions(scenario="x")):
        assert asked.completed() == asked
    setting = Setting.of(options)
    assert setting.scenario is not None
    assert (setting.world, setting.peers) == ("real", 6)
    assert len({peer.place for peer in setting.scenario.peers}) == 2


@pytest.mark.parametrize("where", [{"peers": 2}, {"scenario": DEFAULT, "world": "virtual"}])
def test_comparisons_are_measured_over_shaped_links_only(where: Any) -> None:
    with pytest.raises(SettingsError, match="--compare measures real processes over shaped links"):
        Setting.of(SimOptions(compare=True, **where).completed())


def test_equal_peers_on_loopback_need_no_scenario() -> None:
    setting = Setting.of(SimOptions(peers=3))
    assert (setting.scenario, setting.world, setting.peers) == (None, "real", 3)
    assert setting.job.plan.stages == 3


@pytest.mark.parametrize("entry", list(catalogue()), ids=lambda e: e.name)
def test_every_built_in_scenario_has_a_job_and_a_line_about_it(entry: Any) -> None:
    scenario = Scenario.from_toml(entry.path)
    assert scenario.name == entry.name
    assert scenario.mode == entry.mode
    assert 20 < len(entry.about) <= 100
    job = scenario.adjusted(Job.from_toml(scenario.job_path))
    assert scenario.job_path.is_relative_to(
        SCENARIOS.resolve().parents[1]
    )  # it ships with the package
    assert job.train.batch > 0
    if entry.mode == "real":
        check_real(scenario)


def test_the_list_has_all_of_them_the_default_first(folder: Path) -> None:
    code, output = call("--list")
    assert code == 0
    names = [line.split()[0] for line in output.splitlines()]
    assert names[0] == DEFAULT
    assert sorted(names) == sorted(path.stem for path in SCENARIOS.glob("*.toml"))
    assert find("slow-homes") == SCENARIOS / "slow-homes.toml"


def test_scenarios_and_their_traces_are_package_data() -> None:
    import tomllib

    root = SCENARIOS.parents[1]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = data["package-data"]["shoal.sim"]
    kept = {path for glob in globs for path in (root / "sim").glob(glob)}
    assert set(SCENARIOS.iterdir()) <= kept
    assert root / "sim" / "builtin.toml" in kept


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["slow-home"], '"slow-home" is no file, and no built-in scenario; did you mean "slow-hom'),
        (["none.toml"], "none.toml: No such file or directory"),
        (["home.toml", "--peers", "3"], "--peers 3 says how many peers there are, and a scenario"),
        (["--ghost", "--peers", "3"], "--ghost needs a scenario that says what is between"),
        (["home.toml", "--ghost", "--virtual"], "--virtual and --ghost: expected one of them"),
    ],
)
def test_flags_that_do_not_go_together_are_wrong_input(
    folder: Path, words: list[str], says: str
) -> None:
    code, output = call(*words)
    assert code == 2
    assert says in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "line", "says"),
    [
        (('place = "us"', 'place = "us"\nmemory = "900TiB"'), 12, "B of this machine, on which b"),
        (('name = "a{1..2}"', 'name = "a{1..2}"\nmemory = "900TiB"'), 8, "machine, on which a1"),
        (
            (
                "[[links]]",
                '[[faults]]\ndo = "kill"\nwho = ["b"]\nat_step = 1\nphase = "clip"\n[[links]]',
            ),
            16,
            "what lies within a step of real processes is not seen",
        ),
    ],
)
def test_what_real_processes_cannot_do_is_named_with_its_line(
    folder: Path, change: tuple[str, str], line: int, says: str
) -> None:
    (folder / "home.toml").write_text(SCENARIO.replace(*change))
    code, output = call("home.toml", "--real")
    assert code == 2
    assert f"home.toml:{line}: `" in output
    assert says in output


@pytest.mark.parametrize("world", ["--virtual", "--ghost"])
def test_relays_are_not_modelled_and_that_is_said_with_its_line(folder: Path, world: str) -> None:
    behind = SCENARIO.replace('place = "us"', 'place = "us"\nnat = "outbound"')
    (folder / "home.toml").write_text(behind)
    code, output = call("home.toml", world)
    assert code == 2
    assert "home.toml:12: `peers[1].nat` is" in output
    assert "relays are not modelled" in output


def test_a_trace_whose_time_runs_backwards_is_wrong_input(folder: Path) -> None:
    (folder / "home.toml").write_text(SCENARIO + '[churn]\ntrace = "seen.csv"\n')
    (folder / "seen.csv").write_text("10,b,down\n5,b,up\n")
    code, output = call("home.toml", "--ghost", "--quiet")
    assert code == 2
    assert "seen.csv:2: time runs backwards" in output


def test_an_override_that_no_job_has_is_named_with_its_line(folder: Path) -> None:
    (folder / "home.toml").write_text(SCENARIO + "[job_overrides.train]\nstep = 3\n")
    with pytest.raises(SettingsError, match=r"home\.toml:18: `job_overrides\.train\.step` is not"):
        Setting.of(SimOptions(scenario="home.toml"))


def test_overrides_and_expectations_are_for_the_job_that_the_scenario_names(folder: Path) -> None:
    more = "[job_overrides.train]\nsteps = 3\n[expect]\nstep_time_error_at_most = 0.0\n"
    (folder / "home.toml").write_text(SCENARIO + more)
    (folder / "other.toml").write_text(JOB.replace("steps = 4", "steps = 2"))
    for words, steps in (((), 3), (("--job", "job.toml"), 3), (("--job", "other.toml"), 2)):
        code, output = call("home.toml", "--ghost", "--json", "out.json", *words)
        found = json.loads(Path("out.json").read_text())
        assert found["steps"] == steps
        missed = "[expect] step_time_error_at_most" in found["error"]
        said = "without job_overrides and expect of home: said of the job that it names" in output
        assert (code == 1, missed, said) == ((steps == 3, steps == 3, steps == 2))


def test_a_shorter_run_is_not_held_to_the_loss_of_the_whole_length(folder: Path) -> None:
    (folder / "home.toml").write_text(SCENARIO + "[expect]\nloss_below = 0.5\n")
    for steps, wanted in ((2, None), (4, 0.5), (5, 0.5)):
        setting = Setting.of(SimOptions(scenario="home.toml", steps=steps))
        assert setting.scenario is not None
        assert setting.scenario.expect.loss_below == wanted


# ---------------------------------------------------------------- expectations


def summary(**more: Any) -> Summary:
    return Summary(name="s", world="w", seed=0, **more)


@pytest.mark.parametrize(
    ("expect", "came", "short"),
    [
        ({"loss_below": 3.0}, {"loss_last": 2.9}, ""),
        ({"loss_below": 3.0}, {"loss_last": 3.0}, "loss_below = 3, and it came to 3"),
        ({"loss_below": 3.0}, {"loss_last": float("nan")}, "and it came to nan"),
        ({"loss_below": 3.0}, {}, "loss_below = 3, and nothing measured it"),
        ({"goodput_at_least": 0.9}, {"goodput": 0.95}, ""),
        ({"goodput_at_least": 0.9}, {"goodput": 0.5}, "goodput_at_least = 0.9, and it came to 0.5"),
        ({"max_loss_difference": 0.0}, {"max_loss_difference": 0.0}, ""),
        ({"max_loss_difference": 1e-6}, {"max_loss_difference": 1e-5}, "and it came to 1e-05"),
        ({"step_time_error_at_most": 0.1}, {"step_s": 1.0, "predicted_step_s": 1.05}, ""),
        (
            {"step_time_error_at_most": 0.1},
            {"step_s": 1.0, "predicted_step_s": 0.8},
            "step_time_error_at_most = 0.1, and it came to 0.2",
        ),
        ({}, {}, ""),
    ],
)
def test_an_expectation_is_met_or_named_with_what_came(
    expect: dict[str, float], came: dict[str, float], short: str
) -> None:
    found = list(missed(Expectations(**expect), summary(**came)))
    assert len(found) == bool(short)
    assert short in "".join(found)
