"""A node of hivemind's DHT for one swarm: `python -m shoal.net.discovery.node`, see `process.py`.

- Only the records of one authority and one swarm are kept, each until its own end: who reaches the
  node can leave nothing else there, nor make an old record last.
- The broker's node keeps records for others, and so do the few peers that its record names as ways
  in; all others only ask. So a lookup speaks with nodes that can be reached, and with few.
- What it knew last (a record and the ways in) is in its folder: after a restart it finds the others
  again, even where the address that somebody pasted once is gone.

hivemind is used without its forked server process, without its averager, without opening ports in
routers (UPnP) and without relaying for strangers.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # read at its import

from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.multiaddr import Multiaddr

from ...proto.discovery_pb2 import Whereabouts
from ..local import local_address
from ..printable import SafeFormatter
from ..repeats import Repeats
from . import tied
from .process import NodeConfig
from .record import check_multiaddr, multiaddr, newest, read

__all__ = ["main"]

log = logging.getLogger(__name__)

_REPLICAS = 20
"""A swarm has fewer nodes that serve: each of them keeps the record."""
_CALL_S = 3.0
_CONNECT_S = 5.0
_FIND_S = 10.0
_MEET_EVERY_S = 10.0
_FIND_EVERY_S = 30.0
_MOST_WAYS = 32
_ORPHANED_S = 3.0


class _OnlyOurs(RecordValidatorBase):  # type: ignore[misc]  # hivemind has no types for us
    """Lets the node store one kind of record only: the swarm's own."""

    def __init__(self, config: NodeConfig, key: str) -> None:
        self._config = config
        self._key = DHTID.generate(key).to_bytes()

    def validate(self, record: DHTRecord) -> bool:
        if record.key != self._key or record.subkey != DHTProtocol.IS_REGULAR_VALUE:
            return False
        config = self._config
        try:
            data = MSGPackSerializer.loads(record.value)
            said = read(data, config.swarm, bytes.fromhex(config.fingerprint), time.time())
        except Exception:  # whatever somebody sent
            return False
        return abs(said.ends_s - float(record.expiration_time)) < 1.0


class _TiedP2P(P2P):  # type: ignore[misc]  # as above
    """With its sockets in our folder and a daemon that ends with us."""

    @staticmethod
    def _make_process_args(*arguments: Any, **options: Any) -> list[str]:
        command: list[str] = P2P._make_process_args(*arguments, **options)
        return [sys.executable, "-IS", str(tied.__file__), str(os.getpid()), *command]


