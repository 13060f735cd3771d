"""Receipts of one attempt at one peer: those that it signs for what it sends, and those that came
with what others sent (`net/identity/receipts.py`).

A receipt is signed once for the same bytes and kept as it was signed, so that nobody who compares
ever sees two of an honest peer for the same elements. What comes without one counts as not come.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from google.protobuf.message import DecodeError

from ...dag.execute.execute import TensorSpecError
from ...dag.plan.plan import PeerId
from ...dag.rounds.vector import Span
from ...dag.rounds.wiring import (
    GATHER,
    GIVE,
    RESULT,
    Signed,
    VectorSegment,
    segments_of,
)
from ...net.identity.receipts import (
    ATTEMPT,
    MOST_RECEIPTS,
    RECEIPT,
    claim_of,
    data_hash,
    read_receipt,
)
from ...net.identity.signing import SignatureError
from ...net.identity.statements import MemberIdentity, signed
from ...net.links.frame import Arrived, FrameKey
from ...proto.broker_pb2 import (
    AttemptStatement,
    RoundAnswer,
    RoundPlan,
    RoundQuestion,
    RoundReceipt,
    SignedStatement,
)

__all__ = ["AttemptReceipts", "ReceiptsOf"]

_ByBlock = dict[tuple[Span, int], SignedStatement]
"""Receipts of one peer by part and block."""


class AttemptReceipts:
    """Receipts of the attempt that `plan` is of, in a run. For any thread."""

    def __init__(self, identity: MemberIdentity, run: str, plan: RoundPlan) -> None:
        self._identity, self._run, self._plan = identity, run, plan
        self._kept = defaultdict[Signed, _ByBlock](dict)
        self._deduced = defaultdict[Signed, _ByBlock](dict)
        """What honest gatherers of places sign for sums that are added up again here."""

    # ------------------------------------------------------------ frames

    def sign(
        self, hop: int, part: Span, block: int, data: Iterable[memoryview], heard: bytes = b""
    ) -> None:
        """Sign what is sent of a part, or given to itself; once."""
        own = self._kept[hop, self._identity.member]
        if (part, block) not in own:
            said = self._statement(hop, part, block, data, heard)
            own[part, block] = signed(self._identity, RECEIPT, said)

    def sign_sum(self, by: PeerId, part: Span, data: Iterable[memoryview], heard: bytes) -> None:
        """Sign the sum of a place; where another peer gives it, note what that one has signed."""
        if by == self._identity.member:
            self.sign(GATHER, part, 0, data, heard)
        else:
            said = self._statement(GATHER, part, 0, data, heard)
            self._deduced[GATHER, by][part, 0] = SignedStatement(statement=said)

    def _statement(
        self, hop: int, part: Span, block: int, data: Iterable[memoryview], heard: bytes
    ) -> bytes:
        receipt = RoundReceipt(
            run=self._run,
            round=self._plan.round,
            attempt=self._plan.attempt,
            hop=hop,
            start=part[0],
            stop=part[1],
            block=block,
            hash=data_hash(data),
            heard=heard,
        )
        return receipt.SerializeToString(deterministic=True)

    def header(self, key: FrameKey, part: Span, *, signer: PeerId | None = None) -> bytes:
        """Return what stands in front of a frame that is sent; nothing with a version. `signer`: of
        a result that is passed on, who made it."""
        found = self._kept[key.hop, signer or PeerId(key.source)].get((part, key.microbatch))
        return b"" if found is None else found.SerializeToString()

    def read(
        self, part: Span, arrived: Arrived, *, signer: PeerId | None = None
    ) -> SignedStatement | None:
        """Return the receipt that came with a frame; None with a version, which has none. `signer`:
        as in `header`. Raises TensorSpecError for one of somebody else, or not of these bytes."""
        key = arrived.key
        if key.hop not in (GIVE, GATHER, RESULT):
            if arrived.codec_header:
                raise TensorSpecError(f"{key}: expected no receipt with a version")
            return None
        try:
            said = SignedStatement.FromString(arrived.codec_header)
            by, receipt = read_receipt(said, self._identity.check)
        except (DecodeError, SignatureError) as error:
            raise TensorSpecError(f"{key}: its receipt cannot be read: {error}") from None
        about = receipt.run, receipt.round, receipt.attempt, receipt.hop
        expected = self._run, self._plan.round, self._plan.attempt, key.hop
        at = receipt.start, receipt.stop, receipt.block
        if by != (signer or key.source) or about != expected or at != (*part, key.microbatch):
            raise TensorSpecError(f"{key}: its receipt is of {by}, for another frame")
        if receipt.hash != data_hash([arrived.data]):
            raise TensorSpecError(f"{key}: its receipt is for other bytes")
        return said

    def keep(
        self,
        key: FrameKey,
        part: Span,
        receipt: SignedStatement,
        *,
        signer: PeerId | None = None,
    ) -> None:
        """Keep the receipt of a frame that was taken; of several the first, as of frames."""
        of = self._kept[key.hop, signer or PeerId(key.source)]
        of.setdefault((part, key.microbatch), receipt)

    def heard(self, part: Span, addends: Iterable[tuple[Signed, int]]) -> bytes:
        """Return the hash of the receipts of all that is added up of a part. `addends`: with the
        blocks that each has."""
        found = hashlib.sha256()
        for of, blocks in addends:
            kept, deduced = self._kept[of], self._deduced.get(of, {})
            for at in ((part, block) for block in range(blocks)):
                said = deduced.get(at) or kept[at]
                found.update(hashlib.sha256(said.statement).digest())
        return found.digest()

    # ------------------------------------------------------------ what is said of them

    def _claim(self, of: _ByBlock, segment: VectorSegment) -> bytes:
        if self._plan.unclaimed:
            return b""
        return claim_of(s.statement for s in _inside(of, *segment.span))

    def heard_of(self, segment: VectorSegment) -> list[bytes]:
        """Return claims of what was given to a segment that is added up again here, and of what
        gatherers of places are to have signed, in order."""
        known = (self._deduced.get(of) or self._kept[of] for of in segment.again)
        return [self._claim(receipts, segment) for receipts in known]

    def refutes(self, part: Span, adder: PeerId) -> tuple[SignedStatement, SignedStatement] | None:
        """Return this peer's receipt for the sum of a part and that of `adder`, where these tell of
        other sums, or of sums of something else; None: they tell the same."""
        mine, said = (self._kept[RESULT, peer][part, 0] for peer in (self._identity.member, adder))
        a, b = (RoundReceipt.FromString(s.statement) for s in (mine, said))
        return None if (a.hash, a.heard) == (b.hash, b.heard) else (mine, said)

    def statement(self, hashes: Sequence[int]) -> SignedStatement:
        """Return what this peer says of the attempt, whose version it has made. `hashes`: of that,
        by its stages."""
        me, said = self._identity.member, AttemptStatement(run=self._run, hashes=hashes)
        said.round, said.attempt = self._plan.round, self._plan.attempt
        for s in segments_of(self._plan):
            gave, heard, got = s.claims(me)
            said.gave.extend(self._claim(self._kept[of], s) for of in gave)
            said.heard.extend(self._claim(self._kept[of], s) for of in heard)
            said.got.extend(self._claim(self._kept[of], s) for of in got)
        return signed(self._identity, ATTEMPT, said.SerializeToString(deterministic=True))

    def answer(self, asked: RoundQuestion) -> RoundAnswer:
        """Return the receipts that a question is about, as far as they are here."""
        of = self._kept[asked.hop, PeerId(asked.signer)]
        found = _inside(of, asked.start, asked.stop)[:MOST_RECEIPTS]
        answer = RoundAnswer(run=asked.run, term=asked.term)
        answer.round, answer.attempt = asked.round, asked.attempt
        for said in found:
            answer.receipts.add(statement=said.statement, signature=said.signature)
            answer.certificate = said.certificate
        return answer


def _inside(of: _ByBlock, start: int, stop: int) -> list[SignedStatement]:
    """Return receipts for parts of a segment, in order. Parts begin and end where pieces do, so a
    part is of the segment that it ends in."""
    return [of[at] for at in sorted(of) if start < at[0][1] <= stop]


ReceiptsOf = Callable[[RoundPlan], AttemptReceipts]
"""Returns those of an attempt, of which there are none yet."""
