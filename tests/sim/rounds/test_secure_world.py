"""Federated rounds whose sums are masked, in the simulated world: the same versions to the bit as
without masks, whoever is lost and whenever the broker is started again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.broker.policies import segments
from shoal.client import submission
from shoal.job import Job
from shoal.job.clients.client_options import ClientPrivacy
from shoal.proto.broker_pb2 import DONE
from shoal.tests.sim.rounds.test_federated_world import METHODS, assert_expected, job_of, world_of


@pytest.fixture(autouse=True)
def several_adders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small vectors are divided among all who may add up."""
    monkeypatch.setattr(segments, "UNDIVIDED", 10)
    monkeypatch.setattr(submission, "with_noise", lambda job: job)


def secure(job: Job, *, replicas: int = 3, name: str = "secure") -> Job:
    sync, plan = replace(job.sync, secure=True), replace(job.plan, replicas=replicas)
    return replace(job, name=f"{job.name} {name}", sync=sync, plan=plan)


def hashes(lab: Any, peers: int = 3) -> list[int]:
    world = world_of(lab, peers)
    run = world.submit(lab.spec)
    events = world.finish(run)
    assert events[-1].state.phase == DONE, events[-1].state.reason.text
    return [e.round_done.hash for e in events if e.HasField("round_done")]


@pytest.mark.parametrize("method", METHODS)
def test_versions_are_those_without_masks_to_the_bit(
    laboratory: Callable[[Job], Any], tmp_path: Path, method: str
) -> None:
    job = job_of(tmp_path, method, 3)
    found = hashes(laboratory(secure(job)))
    assert len(set(found)) == 3
    assert found == hashes(laboratory(job))
