"""Probes and training traffic: what a peer measures, and that neither harms an assignment."""

from __future__ import annotations

import math
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dag.plan.plan import PeerId
from shoal.dag.schedule.flow import Role
from shoal.net.links.frame import FrameKey
from shoal.peer.core import events as e
from shoal.peer.core.machine import PeerMachine
from shoal.peer.core.rates.probe import probe_payload
from shoal.proto import broker_pb2

ME, OTHER = PeerId("me"), PeerId("other")
MOST = 2 << 20


def said(**kind):
    return e.BrokerSaid(broker_pb2.BrokerMessage(**kind))


def probe(number=1, peer=OTHER, address="other:1", most_bytes=MOST, patience_s=10.0):
    order = broker_pb2.Probe(
        number=number,
        peer=peer,
        address=address,
        generation=7,
        most_bytes=most_bytes,
        patience_s=patience_s,
    )
    return said(probe=order)


def assign(run="r-1", term=1, holders=(ME, OTHER)):
    plan = broker_pb2.Plan(stages=[broker_pb2.StageSlot(start=0, stop=1, holders=holders)])
    dials = [broker_pb2.DialOrder(peer=h, address="x:1", generation=9) for h in holders if h != ME]
    return said(assign=broker_pb2.Assign(run=run, term=term, slice={"plan": plan}, dials=dials))


def of(out, kind):
    return [i for i in out if isinstance(i, kind)]


def reports(out):
    told = (i.message for i in of(out, e.Tell))
    return [m.link for m in told if m.WhichOneof("kind") == "link"]


class Peer:
    """A member, validated after every event."""

    def __init__(self, me=ME):
        profile = broker_pb2.Profile(device_memory_bytes=1 << 20)
        self.machine = PeerMachine(me, "boot", profile)
        self.now = 0.0
        welcome = broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3)
        for event in (e.Started(), e.Attached(), said(welcome=welcome)):
            self(event)

    def __call__(self, event):
        out = self.machine.handle(event, self.now)
        self.machine.validate()
        return out

    def carry(self, out, rtt, rate):
        """Lets the link carry what is sent until it is the other side's turn; all that was done."""
        done, sends, free = list(out), of(out, e.SendProbe), self.now
        queued = dict[FrameKey, float]()
        while sends:
            for send in sends:
                if send.key not in queued:
                    queued[send.key] = self.now
                    done += self(e.FrameQueued(send.key, send.size_bytes))
            first = sends.pop(0)
            free = max(free, queued[first.key]) + first.size_bytes / rate
            self.now = max(self.now, free + rtt)
            out = self(e.FrameAcknowledged(first.key))
            done += out
            sends += of(out, e.SendProbe)
        return done


def ended_by_other(number=1):
    return e.FrameArrived(
        FrameKey("probe", number, 0, Role.PROBE, 0, 0, "end", source=OTHER, destination=ME)
    )


@pytest.fixture
def peer():
    return Peer()


def test_bytes_of_a_probe_do_not_compress():
    data = b"".join(probe_payload(100_000).buffers)
    assert len(data) == 100_000
    assert len(zlib.compress(data)) > 99_000
    assert b"".join(probe_payload(3 << 20).buffers)[:100_000] == data
    assert probe_payload(0).size_bytes == 0


# ------------------------------------------------------------ one probe


def test_the_dialling_side_measures_then_waits_for_the_other_and_hangs_up(peer):
    began = peer(probe())
    assert [type(i) for i in began] == [e.Dial, e.Allow, e.SetTimer]
    out = peer.carry(peer(e.LinkUp(OTHER)), rtt=0.05, rate=1e6)
    (report,) = reports(out)
    assert (report.peer, report.probe) == (OTHER, 1)
    assert report.latency_s == pytest.approx(0.025, rel=0.01)
    assert report.bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert report.size_bytes < MOST, "an even rate ends it early"
    assert not report.burst_bytes
    assert of(out, e.SendProbe)[-1].size_bytes == 0
    end = peer(ended_by_other())
    assert of(end, e.HangUp) == [e.HangUp(OTHER)]
    assert not len(peer.machine.probes)


def test_the_other_side_waits_for_its_turn(peer):
    out = peer(probe(address=""))
    assert of(out, e.ExpectPeer) == [e.ExpectPeer(OTHER)]
    assert not of(peer(e.LinkUp(OTHER)), e.SendProbe)
    out = peer.carry(peer(ended_by_other()), rtt=0.01, rate=1e7)
    assert len(reports(out)) == 1
    assert out[-1] == e.HangUp(OTHER)


def test_a_side_without_sizes_says_only_that_it_has_none(peer):
    peer(probe(most_bytes=0))
    out = peer(e.LinkUp(OTHER))
    assert [i.size_bytes for i in of(out, e.SendProbe)] == [0]
    peer.carry(out, 0.01, 1e6)
    out = peer(ended_by_other())
    assert not reports(out)
    assert of(out, e.HangUp)


