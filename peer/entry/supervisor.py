"""`shoal join`: one worker process per device, kept alive, and ended with this process.

- A worker that crashes is started again after a pause (1 s, doubling to 60 s; 1 s again once it has
  lived for 60 s). It comes back under its persistent id with a higher counter. One that ended on
  purpose is not: codes 0, 2 (wrong input), 3 (gave up on the broker), 4 (refused).
- The first SIGINT, SIGTERM or SIGHUP lets the workers drain: each ends when its part of a run is
  handed over, or else after the step that it is in, with a countdown here that says what it waits
  for. A second SIGINT or SIGTERM makes them leave at once; who has not after 5 s is killed.
- A signal that a whole unit or terminal gets reaches the workers too, and means the same there: the
  first one drains, and no further one counts.
- Workers live in sessions of their own, so that a Ctrl-C in the terminal reaches only this process;
  they end when their standard input does, so this process's death, even by SIGKILL, ends them.

The supervisor never loads torch, and little else: until it has started its workers nobody works.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TextIO

from ...net.local import joined, split
from ...net.printable import printable
from ...net.surroundings import user_path
from ..host.config import (
    DEFAULT_STATE,
    WAITS,
    JoinConfig,
    PeerConfig,
    SharedConfig,
    host_name,
    no_token,
    with_suffix,
)
from ..host.identity import seat
from ..host.lending import lending_lines
from ..host.profile import find_devices
from ..logs import note, to_stderr

if TYPE_CHECKING:
    from ...net.discovery.process import NodeProcess

__all__ = ["peer_configs", "supervise"]

_log = logging.getLogger(__name__)
_ON_PURPOSE = (0, 2, 3, 4)
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_S = 1.0, 60.0, 60.0
_KILL_AFTER_S = 5.0
_ONE_WISH_S = 0.3
"""Two signals within so long are one wish to end."""


def supervise(config: JoinConfig) -> int:
    """Runs the peers of this host to their end; call it in the main thread. Returns the exit code:
    0, or that of the first worker that ended otherwise. Raises JoinError when there is
    nothing to join with, BrokerAwayError when no broker is found in a swarm."""
    to_stderr(config.log)
    devices = find_devices() if config.devices == "all" else config.devices
    with _seated(config) as config:
        _check_credentials(peer_configs(config, devices))
        for line in lending_lines(config, devices):
            _tell(printable(line, 500))
        with _in_swarm(config) as (config, node), _signals() as inbox:
            return _Supervisor(peer_configs(config, devices), config.drain_s, node).run(inbox)


@contextmanager
def _in_swarm(config: JoinConfig) -> Iterator[tuple[JoinConfig, NodeProcess | None]]:
    """The settings with the broker's address in them, and this host's node of the directory."""
    if not config.swarm:
        yield config, None
        return
    from .swarm import in_swarm  # loads what signs and dials: others join without it

    with in_swarm(config) as found:
        yield found


def _check_credentials(configs: Sequence[PeerConfig]) -> None:
    """Before seconds go by. Raises JoinError when a peer has nothing to join with."""
    for config in configs:
        if config.insecure or config.token or (config.state / "certificate.pem").exists():
            continue
        raise no_token(config.state)


@contextmanager
def _seated(config: JoinConfig) -> Iterator[JoinConfig]:
    """Without a folder of its own, the second `shoal join` on a host is NAME-2, and so on."""
    if config.state is not None:
        yield replace(config, host_state=config.host_state or config.state)
        return
    name, folder = config.name or host_name(), user_path(DEFAULT_STATE)
    config = replace(config, host_state=config.host_state or folder)
    with seat(folder, name) as number:
        numbered = name if number == 1 else with_suffix(name, f"-{number}")
        yield replace(config, name=numbered, state=folder / numbered)


def peer_configs(config: JoinConfig, devices: Sequence[str]) -> list[PeerConfig]:
    """One worker's settings per device. With several, each name says its device."""
    name = config.name or host_name()
    state = user_path(config.state or DEFAULT_STATE / name).resolve()
    shared = {f.name: getattr(config, f.name) for f in fields(SharedConfig)}
    return [
        PeerConfig(
            **shared
            | {
                "name": name
                if len(devices) == 1
                else with_suffix(name, f"-{device.replace(':', '-')}"),
                "host_state": config.host_state and user_path(config.host_state).resolve(),
                "port": config.port + number if config.port else 0,
                "address": _after(config.address, number),
            },
            state=state / device.replace(":", "-"),
            device=device,
            trace=_trace(config, device if len(devices) > 1 else ""),
        )
        for number, device in enumerate(devices)
    ]


