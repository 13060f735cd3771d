"""The daemon as a real process: it says where it is, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
from shoal.broker.service.server import BrokerConfig, serve
config = BrokerConfig(insecure=True, port=0)
asyncio.run(serve(config, ready=lambda broker: print(broker.join_line(), flush=True)))
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_stays(tmp_path: Path, number: signal.Signals) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline().split()
        assert [*line[:2], line[3]] == ["shoal", "join", "--insecure"]
        assert list(tmp_path.glob("shoal-blobs-*"))
        host, _, port = line[2].rpartition(":")
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
        logged = process.stderr.read()
    assert list(tmp_path.iterdir()) == []
    for event in ("broker_insecure", "broker_listens", "broker_left"):
        assert event in logged
    assert "Traceback" not in logged
    with socket.create_server((host, int(port))):
        pass
