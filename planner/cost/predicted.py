"""An estimate in the words of a plan's prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...dag.cost.estimate import StepEstimate
from ...dag.plan.plan import PeerId
from ...dag.plan.report import Alternative, CodecUse, LinkPrediction, PeerPrediction, Prediction
from ..base.interface import PeerOffer

__all__ = ["predicted", "seconds_text"]


def predicted(
    estimate: StepEstimate,
    offers: Mapping[PeerId, PeerOffer],
    *,
    owner: Sequence[int],
    bare: Sequence[float],
    seconds: Sequence[float],
    device_bytes: Sequence[int],
    host_bytes: Sequence[int],
    alternatives: Sequence[Alternative] = (),
    uses: Mapping[tuple[PeerId, PeerId], tuple[CodecUse, ...]] | None = None,
) -> Prediction:
    """`offers`: by the estimate's peers, in the order of the plan; bytes are in that order. By
    action: its peer (`owner`), its seconds, and those without what frames and codecs cost (`bare`):
    peers report compute alone. `uses`: by link, in the estimate's ids."""
    own, whole = [0.0] * len(offers), [0.0] * len(offers)
    for i, a, b in zip(owner, bare, seconds, strict=True):
        own[i] += a
        whole[i] += b
    pure = [a / b if b else 1.0 for a, b in zip(own, whole, strict=True)]
    place = {peer: i for i, peer in enumerate(offers)}
    links = sorted(estimate.links.items(), key=lambda x: [place[p] for p in x[0]])
    return Prediction(
        estimate.step_s,
        tuple(
            PeerPrediction(
                offer.peer,
                estimate.peers[p].compute_s * pure[i],
                device_bytes[i],
                host_bytes[i],
                estimate.peers[p].bubble,
                offer.learned,
            )
            for i, (p, offer) in enumerate(offers.items())
        ),
        tuple(
            LinkPrediction(
                offers[a].peer,
                offers[b].peer,
                use.size_bytes,
                use.busy_s,
                (uses or {}).get((a, b), ()),
            )
            for (a, b), use in links
        ),
        tuple(
            f"{offers[c.peer]}{f' -> {offers[c.destination]}' if c.destination else ' computes'}: "
            f"{c.seconds:.3g} s of the step's {estimate.step_s:.3g} s hang on it"
            for c in estimate.critical[:3]
        ),
        tuple(alternatives),
    )


def seconds_text(seconds: float) -> str:
    """For people, such as "12 s" or "12 ms"."""
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
