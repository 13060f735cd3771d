"""Whether the public address leads to the broker, as peers find that join.

A broker cannot see that by itself: a router in between may forward nothing, or let nobody in the
house use the outer address. So each peer that attaches is asked to dial it and to check who
answers, until one on another host has got through.
"""

from __future__ import annotations

import logging

from ....dag.schedule.filled import filled
from ....net.printable import printable
from ....proto import broker_pb2
from ....proto.broker_pb2 import BrokerMessage, Confirm, Confirmed

__all__ = ["PublicAddress"]

log = logging.getLogger(__name__)

_LONGEST_PROBLEM = 200


class PublicAddress:
    """`address`: HOST:PORT that the owner named."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.confirmed_by = ""
        self.problem, self.tried_by = "", ""

    def question(self) -> BrokerMessage | None:
        """For a peer that has attached; None when nothing is to be asked any more."""
        if self.confirmed_by:
            return None
        return BrokerMessage(confirm=Confirm(address=self.address))

    def answered(self, peer: str, said: Confirmed) -> None:
        """A peer, by its certificate, says what it found."""
        if said.address != self.address or self.confirmed_by:
            return
        if said.inside:
            log.info("public_not_tried address=%s by=%s: it is on this host", self.address, peer)
            return
        self.tried_by = peer
        if said.reached:
            self.confirmed_by, self.problem = peer, ""
            log.info("public_confirmed address=%s by=%s", self.address, peer)
            return
        self.problem = printable(said.problem, _LONGEST_PROBLEM) or "it did not say why"
        log.warning(
            "public_not_reached address=%s by=%s why=%s: is the port forwarded to this host, and "
            "does its firewall let it in? The line that peers paste has this address",
            *(self.address, peer, self.problem),
        )

    def describe(self) -> broker_pb2.PublicAddress:
        return filled(broker_pb2.PublicAddress, self)

    def __repr__(self) -> str:
        return f"<PublicAddress {self.address}, {self.confirmed_by or 'nobody'} confirms it>"