def _after(address: str, number: int) -> str:
    """The address of a device's peer, from that of the first one."""
    if address in ("", "none") or not number:
        return address
    host, port = split(address)
    return joined(host, port + number)


def _trace(config: JoinConfig, device: str) -> str:
    """Where a device's worker writes what it does; `device` is empty where there is only one."""
    if config.trace is None:
        return ""
    path = user_path(config.trace).resolve()
    named = f"{path.stem}-{device.replace(':', '-')}{path.suffix}" if device else path.name
    return str(path.with_name(named))


@dataclass
class _Child:
    """A device's worker: running, waiting for its next start, or ended for good."""

    config: PeerConfig
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause_s: float = _FIRST_PAUSE_S
    start_at: float | None = 0.0
    """When to start it; None while it runs or after its end."""
    code: int = 0
    waits: str = ""
    """What its drain waits for, as it last said."""
    unread: bytes = b""
    """What came of a line that is not whole."""

    @property
    def over(self) -> bool:
        return self.process is None and self.start_at is None

    def start(self) -> None:
        command = [sys.executable, "-m", "shoal.peer.entry.worker"]
        threads = {"OMP_NUM_THREADS": str(self.config.threads)} if self.config.threads else {}
        # What ends a whole unit waits, at the worker, until that can hand over.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | threads,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self.unread = b""
        self.started_at, self.start_at = time.monotonic(), None
        self.say(replace(self.config, parent=os.getpid()).to_json())

    def say(self, line: str) -> None:
        """A line down the rope; a worker that is gone already is noticed elsewhere."""
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def hear(self) -> float | None:
        """Read what the child has said since the last time; return for how long it waits at most,
        if it said that."""
        if self.process is None or self.process.stdout is None or self.process.stdout.closed:
            return None
        wait: float | None = None
        with suppress(BlockingIOError):  # that is all for now
            while data := os.read(self.process.stdout.fileno(), 1 << 16):
                self.unread += data
            self.process.stdout.close()
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            try:
                said = json.loads(line)
                self.waits, wait = str(said[WAITS]), float(said["within_s"])
            except (ValueError, KeyError, TypeError):  # of a library, say
                _tell(printable(line.decode(errors="replace")), sys.stdout)
        return wait

    def reap(self, ending: bool) -> None:
        """Takes note of a worker's end, and decides whether there is a next start."""
        if self.process is None or (code := self.process.poll()) is None:
            return
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.hear()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process, self.code, self.waits = None, code, ""
        if ending or code in _ON_PURPOSE:
            return
        self.config = replace(self.config, first_s=None)  # it may have been a member
        lived = time.monotonic() - self.started_at
        self.pause_s = _FIRST_PAUSE_S if lived >= _HEALTHY_S else self.pause_s
        self.start_at = time.monotonic() + self.pause_s
        how = f"signal {-code}" if code < 0 else f"code {code}"
        note(
            _log,
            logging.ERROR,
            "worker crashed",
            device=self.config.device,
            how=how,
            lived_s=lived,
            again_in_s=self.pause_s,
        )
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)


