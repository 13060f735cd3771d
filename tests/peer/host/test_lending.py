"""What somebody who lends a GPU reads first."""

from __future__ import annotations

from shoal.peer.host.config import JoinConfig
from shoal.peer.host.lending import in_text, lending_lines
from shoal.proto.broker_pb2 import Profile


def test_what_a_host_gives_is_said_in_units_of_people() -> None:
    config = JoinConfig(
        broker="127.0.0.1:7077",
        insecure=True,
        memory_bytes=10 << 30,
        hours="22-08",
        up_bytes_per_s=2.5e6,
        monthly_bytes=500 * 10**9,
    )
    assert list(lending_lines(config, ("cuda:0", "cuda:1"))) == [
        "This host lends cuda:0, cuda:1 to train models together with others. It gets parts of a "
        "model as data, never a program to run (docs/security.md).",
        "It gives: 10 GiB of memory of each device, between 22-08, at most 20 Mbit/s up, at most "
        "500 GB a month. Less: --memory, --hours, --up, or peer.toml.",
        "Ctrl-C leaves in good order; `shoal pause` rests this host, `shoal unpause` ends that.",
    ]


def test_a_host_without_limits() -> None:
    config = JoinConfig(broker="127.0.0.1:7077", insecure=True)
    _, gives, _ = lending_lines(config, ("cpu",))
    assert gives.startswith("It gives: a share of the memory that is free, at any hour. Less: ")


def test_who_is_in_reads_it_once_in_units_of_people() -> None:
    profile = Profile(device="cuda H200", device_memory_bytes=3 << 29, flops_per_s=42.5e12)
    assert in_text("home", profile) == (
        "you are in as home: 1.5 GiB and 42.5 TFLOP/s of cuda H200; Ctrl-C leaves in good order"
    )
