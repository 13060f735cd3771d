"""Where the seconds of codecs are in a step: of two real processes, with and without `lossless`.

With one microbatch everything waits for everything, and what both ends encode and decode is in the
step to its last second. With eight, the stages compute while codecs and links are at work on other
microbatches. The devices take three times as long as their threads compute and encode (`shoal join
--stretch`), so that two cores are enough for all of it to run at once.

    share = (step with the codec - step without) / seconds of codecs at both ends in a step

The model (wide_stream.py) has large values for what it computes, so that codecs weigh as much as
computing does; in an ordinary one they are less than runs differ from each other. Runs with and
without take turns; each figure is the median of the pairs.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from shoal.benchmarks.table import Figure
from shoal.client import Client, connect
from shoal.client.submission import prepare
from shoal.job import Codec, Job
from shoal.proto.broker_pb2 import StepDone
from shoal.sim.processes import LocalCluster

BATCH = 8
STRETCH = 3
PAIRS = 3
WARM_UP = 3
"""Steps at the beginning of a run that are not counted."""


def overlap(steps: int) -> list[Figure]:
    """Two stages, the batch whole and in eight microbatches."""
    base, batch, found = job(steps), BATCH, list[Figure]()
    with LocalCluster(peers=2, threads=1, join_flags=["--stretch", str(STRETCH)]) as cluster:
        for microbatches in (1, 8):
            train = replace(base.train, microbatch=batch // microbatches)
            wanted = replace(base, train=train)
            shares, codec_s = [], []
            for _ in range(PAIRS):
                plain_s, _ = _steps(cluster, wanted)
                coded_s, spent_s = _steps(cluster, replace(wanted, codec=Codec(default="lossless")))
                shares.append((coded_s - plain_s) / spent_s)
                codec_s.append(spent_s)
            name = f"{microbatches}_microbatch{'es' if microbatches > 1 else ''}"
            found += [
                Figure(f"codec_s_{name}", statistics.median(codec_s), "s", "lower"),
                Figure(f"codec_share_in_step_{name}", statistics.median(shares), "ratio", "lower"),
            ]
    return found


def job(steps: int) -> Job:
    return Job.from_table(
        {
            "version": 1,
            "name": "wide-stream",
            "model": {"factory": f"{Path(__file__).with_name('wide_stream.py')}:wide_stream"},
            "data": {"length": 128},
            # Equal halves: with one microbatch `auto` would leave nothing to cross the link.
            "plan": {"scheduler": "equal-compute", "stages": 2, "pipelines": 1, "schedule": "1f1b"},
            "train": {"steps": steps, "batch": BATCH, "microbatch": BATCH, "eval_every": 0},
        }
    )


def _steps(cluster: LocalCluster, job: Job) -> tuple[float, float]:
    """Median seconds of a step, and of its codecs at both ends, stretched as they were."""
    with (
        prepare(job) as prepared,
        tempfile.TemporaryDirectory() as folder,
        connect(cluster.address) as client,
    ):
        wait_for_peers(cluster, client)
        run = client.submit_prepared(prepared, Path(folder))
        done = [e.step for e in run.watch() if e.HasField("step")][WARM_UP:]
    return statistics.median(s.seconds for s in done), statistics.median(map(_codec_s, done))


def wait_for_peers(cluster: LocalCluster, client: Client) -> None:
    """Until all have joined."""
    while len(client.describe().peers) < len(cluster.processes) - 1:
        cluster.check()
        time.sleep(0.1)


def _codec_s(step: StepDone) -> float:
    coded = [use for use in step.links if use.codec != "raw/1"]
    return STRETCH * sum(use.encode_s + use.decode_s for use in coded)
