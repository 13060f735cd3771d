"""What federated training is held against: what its clients come to alone, and what one model comes
to that has all their samples. Plain loops, as `client_loops.py`.

    run         the version that the run should have come to
    pooled      one model on the samples of all clients together, for as many local steps as clients
                made in each round, with that round's learning rate
    local only  each client by itself, from where the run began, for the steps that it made in the
                run, on the same batches

All are evaluated on what the same clients hold out of their own samples. An optimizer begins fresh
where it does in the run: with each round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from ...job import Job
from ...peer.data.partition import Partition, partition_of
from ...peer.data.reader import Reader
from ...proto.broker_pb2 import RunEvent
from .client_loops import ClientWork, train_cohorts
from .client_methods import FedAvg, Named
from .plain_cohorts import committed_cohorts, last_version, local_training, reading

__all__ = ["client_baselines"]

Row = dict[str, float | int | str]


def client_baselines(
    module: nn.Module, job: Job, events: Sequence[RunEvent], reader: Reader, most: int
) -> list[Row]:
    """Return a row for each of the three: its `name`, how many `clients` it was evaluated on, and
    of the loss and each metric `clients_NAME`, the mean over their held-out samples, with
    `clients_NAME_least`, `_median` and `_most` of the clients' own means. `most`: of the clients
    that were in the run and hold samples out so many count, drawn by the job's seed. None count:
    no rows."""
    assert job.data.partition is not None, "its data is elsewhere"
    partition = partition_of(job.data.partition, job.data.targets, reader)
    cohorts = [*committed_cohorts(events, job, reader)]
    took_part = sorted({work.client for cohort in cohorts for work in cohort})
    able = [c for c in took_part if len(partition.held_out(c))]
    drawn = np.random.default_rng(job.seed).permutation(len(able))[:most]
    clients = sorted(able[i] for i in drawn)
    if not clients:
        return []
    version = last_version(module, job, events, reader)
    one = _trained(module, job, reader, [*_pooled(cohorts, partition, job)])
    apart = {}
    for c in clients:
        mine = [[w for w in cohort if w.client == c] for cohort in cohorts]
        apart[c] = _trained(module, job, reader, mine)
    each = {"run": dict.fromkeys(clients, version), "pooled": dict.fromkeys(clients, one)}
    return [
        _row(name, {c: _judged(module, states[c], partition.held_out(c), reader) for c in clients})
        for name, states in (each | {"local only": apart}).items()
    ]


def _trained(
    module: nn.Module, job: Job, reader: Reader, cohorts: Sequence[Sequence[ClientWork]]
) -> Named:
    made = train_cohorts(module, cohorts, reading(reader), FedAvg(), **local_training(job))
    return made.shared


def _pooled(
    cohorts: Sequence[Sequence[ClientWork]], partition: Partition, job: Job
) -> Iterator[list[ClientWork]]:
    """The work of one client that has everybody's samples, round after round: pass after pass in
    new orders."""
    samples = np.concatenate([partition.train(c) for c in range(len(partition))])
    rng = np.random.default_rng([job.seed, 1])

    def batches() -> Iterator[list[int]]:
        while True:
            order = samples[rng.permutation(len(samples))]
            for at in range(0, len(order), job.train.batch):
                yield order[at : at + job.train.batch].tolist()

    endless = batches()
    for cohort in cohorts:
        steps = sum(len(work.batches) for work in cohort)
        yield [ClientWork(0, [*islice(endless, steps)])] if steps else []


@torch.no_grad()
def _judged(
    module: nn.Module, state: Mapping[str, Tensor], held_out: np.ndarray, reader: Reader
) -> dict[str, tuple[float, int]]:
    """The mean of loss and metrics over a client's samples, with their number, by name."""
    training = module.training
    module.eval()
    out = torch.func.functional_call(module, dict(state), (), reader.samples(held_out))
    module.train(training)
    named = {"loss": out} if isinstance(out, Tensor) else out
    return {n: (float(v), len(held_out)) for n, v in named.items() if n != "weight"}


def _row(name: str, judged: Mapping[int, Mapping[str, tuple[float, int]]]) -> Row:
    row: Row = {"name": name, "clients": len(judged)}
    for number in next(iter(judged.values())):
        means = [found[number][0] for found in judged.values()]
        sizes = [found[number][1] for found in judged.values()]
        key = f"clients_{number}"
        row[key] = float(np.average(means, weights=sizes))
        row |= {f"{key}_least": min(means), f"{key}_median": median(means)}
        row[f"{key}_most"] = max(means)
    return row
