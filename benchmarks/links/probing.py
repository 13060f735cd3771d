"""Links: what a probe costs, how right it is, and how well few of them predict all others.

Completion is measured on networks whose truth is known, with the probes that the broker's own
machine orders and no others: their reports are the true numbers with 5 % of noise. The error is the
median of |estimate / truth - 1| over the pairs that nobody measured, the mean over `--seeds` runs.

- sets of the literature (sim/topologies.json), four nodes at each place
- clustered: 60 peers at 6 sites, rates by pair of sites, home uplinks below many of them

Against the global geometric mean, and the geometric means of measured pairs between communities.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from shoal.benchmarks.table import Figure, arguments, report
from shoal.broker.events import Instruction, PeerSaid, StreamId, StreamOpened, Tell
from shoal.broker.machine import BrokerMachine
from shoal.broker.service.server import Broker, BrokerConfig
from shoal.dag.plan.plan import PeerId
from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.shell.daemon import Worker
from shoal.planner.network.completion import communities, community_means, complete
from shoal.proto import broker_pb2, broker_pb2_grpc
from shoal.sim.scenario.topologies import load
from shoal.sim.virtual.world import PeerSpec, World

Floats = NDArray[np.float64]
Truth = tuple[Floats, Floats, list[str]]
"""Latency and rates (P, P), and the place of each peer."""
NOISE = 0.05
NODES = 4


def of_the_literature(name: str) -> Truth:
    topology = load(name)
    at = np.repeat(np.arange(len(topology.places)), NODES)
    grid = np.ix_(at, at)
    places = [topology.places[k] for k in at]
    return topology.latency_s[grid], topology.bandwidth[grid], places


def clustered(n: int, sites: int, seed: int) -> Truth:
    rng = np.random.default_rng(seed)
    place, site = rng.uniform(0, 1, (sites, 2)), rng.integers(0, sites, n)
    apart = np.sqrt(((place[site][:, None] - place[site][None]) ** 2).sum(-1))
    mile = rng.uniform(0, 0.004, n)
    latency = 0.001 + 0.05 * apart + (mile[:, None] + mile[None]) / 2
    between = np.exp(rng.normal(np.log(2e7), 0.5, (sites, sites)))
    between = np.sqrt(between * between.T)
    np.fill_diagonal(between, 1e8)
    rates = between[site][:, site] * np.exp(rng.normal(0, 0.1, (n, n)))
    up = np.exp(rng.normal(np.log(3e7), 1, n))
    return latency, np.minimum(rates, np.minimum(up[:, None], 5 * up[None])), [f"{k}" for k in site]


def measured_by_the_broker(truth: Truth, seed: int, *, named: bool) -> tuple[Floats, Floats, int]:
    """(latency, rates) with NaN where no probe was ordered, and the number of probes."""
    latency, rates, places = truth
    rng, n = random.Random(seed), len(places)
    machine, orders, probes = BrokerMachine("broker"), list[tuple[int, broker_pb2.Probe]](), 0
    order = rng.sample(range(n), n)

    def collect(out: list[Instruction]) -> None:
        for item in out:
            if isinstance(item, Tell) and item.message.HasField("probe"):
                orders.append((int(item.stream), item.message.probe))

    for i in order:
        profile = broker_pb2.Profile(place=places[i] if named else "", operator_set="FULL")
        hello = broker_pb2.Hello(
            version=1, peer=str(i), boot="b", profile=profile, address=f"peer-{i}:1"
        )
        stream = StreamId(str(i))
        collect(machine.handle(StreamOpened(stream), 0.0))
        collect(machine.handle(PeerSaid(stream, broker_pb2.PeerMessage(hello=hello)), 0.0))
        while orders:
            me, probe = orders.pop(0)
            other = int(probe.peer)
            probes += 1
            link = broker_pb2.LinkReport(
                peer=probe.peer,
                probe=probe.number,
                latency_s=latency[me, other] * rng.uniform(1 - NOISE, 1 + NOISE),
                bytes_per_s=rates[me, other] * rng.uniform(1 - NOISE, 1 + NOISE),
                size_bytes=100_000,
            )
            said = PeerSaid(StreamId(str(me)), broker_pb2.PeerMessage(link=link))
            collect(machine.handle(said, 0.0))
    known = np.full((n, n), np.nan), np.full((n, n), np.nan)
    for i in range(n):
        for j in range(n):
            found = machine.probing.links.get(PeerId(str(i)), PeerId(str(j)), 0.0)
            if found is not None:
                known[0][i, j], known[1][i, j] = found.latency_s, found.bytes_per_s
    return *known, probes // 2


def errors(truth: Truth, seed: int, *, named: bool) -> tuple[float, float, float, float, float]:
    """Of rates: completed, community means, global mean; of completed latencies; probes a peer."""
    latency, rates, places = truth
    n, groups = len(places), places if named else [""] * len(places)
    known_latency, known_rates, probes = measured_by_the_broker(truth, seed, named=named)
    full = complete(known_latency, known_rates, groups)
    unknown = np.isnan(known_rates) & ~np.eye(n, dtype=bool)
    logs = np.log(known_rates)
    overall = np.nanmean(logs)
    labels = communities(groups, known_latency)
    means, _ = community_means(logs, labels)
    means = np.where(np.isnan(means), np.where(np.isnan(means.T), overall, means.T), means)

    def error(found: Floats, true: Floats) -> float:
        return float(np.median(np.abs(found / true - 1)[unknown]))

    return (
        error(full.bandwidth, rates),
        error(np.exp(means)[labels[:, None], labels[None, :]], rates),
        error(np.full((n, n), np.exp(overall)), rates),
        error(full.latency_s, latency),
        probes / n,
    )


def completion(seeds: int) -> list[Figure]:
    cases: dict[str, Callable[[int], Truth]] = {
        "skippipe_gcp_12": lambda seed: of_the_literature("skippipe_gcp_12"),
        "dtfm_world_10": lambda seed: of_the_literature("dtfm_world_10"),
        "clustered": lambda seed: clustered(60, 6, seed),
    }
    figures, all_ours = [], []
    for name, make in cases.items():
        for named in (True, False):
            rows = [errors(make(seed), seed, named=named) for seed in range(seeds)]
            ours, means, overall, latency, probes = np.mean(rows, axis=0)
            label = f"completion_{name}" + ("" if named else "_unnamed")
            figures += [
                Figure(f"{label}_bandwidth_error", ours, "ratio", "lower"),
                Figure(f"{label}_of_community_means", means, "ratio", "lower"),
                Figure(f"{label}_of_global_mean", overall, "ratio", "lower"),
                Figure(f"{label}_latency_error", latency, "ratio", "lower"),
                Figure(f"{label}_probes_per_peer", probes, "probes", "lower"),
            ]
            all_ours += [row[0] for row in rows] if named else []
    middle = statistics.median(all_ours)
    return [Figure("completion_bandwidth_error_median", middle, "ratio", "lower"), *figures]


def seconds_of_a_thousand() -> list[Figure]:
    latency, rates, places = clustered(1000, 20, 1)
    measured = np.zeros(rates.shape, dtype=bool)
    measured[:, random.Random(1).sample(range(1000), 4)] = True
    measured |= measured.T
    partial = np.where(measured, latency, np.nan), np.where(measured, rates, np.nan)
    times = []
    for groups in (places, places, places, [""] * 1000):
        began = time.process_time()  # of one core, whatever else the machine does
        complete(*partial, groups)
        times.append(time.process_time() - began)
    return [
        Figure("completion_1000_peers", statistics.median(times[:3]), "s", "lower"),
        Figure("completion_1000_peers_unnamed", times[3], "s", "lower"),
    ]


def in_the_world() -> list[Figure]:
    """One probe between two peers on modelled links: its error, bytes and seconds, both ways."""
    figures = []
    for name, latency, rate in (
        ("home_20Mbit_20ms", 0.02, 2.5e6),
        ("cloud_1Gbit_40ms", 0.04, 125e6),
        ("ocean_100Mbit_120ms", 0.12, 12.5e6),
    ):

        def carry(a: str, b: str, size: int, latency=latency, rate=rate) -> tuple[float, float]:  # type: ignore[no-untyped-def]
            return size / rate, size / rate + latency

        with tempfile.TemporaryDirectory() as folder:
            peers = [PeerSpec(name="a"), PeerSpec(name="b")]
            world = World(peers, blobs={}, folder=Path(folder), carry=carry)
            world.until(lambda w=world: len(w.broker.machine.members.members) == 2)  # type: ignore[misc]
            began = world.now
            world.until(lambda w=world: w.broker.machine.probing.settled(w.peers))  # type: ignore[misc]
        probing = world.broker.machine.probing
        found = probing.links.get(PeerId("a"), PeerId("b"), world.now)
        assert found is not None
        error = max(abs(found.latency_s / latency - 1), abs(found.bytes_per_s / rate - 1))
        size = sum(n for known in probing._peers.values() for _, n in known.sent)
        figures += [
            Figure(f"probe_{name}_error", error, "ratio", "lower"),
            Figure(f"probe_{name}_bytes", size, "B", "lower"),
            Figure(f"probe_{name}_seconds", world.now - began, "s", "lower"),
        ]
    return figures


async def over_loopback() -> list[Figure]:
    """Two real workers in this process: the rate that they measure of each other."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Broker(BrokerConfig(port=0, insecure=True)) as broker,
            grpc.aio.insecure_channel(broker.address) as channel,
        ):
            workers: list[Worker] = []
            configs = [
                PeerConfig(
                    insecure=True,
                    broker=broker.address,
                    state=Path(folder) / name,
                    name=name,
                    threads=1,
                )
                for name in ("a", "b")
            ]
            ends = [asyncio.create_task(work(c, workers.append)) for c in configs]
            stub = broker_pb2_grpc.RunsStub(channel)  # type: ignore[no-untyped-call]
            links: list[broker_pb2.LinkState] = []
            while len(links) < 2:
                links = list((await stub.Describe(broker_pb2.DescribeRequest())).links)
            for worker in workers:
                worker.stop(now=True)
            await asyncio.gather(*ends)
    rate = statistics.mean(link.bytes_per_s for link in links)
    latency = statistics.mean(link.latency_s for link in links)
    return [
        Figure("probe_loopback_rate", rate / 1e6, "MB/s", "higher"),
        Figure("probe_loopback_latency", latency * 1e3, "ms", "lower"),
    ]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="networks and orders of joining")
    options = parser.parse_args()
    found = [*completion(options.seeds), *seconds_of_a_thousand(), *in_the_world()]
    report("probing", [*found, *asyncio.run(over_loopback())], options.json)
