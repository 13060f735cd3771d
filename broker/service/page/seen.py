"""What all requests are answered from: asked of the machine as a client would, so that nothing is
shown that the journal does not hold yet (I10), and at most once a second for everybody together.
What happens in a run is shown to its submitter and to operators; to others that there is one, and
how it stands. A peer sees its own part of all that, and what it has given.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....net.finite import finite
from ....net.identity.names import Party, PartyRole
from ....proto.broker_pb2 import (
    Description,
    LinkState,
    PeerShare,
    PeerState,
    Phase,
    RunSpec,
    RunState,
)
from ...events import DescribeAsked, RunId
from ...lender_view import for_lender
from ...membership.member import clean
from ..shell import RejectedError, Shell
from .digest import Digest, MetricTotals

__all__ = ["EVERY_S", "Look", "Watcher", "tokens_per_step"]

EVERY_S = 1.0
"""How old an answer may be."""
MOST_ENDED = 10
"""Ended runs that are shown, the newest."""
_MOST_PEERS, _MOST_LINKS = 500, 2000
"""That are shown; the counts say how many there are."""


@dataclass(frozen=True)
class Look:
    """One look. `digests` and `owners`: by run, in order of submission. `shares`: what a peer has
    given."""

    description: Description
    digests: Mapping[str, Digest]
    owners: Mapping[str, str]
    now: float
    shares: Callable[[str], Sequence[PeerShare]]
    texts: dict[Party, str] = field(default_factory=dict)

    def of(self, viewer: Party) -> Mapping[str, Digest]:
        """What happened in the runs that somebody may look into."""
        if viewer.role is PartyRole.PEER:
            return {}
        everything, who = viewer.role is PartyRole.OPERATOR, viewer.subject
        return {r: d for r, d in self.digests.items() if everything or self.owners[r] == who}

    def text(self, viewer: Party) -> str:
        """JSON of what the page shows to somebody."""
        if viewer not in self.texts:
            found, peer = self.description, viewer.subject
            if viewer.role is PartyRole.PEER:
                found = for_lender(found, peer, self.shares(peer))
            page = _page(found, self.of(viewer), self.now)
            self.texts[viewer] = json.dumps(finite(page), allow_nan=False)
        return self.texts[viewer]


class Watcher:
    """`await watcher.look()` gives a Look of this second. Raises RejectedError when the broker is
    about to stop."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._since_s = shell.now
        self.totals = MetricTotals()
        self._digests: dict[str, Digest] = {}
        self._one = asyncio.Lock()
        self._seen: Look | None = None
        self._seen_at = 0.0

    async def look(self) -> Look:
        async with self._one:
            now = self._shell.now
            if self._seen is None or now - self._seen_at >= EVERY_S:
                self._seen = await self._look()
                self._seen_at = now
            return self._seen

    async def _look(self) -> Look:
        description = await self._shell.ask(DescribeAsked, Description)
        known = {state.run for state in description.runs}
        for gone in [run for run in self._digests if run not in known]:
            del self._digests[gone]
        for state in description.runs:
            await self._read(state.run)
        runs = self._shell.machine.runs
        owners = {run: runs[RunId(run)].owner if run in runs else "" for run in self._digests}
        shares = self._shell.machine.decided.shares.of
        return Look(description, dict(self._digests), owners, self._shell.now, shares)

    async def _read(self, run: str) -> None:
        """What has happened in a run since the last look."""
        digest = self._digests.get(run)
        if digest is None:
            found = self._shell.machine.runs.get(RunId(run))
            tokens = tokens_per_step(found.submitted.spec) if found is not None else 0
            digest = self._digests[run] = Digest(tokens, self.totals, self._since_s)
        while True:
            try:
                watched, _ = await self._shell.watch(RunId(run), digest.next_event, "")
            except RejectedError:
                return  # forgotten in this very moment
            for event in watched.events:
                digest.add(event)
            if not watched.events:
                return


def tokens_per_step(spec: RunSpec) -> int:
    """Positions of text or tokens in a step, else samples."""
    try:
        data = json.loads(spec.job).get("data", {})
        length = data.get("length", 128) if data.get("kind", "text") in ("text", "tokens") else 1
    except (ValueError, AttributeError):
        length = 1
    return spec.microbatches * spec.microbatch_size * int(length)


def _page(description: Description, digests: Mapping[str, Digest], now: float) -> dict[str, Any]:
    ended = [
        s.run for s in description.runs if Phase.Name(s.phase) in ("DONE", "FAILED", "CANCELLED")
    ]
    old = set(ended[:-MOST_ENDED])
    return {
        "broker": description.broker,
        "now_s": now,
        "peers": [_peer(p) for p in description.peers[:_MOST_PEERS]],
        "peer_count": len(description.peers),
        "runs": [
            _run(s, digests.get(s.run, _NOTHING)) for s in description.runs if s.run not in old
        ],
        "run_count": len(description.runs),
        "links": _links(description.links[:_MOST_LINKS]),
        "shares": [_share(s) for s in description.shares],
        "public": {
            "address": description.public.address,
            "confirmed_by": description.public.confirmed_by,
            "problem": clean(description.public.problem),
        }
        if description.HasField("public")
        else None,
    }


def _peer(state: PeerState) -> dict[str, Any]:
    profile = state.profile
    return {
        "peer": state.peer,
        "name": clean(profile.name, 80) or state.peer,
        "place": clean(profile.place, 80),
        "owner": clean(profile.owner, 80),
        "device": clean(profile.device, 120),
        "memory_bytes": profile.device_memory_bytes,
        "state": state.membership,
        "run": state.run,
        "relayed": not state.address,
        "silent_s": round(state.silent_s),
        "closed": clean(state.closed.text),
        "software": clean(profile.software, 120),
    }


def _share(share: PeerShare) -> dict[str, Any]:
    return {
        "run": share.run,
        "name": clean(share.name, 120),
        "samples": share.samples,
        "sent_bytes": share.sent_bytes,
        "hours": share.seconds / 3600,
        "first_s": share.first_s,
        "last_s": share.last_s,
    }


_NOTHING = Digest(0, MetricTotals(), 0.0)
"""What is shown of what happens in somebody else's run."""


def _run(state: RunState, digest: Digest) -> dict[str, Any]:
    return {
        "run": state.run,
        "name": clean(state.name, 120),
        "phase": Phase.Name(state.phase).lower(),
        "reason": clean(state.reason.text, 2000),
        "step": state.step,
        "steps": state.steps,
        "left_s": state.left_s,
        "term": state.term,
        "round_number": state.round,
        "replicas": [
            {
                "replica": r.replica,
                "phase": Phase.Name(r.phase).lower(),
                "term": r.term,
                "step": r.step,
            }
            for r in state.replicas
        ],
        **digest.row(),
    }


def _links(links: Sequence[LinkState]) -> list[list[Any]]:
    """[source, destination, milliseconds one way, bytes/s]."""
    return [
        [k.source, k.destination, round(1e3 * k.latency_s, 2), round(k.bytes_per_s)] for k in links
    ]
