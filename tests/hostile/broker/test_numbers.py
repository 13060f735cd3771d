"""The limits themselves: other tests shrink them to be quick, so these alone notice one that was
made so large that it holds nothing. Those whose numbers stand in `docs/security.md` are in
`tests/hostile/test_stated_numbers.py`."""

from __future__ import annotations

import pytest

from shoal.broker.access import guard, limits
from shoal.broker.journal import journal
from shoal.broker.options import BrokerOptions
from shoal.broker.service import blobs_service, services
from shoal.broker.service.blobs import BlobLimits
from shoal.broker.service.calls import LEAST_BYTES
from shoal.broker.service.door import reach
from shoal.broker.service.door.front import MultiplexerLimits
from shoal.broker.service.door.relay import RelayLimits
from shoal.dag.ir.convert import MAX_GRAPH_BYTES
from shoal.net.transports import grpc_transport
from shoal.peer.blobs import sharing
from shoal.peer.core.rates import probe
from shoal.planner.service.planner import PlannerLimits

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OPTIONS, BLOBS, RELAY, FRONT, PLANNER = (
    BrokerOptions(),
    BlobLimits(),
    RelayLimits(),
    MultiplexerLimits(),
    PlannerLimits(),
)

AT_MOST = {
    "a message of a call": (limits.MOST_MESSAGE_BYTES, 4 * MIB + 1024),
    "refused streams whose message is taken": (guard._MOST_TAKEN, 16),
    "ended runs": (OPTIONS.kept_runs, 100),
    "a graph": (MAX_GRAPH_BYTES, 64 * MIB),
    "what one subject announces": (BLOBS.of_one, 0.25),
    "the first word on a stream": (grpc_transport._HELLO_S, 10),
    "a probe": (probe.MOST_BYTES, 64 * MIB),
    "a frame of it": (probe.MOST_FRAME_BYTES, MIB),
    "probes at once": (probe._MOST_PROBES, 4),
    "seconds of a dial": (reach._PATIENCE_S, 3),
    "a look at a watcher": (services._LOOK_S, 30),
}

SHARES = {
    **{name: (call.of_one, call.of_all, 16) for name, call in limits.CALLS.items()},
    "any other call": (limits.CallLimit().of_one, limits.CallLimit().of_all, 16),
    "bytes of runs": (OPTIONS.subject_bytes, OPTIONS.kept_bytes, 8),
    "open runs": (OPTIONS.most_waiting_of_one, OPTIONS.most_waiting, 10),
    "streams at a peer": (grpc_transport._STREAMS_OF_ONE, grpc_transport._STREAMS, 16),
    "fetches at a peer": (sharing._MOST_OF_ONE, sharing._MOST_STREAMS, 4),
    "connections": (FRONT.of_an_address, FRONT.most_connections, 16),
    "relayed connections": (RELAY.of_a_peer, RELAY.at_once, 8),
    "young relayed connections": (RELAY.young_of_a_peer, RELAY.young_at_once, 4),
}
"""(Of one, of all, how many such shares there are at least)."""


@pytest.mark.parametrize("what", AT_MOST)
def test_no_limit_is_larger_than_it_says(what: str):
    value, most = AT_MOST[what]
    assert 0 < value <= most


@pytest.mark.parametrize("what", SHARES)
def test_the_share_of_one_is_a_small_part_of_what_all_have(what: str):
    of_one, of_all, times = SHARES[what]
    assert 0 < of_one * times <= of_all


def test_the_least_is_not_less():
    assert LEAST_BYTES >= 8
    assert journal.RESERVE_BYTES >= 128 * MIB
    assert blobs_service.LEAST_BYTES >= 64 * KIB
    assert BLOBS.spare_bytes >= 2 * journal.RESERVE_BYTES
