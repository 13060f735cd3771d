"""Data that stays with peers, as the broker sees it: who is asked, who may, who waits for it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.broker.events import (
    Answer,
    DataAsked,
    Instruction,
    MakePlan,
    PlanReady,
    Reject,
    RunSubmitted,
    Started,
)
from shoal.broker.placement.datasets import MOST_MANIFESTS
from shoal.job.settings import plain
from shoal.job.tables import Data
from shoal.planner.requests.requirements import read_spec
from shoal.planner.requests.run_spec import RunSpecError
from shoal.proto.broker_pb2 import Availability, DataSet, Resolved, RunSpec
from shoal.proto.common_pb2 import BlobRef, Reason

OPTIONS = json.dumps(plain(Data(where="peer", source="scans")))
MANIFEST, OTHER = "cd" * 32, "ef" * 32


def has(*users: str, name: str = "scans") -> list[DataSet]:
    return [DataSet(name=name, users=users)]


def ask(world: Any, name: str = "scans", by: str = "") -> list[Instruction]:
    out: list[Instruction] = world.handle(DataAsked(world.request(), name, OPTIONS, by))
    return out


def numbers(world: Any, out: list[Instruction], peer: str) -> list[int]:
    return [m.resolve.number for m in world.told(out, peer) if m.HasField("resolve")]


def resolve(
    world: Any,
    out: list[Instruction],
    peer: str,
    manifest: str = MANIFEST,
    blended: bool = False,
) -> Any:
    (number,) = numbers(world, out, peer)
    ref = BlobRef(hash=manifest, size_bytes=9)
    said = Resolved(number=number, manifest=ref, local=["x"], blended=blended)
    return world.say(peer, resolved=said)


def refuse(world: Any, out: list[Instruction], peer: str, why: str) -> Any:
    (number,) = numbers(world, out, peer)
    return world.say(peer, resolved=Resolved(number=number, problem=Reason(code="data", text=why)))


def rejected(world: Any, out: list[Instruction]) -> tuple[str, str]:
    reject = world.only(out, Reject)
    return reject.code, reject.reason


def make_spec(world: Any) -> RunSpec:
    spec: RunSpec = world.spec(data={"where": "peer", "source": "scans"})
    spec.data.hash = MANIFEST
    spec.local.append("x")
    return spec


# ---------------------------------------------------------------- a submitter asks


def test_the_manifest_that_most_peers_made_is_the_answer(world) -> None:
    for peer in "abc":
        world.join(peer, data=has())
    world.join("d", data=has(name="else"))
    out = ask(world)
    assert not numbers(world, out, "d")
    assert not [i for i in resolve(world, out, "a", OTHER) if isinstance(i, Answer)]
    resolve(world, out, "b")
    answer = world.only(resolve(world, out, "c"), Answer).message
    assert answer.manifest.hash == MANIFEST
    assert list(answer.peers) == ["b", "c"]
    assert list(answer.local) == ["x"]
    again = ask(world)  # it is known by now
    assert world.only(again, Answer).message == answer
    assert not numbers(world, again, "a")


def test_who_leaves_or_has_a_problem_is_not_waited_for(world) -> None:
    for peer in "abc":
        world.join(peer, data=has())
    out = ask(world)
    world.close("a")
    refuse(world, out, "b", "no array 'x'")
    assert list(world.only(resolve(world, out, "c"), Answer).message.peers) == ["c"]


def test_problems_of_all_are_told_in_their_words(world) -> None:
    world.join("a", data=has())
    code, text = rejected(world, refuse(world, ask(world), "a", "scans has no array 'x'"))
    assert (code, text) == ("INVALID_ARGUMENT", "a: scans has no array 'x'")
    world.join("b", data=has())
    out = ask(world)
    code, text = rejected(world, world.wait(700.0))
    assert code == "INVALID_ARGUMENT" or "left" in text
    assert numbers(world, out, "b")


def test_a_wrong_name_a_closed_door_and_a_rest_are_told_apart(world) -> None:
    world.join("a", data=has("ann"))
    world.join("b", data=has("bob", name="notes"))
    code, text = rejected(world, ask(world, "skans", "ann"))
    assert code == "NOT_FOUND"
    assert "no peer here has data called 'skans'; there is 'scans' (a)" in text
    assert "notes" not in text, "of what others keep from her she hears nothing"
    code, text = rejected(world, ask(world, "scans", "bob"))
    assert code == "PERMISSION_DENIED"
    assert "the owner of a does not let bob use its data 'scans'" in text
    assert rejected(world, ask(world, "scans", ""))[0] == "PERMISSION_DENIED"
    world.say(
        "a", availability=Availability(closed=Reason(code="paused", text="its owner has paused it"))
    )
    code, text = rejected(world, ask(world, "scans", "ann"))
    assert code == "FAILED_PRECONDITION"
    assert "a has the data 'scans' and rests now: its owner has paused it" in text


def test_a_peer_that_never_answers_ends_the_wait(make_world) -> None:
    world = make_world(data_s=5.0)
    world.join("a", data=has())
    world.join("b", data=has())
    out = ask(world)
    resolve(world, out, "b")
    assert list(world.only(world.wait(6.0), Answer).message.peers) == ["b"]
    late = resolve(world, out, "a")
    assert world.machine.ignored["resolved"] == 1
    assert not [i for i in late if isinstance(i, Answer)]


def test_an_answer_counts_once_from_whom_it_was_asked_and_only_with_a_manifest(world) -> None:
    world.join("a", data=has())
    world.join("b")
    out = ask(world)
    (number,) = numbers(world, out, "a")
    ref = BlobRef(hash=MANIFEST)
    world.say("b", resolved=Resolved(number=number, manifest=ref))
    assert world.machine.ignored["resolved"] == 1
    out = ask(world, by="somebody else")
    assert (
        rejected(world, resolve(world, out, "a", "nonsense"))[1]
        == "a: its answer names no manifest"
    )


# ---------------------------------------------------------------- a run needs it


def test_a_run_is_planned_once_a_peer_with_its_data_is_free(world) -> None:
    world.join("a")
    run, out = world.submit(make_spec(world))
    text = "no peer that could take part has its data 'scans': it waits until one joins"
    assert world.state(run).reason.text == text
    out = world.join("b", data=has())
    assert world.state(run).reason.text == "b reads the data 'scans'"
    ask = world.only(resolve(world, out, "b"), MakePlan)
    assert [(o.peer, o.manifests) for o in ask.peers] == [("a", ()), ("b", ((MANIFEST, ("x",)),))]
    out = world.handle(PlanReady(run, ask.version, world.plan("b", "a")))
    assert [m.assign.submitter for m in world.told(out, "b") if m.HasField("assign")] == [""]


def test_a_peer_has_no_say_over_the_data_of_others_runs(world) -> None:
    """A peer that was asked for its own data claims that the manifest of other runs is it."""
    world.join("a", data=has())
    resolve(world, ask(world, by="mallory"), "a")
    spec = world.spec()
    spec.data.hash = MANIFEST  # brought by who submits
    made = world.only(world.handle(RunSubmitted(world.request(), spec, "ann")), MakePlan)
    assert [o.manifests for o in made.peers] == [()]
    offer = world.machine.members.members["a"].offer_to("mallory")
    assert offer.manifests == ((MANIFEST, ("x",)),)


def test_whether_sums_may_leave_is_what_the_owner_said_last(world) -> None:
    world.join("a", data=has())
    member = world.machine.members.members["a"]
    for who, blended in (("ann", True), ("bob", False), ("cid", True)):
        resolve(world, ask(world, by=who), "a", blended=blended)
        assert member.offer_to(who).blended == (frozenset([MANIFEST]) if blended else frozenset())
    assert not member.offer_to("dan").blended, "it was not asked for them"


def test_manifests_of_a_peer_are_bounded(world) -> None:
    world.join("a", data=has())
    member = world.machine.members.members["a"]
    for n in range(300):
        out = ask(world, by=f"who-{n}")
        resolve(world, out, "a", f"{n:064x}", blended=n == 0)
    assert len(member.manifests) == MOST_MANIFESTS
    assert not member.blended, "of those that are forgotten nothing is kept"
    assert ("who-299", f"{299:064x}") in member.manifests


def test_other_data_of_that_name_is_not_its_data(world) -> None:
    out = world.join("a", data=has())
    run, out = world.submit(make_spec(world))
    resolve(world, out, "a", OTHER)
    assert "a: it has other data of that name" in world.state(run).reason.text
    assert not world.machine.placing.planning


def test_it_waits_behind_the_run_that_has_the_data(world) -> None:
    world.join("a", data=has())
    first, out = world.submit(make_spec(world))
    ask = world.only(resolve(world, out, "a"), MakePlan)
    world.handle(PlanReady(first, ask.version, world.plan("a")))
    world.join("b")
    second, out = world.submit(make_spec(world))
    text = "waits for its data 'scans', which stays with a: busy with another run"
    assert world.state(second).reason.text == text
    small, out = world.submit()
    assert not [i for i in out if isinstance(i, MakePlan)], "it is not overtaken"
    assert "waits behind" in world.state(small).reason.text


def test_a_peer_whose_owner_does_not_let_the_submitter_is_not_asked(world) -> None:
    out = world.join("a", data=has("ann"))
    run, out = world.submit(make_spec(world))  # nobody's identity is known here
    assert not numbers(world, out, "a")
    assert "no peer that could take part has its data" in world.state(run).reason.text


def test_after_a_restart_peers_are_asked_again(world) -> None:
    world.handle(Started())
    world.join("a", data=has())
    run, out = world.submit(make_spec(world))
    (before,) = numbers(world, out, "a")
    world.restart()
    out = world.join("a", counter=2, data=has())
    (number,) = numbers(world, out, "a")
    assert number != before
    resolve(world, out, "a")
    world.wait(11.0)  # the lease in which nothing is planned
    assert world.machine.placing.planning == run


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_whatever_happens_every_submitter_is_answered_once(make_world, seed: int) -> None:
    """Peers that come, go, rest, answer well, badly or never; runs that wait for their data."""
    rng, world = random.Random(seed), make_world(data_s=5.0)
    open_numbers: dict[str, list[int]] = {p: [] for p in "abc"}
    asked, answered = 0, 0

    def note(out: list[Instruction]) -> None:
        nonlocal answered
        answered += sum(isinstance(i, Answer | Reject) for i in out)
        for peer in world.streams:
            open_numbers[peer] += numbers(world, out, peer)

    for _ in range(60):
        peer = rng.choice("abc")
        here = peer in world.machine.members.members
        match rng.choice(("join", "close", "rest", "open", "resolve", "ask", "submit", "wait")):
            case "join" if not here:
                users = rng.choice(((), ("ann",)))
                note(world.join(peer, counter=rng.randrange(100, 10**6), data=has(*users)))
            case "close" if here:
                note(world.close(peer))
            case "rest" if here:
                closed = Reason(code="paused", text="its owner has paused it")
                note(world.say(peer, availability=Availability(closed=closed)))
            case "open" if here:
                note(world.say(peer, availability=Availability()))
            case "resolve" if here and open_numbers[peer]:
                resolved = Resolved(number=rng.choice(open_numbers[peer]))
                if rng.random() < 0.8:
                    resolved.manifest.hash = rng.choice((MANIFEST, OTHER, "nonsense"))
                note(world.say(peer, resolved=resolved))
            case "ask":
                asked += 1
                note(ask(world, rng.choice(("scans", "skans")), rng.choice(("", "ann"))))
            case "submit":
                asked += 1
                note(world.handle(RunSubmitted(world.request(), make_spec(world))))
            case "wait":
                note(world.wait(rng.choice((0.5, 3.0))))
    note(world.wait(30.0))
    assert answered == asked


@pytest.mark.parametrize(
    ("data", "local", "said"),
    [
        ({}, ["x"], 'data.where is "submitter": expected "peer"'),
        ({"where": "peer", "source": "s"}, ["x"] * 65, "at most 64"),
        ({"where": "peer", "source": "s"}, ["\n"], "printable"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(
    world, data: dict[str, str], local: list[str], said: str
) -> None:
    spec = world.spec(data=data)
    spec.local.extend(local)
    with pytest.raises(RunSpecError, match=said):
        read_spec(spec)
