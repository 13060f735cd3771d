"""The plain loop of a federated run: fed with the clients that its rounds committed, it says what
each version that was evaluated should have come to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...compression.sparse.masks import SharedMask
from ...dag.rounds.cohorts import cohort_of, places_of
from ...job import Job
from ...job.clients.client_options import Cohorts
from ...job.rounds import options_of
from ...job.settings import plain
from ...peer.data.partition import Partition, partition_of
from ...peer.data.reader import Reader
from ...peer.federated.batches import Participant, batches
from ...proto.broker_pb2 import RoundWork, RunEvent
from .client_loops import ClientWork, FederatedResult, train_cohorts
from .client_methods import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedBuff,
    FedNova,
    FedProx,
    FedYogi,
    Named,
    Scaffold,
)
from .client_updates import shared_positions
from .hidden import hidden_mean
from .oracle import learning_rate, optimizer_of, scaler_of
from .plain_impro import ImproClient
from .plain_vhl import VhlClient, with_places
from .robust import AGGREGATES

__all__ = [
    "aggregate_of",
    "committed_cohorts",
    "expected_versions",
    "last_version",
    "local_training",
    "method_of",
    "positions_of",
    "reading",
]

_METHODS: Mapping[str, type[FedAvg]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "fednova": FedNova,
    "fedavgm": FedAvgM,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "fedadagrad": FedAdagrad,
    "fedbuff": FedBuff,
}


def committed_cohorts(
    events: Iterable[RunEvent], job: Job, reader: Reader
) -> Iterator[list[ClientWork]]:
    """The clients of each round that was committed, those that began with it first, in the order of
    their cohorts, with what each was to train on. Raises ValueError for a round with a member that
    had no work."""
    partition = partition_of(_cohorts(job).partition, _cohorts(job).labels, reader)
    work: dict[int, RoundWork] = {}
    for event in events:
        match event.WhichOneof("kind"):
            case "round_begun":
                work |= {w.replica: w for w in event.round_begun.work}
            case "round_done":
                done = event.round_done
                inside = {m.replica for m in done.members}
                if missing := inside - work.keys():
                    raise ValueError(f"round {done.round} has members {missing} without work")
                found = list[ClientWork]()
                for behind in sorted({work[n].behind for n in inside}):
                    some = [work[n] for n in inside if work[n].behind == behind]
                    began = _begun(some, job, partition, done.round - behind)
                    found += [replace(w, behind=behind) for w in began]
                work = {}
                yield found


def _begun(
    work: Iterable[RoundWork], job: Job, partition: Partition, number: int
) -> Iterator[ClientWork]:
    """Yield the clients of work that was handed out in a round."""
    cohorts, sent = _cohorts(job), dict[int, tuple[int, int]]()
    places, new = list[int](), set[int]()
    for w in work:
        places += places_of(w.cohort)
        new |= {*w.lost}
        trained = zip(places_of(w.cohort), w.trained, strict=False)  # if any is told
        new |= {p for p, state in trained if not state}
        told = zip(w.kept, w.weights, strict=True)
        sent |= zip(places_of(w.cohort), told, strict=False)
    places.sort()
    clients = cohort_of(cohorts.clients, job.seed, number, places)
    some = [Participant(n, partition.train(n)) for n in clients]
    plans = batches(
        some,
        seed=job.seed,
        round_=number,
        batch=job.train.batch,
        passes=cohorts.local.passes,
        steps=cohorts.local.steps,
    )
    for place, p, plan in zip(places, some, plans, strict=True):
        kept, weight = sent.get(place, (None, 1 if cohorts.weight == "equal" else len(p.samples)))
        yield ClientWork(p.number, [b.tolist() for b in plan], weight, kept, place in new)


def _cohorts(job: Job) -> Cohorts:
    assert job.rounds is not None
    cohorts = job.rounds.cohorts
    assert cohorts is not None, f"{job.name} has no clients"
    return cohorts


def aggregate_of(
    job: Job, events: Iterable[RunEvent] = ()
) -> Callable[[Sequence[Named]], Named] | None:
    """What the job has made of what clients moved in one round after the other; None: their
    weighted mean. `events`: of the run, whose attempts say which noise it was."""
    cohorts = _cohorts(job)
    if (privacy := cohorts.privacy) is not None:
        done = [e.round_done for e in events if e.HasField("round_done")]
        givers = [[m.replica for m in d.members] if privacy.distributed else [] for d in done]
        at = iter([((d.round, d.attempt), g) for d, g in zip(done, givers, strict=True)])
        made = partial(hidden_mean, clip=privacy.clip, noise=privacy.noise, seed=job.seed)
        asked, fewest = cohorts.per_round, privacy.fewest

        def hidden(moved: Sequence[Named]) -> Named:
            number, who = next(at)
            return made(moved, asked=asked, fewest=fewest, at=number, givers=who)

        return hidden
    if cohorts.aggregate == "mean":
        return None
    rule, wrong = AGGREGATES[cohorts.aggregate], cohorts.byzantine
    return lambda moved: rule(moved, wrong)


def positions_of(job: Job) -> Callable[[int, Named], Named] | None:
    """Return what finds the numbers that all clients of a round send; None: each sends its own, or
    all."""
    cohorts, options = _cohorts(job), job.sync.client_compression.compression_options
    if not cohorts.shares_positions:
        return None

    def positions(count: int, last: Named) -> Named:
        lots = SharedMask(job.seed, count, options.least_ratio)
        return shared_positions(
            last,
            options.least_ratio,
            options.explore,
            lambda name, n, k: lots.drawn(name, n, k).tolist(),
        )

    return positions


def expected_versions(
    module: nn.Module, job: Job, events: Sequence[RunEvent], reader: Reader, *, size: int
) -> dict[int, float]:
    """The held-out loss of the version after each round, by number of rounds, as far as the run
    evaluated them. `size`: samples of a held-out microbatch."""
    wanted = {e.evaluated.step for e in events if e.HasField("evaluated")}
    found: dict[int, float] = {}

    def look(count: int, state: Named) -> None:
        if count + 1 in wanted:
            found[count + 1] = _held_out(module, state, job, reader, size)

    last_version(module, job, events, reader, committed=look)
    return found


def last_version(
    module: nn.Module,
    job: Job,
    events: Sequence[RunEvent],
    reader: Reader,
    *,
    committed: Callable[[int, Named], None] = lambda count, state: None,
) -> Named:
    """Return the parameters that the run should have come to, by name. `committed` sees each
    round's number and its version."""
    names, inside = [n for n, p in module.named_parameters() if p.requires_grad], ""
    averaged: tuple[str, ...] = ()

    def version(result: FederatedResult) -> Named:
        return {n: result.shared[inside + n] for n in names}

    local, cohorts = module, committed_cohorts(events, job, reader)
    read: Callable[[Any], Mapping[str, Any]] = reading(reader)
    if job.sync.virtual_data == "vhl":
        vhl = VhlClient.of(module, job, reader)
        local, read = vhl, vhl.reading(reader, job.seed)
    if job.sync.chosen == "fedimpro":
        impro = ImproClient.of(module, job, reader)
        local, read, averaged = impro, impro.reading(reader), ImproClient.AVERAGED
    if local is not module:
        cohorts, inside = with_places(cohorts, job.train.batch), "module."
    made = train_cohorts(
        local,
        cohorts,
        read,
        method_of(job, events),
        **local_training(job),
        aggregate=aggregate_of(job, events),
        overlap=job.sync.client_compression.overlap,
        feedback=job.sync.client_compression.feedback,
        positions=positions_of(job),
        averaged=averaged,
        committed=lambda count, result: committed(count, version(result)),
    )
    return version(made)


