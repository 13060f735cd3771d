"""Which record of a swarm is believed, whatever else lies in the directory. No I/O, no clock."""

from __future__ import annotations

import asyncio
import contextlib
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.net.discovery.record import (
    AHEAD_S,
    LASTS_S,
    MOST_BYTES,
    MOST_NODES,
    YOUNG_S,
    Claim,
    DiscoveryRecordError,
    check_multiaddr,
    check_swarm,
    endpoint_of,
    multiaddr,
    newest,
    read,
    sign,
)
from shoal.net.identity.authority import Authority, utc
from shoal.proto.discovery_pb2 import SignedWhereabouts, Whereabouts
from shoal.tests.net.discovery.nodes import MemoryDirectory

NOW = 1_800_000_000.0
OURS, THEIRS = Authority.new(utc(NOW)), Authority.new(utc(NOW))
SKEW_S = 0.4 * AHEAD_S
"""By which the clocks of hosts differ from the right time."""
NODE = "/dns/shoal.example.org/tcp/7077/p2p/QmduvmWovF5kFgVztCq1dXBspXNJpvBFpxbSCech8VqWLC"


def a_record(issued_s: float = NOW, **fields: object) -> Whereabouts:
    table: dict[str, object] = {
        "swarm": "fish",
        "address": "a.example:7077",
        "nodes": [NODE],
        "boot": "b1",
        "issued_s": issued_s,
        "ends_s": issued_s + LASTS_S,
    }
    return Whereabouts(**table | fields)  # type: ignore[arg-type]


def test_a_record_is_read_as_it_was_signed_and_is_small() -> None:
    longest = NODE.replace("shoal.example.org", "x" * 253)
    said = a_record(nodes=[longest] * MOST_NODES)
    data = sign(said, OURS)
    assert read(data, "fish", OURS.fingerprint, NOW) == said
    assert len(data) <= MOST_BYTES
    assert len(sign(a_record(), OURS)) < 700


@given(st.data())
def test_a_record_with_one_byte_changed_is_none_or_says_the_same(data: st.DataObject) -> None:
    record = bytearray(sign(a_record(), OURS))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(DiscoveryRecordError):
        assert read(bytes(record), "fish", OURS.fingerprint, NOW) == a_record()


@given(st.binary(max_size=MOST_BYTES + 10) | st.builds(bytes, st.just(MOST_BYTES * 2)))
def test_garbage_is_no_record(data: bytes) -> None:
    with pytest.raises(DiscoveryRecordError):
        read(data, "fish", OURS.fingerprint, NOW)


def forged() -> list[bytes]:
    """What somebody without the authority's key can put together."""
    real, theirs = SignedWhereabouts(), SignedWhereabouts()
    real.ParseFromString(sign(a_record(), OURS))
    theirs.ParseFromString(sign(a_record(address="evil.example:1"), THEIRS))
    mixed = [
        theirs,
        SignedWhereabouts(
            whereabouts=theirs.whereabouts,
            authority=real.authority,
            signature=theirs.signature,
        ),
        SignedWhereabouts(
            whereabouts=theirs.whereabouts,
            authority=real.authority,
            signature=real.signature,
        ),
        SignedWhereabouts(whereabouts=theirs.whereabouts, authority=real.authority),
        SignedWhereabouts(whereabouts=real.whereabouts, signature=real.signature),
    ]
    return [m.SerializeToString() for m in mixed]


@pytest.mark.parametrize("data", forged())
def test_a_forged_record_is_none(data: bytes) -> None:
    with pytest.raises(DiscoveryRecordError):
        read(data, "fish", OURS.fingerprint, NOW)


@pytest.mark.parametrize(
    "fields",
    [
        {"swarm": "fowl"},
        {"address": "nowhere"},
        {"address": ""},
        {"nodes": [NODE] * (MOST_NODES + 1)},
        {"nodes": ["/ip4/1.2.3.4/udp/1/p2p/x"]},
        {"ends_s": NOW + LASTS_S + 1},  # a record for ever
        {"ends_s": NOW},
        {"issued_s": float("nan")},
        {"ends_s": float("nan")},
        {"issued_s": float("inf"), "ends_s": float("inf")},
    ],
)
def test_not_even_the_authority_may_say_everything(fields: dict[str, object]) -> None:
    said = a_record()
    for name, value in fields.items():
        said.ClearField(name)  # type: ignore[arg-type]
        said.MergeFrom(Whereabouts(**{name: value}))  # type: ignore[arg-type]
    with pytest.raises(DiscoveryRecordError):
        read(sign(said, OURS), "fish", OURS.fingerprint, NOW)


@given(st.floats(-2 * LASTS_S, 2 * LASTS_S))
def test_a_record_holds_from_a_little_before_it_was_made_to_its_end(after_s: float) -> None:
    data = sign(a_record(), OURS)
    holds = -AHEAD_S <= after_s < LASTS_S
    found = newest([data], "fish", OURS.fingerprint, NOW + after_s)
    assert (found is not None) == holds


names = st.text(string.printable, max_size=70)


