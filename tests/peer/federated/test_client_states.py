"""State of clients from round to round, on disk as in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.peer.data.manifest import DataError
from shoal.peer.federated.client_states import ClientStates, RoundStates

SIZE = 3


def row(number: float) -> torch.Tensor:
    return torch.full((SIZE,), number)


@given(
    keeps=st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=12),
)
def test_of_each_client_there_is_what_counts_and_what_may_count(
    tmp_path_factory: pytest.TempPathFactory, keeps: list[tuple[int, bool, bool]]
) -> None:
    """Rounds in which one client each is trained; whether the round counts, and whether the peer is
    started again behind it."""
    folder = tmp_path_factory.mktemp("states")
    memory, disk = ClientStates(), ClientStates(folder)
    memory.begin("run")
    disk.begin("run")
    counted = dict.fromkeys(range(3), 0)
    for number, (client, counts, restarts) in enumerate(keeps, 1):
        for states in (memory, disk):
            states.keep(client, number, counted[client], row(number))
        if counts:
            counted[client] = number
        if restarts:
            disk = ClientStates(folder)
            disk.begin("run")
        for states in (memory, disk):
            for one, since in counted.items():
                found = states.load(one, since, SIZE)
                assert (found is None) == (since == 0)
                assert since == 0 or (found is not None and torch.equal(found, row(since)))
        assert len([*(folder / "run").iterdir()]) <= 6, "two of each client at most"


def test_of_another_run_nothing_is_kept(tmp_path: Path) -> None:
    states = ClientStates(tmp_path / "clients")
    states.begin("r-1")
    states.keep(7, 1, 0, row(1.0))
    states.begin("r-1")
    assert states.load(7, 1, SIZE) is not None
    states.begin("r-2")
    states.begin("r-1")
    assert states.load(7, 1, SIZE) is None


@pytest.mark.parametrize("run", ["../elsewhere", "/", ".", "..", "a/b"])
def test_a_run_is_no_path(tmp_path: Path, run: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    states = ClientStates(tmp_path / "clients")
    states.begin("r-1")
    with pytest.raises(DataError, match="is no name"):
        states.begin(run)
    assert (tmp_path / "elsewhere").is_dir()


def test_what_is_damaged_is_not_here(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.begin("r")
    states.keep(0, 1, 0, row(1.0))
    (tmp_path / "r" / "0.1").write_bytes(b"short")
    assert states.load(0, 1, SIZE) is None
    assert RoundStates(states, {0: 1, 1: 0}, 5, SIZE).lost == {0}


def test_a_full_disk_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = ClientStates(tmp_path)
    states.begin("r")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shoal.peer.federated.client_states.write_whole", full)
    with pytest.raises(DataError, match=r"state of client 4 cannot be kept.*No space left"):
        RoundStates(states, {4: 0}, 0, SIZE).keep([4], row(1.0)[None])


def test_who_was_never_trained_and_who_lost_its_state_have_none() -> None:
    states = ClientStates()
    states.begin("r")
    states.keep(1, 3, 0, row(3.0))
    found = RoundStates(states, {0: 0, 1: 3, 2: 3}, 3, SIZE)
    assert found.lost == {2}
    assert torch.equal(found.rows([2, 1, 0]), torch.stack([row(0.0), row(3.0), row(0.0)]))
