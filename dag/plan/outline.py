"""What a plan says of its stages that follows from the graph: which values cross from one to which
others, and what is exchanged of each.

It is the little of `cut.Stage` that schedules and wiring ask for. With it in the plan they follow
from the plan alone, so that the broker, which reads no graph, can find each peer's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Crossed", "Outline", "StageOutline", "TiedGroup"]


class Crossed(NamedTuple):
    """A value that leaves its stage; as `cut.Port`."""

    value: str
    targets: tuple[int, ...]
    grad_targets: tuple[int, ...] = ()
    spec: int = 0
    """Equal numbers: equal specs."""


@dataclass(frozen=True, slots=True)
class StageOutline:
    """One stage; as `cut.Stage`."""

    index: int
    sends: tuple[Crossed, ...] = ()
    trainable: bool = False
    """Whether it has a trained parameter."""
    statistics: bool = False
    """Whether its holders exchange batch statistics."""
    makes_loss: bool = False
    has_backward: bool = False
    elements: int = 0
    """Of the run's vector (`dag/rounds/vector.py`) that are its own."""


@dataclass(frozen=True, slots=True)
class TiedGroup:
    """A trainable parameter that several stages hold; their gradients are summed in stage order."""

    index: int
    parameter: str
    stages: tuple[int, ...]
    start: int = 0
    elements: int = 0
    """Where it is in the run's vector (`dag/rounds/vector.py`)."""


@dataclass(frozen=True, slots=True)
class Outline:
    """The stages of a plan, and its tied groups."""

    stages: tuple[StageOutline, ...] = ()
    tied: tuple[TiedGroup, ...] = ()

    def problem(self, stages: int) -> str:
        """Why this is none of so many stages; empty: it is, or says nothing yet."""
        if not self.stages:
            return "it has tied groups of no stages" if self.tied else ""
        if [s.index for s in self.stages] != list(range(stages)):
            return f"its outline has {len(self.stages)} stages, expected {stages}"
        if sum(s.makes_loss for s in self.stages) != 1:
            return "its outline has no stage, or several, that make the loss"
        loss = next(s.index for s in self.stages if s.makes_loss)
        seen: set[tuple[str, int]] = set()
        for s in self.stages:
            for sent in s.sends:
                if not sent.targets or any(
                    not (s.index < t < stages or t == loss != s.index) for t in sent.targets
                ):
                    return (
                        f"its outline has {sent.value!r} go from stage {s.index} to none behind it"
                    )
                if not set(sent.grad_targets) <= set(sent.targets):
                    return f"its outline has a gradient of {sent.value!r} from where it is not sent"
                if (sent.value, s.index) in seen or len(set(sent.targets)) < len(sent.targets):
                    return f"its outline has {sent.value!r} leave stage {s.index} twice"
                seen.add((sent.value, s.index))
        for i, group in enumerate(self.tied):
            known = len(group.stages) > 1 and set(group.stages) <= set(range(stages))
            if group.index != i or not known or list(group.stages) != sorted({*group.stages}):
                return f"its outline has a tied parameter of stages {group.stages}"
        return ""
