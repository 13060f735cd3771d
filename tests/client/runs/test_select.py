"""A rule of the submitter's own for who is in a round, over the real client, broker and peers; and
what its threads do, over a client that is played."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from shoal import Candidates
from shoal.client import Refused, connect
from shoal.client.errors import BrokerUnreachable
from shoal.client.models.factories import ModelError
from shoal.client.runs import selecting
from shoal.client.runs.selecting import rule_of
from shoal.dag.rounds.cohorts import cohort_of, places_of, ranges_of
from shoal.job import Job, SettingsError
from shoal.proto.broker_pb2 import (
    Cohort,
    CohortChoice,
    RoundBegun,
    RoundWork,
    RunEvent,
    RunSpec,
    RunState,
)
from shoal.sim.processes import LocalCluster
from shoal.tests.sim.clients.test_federated_world import job_of

from .scripted_broker import Script, serving

CLIENTS, PER_ROUND = 12, 5


def job(folder: Path, rounds: int = 6, select: str = "rules.py:own") -> Job:
    found = job_of(folder, "fedavg", rounds)
    return replace(found, sync=replace(found.sync, select=select))


@pytest.mark.process
@pytest.mark.slow
def test_rounds_are_of_the_clients_that_a_function_of_this_process_chose(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each round is of these, or of those that its number says, and says which; an answer may come
    too late."""
    chosen: dict[int, set[int]] = {}

    def rule(seen: Candidates) -> list[int]:
        if seen.round == 3:
            raise LookupError("nobody to be found")
        found = [(7 * seen.round + 5 * i) % seen.clients for i in range(3)]
        chosen[seen.round] = {*found}
        return found

    wanted = job(tmp_path, select="")
    wanted = replace(
        wanted,
        plan=replace(wanted.plan, replicas=2),
        sync=replace(wanted.sync, local=replace(wanted.sync.local, passes=40)),
        output=replace(wanted.output, to=str(tmp_path / "runs")),
    )
    with LocalCluster(peers=[[], []], threads=1) as cluster, connect(cluster.address) as client:
        run = client.submit(wanted, select=rule)
        run.wait()
        events = [*run.so_far()]
        with pytest.raises(Refused, match="begins no round any more"):
            client.choose(run.id, Cohort(round=6, clients=[1]))
    rows = [json.loads(line) for line in (run.folder / "rounds.jsonl").read_text().splitlines()]
    by = {row["round"]: row["chosen_by"] for row in rows if "chosen_by" in row}
    inside: dict[int, set[int]] = {}
    for event in events:
        for work in event.round_begun.work:
            number = event.round_begun.round
            places = places_of(work.cohort)
            inside.setdefault(number, set()).update(cohort_of(CLIENTS, wanted.seed, number, places))
    usual = {n: {*cohort_of(CLIENTS, wanted.seed, n, range(PER_ROUND))} for n in range(6)}
    assert inside == {n: chosen[n] if by[n] == "rule" else usual[n] for n in range(6)}
    assert by[0] == by[3] == "run"
    assert "rule" in by.values()
    said = capfd.readouterr().err
    place = f"({__file__}, line {rule.__code__.co_firstlineno + 2})"
    assert f"the rule raised LookupError: nobody to be found {place}" in said


# ---------------------------------------------------------------- a client that is played


class Played:
    """What a rule's threads ask of a run. `past`, `then`: events, of which the latter come while
    they are watched; an exception is raised."""

    def __init__(self, job: Job, past: list[Any], then: list[Any]) -> None:
        spec = RunSpec(job=job.to_json(), client_sizes=[3] * CLIENTS, name="played")
        self.id, self.past, self.then = "r-1", past, then
        self.answers: list[Cohort] = []
        self.said: list[str] = []
        self.refuses = ""
        self.client = SimpleNamespace(
            recall=lambda run: SimpleNamespace(spec=spec),
            choose=self.choose,
            watch=lambda run, number, so_far: iter(self.past),
            follow=self.follow,
        )

    def follow(self, run: str, number: int) -> Iterator[RunEvent]:
        assert number == (self.past[-1].number + 1 if self.past else 0)
        for event in self.then:
            if isinstance(event, Exception):
                raise event
            yield event

    def choose(self, run: str, cohort: Cohort) -> None:
        if self.refuses:
            raise Refused(self.refuses)
        self.answers.append(cohort)

    def play(self, rule: Any) -> None:
        """Run the threads to their end."""
        before = {*threading.enumerate()}
        selecting.begin(self.client, self.id, rule, self.said.append)  # type: ignore[arg-type]
        for thread in {*threading.enumerate()} - before:
            thread.join()


