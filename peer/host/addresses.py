"""Addresses to dial in the place of others: for port forwards, tunnels, and shaped paths.

    "10.0.0.2:7077" = "127.0.0.1:9001"      # peer.toml's `--via FILE`: TOML, or JSON in FILE.json

Who is told to dial the address on the left, a peer's or the broker's, dials the one on the right.
A replacement is not looked up again, and an address that the file does not name is dialled as it
is.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...job.encodings import each_key_once
from ...net.address import AddressError, address_of

__all__ = ["read_addresses", "to_dial"]

_LONGEST_BYTES = 1 << 20


def to_dial(via: Mapping[str, str], address: str) -> str:
    """The address to dial for one that was named."""
    return via.get(address, address)


def read_addresses(path: Path) -> dict[str, str]:
    """The table in a file: address -> address to dial instead. Raises ValueError, with the file's
    name, for anything that is no such table, OSError when it cannot be read."""
    data = path.read_bytes()
    if len(data) > _LONGEST_BYTES:
        raise ValueError(f"{path} has {len(data)} bytes: expected at most {_LONGEST_BYTES}")
    try:
        text = data.decode()
        table: Any = (
            json.loads(text, object_pairs_hook=each_key_once)
            if path.suffix == ".json"
            else tomllib.loads(text)
        )
    except ValueError as error:  # of either format, UnicodeDecodeError included
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ValueError(f"{path} is no table of addresses in {kind}: {error}") from None
    if not isinstance(table, dict):
        raise ValueError(f"{path}: expected a table of addresses, not a {type(table).__name__}")
    found: dict[str, str] = {}
    for address, instead in table.items():
        if isinstance(instead, dict):
            raise ValueError(
                f'{path}: "{address}" is a table: expected HOST:PORT in quotes on both sides, '
                'e.g. "10.0.0.2:7077" = "127.0.0.1:9001"'
            )
        if not isinstance(instead, str):
            raise ValueError(f'{path}: "{address}" stands for {instead!r}: expected "HOST:PORT"')
        try:
            found[address_of(address, None)] = address_of(instead, None)
        except AddressError as error:
            raise ValueError(f"{path}: {error}") from None
    return found
