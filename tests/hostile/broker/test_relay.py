"""Strangers at the relay, none of whom ever ends a handshake: how many of them it holds, whom it
drops for others, and when they end."""

from __future__ import annotations

import asyncio

from shoal.broker.service.door.relay import RelayLimits
from shoal.net.identity.names import PartyRole, dns_name
from shoal.tests.broker.service.door.test_relay import network

from ..peer.test_links import client_hello, ended, gone, silent

SOON_S = 5.0
"""Sooner than a peer ends the handshake by itself."""


def hello_for(peer: str) -> bytes:
    return client_hello(dns_name(PartyRole.PEER, peer))


async def test_who_has_most_young_ones_at_the_relay_gives_way_and_its_oldest_first():
    async with network("b") as (broker, (b,)):
        broker.secured.relay.limits = RelayLimits(young_of_a_peer=4)
        said = hello_for("b")
        slow = await silent(broker.address, said, "127.0.0.9")  # somebody with a long way
        await b.told(1)
        strangers = []
        for i in range(5):
            strangers.append(await silent(broker.address, said))
            await b.told(2 + i)
        assert all(await asyncio.gather(*(ended(s, SOON_S) for s in strangers[:2])))
        sources = [dial.source for dial in broker.secured.relay._young]
        assert sources == ["127.0.0.9", *["127.0.0.1"] * 3]
        await gone([slow, *strangers[2:]])


async def test_all_peers_together_have_only_so_many_young_ones_at_the_relay():
    async with network("b", "c") as (broker, (b, c)):
        broker.secured.relay.limits = RelayLimits(young_at_once=3)
        strangers = []
        for i in range(3):
            for peer in (b, c):
                strangers.append(await silent(broker.address, hello_for(peer.name)))
                await peer.told(i + 1)
        assert len(broker.secured.relay._young) == 3
        await gone(strangers)


async def test_of_those_that_grow_old_only_so_many_stay():
    async with network("b") as (broker, (b,)):
        relay = broker.secured.relay
        relay.limits = RelayLimits(of_a_peer=2)
        strangers = []
        for i in range(3):
            strangers.append(await silent(broker.address, hello_for("b")))
            await b.told(i + 1)
        for dial in list(relay._young):
            relay._prove(dial)  # as its timer does
        assert await ended(strangers[2], SOON_S)
        assert len(relay._proven) == 2
        await gone(strangers[:2])


async def test_one_address_has_only_so_many_dials_that_wait_for_an_answer():
    async with network("b") as (broker, (b,)):
        b.answers = False
        broker.secured.relay.limits = RelayLimits(unanswered=2)
        said, strangers = hello_for("b"), []
        for i in range(2):
            strangers.append(await silent(broker.address, said))
            await b.told(i + 1)
        assert await ended(await silent(broker.address, said), SOON_S)
        strangers.append(await silent(broker.address, said, "127.0.0.9"))
        await b.told(3)
        for _, writer in strangers:
            writer.close()


async def test_a_dial_that_is_not_answered_ends_whoever_dialled():
    async with network("b") as (broker, (b,)):
        b.answers = False
        broker.secured.relay.limits = RelayLimits(answer_s=0.1)
        assert await ended(await silent(broker.address, hello_for("b")), SOON_S)
        assert len(b.relayed) == 1


async def test_idle_ones_and_those_of_whoever_has_most_give_way():
    """They are of members: nothing else lets them grow old."""
    async with network("b") as (broker, (b,)):
        relay = broker.secured.relay
        relay.limits = RelayLimits(of_a_peer=3, idle_s=1000.0)
        held = []
        for i in range(3):
            held.append(await silent(broker.address, hello_for("b")))
            await b.told(i + 1)
        for dial in list(relay._young):
            relay._prove(dial)
        again = await silent(broker.address, hello_for("b"))  # of the address that has all
        assert await ended(again, SOON_S)
        partner = await silent(broker.address, hello_for("b"), "127.0.0.9")
        await b.told(4)
        assert sum(await asyncio.gather(*(ended(s, SOON_S) for s in held))) == 1
        for dial in list(relay._young):
            relay._prove(dial)
        relay.limits = RelayLimits(of_a_peer=3, idle_s=0.0)
        later = await silent(broker.address, hello_for("b"))  # all are idle
        await b.told(5)
        assert len(relay._proven) == 2
        await gone([partner, later, *held])
