"""A broker and its peers as real processes of this host, on loopback, that leave nothing behind.

Each child runs in its own session, so that a Ctrl-C in the terminal reaches only us, and dies with
us: on the way out they are asked to drain, asked again, and then killed. Asked by SIGTERM: a child
of a shell's background job ignores SIGINT.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..net.interrupts import uninterrupted

__all__ = ["ClusterError", "LocalCluster", "started_by", "tied"]

_SETTINGS = "XDG_CONFIG_HOME"
PATIENCE_S = 60.0
"""How long a process may take to start: importing torch on a busy laptop is slow."""


class ClusterError(RuntimeError):
    """A process of the cluster did not start or ended early; the message carries its last lines."""


class LocalCluster:
    """`with LocalCluster(peers=4) as cluster:` gives a broker at `cluster.address` and its peers;
    `cluster.join("eu-1", [...])` starts another.

    With `secure` they have identities and speak mutual TLS; this user's settings are its own then.
    `folder` (made and removed unless given) holds their state and one log per process.
    """

    def __init__(
        self,
        *,
        peers: int | Sequence[Sequence[str]] = 4,
        threads: int = 1,
        folder: Path | None = None,
        join_flags: Sequence[str] = (),
        secure: bool = False,
    ) -> None:
        self.flags = (
            [list(join_flags) for _ in range(peers)]
            if isinstance(peers, int)
            else [[*join_flags, *f] for f in peers]
        )
        self.threads = threads
        self.keep = folder is not None
        self.folder = folder
        self.secure = secure
        self._token = ""
        self._settings: str | None = None  # of this user, while the cluster has its own
        self.address = ""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._gone: set[str] = set()  # that are meant to have ended

    def __enter__(self) -> LocalCluster:
        try:
            with uninterrupted():
                self.folder = self.folder or Path(tempfile.mkdtemp(prefix="shoal-sim-"))
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.secure:
                # Credentials for a broker that is gone in a minute are not the user's to keep.
                self._settings = os.environ.get(_SETTINGS, "")
                os.environ[_SETTINGS] = str(self.folder / "config")
            self._start_broker("0")
            for i, flags in enumerate(self.flags):
                self.join(f"sim-{i + 1}", flags)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def join(self, name: str, flags: Sequence[str] = ()) -> None:
        """Starts a peer, or starts one again that is gone."""
        assert self.folder is not None
        state = str(self.folder / name)
        arguments = ["join", self.address, "--name", name, "--state", state]
        how = ["--token", self._token] if self.secure else ["--insecure"]
        self._start(name, [*arguments, *how, "--threads", str(self.threads), *flags])
        self._gone.discard(name)

    def restart_broker(self) -> None:
        """Kills the broker, and starts one again at its address with the state that it left."""
        self.send("broker", signal.SIGKILL)
        if (out := self.processes["broker"].stdout) is not None:
            out.close()
        self._start_broker(self.address.rpartition(":")[2])
        self._gone.discard("broker")

    def _start_broker(self, port: str) -> None:
        assert self.folder is not None
        state = str(self.folder / "broker")
        how = ["--host", "127.0.0.1"] if self.secure else ["--insecure"]
        self._start("broker", ["broker", *how, "--port", port, "--state", state])
        self.address, self._token = self._join_line()

    def runs(self, name: str) -> bool:
        """Whether a process was started and has not ended."""
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def send(self, name: str, sign: signal.Signals) -> None:
        """A signal for a peer and for all that it started; SIGTERM, the owner's, for the first of
        them. SIGKILL and SIGTERM are meant to end it."""
        if sign in (signal.SIGKILL, signal.SIGTERM):
            self._gone.add(name)
        if self.runs(name):
            first, workers = self.processes[name].pid, list[int]()
            if sign == signal.SIGKILL:  # it starts no other worker, and no worker outlives it
                os.killpg(first, signal.SIGSTOP)
            if sign != signal.SIGTERM:
                workers = started_by(first)
            for worker in workers:  # each in a session of its own
                with suppress(ProcessLookupError):
                    os.killpg(worker, sign)
            os.killpg(first, sign)
        if sign == signal.SIGKILL:
            self.processes[name].wait()

    def check(self) -> None:
        """Raises ClusterError when a process has ended that should run."""
        for name, process in list(self.processes.items()):
            if process.poll() is not None and name not in self._gone:
                raise ClusterError(
                    f"{name} ended with exit code {process.returncode}:\n{self.log(name)}"
                )

    def log(self, name: str, lines: int = 20) -> str:
        """The last lines that a process wrote."""
        assert self.folder is not None
        path = self.folder / f"{name}.log"
        return (
            "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
            if path.exists()
            else ""
        )

    def stop(self) -> None:
        """Ends every process, peers first; returns when none is left, whatever signals come."""
        with uninterrupted():
            self._stop()

    def _stop(self) -> None:
        for names in ([n for n in self.processes if n != "broker"], ["broker"]):
            group = [self.processes[n] for n in names if n in self.processes]
            for sign, patience_s in (
                (signal.SIGTERM, 3.0),
                (signal.SIGTERM, 5.0),
                (signal.SIGKILL, 5.0),
            ):
                for name in names:
                    if self.runs(name):
                        self.send(name, sign)
                        with suppress(ProcessLookupError):  # it may be frozen, or gone by now
                            os.killpg(self.processes[name].pid, signal.SIGCONT)
                end = time.monotonic() + patience_s
                for process in group:
                    try:
                        process.wait(max(0.0, end - time.monotonic()))
                    except subprocess.TimeoutExpired:
                        continue  # asked again, more firmly, in the next round
                if all(p.poll() is not None for p in group):
                    break
        for process in self.processes.values():
            if process.stdout is not None:
                process.stdout.close()
        self.processes.clear()
        if self._settings is not None:
            os.environ[_SETTINGS] = self._settings
            if not self._settings:
                del os.environ[_SETTINGS]
            self._settings = None
        if not self.keep and self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self, name: str, arguments: list[str]) -> None:
        assert self.folder is not None
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "PYTHONUNBUFFERED": "1"}
        with open(self.folder / f"{name}.log", "ab") as log, uninterrupted():
            self.processes[name] = subprocess.Popen(
                tied([sys.executable, "-m", "shoal.cli", *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if name == "broker" else log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def _join_line(self) -> tuple[str, str]:
        """The broker's address and a token, read from the line that it prints for peers."""
        broker = self.processes["broker"]
        assert broker.stdout is not None
        end, text = time.monotonic() + PATIENCE_S, ""
        while time.monotonic() < end:
            if select.select([broker.stdout], [], [], 0.5)[0]:
                piece = os.read(broker.stdout.fileno(), 65536).decode(errors="replace")
                text += piece
                found = re.search(r"shoal join (\S+:\d+) --(?:insecure|token (\S+))\n", text)
                if found:
                    return found[1], found[2] or ""
                if not piece:
                    break
            self.check()
        raise ClusterError(f"the broker printed no join line, but {text!r}\n{self.log('broker')}")


_TIE = """\
import ctypes, os, signal, sys
pr_set_pdeathsig = 1
ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """A command that does the same, and that the kernel ends with this process (Linux).

    Not by Popen's `preexec_fn`: with one it forks in a way that runs gRPC's handlers, and of some
    hundred children one aborts in gRPC's poller before it is the program (grpc/grpc#43055)."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def started_by(pid: int, root: Path = Path("/proc")) -> list[int]:
    """Processes that another one started and that have not ended (Linux)."""
    found: list[int] = []
    for thread in (root / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            found += map(int, thread.read_text().split())
    return found
