"""The directory over hivemind's DHT: real nodes on loopback, in processes of their own."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.net.discovery.process import NodeConfig, NodeProcess, check_available
from shoal.net.discovery.record import Claim, DirectoryError, newest, sign
from shoal.net.identity.authority import Authority, utc


def _missing() -> str:
    try:
        check_available()
    except DirectoryError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(_missing()), reason=_missing()),
    pytest.mark.timeout(180),  # hivemind loads torch, in each process
]
PATIENCE_S = 60.0


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)  # another process is waited for, which tells nobody


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def daemon_of(pid: int) -> int:
    """The p2pd that a node has started."""
    [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


class Sea:
    """A broker's authority, and what it says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = Authority.new(utc(time.time()))
        self.claim = Claim("fish", "boot")

    def config(self, name: str, *ways: str, serves: bool = False) -> NodeConfig:
        return NodeConfig(
            swarm="fish",
            fingerprint=self.authority.fingerprint.hex(),
            folder=str(self.folder / name),
            host="127.0.0.1",
            public_host="127.0.0.1",
            bootstrap=ways,
            serves=serves,
        )

    def record(self, address: str, *ways: str) -> bytes:
        said = self.claim.next(None, address, ways, now_s=time.time(), age_s=0.0)
        assert said is not None
        return sign(said, self.authority)

    async def found(self, node: NodeProcess) -> str:
        found = await node.directory.find()
        said = newest(found, "fish", self.authority.fingerprint, time.time())
        return "" if said is None else said.address

    async def finds(self, node: NodeProcess, address: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.found(node) != address:
                pass


OWNER = """
import asyncio, json, sys
from shoal.net.discovery.process import NodeConfig, NodeProcess
config, record = json.loads(sys.stdin.readline())
with NodeProcess(NodeConfig.from_json(config)) as node:
    async def talk():
        await node.started()
        await node.directory.publish(record.encode("latin-1"))
        return [r.decode("latin-1") for r in await node.directory.find()]
    print(json.dumps([asyncio.run(talk()), node.pid, node.config.sockets]), flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param(["owner"], id="owner"),
        pytest.param(["owner", "node"], id="owner and node", marks=pytest.mark.slow),
        pytest.param([], id="nobody", marks=pytest.mark.slow),
    ],
)
def test_a_node_keeps_what_is_left_there_and_never_outlives_its_owner(
    tmp_path: Path, killed: list[str]
) -> None:
    """Whose process is killed without a word, alone or with the node's; or ends as it should."""
    sea = Sea(tmp_path)
    record = sea.record("a.example:7077").decode("latin-1")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            told = [sea.config("one", serves=True).to_json(), record]
            process.stdin.write(json.dumps(told) + "\n")
            process.stdin.flush()
            assert select.select([process.stdout], [], [], 2 * PATIENCE_S)[0]
            found, node, sockets = json.loads(process.stdout.readline())
            assert found == [record]
            daemon = daemon_of(node)
            assert runs(node)
            assert runs(daemon)
            # Together: whoever dies first has no time to tell the others.
            for name, pid in (("owner", process.pid), ("node", node)):
                if name in killed:
                    os.kill(pid, signal.SIGKILL)
        finally:
            process.stdin.close()
            if killed:
                process.kill()
    until(lambda: not runs(node) and not runs(daemon), "something outlives its owner")
    if "node" in killed:
        shutil.rmtree(sockets)  # nobody was left to do it
    until(lambda: not os.path.exists(sockets), "sockets are left")


async def test_a_node_removes_its_sockets_when_its_rope_is_cut(tmp_path: Path) -> None:
    """Of an owner that was killed the pipe may close well before the kernel tells of its death."""
    with NodeProcess(Sea(tmp_path).config("one", serves=True)) as node:
        await node.started()
        process, sockets = node._process, node.config.sockets
        assert process is not None
        assert process.stdin is not None
        process.stdin.close()
        until(lambda: process.poll() is not None, "the node stays")
        until(lambda: not os.path.exists(sockets), "sockets are left")


@pytest.mark.slow
async def test_a_node_that_is_killed_comes_back_and_its_daemon_does_not_stay(
    tmp_path: Path,
) -> None:
    sea = Sea(tmp_path)
    with NodeProcess(sea.config("one", serves=True)) as node:
        before = await node.started()
        await node.directory.publish(sea.record("a.example:7077"))
        pid = node.pid
        assert pid is not None
        daemon = daemon_of(pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not runs(daemon), "the daemon outlives its node")
        until(lambda: (node.keep(), node.pid not in (None, pid))[1], "the node stays away")
        assert await node.started() == before  # under the same id, at the same port
        assert await sea.found(node) == "a.example:7077"


@pytest.mark.slow
async def test_who_moved_is_found_through_those_who_stay(tmp_path: Path) -> None:
    """Two nodes of peers; the broker's own goes, and comes back elsewhere. Beside them somebody
    who leaves there whatever they like, and answers every question wrongly."""
    sea = Sea(tmp_path)
    with NodeProcess(sea.config("broker", serves=True)) as broker:
        entry = (await broker.started()).multiaddr
        with NodeProcess(sea.config("peer", entry)) as peer:
            way = (await peer.started()).multiaddr
            record = sea.record("a.example:7077", entry, way)
            await broker.directory.publish(record)
            await sea.finds(peer, "a.example:7077")
            async with asyncio.timeout(PATIENCE_S):  # the record names it: it serves
                while not (await peer.directory.look()).serves:
                    await sea.found(peer)
            assert broker.pid is not None
            os.kill(broker.pid, signal.SIGKILL)
            with hostile(way, sea, record) as accepted, NodeProcess(sea.config("new", way)) as new:
                assert accepted == [False] * 6
                await new.started()
                await sea.finds(new, "a.example:7077")
                # The broker's folder on another host: it finds the others by what it knew.
                shutil.copytree(tmp_path / "broker", tmp_path / "heir")
                (tmp_path / "heir" / "port").unlink()
                with NodeProcess(sea.config("heir", serves=True)) as heir:
                    assert (await heir.started()).multiaddr != entry
                    await heir.directory.publish(sea.record("b.example:1"))
                    await sea.finds(peer, "b.example:1")
                    await sea.finds(new, "b.example:1")
                # Peers that stay keep it findable without any broker.
                with NodeProcess(sea.config("late", entry, way)) as late:
                    await late.started()
                    await sea.finds(late, "b.example:1")


@contextmanager
def hostile(way: str, sea: Sea, record: bytes) -> Iterator[list[bool]]:
    """While it answers; gives what of its own the honest node has accepted."""
    key = f"shoal:fish:{sea.authority.fingerprint.hex()}"
    program = str(Path(__file__).with_name("hostile_node.py"))
    said = newest([record], "fish", sea.authority.fingerprint, time.time())
    assert said is not None
    coded = base64.b64encode(record).decode()
    command = [sys.executable, program, way, key, coded, str(said.ends_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(PATIENCE_S)
