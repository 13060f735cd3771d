"""Which addresses the broker dials for whom, as a plain function."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.broker.service.door.reach import came_from, may_dial, socket_name
from shoal.net.web.internet import stands_for

FAR, NEAR, HERE = "8.8.4.4", "192.168.7.2", "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "came", "dialled"),
    [
        (HERE, HERE, True),
        ("::1", "::1", True),
        (HERE, NEAR, False),
        (HERE, FAR, False),
        (HERE, "", False),
        ("::ffff:127.0.0.1", FAR, False),
        ("127.8.9.10", NEAR, False),
        ("10.0.0.1", NEAR, True),
        ("10.0.0.1", HERE, True),
        ("10.0.0.1", FAR, False),
        ("10.0.0.1", "::ffff:9.9.9.9", False),
        (HERE, "::ffff:127.0.0.1", True),
        ("100.64.0.1", FAR, False),
        ("100.64.0.1", "100.64.0.9", True),
        ("fd00::1", "2a00::1", False),
        ("fd00::1", "fd00::2", True),
        ("fec0::1", "2a00::1", False),
        ("fec0::1", "fec0::2", True),
        ("2002:7f00:1::", FAR, False),
        ("2002:a00:1::", FAR, False),
        ("2002:a9fe:a9fe::", HERE, False),
        ("2002:909:909::", FAR, True),
        ("64:ff9b::a00:1", FAR, False),
        ("169.254.169.254", HERE, False),
        ("fe80::1", "fe80::1", False),
        ("0.0.0.0", HERE, False),
        ("::", HERE, False),
        ("224.0.0.1", HERE, False),
        ("255.255.255.255", HERE, False),
        ("192.0.0.192", FAR, False),
        ("168.63.129.16", FAR, False),
        ("64:ff9b::7f00:1", FAR, False),
        ("9.9.9.9", FAR, True),
        ("9.9.9.9", NEAR, True),
        ("9.9.9.9", "", True),
        ("no address", HERE, False),
    ],
)
def test_what_is_dialled_for_whom(host: str, came: str, dialled: bool):
    assert (may_dial(host, 7077, came) == "") == dialled


@pytest.mark.parametrize(("port", "dialled"), [(22, False), (25, False), (443, True), (1024, True)])
def test_ports_that_belong_to_others_are_left_alone(port: int, dialled: bool):
    assert (may_dial("9.9.9.9", port, FAR) == "") == dialled


@given(st.ip_addresses())
def test_for_a_peer_from_afar_only_public_addresses_are(address: ipaddress.IPv4Address):
    dialled = may_dial(str(address), 7077, FAR) == ""
    mapped = stands_for(address)
    assert not dialled or (mapped.is_global and not mapped.is_multicast)


@pytest.mark.parametrize(
    ("peer", "came"),
    [
        ("ipv4:9.9.9.9:50000", "9.9.9.9"),
        ("ipv6:%5B::1%5D:50000", "::1"),
        ("ipv6:[fe80::1%25eth0]:50000", "fe80::1%eth0"),
        ("unix:", ""),
        ("unix:/tmp/x/main", ""),
        ("", ""),
    ],
)
def test_where_a_call_came_from(peer: str, came: str):
    assert came_from(peer) == came


@given(st.integers(0), st.ip_addresses())
def test_what_the_front_calls_a_connection_is_read_again(
    number: int, address: ipaddress.IPv4Address
):
    name = socket_name(number, str(address))
    assert came_from(f"unix:/tmp/shoal-broker-a-b/{name}") == str(address)
