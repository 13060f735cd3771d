"""The broker's own id, which stays the same in a state folder: FOLDER/broker-id."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from ...net.identity.credential import write_private
from ...net.surroundings import SurroundingsError

__all__ = ["broker_id"]


def broker_id(state: Path | None) -> str:
    """The persistent id of this broker; a new one for a temporary state. Raises SurroundingsError
    for a file that is damaged, OSError."""
    made = f"broker-{secrets.token_hex(4)}"
    if state is None:
        return made
    path = state / "broker-id"
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        write_private(path, f"{made}\n".encode())
        return made
    if not re.fullmatch(rb"broker-[0-9a-f]{8}\n?", found):
        raise SurroundingsError(
            f"{path} is empty or damaged: expected the id of this broker in it, such as {made}: "
            "restore it from a copy, or remove it to go on under a new id"
        )
    return found.decode().strip()
