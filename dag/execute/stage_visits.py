"""What makes up for the microbatches that leave a stage out, as a job's `plan.skip_scaling` says.

renormalise       the stage's gradients count as if those that visit it stood for all
sum               nothing: they are added up as they are (SkipPipe, arXiv 2502.19913)
stochastic-depth  with p for the share that visits it, what it adds to what goes through it is
                  divided by p, in training only: out = in + (stage(in) - in) / p. On average
                  that is what the whole model computes, so evaluations and weights stay as they
                  are (Huang et al., arXiv 1603.09382, which multiplies by p in evaluation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..analysis.skippable import bypass_of
from ..ir.graph import Graph
from ..plan.cut import Stage
from ..plan.plan import PeerId, PlanError, Route, Visit
from .gradients import total

__all__ = ["Grads", "ScaledStage", "StageVisits"]

Grads = Mapping[str, Sequence[Tensor | None]]


@dataclass(frozen=True, slots=True)
class ScaledStage:
    """A residual stage of which what it adds is multiplied by `by`: `made` = `taken` + what it
    adds, two values of the graph."""

    taken: str
    made: str
    by: float

    def forward(self, ports: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What leaves, of what came in and what the stage made of it."""
        came, own = ports[self.taken].detach(), made[self.made].detach()
        return {**made, self.made: came + (own - came) * self.by}

    def seeds(self, grads: Grads) -> dict[str, Sequence[Tensor | None]]:
        """The gradients that the stage's own backward begins with."""
        own = [None if g is None else g * self.by for g in grads.get(self.made, ())]
        return {**grads, self.made: own}

    def back(self, grads: Grads, back: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The gradients of what came in, of those of what left and what the stage's own backward
        made of `seeds`."""
        left = [None if g is None else g * (1 - self.by) for g in grads.get(self.made, ())]
        own = [*left, back.get(self.taken)]
        device = next((g.device for g in own if g is not None), None)
        return {**back, self.taken: None if device is None else total(own, device)}


@dataclass(frozen=True, slots=True)
class StageVisits:
    """How the microbatches of a step visit a stage. visited: those that do, wherever, ascending.
    last: the last one that this peer runs through it."""

    visited: tuple[int, ...]
    last: int
    gradients: float = 1.0
    """By what gradients are multiplied when the last microbatch is through."""
    scaled: ScaledStage | None = None
    """Stochastic depth, where the job asks for it and some leave the stage out."""

    @classmethod
    def of(
        cls,
        graph: Graph,
        stage: Stage,
        visited: tuple[int, ...],
        routes: Sequence[Route],
        peer: PeerId,
        scaling: str,
    ) -> StageVisits:
        """Return those of a stage of a bound graph by these routes; `scaling`: a value of
        `plan.skip_scaling`. Raises PlanError for a stage that is to be scaled and cannot be."""
        share, here = len(visited) / len(routes), Visit(stage.index, peer)
        last = max((m for m, route in enumerate(routes) if here in route), default=-1)
        if scaling == "sum" or share in (0, 1):
            return cls(visited, last)
        if scaling == "renormalise":
            return cls(visited, last, 1 / share)
        bypass = bypass_of(graph, stage.start, stage.stop)
        if why := bypass.why_not_scaled:
            raise PlanError(
                f"stage {stage.index} is left out and is to be scaled (stochastic depth), and {why}"
            )
        return cls(visited, last, scaled=ScaledStage(bypass.taken, bypass.made, 1 / share))
