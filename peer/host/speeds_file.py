"""Speeds that were measured on this machine before: one file for all its peers.

FILE        {"KEY": {"at": seconds since 1970, "load": 0.1, "speeds": {"product": 8.1e10, …}}, …}
FILE.lock   held while one of the peers measures

KEY names the device, torch's version and the number of threads. An entry is good for a week, one
whose fit was poor for an hour. One that was measured while the machine was busy with something else
("load": processes that wanted to compute, for each core) is good for an hour too, and no longer
than until a peer starts, or looks from the pool, while the machine is idle. Of peers that join at
once the first one measures, and the others wait for what it finds, at most PATIENCE_S.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...dag.cost.speed import Speeds
from ...net.surroundings import SurroundingsError, user_path
from ..logs import note
from .calibrate import measure_speeds
from .config import DEFAULT_STATE

__all__ = ["known_speeds", "newer_speeds", "speeds_path"]

_log = logging.getLogger(__name__)
GOOD_S, POOR_S = 7 * 86400.0, 3600.0
PATIENCE_S = 10.0
BUSY = 0.5
"""Load of a core, in the minute before, from which on a machine counts as busy."""
POOR = 0.25
"""Median relative error of a fit from which on it is poor."""


def speeds_path() -> Path | None:
    """Where measured speeds are kept for all peers of this user; None: it has no home."""
    try:
        return user_path(DEFAULT_STATE).with_name("speeds.json")
    except SurroundingsError:
        return None


def host_load() -> float:
    """Processes that wanted to compute in the last minute, on average, for each core; 0 where the
    system does not say."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (AttributeError, OSError):
        return 0.0


def known_speeds(
    device: torch.device,
    model: str,
    path: Path | None,
    measure: Callable[[torch.device], Speeds] = measure_speeds,
    now: Callable[[], float] = time.time,
    meanwhile: Callable[[], None] = lambda: None,
    load: Callable[[], float] = host_load,
) -> Speeds:
    """The speeds of the device, measured unless the file has them. None: always measured. A file
    that cannot be read or written costs a measurement, and is no error. `meanwhile` is called once
    if another peer measures just now. `load`: as `host_load`."""
    if path is None:
        return measure(device)
    key = _key(model)
    loaded = load()  # before anything is measured, which is load itself
    if (found := _good(_read(path), key, now(), loaded)) is not None:
        return found
    try:
        with _turn(path, meanwhile):
            # Another peer may have measured meanwhile.
            if (found := _good(_read(path), key, now(), loaded)) is None:
                found = measure(device)
                entry = {"at": now(), "load": loaded, "speeds": asdict(found)}
                _write(path, _read(path) | {key: entry})
    except OSError as error:
        note(_log, logging.WARNING, "speeds not kept", path=path, why=error)
    return measure(device) if found is None else found


def newer_speeds(
    device: torch.device,
    model: str,
    path: Path | None,
    measure: Callable[[torch.device], Speeds] = measure_speeds,
    now: Callable[[], float] = time.time,
    load: Callable[[], float] = host_load,
) -> Speeds | None:
    """Return the speeds that the file has of a device; those that were measured on a busy machine
    are measured anew. None: the machine is busy, or nothing is kept of the device."""
    if path is None or load() >= BUSY:
        return None
    kept = _read(path).get(_key(model))
    return known_speeds(device, model, path, measure, now, load=load) if kept else None


def _key(model: str) -> str:
    return f"{model}, torch {torch.__version__}, {torch.get_num_threads()} threads"


@contextmanager
def _turn(path: Path, meanwhile: Callable[[], None]) -> Iterator[None]:
    """While no other peer is in it; after PATIENCE_S all the same: that one may be stopped."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end, idle = time.monotonic() + PATIENCE_S, False
    with open(path.with_name(f"{path.name}.lock"), "a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    break
                if not idle:
                    meanwhile()
                    idle = True
                time.sleep(0.05)
        yield


def _write(path: Path, table: dict[str, Any]) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(table, indent=1))
    new.replace(path)  # at once: a crash leaves the old one or the new one


def _read(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return table if isinstance(table, dict) else {}


def _good(table: dict[str, Any], key: str, now: float, load: float) -> Speeds | None:
    """The entry, when it is one and not too old (or from the future), and the machine is not idler
    than it was then by all that matters."""
    try:
        entry = table[key]
        speeds = Speeds(**{name: float(value) for name, value in entry["speeds"].items()})
        age, busy = now - float(entry["at"]), float(entry.get("load", 0.0)) >= BUSY
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if busy and load < BUSY:
        return None
    return speeds if 0 <= age <= (POOR_S if busy or speeds.error > POOR else GOOD_S) else None
