"""Clients that send a part of their updates, in the simulated world: through broker and peers,
against a plain loop over the same cohorts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from shoal.broker.policies.uploads import links_of
from shoal.compression import codec
from shoal.compression.echo import TensorShape
from shoal.compression.sparse.topk import TopK
from shoal.dag.rounds.cohorts import cohort_of
from shoal.job import Job
from shoal.job.clients.client_compression import ClientLinks
from shoal.peer.data.partition import partition_of
from shoal.peer.rounds import coding
from shoal.sim.ghost.device import Ghosts
from shoal.sim.ghost.round_hashes import expected_rounds
from shoal.sim.plain.client_methods import ClientUpdate, FedAvgM
from shoal.sim.plain.round_log import committed_rounds
from shoal.tests.sim.clients.moments import in_rounds
from shoal.tests.sim.clients.test_federated_world import METHODS, assert_expected, job_of, world_of
from shoal.tests.sim.conftest import Laboratory

LINKS = {"up": "uniform:2kB/s,20kB/s", "latency": "uniform:10ms,20ms", "seed": 5}
SENDS: dict[str, dict[str, Any]] = {
    "topk": {"compression_options": {"least_ratio": 0.1}},
    "bcrs": {"compression_options": {"least_ratio": 0.1, "alpha": 1.0}, "client_links": LINKS},
    "bcrs+opwa": {
        "compression_options": {"least_ratio": 0.1, "gamma": 3.0, "overlap_degree": 2},
        "client_links": LINKS,
    },
}


@pytest.fixture(scope="module")
def base(
    laboratory: Callable[[Job], Laboratory], tmp_path_factory: pytest.TempPathFactory
) -> Laboratory:
    return laboratory(job_of(tmp_path_factory.mktemp("clients"), "fedavg"))


def sending(
    base: Laboratory, compression: str, method: str = "fedavg", peers: int = 3, **sync: Any
) -> Laboratory:
    """The same model and data, by another [sync]; without more, that of SENDS."""
    job = base.prepared.job
    options, _ = METHODS[method]
    keys = {"compression": compression, **(sync or SENDS[compression])}
    job = replace(
        job,
        sync=replace(job.sync, method=method, options=options, **keys),
        plan=replace(job.plan, replicas=peers),
    )
    return Laboratory(job, replace(base.prepared, job=job), base.module)


def size(kept: int) -> int:
    """Bytes of so many of 83 numbers, with their places."""
    spec = TensorShape((83,), "float32", 332)
    return min(332, TopK(ratio=83 / kept, values="fp32").size_bytes(spec))


def played(lab: Any, peers: int = 3) -> tuple[Any, str]:
    world = world_of(lab, peers)
    run = world.submit(lab.spec)
    world.finish(run)
    return world, run


@pytest.mark.parametrize(
    ("sends", "peers", "method"),
    [
        ("topk", 3, "fedavg"),
        ("bcrs", 2, "fedadam"),
        ("bcrs+opwa", 2, "fedavg"),
        ("bcrs+opwa", 5, "fedavgm"),
    ],
)
def test_the_version_is_that_of_a_plain_loop(
    base: Laboratory, sends: str, peers: int, method: str
) -> None:
    lab = sending(base, sends, method, peers)
    world, run = played(lab, peers)
    done = assert_expected(lab, world, run)
    assert [len(d.members) for d in done] == [peers] * 4
    begun = [e.round_begun for e in world.events(run) if e.HasField("round_begun")]
    assert all(len(w.kept) == len(w.weights) == w.cohort[0].count for b in begun for w in b.work)
    kept = [sorted(k for w in b.work for k in w.kept) for b in begun]
    if sends == "topk":
        assert kept == [[8] * 5] * 4, "a tenth of 83 numbers"
    else:
        assert all(k[0] == 8 and k[-1] > 16 for k in kept)
    alpha = 1.0 if sends.startswith("bcrs") else 0.0
    partition = partition_of(lab.job.data.partition, "y", lab.reader())
    for b in begun:
        clients = cohort_of(12, lab.job.seed, b.round, range(5))
        told = [k for w in b.work for k in w.kept]
        shares = [
            len(partition.train(c)) * (k / (sum(told) / 5)) ** alpha
            for c, k in zip(clients, told, strict=True)
        ]
        assert [w / 2**20 for x in b.work for w in x.weights] == pytest.approx(shares, rel=1e-5)
        if sends != "topk":
            links = links_of(ClientLinks(**LINKS), clients)
            ends = [
                [a + size(more) / r for more in (k, min(k + 1, 83))]
                for a, r, k in zip(links.latency_s, links.bytes_per_s, told, strict=True)
            ]
            last = max(end for end, _ in ends)
            assert min(after for _, after in ends) > last or 83 in told
    for d in done:
        assert d.uploads.clients == 5
        assert d.uploads.least_ratio == 8 / 83
    assert all((d.uploads.seconds > 0.01) == (sends != "topk") for d in done)


class Rounded(FedAvgM):
    """FedAvgM of means that come back in bf16."""

    def mean(self, came: Sequence[ClientUpdate], name: str) -> Tensor:
        return super().mean(came, name).float().bfloat16().double()


@pytest.mark.parametrize("sends", ["topk", "bcrs+opwa"])
def test_results_have_the_codec_of_the_job(
    base: Laboratory, monkeypatch: pytest.MonkeyPatch, sends: str
) -> None:
    for module in (codec, coding):
        monkeypatch.setattr(module, "LEAST_ELEMENTS", 1)
    lab = sending(base, sends, "fedavgm")
    job = replace(lab.job, codec=replace(lab.job.codec, sync="bf16"))
    lab = Laboratory(job, replace(base.prepared, job=job), base.module)
    world, run = played(lab)
    done = assert_expected(lab, world, run, Rounded(0.5, 0.8))
    assert len(done) == 4
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_expected(lab, world, run)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"compression": "topk", "compression_options": {"least_ratio": 0.2}},
            {
                "compression": "bcrs+opwa",
                "compression_options": {"least_ratio": 0.2, "gamma": 1.0, "overlap_degree": 3},
                "client_links": {"up": "1MB/s", "latency": "5ms"},
            },
        ),
        (
            {
                "compression": "bcrs",
                "compression_options": {"least_ratio": 1.0},
                "client_links": LINKS,
            },
            {
                "compression": "bcrs+opwa",
                "compression_options": {"least_ratio": 1.0, "overlap_degree": 4},
                "client_links": LINKS,
            },
        ),
    ],
    ids=["equal links with gamma 1 are top-k", "full overlap leaves OPWA without effect"],
)
def test_identities_hold_to_the_bit(base: Laboratory, one: Any, other: Any) -> None:
    found = []
    for sync in (one, other):
        world, run = played(sending(base, **sync))
        found.append([e.round_done.hash for e in world.events(run) if e.HasField("round_done")])
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_who_is_lost_leaves_the_others_as_they_were_told(
    base: Laboratory,
) -> None:
    """Numbers and weights of a round follow from its whole cohort, whoever of it comes; after a
    restart the broker says what it said before."""
    lab = sending(base, "bcrs+opwa")

    def play(kill: int, restart: int) -> tuple[list[Any], list[int]]:
        world = world_of(lab)

        def strike(number: int) -> None:
            if number == kill and world.peers["p1"].alive:
                world.kill("p1")
            if number == restart:
                world.restart_broker(1.0)

        run, _ = in_rounds(world, lab.spec, strike)
        done = assert_expected(lab, world, run)
        begun = [e.round_begun for e in world.events(run) if e.HasField("round_begun")]
        told = [
            (k, w) for b in begun for x in b.work for k, w in zip(x.kept, x.weights, strict=True)
        ]
        return told, [len(d.members) for d in done]

    whole, _ = play(0, 0)
    for kill, restart in ((5, 9), (12, 20)):
        told, members = play(kill, restart)
        assert told == whole
        assert min(members) < 3, "nobody was ever left out"


def test_ghosts_count_clients_by_what_they_weigh(
    base: Laboratory,
) -> None:
    lab = sending(base, "bcrs+opwa")
    graph = lab.graph.bind(lab.job.train.microbatch_size)
    world = world_of(lab, device=Ghosts())
    run = world.submit(lab.spec)
    events = world.finish(run)
    rounds = committed_rounds(
        events, microbatches=1, microbatch_size=1, clients=12, seed=lab.job.seed
    )
    loop = expected_rounds(graph, lab.job.seed, rounds, 1, clips=False)
    assert [e.round_done.hash for e in events if e.HasField("round_done")] == loop.versions