def test_frames_that_come_are_freed_and_stored_nowhere(peer):
    peer(probe())
    key = FrameKey("probe", 1, 0, Role.PROBE, 0, 0, "probe", OTHER, ME)
    assert peer(e.FrameArrived(key)) == [e.Release(key)]
    stray = FrameKey("r-1", 5, 0, Role.PROBE, 0, 0, "probe", "stranger", ME)
    assert peer(e.FrameArrived(stray)) == [e.Release(stray)]


def test_what_may_still_come_of_a_probe_shrinks_to_nothing(peer):
    allowed = peer.machine.probes.most_bytes

    def key(step, number=1, port="probe", source=OTHER):
        return FrameKey(
            "probe", number, step, Role.PROBE, 0, 0, port, source=source, destination=ME
        )

    assert allowed(key(0)) == 0, "none was ordered"
    peer(probe())
    assert allowed(key(0, number=2)) == allowed(key(0, port="end")) == 0
    assert allowed(key(0, source="stranger")) == 0
    for step in range(63):
        assert allowed(key(step)) == 1 << 20
        peer(e.FrameArrived(key(step), 1 << 20))
    peer(e.FrameArrived(key(63), (1 << 20) - 5))
    assert allowed(key(64)) == 5
    peer(e.FrameArrived(key(64), 5))
    assert allowed(key(65)) == 0


def test_a_frame_that_a_broken_connection_interrupted_is_not_counted(peer):
    peer(probe())
    (send,) = of(peer(e.LinkUp(OTHER)), e.SendProbe)
    peer(e.FrameQueued(send.key, send.size_bytes))
    peer(e.LinkDown(OTHER, "cut"))
    peer.now += 5.0
    assert not peer(e.LinkUp(OTHER)), "the transport goes on with the frame by itself"
    out = peer.carry(peer(e.FrameAcknowledged(send.key)), rtt=0.05, rate=1e6)
    assert reports(out)[0].latency_s == pytest.approx(0.025, rel=0.01)
    assert reports(out)[0].bytes_per_s == pytest.approx(1e6, rel=0.01)


def test_no_link_within_its_patience_is_a_problem_with_the_reason(peer):
    peer(probe())
    peer(e.LinkDown(OTHER, "nobody can be reached at other:1"))
    peer.now = 10.0
    out = peer(e.TimerFired(f"probe:{OTHER}"))
    assert "nobody can be reached" in reports(out)[0].problem.text
    assert of(out, e.HangUp) == [e.HangUp(OTHER)]


def acknowledge(peer, out, seconds_each):
    """Acknowledges the first frame that is under way; what comes of it."""
    send = of(out, e.SendProbe)[0]
    peer(e.FrameQueued(send.key, send.size_bytes))
    peer.now += seconds_each
    return peer(e.FrameAcknowledged(send.key))


def test_what_is_cut_short_is_a_problem_and_no_measurement(peer):
    """Here by its patience: two pings and a few frames tell no rate."""
    peer(probe())
    out = acknowledge(peer, peer(e.LinkUp(OTHER)), 0.2)
    out = acknowledge(peer, out, 0.2)
    for send in of(out, e.SendProbe):
        peer(e.FrameQueued(send.key, send.size_bytes))
        peer.now += 0.01
        peer(e.FrameAcknowledged(send.key))
    peer.now = 10.0
    (report,) = reports(peer(e.TimerFired(f"probe:{OTHER}")))
    assert report.problem.code == "patience"
    assert report.size_bytes > 0
    assert not report.bytes_per_s


def test_few_bytes_tell_the_latency_and_a_burst_and_no_rate(peer):
    peer(probe(most_bytes=48 << 10))
    out = peer.carry(peer(e.LinkUp(OTHER)), rtt=0.01, rate=1e7)
    (report,) = reports(out)
    assert not report.HasField("problem")
    assert report.latency_s == pytest.approx(0.005, rel=0.05)
    assert report.bytes_per_s == 0
    assert report.burst_bytes_per_s > 0
    assert report.size_bytes == 48 << 10


def test_the_other_side_s_hang_up_at_the_end_is_no_problem(peer):
    peer(probe(address="", most_bytes=48 << 10))
    peer(e.LinkUp(OTHER))
    out = peer(ended_by_other())
    waiting = of(out, e.SendProbe)
    while waiting[0].size_bytes:
        send = waiting.pop(0)
        peer(e.FrameQueued(send.key, send.size_bytes))
        peer.now += 0.1
        more = peer(e.FrameAcknowledged(send.key))
        out += more
        waiting += of(more, e.SendProbe)
    assert len(reports(out)) == 1
    assert peer(e.LinkDown(OTHER, "it hung up")) == [e.HangUp(OTHER)]


# ------------------------------------------------------------ orders that make no sense


