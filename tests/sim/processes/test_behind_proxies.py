"""Real processes that know the broker by a name that only their proxy knows, and cannot be dialled:
the same losses. Its fast sibling: tests/broker/service/door/test_relay.py, for the same three ways
out."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from shoal.client.front import SimulationFront
from shoal.job import Job
from shoal.sim.cluster import train, wait_for_peers
from shoal.sim.live import LiveState, LiveView
from shoal.sim.processes import LocalCluster
from shoal.sim.report import Summary
from shoal.sim.verify import verify
from shoal.tests.net.web.proxies import ConnectProxy
from shoal.tests.sim.processes.test_secure_cluster import JOB

FAR = "broker.invalid:7077"


@pytest.mark.slow
@pytest.mark.process
def test_the_losses_are_those_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("all fish swim in one sea. " * 60)
    (tmp_path / "job.toml").write_text(JOB)
    job = Job.from_toml(tmp_path / "job.toml")
    summary = Summary(name="secure", world="real", seed=0)
    front, proxy = SimulationFront(), ConnectProxy({})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(proxy.__aenter__(), loop).result(10)
    try:
        with LocalCluster(peers=0, folder=tmp_path / "run", secure=True) as cluster:
            here = proxy.targets[FAR] = cluster.address
            monkeypatch.setenv("HTTPS_PROXY", proxy.url)
            cluster.address = FAR
            for name in ("sim-1", "sim-2"):
                cluster.join(name, ["--public", "none"])
            cluster.address = here
            shown = LiveView(LiveState("secure"), "nothing")
            names = wait_for_peers(cluster, front, 2)
            trained = train(cluster, front, job, tmp_path / "run", summary, shown, names)
        verify(job, trained.followed, trained.facts, front, lambda _: [], shown.say)
    finally:
        front.close()
        asyncio.run_coroutine_threadsafe(proxy.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert summary.exit == 0, summary.error
    assert summary.max_loss_difference < 1e-5
    # Of each peer: the certificate, joining, control, blobs; then a dial and its answer.
    assert proxy.asked.count(FAR) == len(proxy.asked) >= 10
