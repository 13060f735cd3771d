"""What masks, receipts and audits cost one member of a round: seconds of its processor, and bytes
that it sends and gets beside what any round has, at 10, 100 and 1,000 members.

One member does all that it does (`peer/secure/secure_member.py`) for a vector of so many numbers;
of the others there is only what reaches it, made in the shortest way. Seconds are those of the
processor on one thread. Bytes of the vector are counted as what it is longer by than in fp32.

    python benchmarks/federated/secure.py [--json FILE]
    python benchmarks/federated/secure.py --parts audits --members 10 --elements 25000000
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import TypeVar

import torch
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from shoal.benchmarks.table import Figure, arguments, report
from shoal.dag.ir.graph import TensorSpec
from shoal.dag.plan.plan import PeerId
from shoal.dag.rounds.secret_sharing import joined
from shoal.dag.rounds.sums import WeightedSum
from shoal.dag.rounds.vector import PIECE, Span
from shoal.dag.rounds.wiring import GIVE, RESULT, UNDIVIDED, port_of
from shoal.dag.schedule.flow import Role
from shoal.job.sync import AUDIT
from shoal.net.identity.authority import Authority
from shoal.net.identity.names import Party, PartyRole
from shoal.net.identity.statements import CertifiedMember
from shoal.net.links.frame import Arrived, FrameKey
from shoal.peer.secure.attempt_receipts import AttemptReceipts
from shoal.peer.secure.pair_masks import derived
from shoal.peer.secure.round_keys import OwnKey, Roster, roster_of
from shoal.peer.secure.secure_member import SecureMember
from shoal.proto.broker_pb2 import RoundPlan, RoundSegment

NOW = datetime.now(UTC)
T = TypeVar("T")
draw = random.Random(0).randbytes


class Timed:
    """Seconds of the processor, by what was done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, what: str, does: Callable[[], T]) -> T:
        began = time.process_time()
        found = does()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - began
        return found


def sealed_and_masks(
    roster: Roster, keys: dict[PeerId, OwnKey], me: PeerId
) -> tuple[dict[PeerId, bytes], dict[PeerId, dict[PeerId, bytes]]]:
    """What the others deal to the first member, and what enough members reveal: shares are drawn,
    and the secret is what they are of."""
    some = list(roster.members)[: roster.threshold]
    revealed = {m: {u: b"\0" + draw(32) for u in roster.members} for m in some}
    masks = joined(revealed, roster.places, roster.threshold)
    sealed = {}
    for member in roster.members:
        if member != me:
            shared = roster.shared(keys[member].exchange, me)
            about = roster.digest, member.encode(), me.encode()
            commitment = hashlib.sha256(b"shoal own mask\0" + masks[member]).digest()
            key = ChaCha20Poly1305(derived(shared, "sealed share", *about))
            sealed[member] = key.encrypt(bytes(12), commitment + revealed[me][member], None)
    return sealed, revealed


def figures(members: int, elements: int) -> Iterator[Figure]:
    """Of one member among so many."""
    authority, timed = Authority.new(NOW), Timed()
    identities = [
        CertifiedMember(
            authority.credential(Party(PartyRole.PEER, f"p{i:05}"), NOW, timedelta(days=1)),
            lambda: NOW,
        )
        for i in range(members)
    ]
    me = identities[0].member
    keys = {i.member: OwnKey(i, "run", 0, draw) for i in identities[1:]}
    member = timed("agree", lambda: SecureMember(identities[0], "run", 0, draw))
    told = [member.key, *(k.said for k in keys.values())]
    dealt = timed("agree", lambda: member.deal(1, told))
    roster = roster_of(told, identities[1], "run", 0, 1)
    sealed, revealed = sealed_and_masks(roster, keys, me)
    sealed[me] = dealt[me]
    values = torch.ones(min(PIECE, elements), dtype=torch.int64)
    parts = [(at, min(at + PIECE, elements)) for at in range(0, elements, PIECE)]
    for part in parts:
        given = values[: part[1] - part[0]]
        timed("mask", partial(member.masked, part, given))
    timed("agree", lambda: member.hold(sealed))
    shares = timed("agree", lambda: member.reveal(1))
    began = time.process_time()
    masks = joined(revealed, roster.places, roster.threshold)
    broker_s = time.process_time() - began
    masks[me] = member._now._own_mask
    timed("agree", lambda: member.open(masks))
    for part in parts:
        total = values[: part[1] - part[0]]
        timed("unmask", partial(member.unmasked, part, total))
    yield from (
        Figure(f"secure_{members}_{what}_s", seconds, "s", "lower")
        for what, seconds in timed.seconds.items()
    )
    sent = told[0].ByteSize() + sum(map(len, dealt.values())) + sum(map(len, shares.values()))
    got = sum(s.ByteSize() for s in told) + sum(map(len, sealed.values())) + 32 * members
    yield Figure(f"secure_{members}_sent", sent / 1e3, "KB", "lower")
    yield Figure(f"secure_{members}_got", got / 1e3, "KB", "lower")
    yield Figure(f"secure_{members}_vector", 4 * elements / 1e6, "MB each way", "lower")
    yield Figure(f"secure_{members}_broker_s", broker_s, "s", "lower")