@pytest.mark.parametrize(
    ("order", "word"),
    [
        (probe(peer=ME), "asked to measure"),
        (probe(peer=""), "nobody"),
        (probe(patience_s=math.nan), "patience"),
        (probe(patience_s=0), "patience"),
        (probe(most_bytes=1 << 40), "bytes to send"),
    ],
)
def test_an_impossible_order_is_answered_with_the_problem(peer, order, word):
    out = peer(order)
    (report,) = reports(out)
    assert word in report.problem.text
    assert len(out) == 1


def test_a_probe_said_twice_is_one_and_a_newer_number_replaces_it(peer):
    peer(probe())
    assert peer(probe()) == []
    out = peer(probe(number=2))
    assert [r.probe for r in reports(out)] == [1]
    assert [type(i) for i in out] == [e.Tell, e.HangUp, e.Dial, e.Allow, e.SetTimer]
    old = FrameKey("probe", 1, 0, Role.PROBE, 0, 0, "end", OTHER, ME)
    assert peer(e.FrameArrived(old)) == [e.Release(old)], "of the old number: no effect"


def test_a_number_used_again_measures_again(peer):
    for _ in range(2):
        peer(probe())
        assert reports(peer.carry(peer(e.LinkUp(OTHER)), 0.01, 1e6))
        peer(ended_by_other())


def test_too_many_probes_at_once_are_refused(peer):
    for i in range(4):
        peer(probe(number=i + 1, peer=f"p{i}"))
    assert reports(peer(probe(number=9)))[0].problem.code == "busy"


def test_reports_are_not_kept_while_the_broker_is_away(peer):
    peer(probe())
    peer(e.Detached("broke"))
    peer.now = 10.0
    peer(e.TimerFired(f"probe:{OTHER}"))
    peer(e.Attached())
    out = peer(said(welcome=broker_pb2.Welcome(broker="b", lease_s=9, heartbeat_s=3)))
    assert not reports(out)


# ------------------------------------------------------------ probes and assignments


def test_an_assignment_ends_the_probe_before_anything_else(peer):
    peer(probe())
    peer(e.LinkUp(OTHER))
    out = peer(assign())
    kinds = [type(i) for i in out]
    assert kinds.index(e.HangUp) < kinds.index(e.Dial) < kinds.index(e.Build)
    assert reports(out)[0].problem.code == "assigned"
    peer.now = 10.0
    assert peer(e.TimerFired(f"probe:{OTHER}")) == [], "no late hang-up of the run's link"
    key = FrameKey("probe", 1, 0, Role.PROBE, 0, 0, "probe", ME, OTHER)
    assert peer(e.FrameAcknowledged(key)) == []
    assert peer(e.FrameRefused(key, "no link")) == []


def test_a_link_of_the_run_is_never_probed(peer):
    peer(assign())
    out = peer(probe(most_bytes=3072))
    assert len(out) == 1
    assert reports(out)[0].problem.code == "assigned"


def test_a_peer_in_a_run_takes_small_probes_of_other_links_only(peer):
    peer(assign())
    assert reports(peer(probe(peer="third")))[0].problem.code == "assigned"
    assert of(peer(probe(number=2, peer="third", most_bytes=48 << 10)), e.Dial)


@given(seed=st.integers(0, 2**32))
def test_events_in_any_order_keep_the_rules(seed):
    """Probes, their frames, links and assignments at random; a link of the run is hung up only with
    the assignment that used it."""
    rng, peer = random.Random(seed), Peer()
    names, term, sent = ["other", "third", "me", ""], 0, []
    for _ in range(60):
        peer.now += rng.choice([0.0, 0.1, 4.0])
        name = PeerId(rng.choice(names))
        number = rng.randrange(3)
        key = FrameKey("probe", number, 0, Role.PROBE, 0, 0, rng.choice(["probe", "end"]), name, ME)
        part = peer.machine.assignment
        event = rng.choice(
            [
                probe(number, name, rng.choice(["", "a:1"]), rng.choice([MOST, 0, 3072])),
                e.LinkUp(name),
                e.LinkDown(name, "cut"),
                e.FrameArrived(key),
                e.TimerFired(f"probe:{name}"),
                e.FrameRefused(key, "why"),
                *[e.FrameQueued(s.key, s.size_bytes) for s in sent[-1:]],
                *[e.FrameAcknowledged(s.key) for s in sent[-2:]],
                assign(term=term + 1) if rng.random() < 0.3 else e.LinkUp(name),
                said(leave=broker_pb2.Leave(run="r-1", term=term)),
            ]
        )
        if event.__class__ is e.BrokerSaid and event.message.HasField("assign"):
            term += 1
        out = peer(event)
        sent += of(out, e.SendProbe)
        if part is not None and part is peer.machine.assignment and part.alive:
            assert not [i for i in of(out, e.HangUp) if i.peer in part.peers]
            assert not [i for i in of(out, e.Dial) if i.peer in part.peers]
