"""`shoal join --swarm`: this host's node of the directory in which the broker is found, and where
the broker is at the start. One node serves all devices of the host."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...net.discovery.process import NodeConfig, NodeProcess
from ...net.discovery.record import DirectoryError
from ...net.identity.credential import Credential
from ...net.identity.enroll import BrokerAwayError
from ...net.identity.token import Token
from ...net.local import local_address, split
from ...net.surroundings import user_path
from ..host.config import JoinConfig, JoinError, no_token
from ..logs import note
from ..shell.attempt import Finder

__all__ = ["in_swarm"]

_log = logging.getLogger(__name__)
_FIND_S, _PAUSE_S = 120.0, 1.0
"""For the broker to be found at the first start; later ones know more."""


@contextmanager
def in_swarm(config: JoinConfig) -> Iterator[tuple[JoinConfig, NodeProcess]]:
    """The settings with the broker's address in them, and the node that keeps finding it. Raises
    JoinError where there can be none, BrokerAwayError when no broker is found."""
    assert config.state is not None, "it was seated"
    folder = user_path(config.state).resolve()
    fingerprint = _fingerprint(config, folder)
    if not config.bootstrap and not (folder / "swarm" / "known.json").exists():
        raise JoinError(
            f"--swarm {config.swarm} without a way into it: expected --bootstrap (or "
            "SHOAL_BOOTSTRAP) at the first join, as in the line that the broker printed"
        )
    towards = split(config.broker)[0] if config.broker else "192.0.2.1"
    known = split(config.address)[0] if config.address not in ("", "none") else ""
    settings = NodeConfig(
        swarm=config.swarm,
        fingerprint=fingerprint.hex(),
        folder=str(folder / "swarm"),
        host="127.0.0.1" if config.address == "none" else "0.0.0.0",  # nobody is to dial
        port=config.swarm_port,
        public_host=known or local_address(towards),
        bootstrap=config.bootstrap,
    )
    try:
        with NodeProcess(settings) as node:
            address = config.broker or asyncio.run(_first(config, fingerprint, node))
            yield replace(config, broker=address, directory=node.config.socket), node
    except DirectoryError as error:
        raise JoinError(str(error)) from None


def _fingerprint(config: JoinConfig, folder: Path) -> bytes:
    """The fingerprint of the authority that is to be believed. Raises JoinError when none is
    known."""
    if config.token:
        return Token.parse(config.token).fingerprint
    for path in sorted(folder.glob("*/certificate.pem")):
        if (found := Credential.load(path.parent)) is not None:
            return found.fingerprint
    raise no_token(folder)


async def _first(config: JoinConfig, fingerprint: bytes, node: NodeProcess) -> str:
    await node.started()
    finder = Finder(config.swarm, fingerprint, node.directory)
    note(_log, logging.INFO, "looking for the broker", swarm=config.swarm)
    until = time.monotonic() + _FIND_S
    while not (address := await finder.look()):
        if time.monotonic() > until:
            state = node.directory.state
            met = 0 if state is None else state.neighbours
            raise BrokerAwayError(
                f"no broker of swarm {config.swarm} was found in {_FIND_S:.0f} s, and {met} nodes: "
                + (
                    "is it running with --swarm and this name, and is the token its own?"
                    if met
                    else "none of the ways in answers; ask for a newer line, or for one more "
                    "--bootstrap"
                )
            )
        await asyncio.sleep(_PAUSE_S)
    note(_log, logging.INFO, "found", swarm=config.swarm, broker=address)
    return address
