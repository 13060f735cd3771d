"""Worlds of random faults, as in `tests/sim/random_rounds.py`, whose replicas train clients and
sign what they give: of plain means, of every client by itself, and of versions that wait for
nobody."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shoal.dag.plan.action import Action, Kind
from shoal.job import Job
from shoal.proto.broker_pb2 import DONE, RunSpec
from shoal.sim.plain.plain_cohorts import last_version
from shoal.sim.virtual.orders import ActionTimes
from shoal.tests.sim.random_rounds import Drawn, draw, play

from .test_federated_world import exported, job_of

__all__ = ["SYNC", "ClientRounds", "draw_clients", "play_clients"]

SYNC: dict[str, list[dict[str, Any]]] = {
    "mean": [{"method": m} for m in ("fedavg", "fednova", "fedavgm", "fedadam")],
    "by client": [
        {"aggregate": a, "weight": "equal"}
        for a in ("median", "trimmed-mean", "krum", "multi-krum", "flag")
    ],
    "buffered": [{"method": "fedbuff", "options": {"buffer": n}} for n in (2, 3, 5)],
}
"""By what a round is made of, tables [sync]."""


class ClientRounds:
    """Plays a job of clients, again and again with other tables."""

    def __init__(self, laboratory: Any, folder: Path) -> None:
        self.lab = laboratory(replace(job_of(folder, "fedavg"), name="random clients"))

    def spec(self, **tables: Any) -> RunSpec:
        """Tables in place of the job's; they must not change the model."""
        spec = copy.deepcopy(self.lab.spec)
        job = json.loads(spec.job)
        self.job = Job.from_table(job | {k: job[k] | t for k, t in tables.items()})
        spec.job, spec.steps = self.job.to_json(), self.job.train.steps or 0
        return spec

    def assert_expected(self, world: Any, run: str) -> None:
        """It is done, with the weights of a plain loop over the clients that it committed."""
        events = world.events(run)
        assert events[-1].state.phase == DONE, events[-1].state.reason.text
        wanted = last_version(self.lab.module, self.job, events, self.lab.reader())
        for name, tensor in exported(world, run).items():
            torch.testing.assert_close(tensor, wanted[name].float(), rtol=1e-4, atol=1e-6)


def draw_clients(seed: int, kind: str) -> Drawn:
    """Return a world of one of `SYNC`, with three peers that train clients and up to three more."""
    found, rng = draw(seed, signs=True), random.Random(f"clients {kind} {seed}")
    tables = {
        "plan": {"replicas": 3, "stages": 1},
        "train": {"steps": rng.randint(4, 8), "eval_every": rng.choice((0, 2))},
        "sync": {"deadline": found.tables["sync"]["deadline"], **rng.choice(SYNC[kind])},
    }
    if kind != "buffered":
        tables["sync"]["quorum"] = found.tables["sync"]["quorum"]
    return replace(found, tables=tables)


def play_clients(rounds: ClientRounds, drawn: Drawn) -> str:
    """Return what is wrong with what came of it; "": nothing. A round takes seconds, on each peer
    others."""
    usual = ActionTimes.seconds

    def seconds(times: ActionTimes, action: Action) -> float:
        if action.kind is not Kind.CONTRIBUTE:
            return usual(times, action)
        return random.Random(f"{drawn.seed} {times._peer}").uniform(0.5, 6.0)

    with patch.object(ActionTimes, "seconds", seconds):
        return play(rounds, drawn, signs=True)