def receipts(members: int, elements: int) -> Iterator[Figure]:
    """Of what one member among so many signs and checks: each adds up a share, of 65,536 elements
    or more."""
    authority, timed = Authority.new(NOW), Timed()
    shares = min(members, max(1, elements // UNDIVIDED))
    edges = [elements * i // shares for i in range(shares + 1)]
    names = [f"p{i:05}" for i in range(members)]
    segments = [
        RoundSegment(start=start, stop=stop, aggregator=name, takers=[names[0]])
        for name, (start, stop) in zip(names, pairwise(edges), strict=False)
    ]
    for i, segment in enumerate(segments):
        for name in names if i == 0 else names[:1]:
            segment.givers.add(peer=name, weight=1)
    plan = RoundPlan(run="run.0", term=1, round=3, attempt=1, segments=segments)
    of = {}
    for name in names:
        credential = authority.credential(Party(PartyRole.PEER, name), NOW, timedelta(days=1))
        of[name] = AttemptReceipts(CertifiedMember(credential, lambda: NOW), "run", plan)
    mine, sent = of[names[0]], 0
    data = memoryview(bytes(4 * min(PIECE, elements)))

    def comes(hop: int, part: Span, by: str) -> None:
        of[by].sign(hop, part, 0, [held], b"h" * 32 if hop == RESULT else b"")
        key = FrameKey("run", 1, 3, Role.ROUND, 0, hop, port_of(part), by, names[0])
        frame = Arrived(key, "raw", of[by].header(key, part), spec, held)
        receipt = timed("check", lambda: mine.read(part, frame))
        assert receipt is not None, "it is no version"
        mine.keep(key, part, receipt)

    for segment in segments:
        for start in range(segment.start, segment.stop, PIECE):
            part = start, min(start + PIECE, segment.stop)
            held, spec = (
                data[: 4 * (part[1] - part[0])],
                TensorSpec((part[1] - part[0],), "float32"),
            )
            key = FrameKey("run", 1, 3, Role.ROUND, 0, GIVE, port_of(part), names[0], "")
            timed("sign", partial(mine.sign, GIVE, part, 0, [held]))
            sent += len(mine.header(key, part))
            if segment.aggregator != names[0]:
                comes(RESULT, part, segment.aggregator)
                continue
            for name in names[1:]:
                comes(GIVE, part, name)
            heard = timed(
                "check", partial(mine.heard, part, [((GIVE, PeerId(n)), 1) for n in names])
            )
            timed("sign", partial(mine.sign, RESULT, part, 0, [held], heard))
            key = key._replace(hop=RESULT)
            sent += len(mine.header(key, part)) * (members - 1)
    said = timed("claim", lambda: mine.statement([7]))
    yield from (
        Figure(f"receipts_{members}_{what}_s", seconds, "s", "lower")
        for what, seconds in timed.seconds.items()
    )
    yield Figure(f"receipts_{members}_frames", sent / 1e3, "KB", "lower")
    yield Figure(f"receipts_{members}_report", said.ByteSize() / 1e3, "KB", "lower")


def audits(members: int, elements: int) -> Iterator[Figure]:
    """Of who adds up one segment again, of as many as `receipts` has; and by the share that a job
    has which does not say: bytes of all members in the mean round, beside those that any round
    has, and in how many rounds there are none."""
    authority, timed = Authority.new(NOW), Timed()
    segments = min(members, max(1, elements // UNDIVIDED))
    length = elements // segments
    names = [PeerId(f"p{i:05}") for i in range(members)]
    plan = RoundPlan(run="run.0", term=1, round=3, attempt=1)
    of = {}
    for name in names:
        credential = authority.credential(Party(PartyRole.PEER, name), NOW, timedelta(days=1))
        of[name] = AttemptReceipts(CertifiedMember(credential, lambda: NOW), "run", plan)
    mine, sent = of[names[0]], 0
    for start in range(0, length, PIECE):
        part = start, min(start + PIECE, length)
        values = torch.rand(part[1] - part[0])
        held, spec = memoryview(values.numpy().tobytes()), TensorSpec(values.shape, "float32")
        total = WeightedSum(len(values), members, 10)
        for name in names:
            of[name].sign(GIVE, part, 0, [held])
            key = FrameKey("run", 1, 3, Role.ROUND, 0, GIVE, port_of(part), name, names[0])
            if name != names[0]:
                frame = Arrived(key, "raw", of[name].header(key, part), spec, held)
                receipt = timed("check", partial(mine.read, part, frame))
                assert receipt is not None, "it is no version"
                mine.keep(key, part, receipt)
                sent += held.nbytes + len(frame.codec_header)
            timed("add", partial(total.add, values, 1))
        heard = mine.heard(part, [((GIVE, name), 1) for name in names])
        made = memoryview(timed("add", total.mean).numpy().tobytes())
        timed("check", partial(mine.sign, RESULT, part, 0, [made], heard))
    yield from (
        Figure(f"audit_{members}_{what}_s", seconds, "s", "lower")
        for what, seconds in timed.seconds.items()
    )
    every_round = 2 * 4 * elements * (members - 1)
    yield Figure(f"audit_{members}_segment", sent / 1e6, "MB", "lower")
    yield Figure(
        f"audit_{members}_more", AUDIT * segments * sent / every_round, "of bytes", "lower"
    )
    yield Figure(f"audit_{members}_none", (1 - AUDIT) ** segments, "of rounds", "higher")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--members", type=int, nargs="+", default=[10, 100, 1000])
    parts = {"masks": figures, "receipts": receipts, "audits": audits}
    parser.add_argument("--parts", nargs="+", choices=parts, default=[*parts])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made = (parts[part](n, asked.elements) for part in asked.parts for n in asked.members)
    found = [figure for each in made for figure in each]
    report("secure", found, asked.json)
