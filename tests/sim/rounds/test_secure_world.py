"""Federated rounds whose sums are masked, in the simulated world: the same versions to the bit as
without masks, whoever is lost and whenever the broker is started again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from shoal.broker import events as b
from shoal.broker.options import BrokerOptions
from shoal.broker.policies import segments
from shoal.broker.rounds.secure_sums import SecureSums
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.wiring import GIVE
from shoal.job import Job
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.peer.compute.device import TorchDevice
from shoal.peer.core import events as p
from shoal.peer.core.rounds.rounds import Rounds
from shoal.proto.broker_pb2 import DONE, FAILED, WAITING, RoundMasks, RoundPlan, RunSpec
from shoal.sim.ghost.device import Ghosts
from shoal.sim.virtual.clock import StalledError
from shoal.tests.sim.clients.test_federated_world import assert_expected, job_of, world_of

ROUNDS = 2


@pytest.fixture(autouse=True)
def several_adders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors are divided among all who may add up."""
    monkeypatch.setattr(segments, "UNDIVIDED", 10)


@pytest.fixture(scope="module")
def lab(laboratory: Callable[[Job], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = job_of(tmp_path_factory.mktemp("secure"), "fedavg", ROUNDS)
    sync = replace(job.sync, per_round=10)
    return laboratory(replace(job, name="secure", sync=sync))


def spec_of(lab: Any, replicas: int = 3, **sync: Any) -> RunSpec:
    """The same job with other settings of [sync]."""
    job = replace(lab.job, sync=replace(lab.job.sync, **sync))
    spec = RunSpec()
    spec.CopyFrom(lab.spec)
    spec.job = replace(job, plan=replace(job.plan, replicas=replicas)).to_json()
    return spec


def hashes(world: Any, run: str) -> list[int]:
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    return [e.round_done.hash for e in events if e.HasField("round_done")]


PRIVACY = ClientPrivacy(clip=0.4, epsilon=8.0, delta=1e-5, noise=0.2)


@pytest.mark.parametrize(
    "sync",
    [
        {"method": "fednova"},
        pytest.param({"method": "fedprox", "options": {"mu": 0.3}}, marks=pytest.mark.slow),
        pytest.param({"method": "fedadam", "options": {"lr": 0.02}}, marks=pytest.mark.slow),
        {"weight": "equal", "privacy": PRIVACY},
    ],
    ids=["fednova", "fedprox", "fedadam", "privacy"],
)
def test_versions_are_those_without_masks_to_the_bit(lab: Any, sync: dict[str, Any]) -> None:
    def play(secure: bool) -> list[int]:
        world = world_of(lab)
        run = world.submit(spec_of(lab, secure=secure, **sync))
        world.finish(run)
        return hashes(world, run)

    found = play(secure=True)
    assert len(set(found)) == ROUNDS
    assert found == play(secure=False)


PHASES = {
    "it trains": lambda said: isinstance(said, p.BeginRound),
    "it told its key": lambda said: _told(said, "key"),
    "it joins": lambda said: isinstance(said, p.JoinExchange),
    "it dealt": lambda said: _told(said, "sealed"),
    "it gives": lambda said: isinstance(said, p.SendFrame),
    "it hears sealed shares": lambda said: _heard(said, "sealed"),
    "it holds": lambda said: _told(said, "holds"),
    "it is asked to reveal": lambda said: _heard(said, "reveal"),
    "it revealed": lambda said: _told(said, "revealed"),
    "it hears the masks": lambda said: _heard(said, "masks"),
    "it made the version": lambda said: _made(said),
}
"""What a peer does or hears in a round, in order."""


def _told(said: Any, what: str) -> bool:
    if not isinstance(said, p.Tell) or said.message.WhichOneof("kind") != "round":
        return False
    masks = said.message.round.masks
    return bool(getattr(masks, what)) if what != "key" else masks.HasField("key")


def _heard(said: Any, what: str) -> bool:
    if not isinstance(said, p.BrokerSaid) or said.message.WhichOneof("kind") != "round_masks":
        return False
    return bool(getattr(said.message.round_masks, what))


def _made(said: Any) -> bool:
    tells = isinstance(said, p.Tell) and said.message.WhichOneof("kind") == "round"
    return tells and bool(said.message.round.hashes)


@pytest.mark.parametrize(
    "phase",
    [
        phase
        if phase in ("it gives", "it revealed")
        else pytest.param(phase, marks=pytest.mark.slow)
        for phase in PHASES
    ],
)
def test_of_ten_peers_three_are_lost_in_any_phase(lab: Any, phase: str) -> None:
    world, lost = world_of(lab, 10), {"p1", "p4", "p8"}
    world.until(lambda: len(world.broker.machine.members.pool) == 10)
    run, checks, seen_by = world.submit(spec_of(lab, 10, secure=True)), world.observe, set[str]()

    def observe(seen: Any) -> None:
        checks(seen)
        if seen.who in lost and world.peers[seen.who].alive and PHASES[phase](seen.record):
            seen_by.add(seen.who)
            world.kill(seen.who)

    world.observe = observe
    world.finish(run)
    assert seen_by == lost, "they were in this phase"
    done = assert_expected(lab, world, run)
    inside = 10 if list(PHASES).index(phase) > list(PHASES).index("it holds") else 7
    assert len(done[0].members) == inside


@pytest.mark.parametrize(
    "part", [3, *(pytest.param(p, marks=pytest.mark.slow) for p in (*range(3), *range(4, 14)))]
)
def test_whenever_the_broker_is_started_again_the_versions_are_the_same(
    lab: Any, part: int
) -> None:
    """Part `part` of all the moments at which it may be."""

    def play(deadly: int) -> tuple[Any, str, int]:
        world, handled = world_of(lab), 0
        run, checks = world.submit(spec_of(lab, secure=True)), world.observe

        def observe(seen: Any) -> None:
            nonlocal handled
            checks(seen)
            said = seen.who == "broker" and isinstance(seen.record, b.PeerSaid | b.Persist)
            about = said and (handled or _is_key(seen.record))
            handled += bool(about)
            if about and handled == deadly:
                world.restart_broker(1.0)

        world.observe = observe
        world.finish(run)
        return world, run, handled

    world, run, records = play(0)
    wanted = hashes(world, run)
    attempts = set[int]()
    for deadly in range(1 + part, records, 14):
        world, run, _ = play(deadly)
        assert hashes(world, run) == wanted
        attempts |= {e.round_done.attempt for e in world.events(run) if e.HasField("round_done")}
    assert attempts <= {1, 2}, "one restart is one more attempt, if masks were not lifted yet"


def _is_key(record: Any) -> bool:
    return isinstance(record, b.PeerSaid) and record.message.round.masks.HasField("key")


def _deaf(monkeypatch: pytest.MonkeyPatch, who: set[str], to: str) -> None:
    """Have peers never hear something of masks in the first round."""
    hears = Rounds.hears

    def hear(self: Rounds, told: RoundMasks) -> None:
        if self._peer not in who or told.round or not getattr(told, to):
            hears(self, told)

    monkeypatch.setattr(Rounds, "hears", hear)


def test_who_never_holds_is_left_out(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _deaf(monkeypatch, {"p1"}, "sealed")
    world = world_of(lab, 4)
    run = world.submit(spec_of(lab, 4, secure=True))
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [3, 3]
    assert done[0].attempt == 2


def test_who_never_lifts_the_masks_takes_the_version_from_others(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _deaf(monkeypatch, {"p1"}, "masks")
    world = world_of(lab, 4)
    run = world.submit(spec_of(lab, 4, secure=True))
    world.finish(run)
    done = assert_expected(lab, world, run)
    assert [m.replica for m in done[0].members] == [0, 1, 2, 3]
    assert [bool(m.term) for m in done[0].members] == [True, False, True, True]
    assert done[0].attempt == 1


@pytest.mark.parametrize(
    ("deaf", "to", "why"),
    [
        (0, "", "2 peers are left with a contribution"),
        (2, "reveal", "too few peers have revealed their shares of masks in time"),
    ],
)
def test_a_run_ends_where_too_few_are_left(
    lab: Any, monkeypatch: pytest.MonkeyPatch, deaf: int, to: str, why: str
) -> None:
    _deaf(monkeypatch, {f"p{i}" for i in range(deaf)}, to)
    world = world_of(lab)
    world.until(lambda: len(world.broker.machine.members.pool) == 3)
    run, checks = world.submit(spec_of(lab, secure=True)), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if not deaf and seen.who == "p1" and PHASES["it joins"](seen.record):
            world.kill("p1")

    world.observe = observe
    events = world.finish(run)
    assert events[-1].state.phase == FAILED
    assert events[-1].state.reason.code == "secure"
    assert why in events[-1].state.reason.text
    assert not any(e.HasField("round_done") for e in events)


def test_more_than_half_lost_once_shares_are_revealed_end_the_run(lab: Any) -> None:
    world, lost = world_of(lab, 4), {"p0", "p1"}
    world.until(lambda: len(world.broker.machine.members.pool) == 4)
    run, checks = world.submit(spec_of(lab, 4, secure=True)), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if seen.who in lost and PHASES["it is asked to reveal"](seen.record):
            world.kill(seen.who)

    world.observe = observe
    events = world.finish(run)
    assert events[-1].state.phase == FAILED
    assert "too few are left of the 4 peers of round 0" in events[-1].state.reason.text


def test_two_peers_are_waited_with(lab: Any) -> None:
    spec = spec_of(lab, secure=True)
    open_ = Job.from_json(spec.job)
    spec.job = replace(open_, plan=replace(open_.plan, replicas="auto")).to_json()
    world = world_of(lab, 2)
    run = world.submit(spec)
    with pytest.raises(StalledError):
        world.finish(run, 60.0)
    [state] = [e.state for e in world.events(run) if e.state.reason.text][-1:]
    assert (state.phase, state.reason.code) == (WAITING, "peers")
    assert (
        "2 peers would train clients, with secure = true: expected at least 3" in state.reason.text
    )


def test_a_network_without_certificates_refuses_it(lab: Any) -> None:
    world = world_of(lab, broker_options=BrokerOptions(identities=False))
    with pytest.raises(ValueError, match=r"sync\.secure .* with --insecure have no certificates"):
        world.submit(spec_of(lab, secure=True))
    bare = world_of(lab, device=lambda _: TorchDevice())
    events = bare.finish(bare.submit(spec_of(lab, secure=True)))
    assert events[-1].state.phase == FAILED
    assert "has no certificate to sign keys with" in events[-1].state.reason.text


def test_ghosts_refuse_it(lab: Any) -> None:
    world = world_of(lab, device=Ghosts())
    last = world.finish(world.submit(spec_of(lab, secure=True)))[-1].state
    assert last.phase == FAILED
    assert "ghosts add up hashes, which no mask is for" in last.reason.text


def test_without_keys_of_others_nothing_is_given(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SecureSums.begin

    def forget(self: SecureSums, members: Iterable[int], plans: Mapping[PeerId, RoundPlan]) -> None:
        begin(self, members, plans)
        plans.get(PeerId("p1"), RoundPlan()).ClearField("keys")

    monkeypatch.setattr(SecureSums, "begin", forget)
    world, given = world_of(lab, 4), list[str]()
    run, checks = world.submit(spec_of(lab, 4, secure=True)), world.observe

    def observe(seen: Any) -> None:
        checks(seen)
        if isinstance(seen.record, p.SendFrame) and seen.record.key.hop == GIVE:
            given.append(seen.who)

    world.observe = observe
    world.finish(run)
    assert given
    assert "p1" not in given
    assert [len(d.members) for d in assert_expected(lab, world, run)] == [3, 3]
