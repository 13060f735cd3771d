"""How a peer begins: who is told to stop before it has a part in anything stops at once."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.peer.entry.worker import work
from shoal.peer.host.config import PeerConfig
from shoal.peer.host.identity import Identity
from shoal.peer.shell import opening


def test_a_stop_does_not_wait_for_a_device_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def look(config: PeerConfig, network: bytes) -> Any:
        asked.set()
        answers.wait()

    monkeypatch.setattr(opening, "look", look)
    config = PeerConfig(broker="127.0.0.1:9", state=tmp_path, name="slow", insecure=True)

    async def run() -> None:
        starting = asyncio.ensure_future(work(config))
        await asyncio.to_thread(asked.wait)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    try:
        asyncio.run(run())  # it would not come back while a thread of its pool waits
        assert not answers.is_set()
        with Identity(tmp_path, "slow"):  # the folder is free again
            pass
    finally:
        answers.set()


@pytest.mark.parametrize("folder", ["/proc/no-folder-can-be-made", "/dev/full/peer"])
async def test_a_peer_that_the_machine_gives_no_folder_ends_for_good(
    folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = PeerConfig(broker="127.0.0.1:9", insecure=True, name="home", state=Path(folder))
    assert await work(config) == 2  # the supervisor starts no peer again that ended with it
    (refused,) = [r for r in caplog.records if r.getMessage() == "cannot start"]
    assert folder in str(refused.fields["why"])  # type: ignore[attr-defined]