class _Supervisor:
    def __init__(
        self, configs: Sequence[PeerConfig], drain_s: float, node: NodeProcess | None = None
    ) -> None:
        self._node = node
        self.children = [_Child(c) for c in configs]
        self.drain_s = drain_s
        self.stops = 0
        self.asked_at = 0.0
        self.deadline = 0.0  # of the drain, or of the kill after a second stop

    def run(self, inbox: int) -> int:
        """`inbox`: where every signal leaves a byte."""
        try:
            while True:
                now = time.monotonic()
                if self._node is not None and not self.stops:
                    self._node.keep()
                for child in self.children:
                    child.reap(ending=self.stops > 0)
                    if child.start_at is not None and now >= child.start_at and not self.stops:
                        child.start()
                if all(child.over for child in self.children):
                    codes = [c.code for c in self.children if c.code]
                    return 0 if not codes else codes[0] if codes[0] > 0 else 1
                for number in _wait(inbox, self._voices, self._patience(now)):
                    if number in _STOPS:
                        self._asked(number, time.monotonic())
                self._hear()
                self._hurry()
        finally:
            self._kill()

    def _patience(self, now: float) -> float:
        """How long nothing needs to be done if no signal comes, seconds."""
        starts = [c.start_at - now for c in self.children if c.start_at is not None]
        longest_s = 1.0 if self.stops else 60.0 if self._node is None else 5.0
        return max(0.0, min([longest_s, *starts]))

    @property
    def _voices(self) -> list[int]:
        """What workers speak on."""
        running = (c.process for c in self.children if c.process is not None)
        return [p.stdout.fileno() for p in running if p.stdout and not p.stdout.closed]

    def _hear(self) -> None:
        """A worker that drains says how long it may take."""
        for child in self.children:
            before, wait = child.waits, child.hear()
            if wait is None or self.stops != 1:
                continue
            self.deadline = max(self.deadline, time.monotonic() + wait)
            if child.waits != before:
                name = f"{child.config.name}: " if len(self.children) > 1 else ""
                _tell(
                    f"draining: {name}waits for {printable(child.waits)}, at most {wait:.0f} s; "
                    "Ctrl-C again leaves at once"
                )

    def _asked(self, number: int, now: float) -> None:
        """Takes a signal for the first wish to end, or for a second one. The end of a unit or of a
        terminal is one wish, however often it is said: SIGTERM goes to a process and then to its
        group, a SIGHUP follows, and a terminal sends several."""
        if self.stops and (number == signal.SIGHUP or now < self.asked_at + _ONE_WISH_S):
            return
        self.asked_at = now
        self._stop()

    def _stop(self) -> None:
        self.stops += 1
        for child in self.children:
            child.start_at = None
            if child.process is not None:
                child.say("drain" if self.stops == 1 else "stop")
        self.deadline = time.monotonic() + (self.drain_s if self.stops == 1 else _KILL_AFTER_S)

    def _hurry(self) -> None:
        """While ending: counts down, and kills who does not end."""
        if not self.stops:
            return
        left = self.deadline - time.monotonic()
        if self.stops == 1:
            waits = any(c.waits for c in self.children)
            if waits and sys.stderr.isatty() and left > 0:
                _tell(f"\rdraining: {left:3.0f} s ", end="")
            if left <= -_KILL_AFTER_S:
                self._stop()  # the workers had their own deadline; they are stuck
        elif left <= 0:
            self._kill()

    def _kill(self) -> None:
        for child in self.children:
            if child.process is not None and child.process.poll() is None:
                note(_log, logging.WARNING, "worker killed", device=child.config.device)
                child.process.kill()
                child.process.wait()


def _tell(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    """Says something to whoever looks; a terminal that is gone, or a full disk, is no reason to end
    before the workers have handed over."""
    with suppress(OSError, ValueError):
        print(text, end=end, file=stream or sys.stderr, flush=True)


@contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that gets a byte, its number, for each signal to stop and each SIGCHLD. One that
    is ignored (nohup) stays so."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    numbers = [n for n in _STOPS if signal.getsignal(n) is not signal.SIG_IGN] + [signal.SIGCHLD]
    before = {n: signal.signal(n, lambda *_: None) for n in numbers}
    descriptor = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _wait(inbox: int, voices: Sequence[int], seconds: float) -> bytes:
    """The signals that came, after at most so long; earlier when a worker says something."""
    ready, _, _ = select.select([inbox, *voices], [], [], seconds)
    return os.read(inbox, 4096) if inbox in ready else b""
