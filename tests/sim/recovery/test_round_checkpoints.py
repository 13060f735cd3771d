"""Checkpoints of replicas that train apart: a run that goes on from one is what a plain loop
makes of all its rounds, whoever goes on and however many.

What is promised: weights, what replicas share (outer momentum), samples and learning rates are
those of the checkpoint. All replicas begin with the inner optimizer of the one that brought it, and
with nothing of their own (what sparse-loco has not given yet).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor, nn

from shoal.job import Train
from shoal.peer.core.events import UploadSnapshot
from shoal.proto.broker_pb2 import DONE, Checkpoint, RunEvent
from shoal.sim.monitor.monitor import Monitor
from shoal.sim.plain import round_oracle
from shoal.sim.plain.oracle import optimizer_of
from shoal.sim.plain.plain_rounds import batches_of, method_of
from shoal.sim.plain.round_log import committed_rounds
from shoal.sim.virtual.clock import Observed
from shoal.sim.virtual.world import PeerSpec, World
from shoal.tests.sim.played import ask
from shoal.tests.sim.played_rounds import TIES, Rounds, sites, sync_of

SAVES = {"output": {"every": 3}}
ADAM = {"optimizer": "adamw", "lr": 0.01, "momentum": 0.9}


def checkpoints(events: list[RunEvent]) -> list[Checkpoint]:
    return [e.checkpoint for e in events if e.HasField("checkpoint")]


def weights(world: World, run: str) -> dict[str, Tensor]:
    assert world.broker.ended[run].phase == DONE, world.broker.ended[run].reason.text
    [found] = [e.weights for e in world.events(run) if e.HasField("weights")]
    return {n: t for f in found.files for n, t in load(world.blobs[f.blob.hash]).items()}


def go_on(
    rounds: Rounds, before: World, saved: Checkpoint, peers: list[PeerSpec], **tables: Any
) -> tuple[World, str]:
    """In another world, to the end."""
    world = rounds.lab.world(peers, log=False)
    world.saved |= before.saved
    monitor = Monitor(world)
    world.until(lambda: len(world.broker.machine.members.pool) == len(peers))
    spec = rounds.spec(**tables)
    spec.resumed.CopyFrom(saved)
    run = world.submit(spec)
    monitor.finish(run, 3600.0)
    return world, run


def expected(
    rounds: Rounds, first: list[RunEvent], saved: Checkpoint, then: list[RunEvent]
) -> dict[str, Tensor]:
    """Of the rounds that are in the checkpoint, and of those behind it."""
    train, reader = rounds.job.train, rounds.lab.reader()
    size, count = train.microbatch_size, train.microbatches
    writer = next(e.replica for e in first if e.checkpoint == saved and e.HasField("checkpoint"))
    known: dict[str, Any] = {}

    def optimizer(module: nn.Module, t: Train) -> torch.optim.Optimizer:
        made = optimizer_of(module, t)
        if known:
            made.load_state_dict(copy.deepcopy(known))
        return made

    def committed(number: int, result: round_oracle.PlainResult) -> None:
        if number + 1 == saved.rounds.round:
            known.update(result.replicas[writer].optimizer.state_dict())

    sizes = {"microbatches": count, "microbatch_size": size}
    at = saved.rounds.committed
    old = committed_rounds(first, **sizes)[: saved.rounds.round]
    new = committed_rounds(then, **sizes, committed=at)
    anew = tuple(replace(m, fresh=True) for m in new[0].members)
    module = copy.deepcopy(rounds.lab.module)
    return round_oracle.train(
        module,
        [*old, replace(new[0], members=anew), *new[1:]],
        batches_of(reader, count, size),
        train,
        method_of(rounds.job),
        steps=train.steps or 0,
        optimizer=optimizer,
        committed=committed,
    ).shared


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], method: str) -> None:
    for name, tensor in wanted.items():
        apart = ~torch.isclose(got[name], tensor, rtol=1e-3, atol=2e-5)
        assert int(apart.sum()) <= TIES.get(method, 0.0) * tensor.numel(), name


@pytest.mark.parametrize(
    ("method", "train", "then"),
    [
        ("diloco", {}, 2),
        ("diloco", {}, 3),
        ("diloco", {}, 1),
        ("sparse-loco", {}, 3),
        ("average", ADAM, 2),
    ],
)
def test_a_run_goes_on_from_a_version_with_any_number_of_replicas(
    rounds: Rounds, method: str, train: dict[str, Any], then: int
) -> None:
    tables = {"sync": sync_of(method), "train": train, **SAVES}
    world, run = rounds.play(sites(1e9, 1e9), **tables)
    saved = checkpoints(world.events(run))
    assert [c.step for c in saved] == [3, 6, 8]
    assert [c.rounds.round for c in saved] == [1, 2, 3]
    tables["plan"] = {"replicas": then}
    again, other = go_on(rounds, world, saved[0], sites(*[1e9] * then), **tables)
    events = again.events(other)
    assert [c.step for c in checkpoints(events)][-1] == 8
    wanted = expected(rounds, world.events(run), saved[0], events)
    assert_same(weights(again, other), wanted, method)


def test_who_brings_it_may_be_a_pipeline_and_who_goes_on_another(rounds: Rounds) -> None:
    weak = [PeerSpec(name=f"w{i}", place="home", memory_bytes=140_000) for i in range(2)]
    strong = PeerSpec(name="q", place="rack", memory_bytes=1 << 30)
    world, run = rounds.play([strong, *weak], **SAVES)
    saved = checkpoints(world.events(run))
    assert {len(c.files) for c in saved} == {1, 2}  # the last is of who exports
    again, other = go_on(rounds, world, saved[0], [*weak, strong], **SAVES)
    wanted = expected(rounds, world.events(run), saved[0], again.events(other))
    assert_same(weights(again, other), wanted, "diloco")


def test_samples_of_who_was_left_out_are_trained_by_who_goes_on(rounds: Rounds) -> None:
    """Its peer dies in the first round, so its work comes back; the monitor counts each once."""
    often = {"output": {"every": 1}}
    rounds.play(sites(1e9, 1e9), **often)
    deaths = {rounds.moment(0.1): "p1"}
    world, run = rounds.play(sites(1e9, 1e9), deaths, **often)
    saved = next(c for c in checkpoints(world.events(run)) if c.rounds.returned)
    again, other = go_on(rounds, world, saved, sites(1e9, 1e9), **often)
    [begun, *_] = [e.round_begun for e in again.events(other) if e.HasField("round_begun")]
    assert begun.work[0].samples[0] == saved.rounds.returned[0]
    assert weights(again, other)


def test_the_newest_are_kept_whoever_brought_them(rounds: Rounds) -> None:
    output = {"output": {"every": 1, "keep": 2}}
    world, run = rounds.play(sites(1e9, 1e9), sync={"every": 1}, **output)
    replicas = world.broker.machine.runs[run].record.replicas
    kept = sorted(c.step for r in replicas for c in r.checkpoints.kept)
    assert len(kept) == 2
    assert kept[-1] == 8


def test_one_that_was_lost_on_its_way_is_made_up_for_at_the_next_version(rounds: Rounds) -> None:
    """Its writer dies as soon as it has begun the round."""
    peers = sites(1e6, 1e6, 1e6)  # a round takes longer than it takes to notice a death
    killed = False

    def kill(world: World, seen: Observed) -> None:
        nonlocal killed
        record = seen.record
        if isinstance(record, UploadSnapshot) and not killed:
            killed = True
            world.after(0.0, lambda: world.kill(seen.who))

    world, run = rounds.play(peers, also=kill, output={"every": 4}, train={"steps": 12})
    assert killed
    first, *_, last = (c.step for c in checkpoints(world.events(run)))
    assert 6 < first < last == 12
    rounds.assert_expected(world, run)


def test_a_run_of_one_replica_goes_on_with_two_but_not_the_other_way_round(rounds: Rounds) -> None:
    plain = {"sync": {"kind": "allreduce", "every": 1}, "plan": {"replicas": 1}}
    world, run = rounds.play(sites(1e9), **SAVES, **plain)
    [first, *_] = checkpoints(world.events(run))
    assert not first.HasField("rounds")
    again, other = go_on(rounds, world, first, sites(1e9, 1e9), **SAVES)
    done = [e.round_done.microbatches for e in again.events(other) if e.HasField("round_done")]
    assert done == [36, 48]
    assert weights(again, other)
    [made, *_] = checkpoints(again.events(other))
    alone = rounds.lab.world(sites(1e9), log=False)
    spec = rounds.spec(**SAVES, **plain)
    spec.resumed.CopyFrom(made)
    with pytest.raises(ValueError, match="replicas that train apart"):
        alone.submit(spec)


@pytest.mark.parametrize("at", [1, 2, 4, 6])
def test_a_pause_loses_nothing_be_it_while_all_wait_for_one(rounds: Rounds, at: int) -> None:
    """The second replica is slower, and stands in a step of the round when the first waits. Who is
    in the middle of a round when it stops, while another stops behind it, is left out of that."""
    world, run = rounds.start(sites(1e9, 4e8), train={"steps": 12})
    machine = world.broker.machine

    def stopped() -> bool:
        return all(r.paused for r in machine.runs[run].record.replicas)

    world.until(lambda: machine.runs[run].record.replicas[0].committed >= at)
    ask(world, run, "pause")
    world.until(stopped)
    assert not any(m.state == "assigned" for m in machine.members.members.values())
    ask(world, run, "resume")
    rounds.monitor.finish(run, 3600.0)
    done = [e.round_done for e in world.events(run) if e.HasField("round_done")]
    assert len(done[-1].members) == 2
    rounds.assert_expected(world, run)
