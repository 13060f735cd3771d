"""What only certificates give: nobody speaks in another's name, and nobody answers in it."""

from __future__ import annotations

import grpc
import pytest

from shoal.dag.ir.graph import TensorSpec
from shoal.dag.schedule.flow import Role
from shoal.net.identity.names import PartyRole
from shoal.net.links.frame import FrameHeader, FrameKey
from shoal.net.links.messages import Hello, Refusal, record, seal

HELLO = b"".join(
    seal([record(Hello(source="a", destination="b", generation=9, attempt=1, session="s"))])
)
"""What a peer `a` would say first to `b`, in a newer dial than any in these tests."""


@pytest.fixture(scope="session")
def others(signed):
    """The certificates of another authority."""
    return type(signed)()


async def goes_on(world, a, b):
    """The first connection of a and b carries what they send."""
    key = a.send("b", 1000)
    await world.until(lambda: key in a.acknowledged)
    assert (b.ups("a"), b.downs("a")) == (a.ups("b"), a.downs("b")) == (1, 0)


async def test_who_claims_to_be_a_with_the_certificate_of_another_is_refused(mtls_world):
    a, b = await mtls_world.pair()
    b.transport.expect("out")
    outsider = await mtls_world.outsider(b, "out")
    outsider.say(HELLO)
    await mtls_world.until(lambda: outsider.ended)
    assert outsider.heard == [Refusal("identity", "a hello of a by the certificate of out")]
    assert b.refusals == ["a hello of a by the certificate of out"]
    await goes_on(mtls_world, a, b)


PRETENDERS = {
    "in_plain_text": lambda signed, others: None,
    "without_a_certificate": lambda signed, others: grpc.ssl_channel_credentials(
        signed.authority.pem
    ),
    "of_another_authority": lambda signed, others: grpc.ssl_channel_credentials(
        signed.authority.pem, others["a"].key, others["a"].certificate
    ),
    "expired": lambda signed, others: signed.credential("a", days_ago=2).for_channel(),
}


@pytest.mark.parametrize("who", PRETENDERS)
async def test_a_dialler_without_a_good_certificate_gets_no_link(mtls_world, signed, others, who):
    a, b = await mtls_world.pair()
    outsider = mtls_world.outsider_showing(b, PRETENDERS[who](signed, others))
    outsider.say(HELLO)
    await mtls_world.until(lambda: outsider.ended)
    assert outsider.heard == []
    assert b.refusals == []
    await goes_on(mtls_world, a, b)


@pytest.mark.parametrize("role", [PartyRole.OPERATOR, PartyRole.SUBMITTER, PartyRole.BROKER])
async def test_a_dialler_with_a_certificate_of_another_role_is_told_that_it_is_no_peer(
    mtls_world, signed, role
):
    a, b = await mtls_world.pair()
    outsider = mtls_world.outsider_showing(b, signed.credential("a", role).for_channel())
    outsider.say(HELLO)
    await mtls_world.until(lambda: outsider.ended)
    assert outsider.heard == []
    assert f"{role} a is no peer" in outsider.why
    await goes_on(mtls_world, a, b)


ANSWERS = {
    "another_peer": lambda signed, others: signed["c"],
    "of_another_authority": lambda signed, others: others["b"],
    "expired": lambda signed, others: signed.credential("b", days_ago=2),
    "operator": lambda signed, others: signed.credential("b", PartyRole.OPERATOR),
    "broker": lambda signed, others: signed.credential("b", PartyRole.BROKER),
}


@pytest.mark.parametrize("who", ANSWERS)
async def test_whoever_answers_in_the_place_of_b_gets_no_link_and_b_does(
    mtls_world, signed, others, who
):
    a, b, c = [await mtls_world.join(name) for name in "abc"]
    b.transport.expect("a")
    c.transport.expect("a")
    mtls_world.credentials["c"] = ANSWERS[who](signed, others)
    a.transport.dial("b", mtls_world.address(c), 1)
    await mtls_world.until(lambda: a.downs("b") >= 2)  # and goes on trying
    assert c.events == []
    a.transport.dial("b", mtls_world.address(b), 2)
    await mtls_world.until(lambda: a.ups("b") == b.ups("a") == 1)


async def test_ids_that_differ_in_case_are_different_names(mtls_world):
    a, upper = await mtls_world.join("a"), await mtls_world.join("A")
    b = await mtls_world.join("b")
    b.transport.expect("a")
    b.transport.expect("A")
    outsider = await mtls_world.outsider(b, "A")
    outsider.say(HELLO)
    await mtls_world.until(lambda: outsider.ended)
    assert outsider.heard == [Refusal("identity", "a hello of a by the certificate of A")]
    b.transport.dial("a", mtls_world.address(upper), 1)
    await mtls_world.until(lambda: b.downs("a") > 0)
    await mtls_world.connect(upper, b)
    assert a.events == []
    assert b.ups("a") == 0


async def test_the_next_connection_goes_by_the_renewed_credential_on_both_ends(mtls_world, others):
    a, b = await mtls_world.pair()
    # In the place of a renewal, which would not show: another authority's, that fits no old one.
    mtls_world.credentials["b"] = others["b"]
    await goes_on(mtls_world, a, b)
    mtls_world.cut(a, b)
    await mtls_world.until(lambda: a.downs("b") >= 3)
    assert a.ups("b") == 1
    mtls_world.credentials["a"] = others["a"]
    await mtls_world.until(lambda: a.ups("b") == b.ups("a") == 2)


async def test_a_frame_for_a_port_that_the_plan_does_not_name_ends_the_link_before_its_bytes_come(
    mtls_world,
):
    """By a peer of the run, with a good certificate: the plan names port x only, of 100 bytes."""
    a = await mtls_world.join("a")
    b = await mtls_world.join("b", allowed=lambda key: 100 if key.port == "x" else 0)
    b.transport.expect("a")
    b.transport.expect("out")
    await mtls_world.dial(a, b)
    for peer in ("a", "out"):
        b.transport.allow(peer, Role.ACTIVATION, 2)
    outsider = await mtls_world.outsider(b, "out")
    key = FrameKey("run", 1, 0, Role.ACTIVATION, 0, 1, "not-there", "out", "b")
    hello = Hello(source="out", destination="b", generation=1, attempt=1, session="s")
    header = FrameHeader(1, key, "raw/1", b"", TensorSpec((50,), "uint8"), 50)
    for message in (hello, header):
        outsider.say(b"".join(seal([record(message)])))
    await mtls_world.until(lambda: any(isinstance(m, Refusal) for m in outsider.heard))
    assert "allow 0" in outsider.heard[-1].text
    assert b.arrived == []
