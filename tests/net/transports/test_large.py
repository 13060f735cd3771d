"""A large tensor crosses gRPC with one copy of it in memory on each side, in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PEER = Path(__file__).parent / "large_peer.py"
MIB = 1 << 20


def peer(*arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, str(PEER), *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def cross(size: int, timeout_s: float) -> tuple[dict, dict]:
    """What the sender and the receiver say of a tensor of `size` bytes."""
    with peer("receive", size) as receiver:
        try:
            port = receiver.stdout.readline().strip()
            with peer("send", size, port) as sender:
                try:
                    sent, _ = sender.communicate(timeout=timeout_s)
                finally:
                    sender.kill()
            received, _ = receiver.communicate(timeout=timeout_s)
        finally:
            receiver.kill()
    return json.loads(sent), json.loads(received)


def check(size: int, sent: dict, received: dict) -> None:
    assert received["right"]
    # Beside the one copy: messages on the way, gRPC's buffers (40 MiB on a quiet machine, more
    # where the reader waits for a processor), and what a first use of it loads.
    assert size <= sent["grown_bytes"] <= size + 192 * MIB
    assert size <= received["grown_bytes"] <= size + 192 * MIB


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_tensor_of_256_mib_is_there_once_on_each_side():
    size = 256 * MIB
    check(size, *cross(size, 50))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_tensor_of_5_gib_is_there_once_on_each_side():
    size = 5 * 1024 * MIB
    check(size, *cross(size, 500))
