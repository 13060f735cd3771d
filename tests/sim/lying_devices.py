"""Devices of peers that sign what they give in rounds, and lie all the same: each keeps to its own
name, as whoever has a certificate of its own must."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from shoal.dag.plan.action import Action, Kind
from shoal.dag.rounds.vector import Span
from shoal.dag.rounds.wiring import ALL, AUDIT, GATHER, GIVE, NEAR, RESULT
from shoal.dag.schedule.flow import Role
from shoal.net.identity.receipts import ATTEMPT, RECEIPT, data_hash, read_receipt
from shoal.net.identity.statements import signed
from shoal.net.links.frame import FrameKey, Payload
from shoal.peer.compute.device import TorchDevice
from shoal.peer.core.events import Result
from shoal.proto.broker_pb2 import (
    AttemptStatement,
    RoundAnswer,
    RoundAudit,
    RoundPlan,
    SignedStatement,
)
from shoal.sim.virtual.identities import NamedMember, check_named
from shoal.sim.virtual.spec import PeerDevice, PeerSpec

__all__ = ["Lie", "devices"]


@dataclass
class Lie:
    """A lie of `who` in rounds from `first` on. told: how often it was told.

    sums, gifts    it gives `to` others than to the rest, or than it claims, and signs both
    got, heard     it claims what is not so
    empty          it claims nothing
    another's      its receipts are in the name of another
    wrong          the sums that it adds up are wrong, for all alike
    place          the sums of its place that it gives are wrong
    two places     it gives another sum of its place than it claims, and signs both
    accuses        the sums of others are wrong where it adds up again
    agrees         it comes to the same wrong sum as who is in `to` where it adds up theirs again
    again          it gives others than before where sums are added up again, and signs both
    hides          what it gives there is not signed
    blames         it claims that gatherers signed other sums than those that it adds up again
    mute           it does not say what came of what it adds up again
    """

    who: str
    kind: str
    to: Collection[str] = ()
    first: int = 0
    told: int = 0


class _Signing(TorchDevice):
    def __init__(self, spec: PeerSpec) -> None:
        super().__init__(clock=lambda: 0.0, identity_of=NamedMember)
        self.me = NamedMember(spec.name)  # type: ignore[arg-type]


class _Liar(_Signing):
    def __init__(self, spec: PeerSpec, lie: Lie) -> None:
        super().__init__(spec)
        self.lie, self._falsified = lie, False

    def _falsifies(self, plan: RoundPlan, part: Span) -> bool:
        """Whether the sum of a part is made a wrong one."""
        lie, attempt = self.lie, self.rounds.frames.attempt
        assert attempt is not None
        adds = any(at[0] == part and at[2] == ALL for at in attempt.wiring.takes)
        bends = plan.round >= lie.first and adds == (lie.kind == "wrong")
        if lie.kind == "agrees":
            bends &= attempt.wiring.adders[part] in lie.to
        lie.told += bends
        return bends

    def _falsify(self) -> None:
        """Have sums be wrong from here on."""
        algebra: Any = self.rounds.algebra
        honest = algebra.result

        def result(part: Span, mean: Any, came: Any, plan: RoundPlan, coding: Any) -> Any:
            by = self._falsifies(plan, part) * (2 if self.lie.kind == "accuses" else 1)
            return honest(part, mean + by, came, plan, coding)

        algebra.result, self._falsified = result, True

    def _falsify_places(self) -> None:
        """Have sums of its place be wrong from here on."""
        algebra: Any = self.rounds.algebra
        honest = algebra.written_sum

        def written_sum(part: Span, total: torch.Tensor, coding: Any) -> Any:
            attempt = self.rounds.frames.attempt
            assert attempt is not None
            gathers = any(at[0] == part and at[2] == NEAR for at in attempt.wiring.takes)
            if attempt.plan.round >= self.lie.first and gathers:
                self.lie.told += 1
                total = (total.view(torch.int64) + (1 << 30)).view(torch.float32)
            return honest(part, total, coding)

        algebra.written_sum, self._falsified = written_sum, True

    def payload(self, key: FrameKey) -> Payload:
        found, lie = super().payload(key), self.lie
        hops = {"sums": RESULT, "gifts": GIVE, "again": AUDIT, "two places": GATHER}
        hop = hops.get(lie.kind)
        if key.role is not Role.ROUND or not found.codec_header or key.step < lie.first:
            return found
        said = SignedStatement.FromString(found.codec_header)
        if lie.kind == "hides" and key.hop == AUDIT:
            lie.told += 1
            said.ClearField("signature")
        elif lie.kind == "another's":
            lie.told += 1
            other = NamedMember(next(iter(lie.to)))  # type: ignore[arg-type]
            said.certificate = other.certificate
        elif key.hop == hop and (key.destination in lie.to or not lie.to):
            lie.told += 1
            dtype = torch.int64 if hop == GATHER else torch.float32
            data = torch.frombuffer(bytearray(b"".join(found.buffers)), dtype=dtype) + 1
            found = replace(found, buffers=(memoryview(data.numpy().tobytes()),))
            receipt = read_receipt(said, check_named)[1]
            receipt.hash = data_hash(found.buffers)
            said = signed(self.me, RECEIPT, receipt.SerializeToString(deterministic=True))
        return replace(found, codec_header=said.SerializeToString())

    def compute(self, step: int, action: Action) -> Result:
        lie = self.lie
        if (
            action.kind is Kind.EXCHANGE
            and lie.kind in ("wrong", "accuses", "agrees")
            and not self._falsified
        ):
            self._falsify()
        if action.kind is Kind.EXCHANGE and lie.kind == "place" and not self._falsified:
            self._falsify_places()
        if action.kind is Kind.EXCHANGE and lie.kind == "blames" and not self._falsified:
            self._answers, self._falsified = self.rounds.answer_audit, True
            self.rounds.answer_audit = self._blaming  # type: ignore[method-assign]
        if action.kind is Kind.EXCHANGE and lie.kind == "mute":
            self.rounds.answer_audit = self._nothing  # type: ignore[method-assign]
        result = super().compute(step, action)
        round_ = result.round
        if action.kind is not Kind.APPLY or step < lie.first or round_ is None or not round_.said:
            return result
        told = AttemptStatement.FromString(round_.said.statement)
        claims: dict[str, Any] = {"got": told.got, "heard": told.heard}
        for kind, of in claims.items():
            if lie.kind in (kind, "empty"):
                lie.told += 1
                of[:] = [b"" if lie.kind == "empty" else bytes(32) for _ in of]
        said = signed(self.me, ATTEMPT, told.SerializeToString(deterministic=True))
        object.__setattr__(round_, "said", said)
        return result

    def _blaming(self, order: RoundAudit) -> RoundAnswer:
        found = self._answers(order)
        for audit, segment in zip(found.audits, order.segments, strict=False):
            for at in range(len(segment.givers), len(audit.heard)):
                self.lie.told += 1
                audit.heard[at] = bytes(32)
        return found

    def _nothing(self, order: RoundAudit) -> RoundAnswer:
        self.lie.told += 1
        return RoundAnswer(run=order.run, term=order.term)


def devices(*lies: Lie) -> Callable[[PeerSpec], PeerDevice]:
    """Return what makes the device of each peer: honest ones but for those who tell `lies`, one
    each."""
    of = {lie.who: lie for lie in lies}

    def made(spec: PeerSpec) -> PeerDevice:
        return _Liar(spec, of[spec.name]) if spec.name in of else _Signing(spec)

    return made
