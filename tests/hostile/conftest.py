"""What hostile clients do to real brokers, each in a process of its own: so what they cost can be
read off that process, and what kills it kills no test.

A broker within the test's own process, for what needs no process: `running` of
tests/broker/service/test_secured.py; with `made`, `channel` and `status` beside it.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc.aio
import pytest

from shoal.net.identity.authority import Authority, utc
from shoal.net.identity.credential import Credential
from shoal.net.identity.enroll import channel_options
from shoal.net.identity.names import Party, PartyRole

MIB = 1 << 20
_WARM = """
from shoal.planner.answers.planning import warm_up
from shoal.cli import main
warm_up()
main()
"""
"""With torch there from the beginning, which the broker would load beside its work: so what its
memory grows by is what was done to it."""


@dataclass
class BrokerProcess:
    """`shoal broker` with a state folder, and everybody's certificates."""

    process: subprocess.Popen[str]
    address: str
    state: Path

    def made(self, role: PartyRole, subject: str = "x", **lasts: float) -> Credential:
        """A certificate that the broker's authority signed, for an hour if not said otherwise; its
        subject never joined."""
        now = utc(time.time())
        authority = Authority.open(self.state / "authority", now)
        return authority.credential(Party(role, subject), now, timedelta(**lasts or {"hours": 1}))

    @asynccontextmanager
    async def channel(self, credential: Credential) -> AsyncIterator[grpc.aio.Channel]:
        options = [*channel_options(self.address), ("grpc.use_local_subchannel_pool", 1)]
        found = grpc.aio.secure_channel(self.address, credential.for_channel(), options=options)
        async with found:
            yield found

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def memory_bytes(self) -> int:
        """What it has in memory now (its resident set)."""
        return self._status("VmRSS")

    def most_memory_bytes(self) -> int:
        """The most that it ever had."""
        return self._status("VmHWM")

    def _status(self, what: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{what}:\s+(\d+) kB$", text, re.MULTILINE)
        assert found, text
        return int(found[1]) * 1024


@contextmanager
def broker_process(state: Path, *flags: str) -> Iterator[BrokerProcess]:
    """Its log is in STATE.log."""
    with state.with_suffix(".log").open("w") as log:
        words = (sys.executable, "-c", _WARM, "broker", "--host", "127.0.0.1", "--port", "0")
        process = subprocess.Popen(
            [*words, "--state", str(state), *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"shoal join (\S+)", line)
            assert found, f"{line!r}, {state.with_suffix('.log').read_text()}"
            yield BrokerProcess(process, found[1], state)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """`start_broker(*flags)`: a broker's process, until the test ends."""
    with ExitStack() as stack:

        def start(*flags: str) -> BrokerProcess:
            return stack.enter_context(broker_process(tmp_path / "broker", *flags))

        yield start
