"""State of clients from one of their rounds to the next, at the peer that trains them.

A state is a vector of float32, and `trained` its number (`dag/rounds/cohorts.py`). Which one holds
the broker says. Of each client that one is kept and, as long as nobody knows whether its round
counts, the one that it came to since.

    FOLDER/RUN/CLIENT.TRAINED    the numbers, little-endian
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...net.surroundings import write_whole
from ..data.manifest import DataError

__all__ = ["ClientStates", "RoundStates"]

_NAME = re.compile(r"(\d+)\.(\d+)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class ClientStates:
    """States of one run's clients, on disk below `folder`; None: in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self._run = folder, ""
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._files: dict[int, set[int]] = {}
        """By client, the numbers of its states."""

    def begin(self, run: str) -> None:
        """What follows is of this run; of others nothing is kept. Raises DataError for a run whose
        id is no name of a folder, and OSError."""
        if run == self._run:
            return
        if not _RUN.fullmatch(run):  # it becomes a folder: never a path of somebody's choice
            raise DataError(f"run {run[:80]!r} is no name: expected letters, digits, '.', '_', '-'")
        self._run, self._kept, self._files = run, {}, {}
        if self._folder is None:
            return
        for other in self._folder.iterdir() if self._folder.is_dir() else ():
            if other.name != run:
                shutil.rmtree(other, ignore_errors=True)
        self._of_run.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._of_run.iterdir():
            if found := _NAME.fullmatch(path.name):
                self._files.setdefault(int(found[1]), set()).add(int(found[2]))
            else:
                path.unlink()  # of a write that was cut short

    @property
    def _of_run(self) -> Path:
        assert self._folder is not None, "there is no folder"
        return self._folder / self._run

    def load(self, client: int, trained: int, numbers: int) -> Tensor | None:
        """Return a client's state, (numbers,), float32, on the host; None: it is not here."""
        if self._folder is None:
            found = self._kept.get((client, trained))
        elif trained not in self._files.get(client, ()):
            return None
        else:
            try:
                data = bytearray((self._of_run / f"{client}.{trained}").read_bytes())
            except OSError:
                return None
            if len(data) != 4 * numbers:
                return None
            found = torch.from_numpy(np.frombuffer(data, "<f4"))
        return found if found is not None and found.shape == (numbers,) else None

    def keep(self, client: int, trained: int, before: int, state: Tensor) -> None:
        """Keep what a client came to, until it is known to count, beside the state of number
        `before`, and no other. `state`: (numbers,). Raises OSError."""
        now = state.detach().to("cpu", torch.float32)
        there = self._files.setdefault(client, set())
        for old in there - {trained, before}:
            self._drop(client, old)
        if self._folder is None:
            self._kept[client, trained] = now.clone()
        else:
            path = self._of_run / f"{client}.{trained}"
            part = path.with_suffix(".part")
            with open(part, "wb", buffering=0) as file:
                write_whole(file, now.contiguous().numpy().astype("<f4").tobytes(), part)
            os.replace(part, path)
        self._files[client] = (there & {before}) | {trained}

    def _drop(self, client: int, trained: int) -> None:
        self._kept.pop((client, trained), None)
        if self._folder is not None:
            (self._of_run / f"{client}.{trained}").unlink(missing_ok=True)


class RoundStates:
    """States of clients in one round, of so many numbers each. `trained`: by client, as in
    RoundStart. `behind`: the number of the states that they come to. lost: clients whose state is
    not here, and should be; it is 0, as of who was never trained."""

    def __init__(
        self, states: ClientStates, trained: Mapping[int, int], behind: int, numbers: int
    ) -> None:
        self._states, self._trained, self._behind = states, trained, behind
        self.numbers = numbers
        self.lost = {n for n, since in trained.items() if since and self._found(n) is None}

    def _found(self, client: int) -> Tensor | None:
        return self._states.load(client, self._trained[client], self.numbers)

    def rows(self, clients: Sequence[int]) -> Tensor:
        """Return the states of these, (clients, numbers), float32, on the host."""
        rows = torch.zeros(len(clients), self.numbers)
        for row, client in zip(rows, clients, strict=True):
            found = self._found(client) if self._trained[client] else None
            if found is not None:
                row.copy_(found)
        return rows

    def keep(self, clients: Sequence[int], rows: Tensor) -> None:
        """Keep what these have behind the round. Raises DataError."""
        for client, row in zip(clients, rows, strict=True):
            try:
                self._states.keep(client, self._behind, self._trained[client], row)
            except OSError as error:
                text = f"the state of client {client} cannot be kept: {error}"
                raise DataError(text) from error
