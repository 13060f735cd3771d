"""A warm peer fetches what is frozen while others train, over a real broker and real peers."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shoal.client import Run, connect
from shoal.client.files import shards as shards_module
from shoal.client.files.weight_files import find
from shoal.client.models.fitting import fit
from shoal.job import Job

from .test_pretrained import Lab, Net, lab, turn, weights
from .test_weight_files import folder, wanted

__all__ = ["lab"]
STILL = "layers.1."


@pytest.fixture
def frozen(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hashes of the shards of what is frozen, which have nothing else."""
    monkeypatch.setattr(shards_module, "SHARD_BYTES", 144)
    monkeypatch.setattr(shards_module, "LARGE_BYTES", 8)
    folder(lab.folder / "w", 1, weights(torch.float32))
    still = {n: t for n, t in weights(torch.float32).items() if n.startswith(STILL)}
    found = fit(find([str(lab.folder / "w")]), wanted(still))
    return {hashlib.sha256(found.read(cut)).hexdigest() for cut in found.cuts}


def job(lab: Lab, steps: int) -> Job:
    made = lab.job(Net(), weights=str(lab.folder / "w"), freeze=[f"{STILL}*"])
    return replace(
        made,
        train=replace(made.train, steps=steps),
        plan=replace(made.plan, scheduler="uniform", stages=2),
    )


def spare(lab: Lab, run: Run) -> str:
    """Who is in no stage."""
    plan = next(e.plan for e in run.watch() if e.HasField("plan"))
    holders = {peer for stage in plan.stages for peer in stage.holders}
    members = lab.broker.shell.machine.members.members
    (found,) = [m.profile.name for m in members.values() if m.id not in holders]
    return found


async def submitted(lab: Lab, steps: int, then: Callable[[Run], str]) -> str:
    def submit() -> str:
        with connect(lab.broker.address) as client:
            return then(client.submit(job(lab, steps)))

    return await asyncio.to_thread(submit)


def fetched(lab: Lab, name: str) -> set[str]:
    """What is in its cache."""
    return set(os.listdir(lab.folder / name / "blobs"))


async def test_it_has_it_while_others_train(lab: Lab, frozen: set[str]) -> None:
    for name in "abc":
        await lab.join(name)
    who = await submitted(lab, 1_000_000, lambda run: spare(lab, run))
    async with asyncio.timeout(30.0):  # it takes less than a second
        while not frozen <= fetched(lab, who):
            await turn()
    assert len(frozen) > 1


async def test_of_an_owner_who_counts_bytes_nothing_is_fetched_that_nobody_needs(
    lab: Lab, frozen: set[str]
) -> None:
    for name in "abc":
        await lab.join(name, monthly_bytes=10**12)

    def over(run: Run) -> str:
        run.wait()
        return spare(lab, run)

    assert not frozen & fetched(lab, await submitted(lab, 20, over))
