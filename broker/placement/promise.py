"""Whether a running plan keeps what it promised, and why not.

A plan is made from what is believed of links and peers then. A `Promise` remembers that; when steps
take BROKEN times as long as predicted, what is believed now differs, most often, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...dag.cost.network import Network
from ...dag.plan.plan import PeerId
from ...planner.base.interface import PeerOffer
from ..records.steps import LATELY

__all__ = ["BROKEN", "Promise"]

BROKEN = 1.5
"""Times the predicted step: predictions are within 15 % where links and speeds are known."""
_TOLD = 1.2
"""A factor by which a belief has to differ to be told, and how many are told at most."""
_MOST_TOLD = 3
_MOST_LOOKS = 6
"""At one plan: what still has no explanation then will not get one."""


@dataclass(eq=False)
class Promise:
    """What one plan promised its run. `step_s`: the predicted duration of a step. `network`,
    `offers`: what was believed of its peers when it began; None: nothing of links."""

    step_s: float
    network: Network | None
    offers: Mapping[PeerId, PeerOffer]
    looks: int = 0
    look_from: int = 0
    """The step from which on its being broken asks for another look."""

    def broken(self, lately_s: float | None, step: int) -> bool:
        """Whether steps take so much longer than promised that another plan is looked for now.
        After each look twice as many steps pass as before it."""
        if lately_s is None or step < self.look_from or self.looks >= _MOST_LOOKS:
            return False
        return 0 < self.step_s < math.inf and lately_s >= BROKEN * self.step_s

    def looked(self, step: int) -> None:
        self.look_from = step + LATELY * 2**self.looks
        self.looks += 1

    def explains(self, running_s: float, lately_s: float) -> bool:
        """Whether the running plan as it is predicted now takes about what its steps take. If not,
        whatever is predicted of another plan is as little to be believed."""
        return running_s * BROKEN >= lately_s

    def why(
        self,
        lately_s: float,
        pairs: Iterable[tuple[PeerId, PeerId]],
        network: Network | None,
        offers: Mapping[PeerId, PeerOffer],
    ) -> str:
        """For people: "step 6.1 s, promised 1.87 s: the link a→b carries 6.2 MB/s, not 150"."""
        text = f"step {lately_s:.3g} s, promised {self.step_s:.3g} s"
        found = [*self._links(pairs, network, offers), *self._speeds(offers)]
        return f"{text}: {', '.join(found)}" if found else text

    def _links(
        self,
        pairs: Iterable[tuple[PeerId, PeerId]],
        network: Network | None,
        offers: Mapping[PeerId, PeerOffer],
    ) -> list[str]:
        if network is None or self.network is None:
            return []
        rates = [
            ({p: i for i, p in enumerate(n.peers)}, n.rates()) for n in (self.network, network)
        ]
        slower: list[tuple[float, str]] = []
        for one, other in pairs:
            for a, b in ((one, other), (other, one)):
                if any(p not in index for index, _ in rates for p in (a, b)):
                    continue
                before, now = (float(r[index[a], index[b]]) for index, r in rates)
                if before > _TOLD * now:
                    ends = "→".join(str(offers.get(p, p)) for p in (a, b))
                    was = f"{before / 1e6:.3g}" if math.isfinite(before) else "any number"
                    slower.append((now, f"{ends} carries {now / 1e6:.2g} MB/s, not {was}"))
        slower.sort()
        told = [text for _, text in slower[:_MOST_TOLD]]
        more = len(slower) - len(told)
        told += [f"{more} more links carry less"] if more else []
        return [f"the link {told[0]}", *told[1:]] if told else []

    def _speeds(self, offers: Mapping[PeerId, PeerOffer]) -> list[str]:
        found = [
            (offers[p].learned / before.learned, offers[p])
            for p, before in self.offers.items()
            if p in offers
        ]
        found = [f for f in found if f[0] > _TOLD]
        found.sort(key=lambda f: (-f[0], str(f[1])))
        return [f"{o} takes {by:.2g} times as long" for by, o in found[:_MOST_TOLD]]
