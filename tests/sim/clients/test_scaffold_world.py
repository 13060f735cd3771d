"""SCAFFOLD in the simulated world: through broker and peers, against a plain loop over the same
cohorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.job import Job, SettingsError
from shoal.job.clients.client_compression import ClientLinks, CompressionOptions
from shoal.job.clients.client_privacy import ClientPrivacy
from shoal.job.clients.local_work import LocalWork
from shoal.peer.core.events import BeginRound
from shoal.proto.broker_pb2 import DONE
from shoal.sim.plain.client_loops import FederatedResult, train_cohorts
from shoal.sim.plain.client_methods import Scaffold
from shoal.sim.plain.plain_cohorts import committed_cohorts, method_of
from shoal.tests.sim.clients.moments import broker_again, losing
from shoal.tests.sim.clients.test_federated_world import exported, job_of, world_of

LOSSES = (10, 17, 29)
"""Fortieths of a run behind which a peer dies: some in local work, some in an exchange."""


def scaffold(folder: Path, rounds: int = 5, **sync: Any) -> Job:
    job = job_of(folder, "fedavg", rounds)
    found = {"method": "scaffold", "local": LocalWork(steps=3), "weight": "equal", **sync}
    return replace(
        job,
        name=f"scaffold {sync} {rounds}",
        sync=replace(job.sync, **{"options": {"lr": 0.8}, **found}),
        train=replace(job.train, momentum=0.0),
    )


def plain(lab: Any, events: Any) -> tuple[Scaffold, dict[str, Any]]:
    """The plain loop over what a run committed, and the version that it came to. Its mean control
    variate is that of all clients behind each round in which nobody lost its own."""
    method, reader = method_of(lab.job, events), lab.reader()
    assert isinstance(method, Scaffold)

    def conserved(count: int, result: FederatedResult) -> None:
        if any(method.lost.get(count, ())):
            return
        for name, c in method.c.items():
            own = torch.stack([each[name] for each in method.own]).mean(0)
            torch.testing.assert_close(c, own, rtol=1e-9, atol=1e-12)

    made = train_cohorts(
        lab.module,
        committed_cohorts(events, lab.job, reader),
        lambda at: reader.samples(np.array(at)),
        method,
        lr=lab.job.train.lr,
        clip=lab.job.train.clip,
        committed=conserved,
    )
    return method, made.shared


def assert_expected(lab: Any, world: Any, run: str) -> Scaffold:
    events = world.events(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    method, wanted = plain(lab, events)
    got = exported(world, run)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
    return method


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_the_version_is_that_of_a_plain_loop(
    laboratory: Callable[[Job], Any], tmp_path: Path, clip: float
) -> None:
    job = scaffold(tmp_path)
    lab = laboratory(replace(job, name=f"clip {clip}", train=replace(job.train, clip=clip)))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    method = assert_expected(lab, world, run)
    assert any(float(c.abs().max()) > 1e-3 for c in method.c.values())
    assert method.afresh == {0}
    assert not any(method.lost.values())


def playing(lab: Any, peers: int) -> Callable[[int], tuple[Any, str, int]]:
    """Return what plays a run, of which p1 dies at a moment, and how many moments there are."""

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab, peers)
        run, count = losing(world, lab.spec, deadly)
        return world, run, count

    return play


def test_where_state_is_lost_with_its_peer_all_begin_without(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(scaffold(tmp_path, 6))
    play = playing(lab, 4)
    _, _, records = play(0)
    again = 0
    for part in LOSSES:
        world, run, _ = play(records * part // 40)
        afresh = assert_expected(lab, world, run).afresh
        again += len(afresh) > 1
        notes = [e.note for e in world.events(run) if "so all begin without" in e.note]
        assert len(notes) == len(afresh) - 1, "and people are told so"
    assert again, "no run began without state a second time"


def test_a_peer_that_lost_the_state_of_its_clients_says_so(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(scaffold(tmp_path, 6))
    world = world_of(lab)
    run, checks, rounds = world.submit(lab.spec), world.observe, 0

    def observe(seen: Any) -> None:
        nonlocal rounds
        if isinstance(seen.record, BeginRound) and seen.who == "p1":
            rounds += 1
            if rounds == 3:
                world.peers["p1"].device.clients.begin("another-run")
                world.peers["p1"].device.clients.begin(run)
        checks(seen)

    world.observe = observe
    world.finish(run)
    method = assert_expected(lab, world, run)
    assert method.afresh == {0, 3}
    assert [number for number, clients in method.lost.items() if clients] == [2]
    notes = [e.note for e in world.events(run) if "all begin" in e.note]
    assert len(notes) == 2, "once it is found out, and as they do"


def test_whenever_the_broker_is_started_again_state_is_where_it_was(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    lab = laboratory(scaffold(tmp_path))

    def play(deadly: int) -> tuple[Any, str, int]:
        world = world_of(lab)
        run, written = broker_again(world, lab.spec, deadly)
        return world, run, written

    world, run, records = play(0)
    assert_expected(lab, world, run)
    for deadly in range(2, records, 7):
        world, run, _ = play(deadly)
        method = assert_expected(lab, world, run)
        assert method.afresh == {0}, "nobody was lost"


def test_control_variates_are_of_what_clients_send(
    laboratory: Callable[[Job], Any], tmp_path: Path
) -> None:
    options = CompressionOptions(least_ratio=0.1)
    lab = laboratory(scaffold(tmp_path, compression="topk", compression_options=options))
    world = world_of(lab)
    run = world.submit(lab.spec)
    world.finish(run)
    assert_expected(lab, world, run)


@pytest.mark.parametrize("compression", [pytest.param("topk", marks=pytest.mark.slow), "bcrs+opwa"])
def test_what_clients_do_not_send_they_add_to_their_next_move(
    laboratory: Callable[[Job], Any], tmp_path: Path, compression: str
) -> None:
    """Of clients of a lost peer the rest is lost, and of no others."""
    job, options = job_of(tmp_path, "fedavgm", 6), CompressionOptions(least_ratio=0.05)
    links = ClientLinks(up="uniform:1Mbit,8Mbit") if "bcrs" in compression else None
    sync = {"compression": compression, "compression_options": options, "client_links": links}
    job = replace(job, sync=replace(job.sync, client_feedback="ef", **sync))
    lab = laboratory(replace(job, name=f"{compression} with feedback"))
    play = playing(lab, 4)

    def assert_rests(world: Any, run: str) -> tuple[set[int], bool]:
        events, reader = world.events(run), lab.reader()
        assert events[-1].state.phase == DONE, events[-1].state.reason.text
        cohorts = [*committed_cohorts(events, lab.job, reader)]
        makes = {
            feedback: train_cohorts(
                lab.module,
                cohorts,
                lambda at: reader.samples(np.array(at)),
                method_of(lab.job),
                lr=lab.job.train.lr,
                momentum=lab.job.train.momentum,
                overlap=lab.job.sync.client_compression.overlap,
                feedback=feedback,
            ).shared
            for feedback in (True, False)
        }
        got = exported(world, run)
        for name, tensor in makes[True].items():
            torch.testing.assert_close(got[name], tensor.float(), rtol=1e-4, atol=1e-6)
        differs = any(
            not torch.allclose(got[n], t.float(), atol=1e-4) for n, t in makes[False].items()
        )
        seen, again = set[int](), False
        for cohort in cohorts:
            again = again or any(w.new and w.client in seen for w in cohort)
            seen |= {w.client for w in cohort}
        return seen, differs and again

    world, run, records = play(0)
    seen, _ = assert_rests(world, run)
    assert len(seen) > 8
    if compression == "topk":
        lost = [assert_rests(*play(records * part // 40)[:2])[1] for part in LOSSES]
        assert any(lost), "no client ever lost its rest"


def test_what_a_run_with_state_cannot_have_is_refused(tmp_path: Path) -> None:
    job = scaffold(tmp_path)
    privacy = ClientPrivacy(clip=1.0, epsilon=8.0, delta=1e-3)
    for key, sync in {
        "sync.local": {"local": LocalWork(passes=1)},
        "sync.weight": {"weight": "samples"},
        "sync.aggregate": {"aggregate": "median"},
        "sync.compression": {"compression": "bcrs", "client_links": ClientLinks(up="1Mbit")},
        "sync.privacy": {"privacy": privacy},
        "sync.secure": {"secure": True},
    }.items():
        with pytest.raises(SettingsError, match=key):
            replace(job, sync=replace(job.sync, **sync)).check()
    for train in ({"momentum": 0.5}, {"optimizer": "adamw"}):
        with pytest.raises(SettingsError, match="momentum 0 is"):
            replace(job, train=replace(job.train, **train)).check()
