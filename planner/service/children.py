"""The broker's side of its planning processes: starts them, speaks with them, says why one ended.

Blocking, for one thread; `stop` is for others, too. Processes of the newest graphs
are kept (KEPT), with what they have found of them; a new one is forked from one that is warm, so
that nobody waits for torch to be imported again.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...job.words import size_text
from .process import (
    FAILED,
    MOST_ANSWER_BYTES,
    ORDER,
    OVER_ANSWER,
    OVER_MEMORY,
    LargeError,
    exactly,
    receive,
    send,
)
from .said import follow

__all__ = ["Children", "DroppedError", "EndedError", "ForkServer", "PlannerLimits"]


KEPT = 2
"""Graphs whose processes stay: of a run that trains, and of one that comes."""
_READY_S = 120.0
"""How long importing torch may take: 4 s on a quick machine, a minute from a cold disk."""
_LOOK_S = 0.25
"""How often it is looked whether somebody still waits."""
_END_S = 2.0
"""How long a process may take to end that was told to, or that has closed its socket."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Planning computes nothing that threads would help, and a process with threads is not forked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerLimits:
    """What one request of planning may take."""

    wall_s: float = 600.0
    """On the clock: twice `cpu_s`, for a machine that does other things."""
    cpu_s: int = 300
    """Seconds of CPU: 1,000 peers and 2,000 operators take 8 s, the longest ever seen 69 s."""
    memory_bytes: int = 2 << 30
    """Of address space beyond the warm process's: 1,000 peers and 2,000 operators take a quarter of
    that."""
    waiting: int = 32
    """Requests of one subject that wait at once."""

    def __post_init__(self) -> None:
        for name in ("wall_s", "cpu_s", "memory_bytes", "waiting"):
            if not getattr(self, name) > 0:
                raise ValueError(f"planner limit {name} is {getattr(self, name)}: expected > 0")


class EndedError(Exception):
    """A request has ended its process, or passed a limit: the text says which, and what to do.
    `blame`: the request did it; else it may be the machine, and once more may help."""

    def __init__(self, text: str, *, blame: bool = True) -> None:
        super().__init__(text)
        self.blame = blame


class DroppedError(Exception):
    """Nobody waits for the answer any more."""


