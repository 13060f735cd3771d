"""[log]: where the numbers of a run go besides its folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .settings import Settings, SettingsError

__all__ = ["Log", "Wandb"]


@dataclass(frozen=True, kw_only=True)
class Wandb(Settings):
    """[log.wandb]: arguments of wandb.init."""

    project: str
    """Where the run is listed."""
    entity: str = ""
    """Person or team; empty: wandb's default."""
    name: str = ""
    """Of the run; empty: the job's name and the run's id."""
    group: str = ""
    """Of runs that belong together."""
    mode: Literal["", "online", "offline"] = ""
    """Whether it is sent, or lies here until `wandb sync`; empty: as WANDB_MODE says."""

    def check(self) -> None:
        if not self.project:
            raise SettingsError("project", "is empty: expected a name")


@dataclass(frozen=True, kw_only=True)
class Log(Settings):
    """[log]: who else is told of steps and evaluations, on the machine that follows the run."""

    OF_JOB: ClassVar[bool] = True

    tensorboard: bool = True
    """Whether the run's folder gets a file for TensorBoard."""
    wandb: Wandb | None = None
    """The run in Weights & Biases; None: not there."""
