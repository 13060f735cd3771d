"""`shoal join`'s supervisor: its settings, and real processes that leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.peer.entry.supervisor import peer_configs
from shoal.peer.host.config import JoinConfig, PeerConfig
from shoal.peer.host.identity import seat

BROKER = "127.0.0.1:9"  # nobody listens there


def join(**fields: Any) -> JoinConfig:
    return JoinConfig(**({"broker": BROKER, "insecure": True, "name": "home"} | fields))


def test_one_worker_per_device_each_with_its_own_folder(tmp_path: Path) -> None:
    made = peer_configs(join(state=tmp_path, threads=2), ("cuda:0", "cuda:1"))
    assert [(c.name, c.device, c.state) for c in made] == [
        ("home-cuda-0", "cuda:0", tmp_path / "cuda-0"),
        ("home-cuda-1", "cuda:1", tmp_path / "cuda-1"),
    ]
    (alone,) = peer_configs(join(state=tmp_path), ("cpu",))
    assert alone.name == "home"
    assert alone.port == 0


def test_a_port_is_the_first_peers_and_the_others_follow(tmp_path: Path) -> None:
    made = peer_configs(join(state=tmp_path, port=7000, via={"a:1": "b:2"}), ("cuda:0", "cuda:1"))
    assert [c.port for c in made] == [7000, 7001]
    assert [PeerConfig.from_json(c.to_json()) for c in made] == made


def test_settings_of_a_worker_survive_the_rope(tmp_path: Path) -> None:
    config = PeerConfig(broker=BROKER, state=tmp_path, name="a b", memory_bytes=5, give_up_s=1.5)
    text = config.to_json()
    assert "\n" not in text
    assert PeerConfig.from_json(text) == config
    with pytest.raises(ValueError, match="expected a JSON object"):
        PeerConfig.from_json('{"broker": "x"}')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"broker": "nowhere"}, "expected a broker on this machine"),
        ({"broker": "host:0"}, "its port is 0, expected 1 to 65535"),
        ({"broker": "10.0.0.1:7077"}, "expected a broker on this machine"),
        ({"token": "shl1.x"}, "expected one of them"),
        ({"insecure": False, "token": "shl1.x"}, "2 parts"),
        ({"address": "nowhere"}, "HOST:PORT"),
        ({"devices": ()}, "devices"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"give_up_s": -1.0}, "give_up_s"),
        ({"port": 65536}, "port is 65536"),
        ({"stretch": 0.5, "threads": 1}, "stretch is 0.5"),
        ({"stretch": float("nan"), "threads": 1}, "stretch is nan"),
        ({"stretch": 2.0}, "threads 1"),
    ],
)
def test_wrong_settings_are_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        join(**fields)


def test_the_supervisor_does_not_load_torch() -> None:
    code = "import sys, shoal.peer.entry.supervisor; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- real processes


class Joined:
    """A supervisor process with one worker. Both write to one pipe: it ends when both are gone."""

    def __init__(self, state: Path, give_up: str, stderr: int = subprocess.PIPE) -> None:
        code = (
            "import sys; from pathlib import Path\n"
            "from shoal.peer.host.config import JoinConfig\n"
            "from shoal.peer.entry.supervisor import supervise\n"
            f"config = JoinConfig(broker={BROKER!r}, insecure=True, name='t', devices=('cpu',),\n"
            f"  state=Path({str(state)!r}), threads=1, give_up_s={give_up})\n"
            "sys.exit(supervise(config))"
        )
        self.state = state
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=stderr, text=True, start_new_session=True
        )

    def wait_for(self, pattern: str) -> str:
        """Reads lines until one matches."""
        assert self.process.stderr is not None
        seen = []
        for line in self.process.stderr:
            seen.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no line with {pattern!r} in {''.join(seen)}")

    def worker(self) -> int:
        """The worker's process id, which it keeps in its lock."""
        return int((self.state / "cpu" / "lock").read_text().split()[0])

    def all_gone(self) -> str:
        """Returns, with what was still written, when no process holds the pipe any more."""
        assert self.process.stderr is not None
        rest = self.process.stderr.read()
        self.process.wait()
        return rest

    def starts(self) -> int:
        return int(json.loads((self.state / "cpu" / "peer.json").read_text())["starts"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Joined]]:
    made: list[Joined] = []

    def make(give_up: str = "None") -> Joined:
        made.append(Joined(tmp_path, give_up))
        return made[-1]

    yield make
    for one in made:
        one.process.kill()
        one.all_gone()
        assert one.process.stderr is not None
        one.process.stderr.close()


@pytest.mark.process
def test_what_a_whole_unit_gets_is_one_wish_and_drains(start: Callable[..., Joined]) -> None:
    joined = start()
    joined.wait_for("This host lends cpu")  # before anything is reached
    joined.wait_for("no broker")
    worker = joined.worker()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
        for pid in (worker, joined.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
    rest = joined.all_gone()
    assert "stop asked" in rest
    assert "at_once=True" not in rest
    assert joined.process.returncode == 0


@pytest.mark.process
def test_a_terminal_that_is_gone_ends_nobody_before_its_time(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    joined = Joined(tmp_path, "None", stderr=theirs)
    os.close(theirs)
    seen = b""
    while b"no broker" not in seen:
        seen += os.read(ours, 4096)
    os.close(ours)  # as `ssh` does when its line breaks; every print fails from here on
    for number in (signal.SIGHUP, signal.SIGINT):
        joined.process.send_signal(number)
    assert joined.process.wait() == 0
    assert sorted(p.name for p in (tmp_path / "cpu").iterdir()) == ["lock", "peer.json"]


@pytest.mark.process
def test_a_first_interrupt_drains_and_nothing_is_left(start: Callable[..., Joined]) -> None:
    joined = start()
    joined.wait_for("no broker")
    joined.process.send_signal(signal.SIGINT)
    assert "stop asked" in joined.all_gone()
    assert joined.process.returncode == 0
    assert sorted(p.name for p in (joined.state / "cpu").iterdir()) == ["lock", "peer.json"]


@pytest.mark.process
def test_a_killed_worker_comes_back_and_dies_with_its_supervisor(
    start: Callable[..., Joined],
) -> None:
    joined = start()
    joined.wait_for("no broker")
    os.kill(joined.worker(), signal.SIGKILL)
    assert "signal 9" in joined.wait_for("worker crashed")
    joined.wait_for("no broker")
    assert joined.starts() == 2, "the same id, a higher counter"
    joined.process.kill()
    joined.all_gone()
    assert not (joined.state / "cpu" / "scratch").exists()


@pytest.mark.process
def test_giving_up_on_the_broker_ends_all_with_code_3(start: Callable[..., Joined]) -> None:
    joined = start(give_up="0.2")
    joined.all_gone()
    assert joined.process.returncode == 3
    assert joined.starts() == 1


def test_the_same_name_again_gets_the_next_seat_and_a_free_one_is_taken_again(tmp_path):
    with seat(tmp_path, "home") as first:
        with seat(tmp_path, "home") as second, seat(tmp_path, "other") as other:
            assert (first, second, other) == (1, 2, 1)
        with seat(tmp_path, "home") as again:
            assert again == 2
    with seat(tmp_path, "home") as alone:
        assert alone == 1