@given(names | st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", fullmatch=True))
def test_a_name_is_taken_or_refused_with_what_is_expected(name: str) -> None:
    letters = string.ascii_letters + string.digits
    fits = 0 < len(name) <= 64 and name[0] in letters and set(name) <= set(letters + "_.-")
    if fits:
        assert check_swarm(name) == name
    else:
        with pytest.raises(ValueError, match="no name of a swarm"):
            check_swarm(name)


def test_ways_into_a_swarm_are_written_and_read() -> None:
    node = NODE.rpartition("/")[2]
    for host in ("1.2.3.4", "2001:db8::1", "shoal.example.org"):
        assert endpoint_of(multiaddr(host, 7077, node)) == (host, 7077)
    assert multiaddr("shoal.example.org", 7077, node) == NODE
    for text in ("", "shoal.example.org:7077", NODE[:-30], NODE + "/x", NODE.replace("7077", "0")):
        with pytest.raises(ValueError, match="no way into a swarm"):
            check_multiaddr(text)
    with pytest.raises(ValueError, match="no way into a swarm"):
        multiaddr("a,b", 1, node)  # p2pd reads a comma as the next address


class Swarm(RuleBasedStateMachine):
    """Brokers that come and go on hosts whose clocks differ, and somebody who leaves in the
    directory whatever they can get or make. The oracle: the last thing that a broker said."""

    @initialize()
    def begin(self) -> None:
        self.directory = MemoryDirectory()
        self.now_s = NOW
        self.last: Whereabouts | None = None
        self.made: list[bytes] = []
        self.starts = 0
        self.start(0.0)

    def look(self, now_s: float) -> Whereabouts | None:
        left = asyncio.run(self.directory.find())
        return newest(left, "fish", OURS.fingerprint, now_s)

    @rule(skew_s=st.floats(-SKEW_S, SKEW_S))
    def start(self, skew_s: float) -> None:
        """A broker on another host takes the place of the one before."""
        self.starts += 1
        self.claim = Claim("fish", f"boot-{self.starts}")
        self.skew_s, self.began_s = skew_s, self.now_s
        self.publish()

    @rule()
    def publish(self) -> None:
        now_s = self.now_s + self.skew_s
        said = self.claim.next(
            self.look(now_s),
            f"host-{self.starts}:7077",
            [NODE],
            now_s=now_s,
            age_s=self.now_s - self.began_s,
        )
        assert said is not None, "no other broker lives"
        self.last = said
        self.made.append(sign(said, OURS))
        asyncio.run(self.directory.publish(self.made[-1]))

    @rule(which=st.integers(0, 1000))
    def replay(self, which: int) -> None:
        asyncio.run(self.directory.publish(self.made[which % len(self.made)]))

    @rule(data=st.binary(max_size=100) | st.sampled_from(forged()))
    def leave_something(self, data: bytes) -> None:
        asyncio.run(self.directory.publish(data))

    @rule(later_s=st.floats(0, LASTS_S / 2))
    def wait(self, later_s: float) -> None:
        self.now_s += later_s

    @precondition(lambda self: hasattr(self, "directory"))
    @invariant()
    def the_last_word_of_the_broker_is_believed_until_its_end(self) -> None:
        found = self.look(self.now_s)
        assert self.last is not None
        assert found == (self.last if self.now_s < self.last.ends_s else None)


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


@given(st.floats(-300, 300), st.floats(YOUNG_S + 60, 1e6))
def test_of_two_brokers_with_one_identity_the_older_one_steps_aside(
    skew_s: float, age_s: float
) -> None:
    old, young = Claim("fish", "old"), Claim("fish", "young")
    seen = old.next(None, "old:1", [], now_s=NOW, age_s=age_s)
    for turn in range(8):
        mine = young.next(seen, "young:1", [], now_s=NOW + skew_s + turn, age_s=10.0 * turn)
        seen = mine or seen
        mine = old.next(seen, "old:1", [], now_s=NOW + turn, age_s=age_s + 10.0 * turn)
        seen = mine or seen
    assert seen is not None
    assert seen.boot == "young"
    assert old.aside
    assert not young.aside
    # Once the young one is forgotten, the old one says again where it is.
    assert old.next(None, "old:1", [], now_s=NOW + 2 * LASTS_S, age_s=age_s) is not None
    assert not old.aside


@given(st.floats(-300, 300), st.lists(st.booleans(), min_size=1, max_size=10))
def test_a_broker_that_is_gone_never_holds_its_heir_up(skew_s: float, seen: list[bool]) -> None:
    """Its record may be seen now and then, as long as it has not ended."""
    gone = Claim("fish", "gone").next(None, "gone:1", [], now_s=NOW + skew_s, age_s=1e6)
    heir = Claim("fish", "heir")
    for turn, visible in enumerate(seen):
        now_s = NOW + 100.0 * turn
        said = heir.next(gone if visible else None, "heir:1", [], now_s=now_s, age_s=100.0 * turn)
        assert said is not None
        assert gone is not None
        assert not visible or said.issued_s > gone.issued_s