def begun(number: int, final: bool = False) -> RunEvent:
    work = RoundWork(cohort=ranges_of(range(PER_ROUND)), final=final)
    return RunEvent(number=number, round_begun=RoundBegun(round=number, work=[work]))


def test_who_comes_back_goes_on_with_the_round_under_way(tmp_path: Path) -> None:
    run, seen = Played(job(tmp_path), [begun(0), begun(1), begun(2)], []), list[Candidates]()
    run.play(lambda found: seen.append(found) or [1])
    assert [s.round for s in seen] == [3], "what is over is not asked for"
    assert seen[0].asked.sum() == 3 * PER_ROUND, "and counts"
    assert run.answers == [Cohort(round=3, clients=[1])]


def test_behind_the_last_round_nobody_is_asked(tmp_path: Path) -> None:
    run = Played(job(tmp_path), [], [begun(0, final=True)])
    run.play(lambda found: [1])
    assert not run.answers


def test_what_goes_wrong_is_said_and_the_next_round_is_asked_for(tmp_path: Path) -> None:
    run = Played(job(tmp_path), [], [begun(0), BrokerUnreachable("nobody answers")])
    run.refuses = "round 1 has begun"
    run.play(lambda found: [1])
    assert sorted(run.said) == [
        "round 1 is of the clients that its number says: round 1 has begun",
        "run r-1: its rule is away, for the run is not heard of: nobody answers",
    ]


def test_a_rule_of_a_run_without_one_is_refused(tmp_path: Path) -> None:
    run = Played(job(tmp_path, select=""), [], [])
    with pytest.raises(Refused, match="played was submitted without a rule"):
        run.play(lambda found: [1])


class Asked(Script):
    """Takes one cohort, and refuses the next."""

    def __init__(self) -> None:
        super().__init__()
        self.choices: list[CohortChoice] = []

    def Choose(self, request: CohortChoice, context: Any) -> RunState:  # noqa: N802 (gRPC's name)
        self.choices.append(request)
        if len(self.choices) > 1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "round 2 has begun")
        return self.state


def test_a_cohort_goes_to_the_broker_as_one_message() -> None:
    script, cohort = Asked(), Cohort(round=2, clients=[4, 1])
    with serving(script) as address, connect(address) as client:
        assert client.choose("r-1", cohort).run == "r-1"
        with pytest.raises(Refused, match="refused: round 2 has begun"):
            client.choose("r-1", cohort)
    assert script.choices == [CohortChoice(run="r-1", cohort=cohort)] * 2


# ---------------------------------------------------------------- the job's text


def test_the_function_that_a_job_names(tmp_path: Path) -> None:
    named = replace(job(tmp_path), folder=tmp_path)
    with pytest.raises(ModelError, match=r'`sync.select` names "rules'):
        rule_of(named)
    (tmp_path / "rules.py").write_text("def own(seen):\n    return [4]\n")
    rule = rule_of(named)
    assert rule is not None
    assert rule(None) == [4]  # type: ignore[arg-type]
    assert rule_of(job(tmp_path, select="")) is None
    live = replace(named, sync=replace(named.sync, select="live:own"))
    with pytest.raises(SettingsError, match="a function of the process that submitted it"):
        rule_of(live)


def test_nobody_is_told_the_function_and_nobody_runs_a_strangers(tmp_path: Path) -> None:
    named = job(tmp_path)
    assert "rules" not in named.to_json()
    told = Job.from_json(named.to_json())
    assert told.rounds is not None
    assert told.rounds.cohorts is not None
    assert told.rounds.cohorts.selected
    strangers = named.to_json().replace("live:elsewhere", "os:system")
    assert Job.from_json(strangers).sync.select == "live:elsewhere"


@pytest.mark.parametrize(
    ("sync", "key"),
    [
        ({"select": "rules"}, "sync.select"),
        ({"select": "a.py:b", "method": "fedbuff"}, "sync.select"),
        ({"select": "a.py:b", "kind": "local", "method": "", "per_round": "10%"}, "sync.select"),
    ],
)
def test_what_a_rule_cannot_be_for(tmp_path: Path, sync: dict[str, Any], key: str) -> None:
    found = job_of(tmp_path, "fedavg")
    base = {"kind": "federated", "per_round": 5, "method": "fedavg"}
    table = {
        "version": 1,
        "model": {"factory": found.model.factory},
        "data": {"kind": "arrays", "source": found.data.source},
        "sync": base | sync,
        "train": {"steps": 4, "batch": 4},
    }
    if sync.get("kind") != "local":
        table["data"]["partition"] = {"kind": "iid", "clients": 12}  # type: ignore[index]
    with pytest.raises(SettingsError) as error:
        Job.from_table(table)
    assert error.value.key == key
