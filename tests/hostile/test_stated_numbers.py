"""The numbers of docs/security.md, each as the page has it and as the code has it: neither changes
without the other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from shoal.broker import machine as machines
from shoal.broker.access import limits
from shoal.broker.access.admission import AdmissionLimits
from shoal.broker.journal import barrier, journal
from shoal.broker.membership import bounds, member
from shoal.broker.options import BrokerOptions
from shoal.broker.policies import disputes
from shoal.broker.rounds import attempts, exchange_planner
from shoal.broker.service import blobs_service, calls, services
from shoal.broker.service.door import front, reach, swarm
from shoal.broker.service.door.front import MultiplexerLimits
from shoal.broker.service.door.relay import RelayLimits
from shoal.broker.service.page import keys, serving
from shoal.dag.ir import convert, recipe
from shoal.dag.ir.rules import rules
from shoal.dag.rounds.vector import PIECE
from shoal.job import MOST_MANIFEST_BYTES
from shoal.net import repeats
from shoal.net.discovery import record
from shoal.net.identity import receipts
from shoal.net.transports import grpc_transport
from shoal.net.web import dial, web
from shoal.peer.blobs import fetching, sharing, weight_shards
from shoal.peer.compute import device
from shoal.peer.core import assignment
from shoal.peer.rounds import round_frames
from shoal.peer.shell import relayed
from shoal.planner.replicas import rounds as planned_rounds
from shoal.planner.requests import requirements, run_spec
from shoal.planner.schedulers import replan
from shoal.planner.service import process, said
from shoal.planner.service.planner import PlannerLimits

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8").split())
FRONT, RELAY, ADMISSION = MultiplexerLimits(), RelayLimits(), AdmissionLimits()
OPTIONS, SERVER = BrokerOptions(), dict(grpc_transport.SERVER_OPTIONS)
WORDS = {
    "an": 1, "a": 1, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "eight": 8, "ten": 10,
    "sixteen": 16,
}  # fmt: skip
UNITS = {
    "s": 1, "second": 1, "minute": 60, "minutes": 60, "hour": 3600, "h": 3600, "days": 86_400,
    "year": 365 * 86_400, "KiB": 1 << 10, "KiB/s": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
    "MB": 1 << 20,
}  # fmt: skip
STATED: dict[str, float] = {
    # Identity, the first contact
    "24 h, renews itself": ADMISSION.peer_lasts.total_seconds(),
    "30 days, renewed when used": ADMISSION.person_lasts.total_seconds(),
    "a year at most": keys.LONGEST_S,
    "64 MiB before the first one": device._UNKNOWN_BYTES,
    "16 MiB of rounds": device._ROUND_BYTES,
    # Peers that cannot be dialled, where the broker is
    "32 times in a row for one peer": reach._IN_A_ROW,
    "ten seconds. It dials its own host": 1 / reach._PER_S,
    "an hour), and through which nodes": record.LASTS_S,
    "eight hosts; join the directory": record.MOST_NODES,
    "three times at once and then": replan.AT_ONCE,
    # Weights from the web
    "five. A model hub": dial._Redirects.max_redirections,
    "64 MiB, of which no byte more": weight_shards.MOST_SHARD_BYTES,
    "20 s; the head of an answer": fetching._WEB_STALL_S,
    "60 s, which its redirects share": web.HEAD_S,
    "64 KiB/s on average": fetching._WEB_FLOOR,
    "60 s of silence": inspect.signature(web.Web).parameters["timeout_s"].default,
    "16 KiB/s of a body on average": web.SLOW,
    # A stranger's graph, recipes
    "1.1 times what its owner offers": assignment.STOP_AT,
    "16 MiB, parsed as protobuf": process.MOST_ANSWER_BYTES,
    "256 in a row and then one per second (`planner": said.IN_A_ROW,
    "600 s on the clock": PlannerLimits().wall_s,
    "64 MiB: shapes, and at most": convert.MAX_RECIPE_BYTES,
    "1,024 steps a tensor": recipe.MOST_STEPS,
    # The table of limits
    "5 s and 16 KiB for a first message": FRONT.hello_s,
    "16 KiB for a first message": FRONT.hello_bytes,
    "8,192 connections": FRONT.most_connections,
    "512 of one address": FRONT.of_an_address,
    "256 joins and relayed dials in a row": FRONT.knocks,
    "four per second | `MultiplexerLimits`": FRONT.knocks_per_s,
    "256 connections, 32 of one address": FRONT.page_connections,
    "32 of one address": FRONT.page_of_an_address,
    "128 requests in a row from one": FRONT.page_knocks,
    "four per second; an hour for an answer": FRONT.page_knocks_per_s,
    "an hour for an answer": FRONT.page_s,
    "10 s, 16 KiB | `broker/service/page/serving.py`": serving.REQUEST_S,
    "16 KiB | `broker/service/page/serving.py`": serving.REQUEST_BYTES,
    "10 s for a dial to be answered": RELAY.answer_s,
    "22 s, which may be anybody's": RELAY.young_s,
    "a minute, else one of the address": RELAY.idle_s,
    "20 s | `peer/shell/relayed.py`": relayed._UNUSED_S,
    "a minute | `SERVER_OPTIONS`": SERVER["grpc.max_connection_idle_ms"] / 1000,
    "4 streams of a peer": limits.CALLS["Attach.Attach"].of_one,
    "4 submissions": limits.CALLS["Runs.Submit"].of_one,
    "64 watchers": limits.CALLS["Runs.Watch"].of_one,
    "64 KiB for most": limits._USUAL.bytes,
    "4 MiB for what comes with a run": limits.CALLS["Runs.Submit"].bytes,
    "10 s for a stranger's message": limits.CALLS["Admission.Join"].message_s,
    "300 s for a member's": limits._USUAL.message_s,
    "two, and one of each open stream": limits._READING,
    "64 KiB a message, 4,096 of them": machines.MOST_MESSAGE_BYTES,
    "4,096 of them in a row": limits.MESSAGES[0],
    "512 per second": limits.MESSAGES[1],
    "256 in a row, then one per second; about an address": machines._IGNORED[0],
    "3, then one in ten seconds": front._TOLD,
    "64 KiB: one for 8 bytes": calls.PLAIN_BYTES,
    "8 bytes, and 500,000 fields": calls.LEAST_BYTES,
    "500,000 fields": calls._MOST_FIELDS,
    "128; 10 s for a handshake": services.MOST_STREAMS,
    "3 MiB) and job": run_spec.MOST_SPEC_BYTES,
    "256 KiB) | `planner/requests/run_spec.py`": run_spec.MOST_JOB_BYTES,
    "128 MiB), and of all": OPTIONS.subject_bytes,
    "1 GiB), in memory and in the journal": OPTIONS.kept_bytes,
    "128 MiB, for runs that are there": journal.RESERVE_BYTES,
    "64 KiB comes in two minutes": blobs_service.LEAST_BYTES,
    "two minutes ends": blobs_service.SILENCE_S,
    "64 MiB; hosts that one run's": weight_shards.MOST_SHARD_BYTES,
    "16; places on a peer's list": requirements.MOST_ORIGINS,
    "64 | `peer/blobs/weight_shards.py`": member.MOST_WEB,
    "64 MiB): sizes are looked at first": MOST_MANIFEST_BYTES,
    "64, of which 2 of one peer": swarm._MOST_OFFERS,
    "2 of one peer": swarm._MOST_OF_ONE,
    "10 s for a handshake, 1,024 connections": SERVER["grpc.server_handshake_timeout_ms"] / 1000,
    "1,024 connections at its port": SERVER["grpc.max_allowed_incoming_connections"],
    "8 of one and 4,096 of all": grpc_transport._STREAMS_OF_ONE,
    "4,096 of all; fetches": grpc_transport._STREAMS,
    "4 of one and 16 of all": sharing._MOST_OF_ONE,
    "16 of all |": sharing._MOST_STREAMS,
    "16,384 results of an operator": rules.MAX_RESULTS,
    "65,536 steps within one": rules.MAX_STEPS,
    "262,144 within a graph": rules.MAX_GRAPH_STEPS,
    "100,000), names and sizes": convert.MAX_OPERATORS,
    # What remains
    "ten in a row and then one a minute": repeats.SAME,
    "a minute, and of any one place": repeats.AGAIN_S,
    "200 and then one a second": repeats.MANY,
    "100,000 things to do": barrier.MOST_HELD,
    "256 siblings": bounds.MOST_METRICS,
    "200 characters": bounds.MOST_NAME,
    # In rounds
    "32 rounds, and twice as long": disputes._LASTS,
    "four rounds: who was so less often": disputes._LASTS_OF_TWO,
    "63), with a note": disputes._MOST_OUT,
    "sixteen rounds. - How long": attempts._CALM,
    "four times as fast as the next one": planned_rounds.MOST_TIMES,
    "192 frames of one peer": receipts.MOST_RECEIPTS,
    "1,024 of them; sums with masks": exchange_planner.MOST_CLAIMS,
    "eight frames of each other peer": round_frames.MOST_EARLY,
    "4 MB, a version 8 MB": 4 * PIECE,
}
"""Words of the page that begin with a number, and the code's."""


def number(words: str) -> float:
    """What words begin with, in bytes, seconds or pieces."""
    first, _, then = words.partition(" ")
    first = re.sub(r"[);:,.]+$", "", first)
    found = WORDS[first] if first in WORDS else float(first.replace(",", ""))
    unit = re.match(r"[A-Za-z]+(?:/s)?", then)
    return found * UNITS.get(unit[0] if unit else "", 1)


@pytest.mark.parametrize("words", STATED)
def test_a_number_of_the_page_is_the_codes(words: str) -> None:
    assert re.search(r"(?<![\w,.])" + re.escape(words), PAGE), "the page has other words"
    assert STATED[words] == number(words)
