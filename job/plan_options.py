"""[plan]: what the scheduler may do, and how microbatches may leave stages out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .settings import Settings, SettingsError, at_least

__all__ = ["PlanOptions", "SkipScaling", "steps_or_share"]

SkipScaling = Literal["renormalise", "sum", "stochastic-depth"]
MANY_STEPS = 2**53
"""Of so many any share is a step or more."""
LEAST_STAGES = {"interleaved": 3, "zero-bubble": 2}
"""By schedule: with fewer stages nobody holds two that are apart, or nobody waits for another."""


def steps_or_share(settings: Settings, key: str, steps: int) -> int:
    """The steps that a key says, as a number or as a share such as "3%" of so many steps. Raises
    SettingsError."""
    value: int | str = getattr(settings, key)
    if isinstance(value, int):
        at_least(settings, 0, key)
        return value
    try:
        share = float(value.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not value.endswith("%") or not 0.0 <= share <= 1.0:
        raise SettingsError(
            key, f'is "{value}": expected a number of steps, or a share such as "3%"'
        )
    return round(share * steps)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Settings):
    """[plan]: what the scheduler may do."""

    scheduler: Literal["auto", "uniform", "equal-compute", "op-fence", "swarm"] = "auto"
    """Which planner decides."""
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "listed", "zero-bubble"] = "auto"
    """Order of forward and backward; "auto": the planner chooses."""
    in_flight: int | Literal["auto"] = "auto"
    """Microbatches that a peer keeps at once, from the begin of a forward to the end of its
    backward; "auto": the planner chooses, by memory."""
    skip: float | Literal["auto"] = 0.0
    """The most of the model's blocks that a microbatch leaves out, 0 to 0.5; "auto": none, or up to
    a quarter where that makes steps much shorter."""
    skip_warmup: int | str = 0
    """Steps at the begin in which every microbatch visits all stages in order, or a share of all
    steps such as "3%"."""
    skip_fade_out: int | str = 0
    """The same at the end."""
    skip_scaling: SkipScaling = "renormalise"
    """What is done about the microbatches that leave a stage out. "renormalise": its gradients
    count as if those that visit it stood for all. "sum": nothing. "stochastic-depth": where it is
    visited it adds as much more to what goes through it, in training."""
    reorder: bool = False
    """Whether neighbouring stages may change places in a microbatch."""
    stages: int | Literal["auto"] = "auto"
    """Number of stages; "auto": the planner chooses."""
    pipelines: int | Literal["auto"] = "auto"
    """Number of disjoint pipelines (data parallelism); "auto": the planner chooses."""
    replicas: int | Literal["auto"] = "auto"
    """Number of replicas that train apart, with sync.kind = "local" or "gossip"; "auto": as many as
    are best by prediction."""
    recompute: bool | Literal["auto"] = "auto"
    """Whether activations are computed again in the backward pass to save memory; "auto": the
    planner chooses, stage by stage."""
    replan: bool = True
    """Whether the plan may change during the run."""

    def check(self) -> None:
        for key in ("in_flight", "stages", "pipelines", "replicas"):
            if getattr(self, key) != "auto":
                at_least(self, 1, key)
        if self.skip != "auto" and not 0.0 <= self.skip <= 0.5:
            raise SettingsError(
                "skip", f'is {self.skip:g}: expected 0 to 0.5, of the blocks, or "auto"'
            )

        for key in ("skip_warmup", "skip_fade_out"):
            if steps_or_share(self, key, MANY_STEPS) and not self.reroutes:
                raise SettingsError(
                    key,
                    f"is {_toml(getattr(self, key))}, and every microbatch visits all stages in "
                    "order in all steps, with skip = 0 and reorder = false: set skip or reorder, "
                    f"or leave {key} out",
                )
        if self.skip_scaling != "renormalise" and self.skip == 0:
            raise SettingsError(
                "skip_scaling",
                f'is "{self.skip_scaling}", and no microbatch leaves a stage out, with skip = 0: '
                "set skip, or leave skip_scaling out",
            )
        least = LEAST_STAGES.get(self.schedule, 1)
        if self.stages != "auto" and self.stages < least and not self.reroutes:
            raise SettingsError(
                "schedule",
                f'is "{self.schedule}", which changes nothing with stages = {self.stages}: set '
                f"stages to {least} or more, or leave schedule out",
            )

    @property
    def in_order(self) -> PlanOptions:
        """Options without skipping and reordering: microbatches visit all stages in order."""
        return replace(
            self,
            skip=0.0,
            reorder=False,
            skip_warmup=0,
            skip_fade_out=0,
            skip_scaling="renormalise",
        )

    def full_steps(self, steps: int) -> tuple[int, int]:
        """Return (before, since): of so many steps those below the one and from the other on are
        full, in which every microbatch visits all stages in order."""
        before = steps_or_share(self, "skip_warmup", steps)
        return before, max(0, steps - steps_or_share(self, "skip_fade_out", steps))

    @property
    def reroutes(self) -> bool:
        """Whether microbatches may take other routes than all stages in order."""
        return self.skip != 0 or self.reorder


def _toml(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