class Children:
    """Starts the planning processes, sends them requests and reports why one ended."""

    def __init__(self, limits: PlannerLimits) -> None:
        self._limits = limits
        self._warm: ForkServer | None = None
        self._children: OrderedDict[str, _Child] = OrderedDict()
        """By graph, the one that was asked last at the end."""
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The process ids of the children, for tests."""
        return [child.pid for child in self._children.values()]

    def ask(self, graph: str, data: bytes, dropped: Callable[[], bool]) -> bytes:
        """The answer to a request about a graph. Raises EndedError, DroppedError."""
        until = time.monotonic() + self._limits.wall_s
        child = self._child(graph)
        try:
            child.socket.settimeout(self._limits.wall_s)
            send(child.socket, data)
            wait = partial(self._wait, child, until, dropped)
            answer = receive(child.socket, MOST_ANSWER_BYTES, wait)
        except LargeError:  # said by one that does not keep to its own limit
            self._end(graph, 0.0)
            raise self._why(OVER_ANSWER << 8) from None
        except (TimeoutError, DroppedError) as error:
            self._end(graph, 0.0)
            if isinstance(error, DroppedError):
                raise
            raise EndedError(self._late(self._limits.wall_s, "on the clock")) from None
        except OSError:  # it went while it was spoken to
            answer = None
        if answer is None:
            raise self._why(self._end(graph, _END_S))
        return answer

    def _wait(self, child: _Child, until: float, dropped: Callable[[], bool]) -> None:
        """Returns when it has something more to say, which buys no time for the rest. Raises
        TimeoutError, DroppedError."""
        ready = False
        while not ready:
            if self._closed or dropped():
                raise DroppedError
            if time.monotonic() > until:
                raise TimeoutError
            ready = _readable(child.socket, _LOOK_S)

    def _child(self, graph: str) -> _Child:
        if graph in self._children:
            self._children.move_to_end(graph)
            return self._children[graph]
        warm = self.warm_up()
        while len(self._children) >= KEPT:
            self._end(next(iter(self._children)), _END_S)
        self._children[graph] = child = warm.fork(self._limits)
        return child

    def warm_up(self) -> ForkServer:
        """Has the warm process ready, and returns it. Raises EndedError, DroppedError."""
        if self._closed:
            raise DroppedError
        if self._warm is None or not self._warm.alive:
            for child in self._children.values():  # they have ended with it
                child.socket.close()
            self._children.clear()
            if self._warm is not None:
                self._warm.close()
            self._warm = ForkServer()
        self._warm.wait(lambda: self._closed)
        return self._warm

    def _end(self, graph: str, within_s: float) -> int | None:
        """Ends a child, and says how it ended; None: nobody can say it."""
        child = self._children.pop(graph)
        child.socket.close()
        return None if self._warm is None else self._warm.ended(child.pid, within_s)

    # ------------------------------------------------------------ why one ended

    def _why(self, status: int | None) -> EndedError:
        if status is None:
            return EndedError("the process that plans was ended from outside", blame=False)
        code = os.waitstatus_to_exitcode(status)
        most = size_text(self._limits.memory_bytes)
        over = f"more than {most} of memory, the limit of this broker"
        if code == -signal.SIGXCPU:
            return EndedError(self._late(self._limits.cpu_s, "of CPU"))
        if code == OVER_MEMORY:
            return EndedError(
                f"planning this run was stopped: it took {over}; its graph makes values that no "
                "peer could hold, or is too large: capture it with fewer or smaller operators"
            )
        if code == OVER_ANSWER:
            return EndedError(
                "planning this run was stopped: its plan takes more than "
                f"{size_text(MOST_ANSWER_BYTES)}, the most that this broker takes from the process "
                "that plans; expected fewer microbatches in a step, or fewer and larger operators"
            )
        if code == -signal.SIGKILL:
            return EndedError(
                "planning this run ended the planner's process by signal 9: the broker's machine "
                "had no memory left, or somebody ended it; submit the run again",
                blame=False,
            )
        how = f"signal {-code} ({_name(-code)})" if code < 0 else f"exit status {code}"
        text = f"planning this run ended the planner's process by {how}: "
        if code == FAILED:
            return EndedError(text + "a bug of shoal, which the broker's log tells of")
        # At the limit of memory a stack that cannot grow ends like this too.
        return EndedError(
            f"{text}an operator of its graph crashes torch where only shapes are computed, or "
            f"planning took {over}. It is not planned again; write that operator in another way, "
            "or capture the model anew with fewer or smaller operators"
        )

    def _late(self, seconds: float, of: str) -> str:
        return (
            f"planning this run was stopped after {seconds:g} s {of}, the limit of this broker: "
            'expected a smaller search; set plan.scheduler = "op-fence", larger microbatches, or '
            "fewer choices of train.microbatch"
        )

    # ------------------------------------------------------------ the end

    def stop(self) -> None:
        """End what is under way within _LOOK_S; for any thread."""
        self._closed = True

    def close(self) -> None:
        """Ends all processes, whatever they do. The last call, behind `stop` and when no other one
        is under way."""
        for graph in list(self._children):
            self._end(graph, 0.0)
        if self._warm is not None:
            self._warm.close()


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    socket: socket.socket


class ForkServer:
    """The process that has imported torch, and forks. It ends with this one, at the latest."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            module, number = f"{__package__}.process", theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(number)],
                pass_fds=(number,),
                env={**os.environ, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        assert self._process.stderr is not None
        follow(self._process.stderr)  # type: ignore[arg-type]  # a buffered reader of bytes
        self._lock = threading.Lock()
        self._is_ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def wait(self, dropped: Callable[[], bool]) -> None:
        """Returns when it can fork. Raises EndedError, DroppedError."""
        until = time.monotonic() + _READY_S
        with self._lock:
            while not (self._is_ready or _readable(self._control, _LOOK_S)):
                if dropped():
                    raise DroppedError
                if time.monotonic() > until:
                    self._process.kill()
            if self._is_ready:
                return
            with contextlib.suppress(OSError):
                self._is_ready = exactly(self._control, ORDER.size) is not None
            self._control.settimeout(10 * _END_S)
        if not self._is_ready:
            self.close()
            raise EndedError(
                "the process that plans could not be started (exit status "
                f"{self._process.returncode}): the broker's log has what it said",
                blame=False,
            )

    def fork(self, limits: PlannerLimits) -> _Child:
        """Raises EndedError when it cannot."""
        mebibytes = max(1, limits.memory_bytes >> 20)
        told, descriptors = b"", list[int]()
        with contextlib.suppress(OSError), self._lock:
            self._control.sendall(ORDER.pack(b"F", mebibytes, limits.cpu_s))
            told, descriptors, _, _ = socket.recv_fds(self._control, ORDER.size, 1)
        if len(told) < ORDER.size or not descriptors:
            self._end()
            raise EndedError("the process that plans has ended, or cannot fork", blame=False)
        return _Child(ORDER.unpack(told)[1], socket.socket(fileno=descriptors[0]))

    def ended(self, pid: int, within_s: float) -> int | None:
        """How a child has ended, which it does within so long or is ended then; None: unknown."""
        with contextlib.suppress(OSError), self._lock:
            self._control.sendall(ORDER.pack(b"E", pid, int(within_s * 1e3)))
            told = exactly(self._control, ORDER.size)
            if told is not None:
                return int(ORDER.unpack(told)[2])
        self._end()  # an answer that came late would be taken for that to another order
        return None

    def close(self) -> None:
        """Close the pool and end its children."""
        self._end()
        self._control.close()

    def _end(self) -> None:
        """Waits for it, too: until then it would count as alive."""
        self._process.kill()
        self._process.wait()


def _readable(where: socket.socket, within_s: float) -> bool:
    """Whether there is something to read, or the end. Not by `select`, which takes no descriptor
    above 1,023: a broker of many peers has more."""
    waits = select.poll()
    waits.register(where, select.POLLIN)
    return bool(waits.poll(within_s * 1e3))


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
