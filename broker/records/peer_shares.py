"""What each peer has given to runs: samples, bytes and hours, as committed steps and rounds say it.

A run's row outlives the run. Of one peer the newest MOST_RUNS runs have a row of their own, and all
before them share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy

from ...dag.plan.plan import PeerId
from ...proto.broker_pb2 import PeerShare, RoundDone, StepDone

__all__ = ["MOST_PEERS", "MOST_RUNS", "PeerShares"]

MOST_RUNS = 32
"""Runs of one peer that are told of one by one."""
MOST_PEERS = 20_000
"""Peers that are remembered; of more, who was new to a run last stays."""
_MOST = 2**64 - 1


class PeerShares:
    """Changes by what the journal replays only."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, PeerShare]] = {}

    def __repr__(self) -> str:
        return f"<PeerShares of {len(self._of)} peers>"

    def of(self, peer: str) -> list[PeerShare]:
        """What a peer has given, by run, the newest run last; messages of the caller's own."""
        return [deepcopy(share) for share in self._of.get(peer, {}).values()]

    def stepped(
        self,
        run: str,
        name: str,
        peers: Iterable[PeerId],
        samples: int,
        done: StepDone,
        at_s: float,
    ) -> None:
        """A step of so many samples was committed, in which each of `peers` had a part. at_s: when,
        by the broker's clock."""
        sent = dict.fromkeys(peers, 0)
        for use in done.links:
            if use.source in sent:
                sent[PeerId(use.source)] += use.bytes
        for peer, bytes_ in sent.items():
            self._add(peer, run, name, samples, bytes_, done.seconds, at_s)

    def met(
        self, run: str, name: str, peers: Iterable[PeerId], done: RoundDone, at_s: float
    ) -> None:
        """A round was committed, whose version `peers` made or took. at_s: as in `stepped`."""
        each = list(dict.fromkeys(peers))
        for peer in each:
            self._add(peer, run, name, 0, done.sent_bytes // len(each), 0.0, at_s)

    def kept(self) -> Iterator[PeerShare]:
        """All of it, for `restore`, in order."""
        for runs in list(self._of.values()):
            yield from [deepcopy(share) for share in runs.values()]

    def restore(self, share: PeerShare) -> None:
        """What an earlier start of the broker left, one after the other."""
        self._of.setdefault(share.peer, {})[share.run] = deepcopy(share)

    def _add(
        self,
        peer: str,
        run: str,
        name: str,
        samples: int,
        sent_bytes: int,
        seconds: float,
        at_s: float,
    ) -> None:
        runs = self._of.get(peer)
        if runs is None or run not in runs:
            runs = self._of[peer] = self._of.pop(peer, {})  # the newest, behind all others
            first_s = max(0.0, at_s - seconds)
            runs[run] = PeerShare(peer=peer, run=run, name=name, first_s=first_s)
            self._shorten(runs)
        _more(runs[run], samples, sent_bytes, seconds, at_s)

    def _shorten(self, runs: dict[str, PeerShare]) -> None:
        if len(self._of) > MOST_PEERS:
            del self._of[next(iter(self._of))]
        if len(runs) - ("" in runs) <= MOST_RUNS:
            return
        oldest = runs.pop(next(run for run in runs if run))
        before = runs.pop("", PeerShare(peer=oldest.peer, first_s=oldest.first_s))
        _more(before, oldest.samples, oldest.sent_bytes, oldest.seconds, oldest.last_s)
        rest = dict(runs)
        runs.clear()
        runs.update({"": before, **rest})


def _more(share: PeerShare, samples: int, sent_bytes: int, seconds: float, at_s: float) -> None:
    share.samples = min(_MOST, share.samples + samples)
    share.sent_bytes = min(_MOST, share.sent_bytes + sent_bytes)
    share.seconds += seconds
    share.last_s = max(share.last_s, at_s)
