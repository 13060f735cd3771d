"""Addresses as people write them mean one thing wherever they are read."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.service.server import BrokerConfig, BrokerConfigError
from shoal.client.access import credential_folder, find_address
from shoal.net.address import USUAL_PORT, AddressError, address_of, host_of
from shoal.net.local import listening, split
from shoal.peer.host.addresses import read_addresses
from shoal.peer.host.config import JoinConfig

NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{2,6}){0,2}", fullmatch=True)
HOSTS = NAMES | st.ip_addresses(v=4).map(str) | st.ip_addresses(v=6).map(lambda a: f"[{a}]")
PORTS = st.integers(1, 65535)
SPELLINGS = [
    ("broker.example:7070", "broker.example:7070"),
    ("Broker.EXAMPLE:7070", "broker.example:7070"),
    ("broker.example.:7070", "broker.example:7070"),
    (" http://broker.example:7070/\n", "broker.example:7070"),
    ("https://broker.example:7070", "broker.example:7070"),
    ("broker.example:7070/", "broker.example:7070"),
    ("bücher.example:7070", "xn--bcher-kva.example:7070"),
    ("[::1]:7070", "[::1]:7070"),
    ("[FD00::0005]:7070", "[fd00::5]:7070"),
    ("[fe80::1%eth0]:7070", "[fe80::1%eth0]:7070"),
    ("[fe80::1%25eth0]:7070", "[fe80::1%eth0]:7070"),
    ("[::ffff:10.0.0.5]:7070", "10.0.0.5:7070"),
]


@given(HOSTS, PORTS, st.sampled_from(["", "http://", "HTTPS://"]), st.sampled_from(["", "/"]))
def test_every_spelling_of_an_address_is_one_and_that_one_stays(
    host: str, port: int, scheme: str, end: str
) -> None:
    known = address_of(f"{scheme}{host.upper()}:{port}{end}")
    assert known == address_of(f"{host}:{port}")
    assert address_of(known, None) == known
    assert split(known)[1] == port
    assert address_of(f"{scheme}{host}{end}") == address_of(f"{host}:{USUAL_PORT}")


@given(st.text(max_size=30))
def test_whatever_is_typed_is_an_address_or_refused_by_one_error(text: str) -> None:
    with suppress(AddressError):
        known = address_of(text)
        assert known.isascii()
        assert address_of(known, None) == known


@pytest.mark.parametrize(("said", "known"), SPELLINGS)
def test_each_place_that_reads_an_address_reads_all_of_its_spellings(
    said: str, known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_BROKER", said)
    assert find_address(said) == find_address() == known
    assert credential_folder(said) == credential_folder(known)
    joins = JoinConfig(broker=said, address=said)
    assert (joins.broker, joins.address) == (known, known)
    assert BrokerConfig(public=said).public == known
    table = tmp_path / "via.json"
    table.write_text(json.dumps({said: "127.0.0.1:9"}))
    assert read_addresses(table) == {known: "127.0.0.1:9"}


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("::1", r"expected \[::1\]:7077"),
        ("fd00::5:7077", r"expected \[fd00::5:7077\]:7077 or \[fd00::5\]:7077"),
        ("https://host:7077/#key=x", "expected HOST:PORT alone, which is host:7077"),
        ("https://user:word@host:7077", "expected HOST:PORT alone, which is host:7077"),
        ("ftp://host:7077", "without ftp://"),
        ("host:", "no port behind the colon"),
        ("host:0", "its port is 0"),
        ("host:99999", "its port is 99999"),
        ("[fd00::5", r"expected \[HOST\]:PORT"),
        ("10.0.5:7077", "no IPv4 address of four numbers"),
        ("a b:7077", "expected HOST:PORT"),
        ("", "expected HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused_with_what_to_write(said: str, wanted: str) -> None:
    with pytest.raises(AddressError, match=wanted):
        address_of(said)


def test_a_peers_own_address_takes_its_port_from_the_flag_or_must_have_one() -> None:
    assert JoinConfig(broker="b:1", address="me", port=7100).address == "me:7100"
    with pytest.raises(AddressError, match='no port in "me"'):
        JoinConfig(broker="b:1", address="me")


def test_a_host_to_listen_on_has_no_port() -> None:
    assert [host_of(h) for h in ("::", "[::]", "0.0.0.0", "LocalHost")] == [
        *("::", "::", "0.0.0.0", "localhost")
    ]
    with pytest.raises(BrokerConfigError, match="the port is said with --port"):
        BrokerConfig(host="0.0.0.0:7077")


def test_everything_is_one_port_of_both_protocols() -> None:
    found = listening("::", 0)
    try:
        assert len({s.getsockname()[1] for s in found}) == 1
        families = {s.family for s in found}
        assert families == (
            {socket.AF_INET, socket.AF_INET6} if socket.has_ipv6 else {socket.AF_INET}
        )
        port = found[0].getsockname()[1]
        with pytest.raises(OSError, match="already in use"):
            listening("127.0.0.1", port)
    finally:
        for each in found:
            each.close()


def test_a_port_that_is_taken_of_one_protocol_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.listen()
        with pytest.raises(OSError, match="already in use"):
            listening("::", other.getsockname()[1])


def test_a_machine_without_ipv6_listens_by_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_server

    def without(address: tuple[str, int], *, family: int, **more: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(address, family=family, **more)

    monkeypatch.setattr(socket, "create_server", without)
    (found,) = listening("::", 0)
    with found:
        assert found.family == socket.AF_INET
    with pytest.raises(OSError, match="not supported"):
        listening("::1", 0)