class _Node:
    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._folder = Path(config.folder)
        self._key = f"shoal:{config.swarm}:{config.fingerprint}"
        self._record = b""
        self._said: Whereabouts | None = None
        self._ways = list(config.bootstrap)
        self._load()

    async def run(self, stop: asyncio.Event) -> int:
        """Until `stop`, or the daemon's end. Returns the exit code."""
        config = self._config
        port = config.port or self._free_port()
        _TiedP2P._UNIX_SOCKET_PREFIX = f"/unix{config.sockets}/"
        kind = "ip6" if ":" in config.host else "ip4"
        shown = config.public_host or local_address()
        announced = multiaddr(shown, config.public_port or port, "1" * 40).rpartition("/p2p/")[0]
        self._p2p = await _TiedP2P.create(
            host_maddrs=[f"/{kind}/{config.host}/tcp/{port}"],
            announce_maddrs=[announced],
            identity_path=str(self._folder / "node.key"),
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
            startup_timeout=30,
        )
        self._here = f"{announced}/p2p/{self._p2p.peer_id.to_base58()}"
        self._id = DHTID.generate()
        try:
            self._dht = await self._made(serves=config.serves)
            server = await asyncio.start_unix_server(self._asked, config.socket)
            log.info("swarm_node swarm=%s at=%s", config.swarm, self._here)
            staying = asyncio.create_task(self._stay())
            gone = asyncio.create_task(self._p2p._child.wait())
            ending = asyncio.create_task(stop.wait())
            await asyncio.wait((staying, gone, ending), return_when=asyncio.FIRST_COMPLETED)
            server.close()
            ended = not ending.done()
            for task in (staying, gone, ending):
                task.cancel()
            results = await asyncio.gather(staying, return_exceptions=True)
            if ended:
                log.error("swarm_node_broke daemon=%s why=%s", self._p2p._child.returncode, results)
            return 1 if ended else 0
        finally:
            await self._p2p.shutdown()

    async def _made(self, *, serves: bool) -> DHTNode:
        dht = await DHTNode.create(
            p2p=self._p2p,
            node_id=self._id,
            num_replicas=_REPLICAS,
            wait_timeout=_CALL_S,
            client_mode=not serves,
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
            record_validator=_OnlyOurs(self._config, self._key),
            ensure_bootstrap_success=False,
            strict=False,
        )
        # An empty dictionary of somebody's would pass for the newest value.
        dht.protocol._validate_dictionary = lambda key, dictionary: False
        return dht

    # ------------------------------------------------------------ the others

    async def _stay(self) -> None:
        """Keeps in touch, and learns what the broker says."""
        found_at = float("-inf")
        while True:
            await self._meet()
            if time.monotonic() > found_at + _FIND_EVERY_S:
                await self._find()
                found_at = time.monotonic()
            await asyncio.sleep(_MEET_EVERY_S)

    async def _meet(self) -> None:
        """Connects to those ways in that it is not connected to."""
        connected = {peer.peer_id for peer in await self._p2p.list_peers()}
        await asyncio.gather(*(self._enter(way, connected) for way in self._ways))

    async def _enter(self, way: str, connected: set[PeerID]) -> None:
        place, _, name = way.rpartition("/p2p/")
        peer = PeerID.from_base58(name)
        if peer == self._p2p.peer_id:
            return
        try:
            if peer not in connected:
                async with asyncio.timeout(_CONNECT_S):
                    await self._p2p._client.connect(peer, [Multiaddr(place)])
            if self._dht.protocol.routing_table.get(peer_id=peer) is None:
                await self._dht.protocol.call_ping(peer)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # of many kinds: nobody is there
            log.debug("swarm_way_closed way=%s why=%s", way, error)

    async def _find(self) -> None:
        if self._neighbours() == 0:
            await self._meet()
        with suppress(TimeoutError):
            async with asyncio.timeout(_FIND_S):
                found = await self._dht.get(self._key, latest=True)
            if found is not None and isinstance(found.value, bytes):
                await self._learn(found.value)

    def _neighbours(self) -> int:
        return len(self._dht.protocol.routing_table.uid_to_peer_id)

    # ------------------------------------------------------------ what it knows

    async def _learn(self, record: bytes) -> None:
        """Takes in a record that may be newer, and serves when the broker says so."""
        said = self._read(record)
        if said is None or (self._said is not None and said.issued_s <= self._said.issued_s):
            return
        self._said, self._record = said, record
        ways = [*said.nodes, *self._config.bootstrap, *self._ways]
        self._ways = list(dict.fromkeys(ways))[:_MOST_WAYS]
        self._save()
        if self._dht.protocol.client_mode and self._here in said.nodes:
            self._dht = await self._made(serves=True)
            await self._meet()
            await self._store()
            log.info("swarm_node_serves at=%s", self._here)

    def _read(self, record: bytes) -> Whereabouts | None:
        fingerprint = bytes.fromhex(self._config.fingerprint)
        return newest([record], self._config.swarm, fingerprint, time.time())

    async def _store(self) -> None:
        assert self._said is not None
        async with asyncio.timeout(_FIND_S):
            await self._dht.store(self._key, self._record, self._said.ends_s)

    def _load(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            known = json.loads((self._folder / "known.json").read_text())
            self._record = base64.b64decode(known["record"])
            ways = [check_multiaddr(way) for way in known["ways"]]
        except (OSError, ValueError, KeyError, TypeError):
            return  # the first time, or damaged: found anew
        self._said = self._read(self._record)
        self._ways = list(dict.fromkeys([*self._ways, *ways]))[:_MOST_WAYS]

    def _save(self) -> None:
        known = {"record": base64.b64encode(self._record).decode(), "ways": self._ways}
        new = self._folder / "known.json.new"
        new.write_text(json.dumps(known))
        new.replace(self._folder / "known.json")

    def _free_port(self) -> int:
        """The one of the last time, if it is free: others have it in what they know."""
        path = self._folder / "port"
        try:
            before = int(path.read_text())
        except (OSError, ValueError):
            before = 0
        for wanted in (before, 0):
            try:
                with socket.create_server((self._config.host, wanted)) as found:
                    port = int(found.getsockname()[1])
            except OSError:
                continue
            path.write_text(str(port))
            return port
        raise OSError(f"no port of {self._config.host} can be had")

    # ------------------------------------------------------------ our owner

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            question = json.loads(await reader.readline())
            try:
                answer = await self._answer(question)
            except Exception as error:  # of hivemind's many kinds; who asked tells it
                answer = {"error": f"{question['do']}: {str(error) or type(error).__name__}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError):  # who asked has gone
            pass
        finally:
            writer.close()

    async def _answer(self, question: dict[str, str]) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if question["do"] == "publish":
            await self._learn(base64.b64decode(question["record"]))
            if self._neighbours() == 0:
                await self._meet()
            await self._store()
        elif question["do"] == "find":
            await self._find()
            # What it knew may have ended; who asked checks that.
            more = {"records": [base64.b64encode(self._record).decode()] if self._record else []}
        serves = not self._dht.protocol.client_mode
        return {"node": self._here, "neighbours": self._neighbours(), "serves": serves} | more


def main() -> int:
    """Reads the config, runs the node, returns its exit code."""
    line = sys.stdin.readline()
    if not line:
        return 0  # our owner went before it said anything
    config = NodeConfig.from_json(line)
    os.umask(0o077)
    handler = logging.StreamHandler()
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s"))
    handler.addFilter(Repeats())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    log.setLevel(logging.INFO)
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != config.parent:
        return 0
    return asyncio.run(_run(config))


async def _run(config: NodeConfig) -> int:
    stop, told, cut = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked() -> None:
        told.set()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)

    def gone() -> None:
        cut.set()
        stop.set()

    def listen() -> None:
        sys.stdin.read()  # until our owner is gone
        loop.call_soon_threadsafe(gone)

    threading.Thread(target=listen, name="rope", daemon=True).start()
    code = await _Node(config).run(stop)
    # A signal is the kernel's word of our owner's death, or somebody's wish that this node ends: in
    # that case our owner lives, and starts another one, which needs the folder.
    if told.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(_ORPHANED_S):
                await cut.wait()
    if cut.is_set() or os.getppid() != config.parent:  # perhaps nobody else is left to do it
        shutil.rmtree(config.sockets, ignore_errors=True)
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # hivemind may have threads; all else is closed by now