def method_of(job: Job, events: Iterable[RunEvent] = ()) -> FedAvg:
    """Return the job's method with all of its options, those that it leaves out as well. `events`:
    of the run, which say where clients lost their state."""
    options = plain(options_of(job.sync.chosen, job.sync.options))
    if job.sync.chosen == "fedimpro":
        return FedAvg()  # its options are of clients (`plain_impro.py`)
    if job.sync.chosen == "scaffold":
        return _scaffold(job, events, **options)
    return _METHODS[job.sync.chosen](**options)


def _scaffold(job: Job, events: Iterable[RunEvent], **options: Any) -> Scaffold:
    clients = _cohorts(job).clients
    afresh, lost = set[int](), dict[int, list[int]]()
    for event in events:
        number = event.round_begun.round
        for work in event.round_begun.work:
            afresh |= {number} if work.afresh else set()
            again = cohort_of(clients, job.seed, number, work.lost)
            lost.setdefault(number, []).extend(again)
    return Scaffold(clients, afresh=afresh, lost=lost, **options)


def local_training(job: Job) -> dict[str, Any]:
    """Return what `train_cohorts` is told of a client's own steps."""
    return {
        "lr": lambda count: learning_rate(job.train, count, job.train.steps or 0),
        "momentum": job.train.momentum,
        "optimizer": lambda local: optimizer_of(local, job.train),
        "clip": job.train.clip,
        "scaler": (lambda: scaler_of(job.train)) if job.model.dtype == "fp16" else None,
    }


def reading(reader: Reader) -> Callable[[Sequence[int]], Mapping[str, Tensor]]:
    """Return what reads samples by their numbers."""
    return lambda at: reader.samples(np.array(at))


@torch.no_grad()
def _held_out(
    module: nn.Module, state: Mapping[str, Tensor], job: Job, reader: Reader, size: int
) -> float:
    """The mean held-out loss with these parameters."""
    total = weights = 0.0
    training = module.training
    module.eval()
    for m in range(job.train.evaluated_batches * (job.train.batch // size)):
        with torch.autocast("cpu", torch.float16, enabled=job.model.dtype == "fp16"):
            out = torch.func.functional_call(module, dict(state), (), reader.held_out(m, size))
        loss = out if isinstance(out, Tensor) else out["loss"]
        weight = 1.0 if isinstance(out, Tensor) else float(out.get("weight", 1.0))
        total, weights = total + float(loss) * weight, weights + weight
    module.train(training)
    return total / weights
