"""What a model of transformers is for: which of its classes a folder becomes, and what that class
learns from text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...job.settings import meant

__all__ = ["TASKS", "Task", "TaskError", "known_class", "task_of", "task_of_module"]


class TaskError(ValueError):
    """A task that nobody knows, or that a family of models has no class for."""


@dataclass(frozen=True)
class Task:
    """name: as `args.task` has it. kind: in `AutoModelFor…` of transformers. table: of the classes
    by family, in transformers.models.auto.modeling_auto. peft: its name in peft, for whoever loads
    an adapter."""

    name: str
    kind: str
    table: str
    peft: str | None = None

    def classes(self, family: str) -> tuple[str, ...]:
        """Names of a family's classes for this task."""
        from transformers.models.auto import modeling_auto

        found = getattr(modeling_auto, f"MODEL_FOR_{self.table}_MAPPING_NAMES").get(family, ())
        return (found,) if isinstance(found, str) else tuple(found)


# A class that is for several is for the first: BartForConditionalGeneration, XLMWithLMHeadModel.
_LISTED = (
    Task("seq2seq-lm", "Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQ_2_SEQ_LM"),
    Task("masked-lm", "MaskedLM", "MASKED_LM"),
    Task("causal-lm", "CausalLM", "CAUSAL_LM", "CAUSAL_LM"),
    Task("sequence-classification", "SequenceClassification", "SEQUENCE_CLASSIFICATION", "SEQ_CLS"),
    Task("token-classification", "TokenClassification", "TOKEN_CLASSIFICATION", "TOKEN_CLS"),
    Task("question-answering", "QuestionAnswering", "QUESTION_ANSWERING", "QUESTION_ANS"),
    Task("multiple-choice", "MultipleChoice", "MULTIPLE_CHOICE"),
    Task("image-classification", "ImageClassification", "IMAGE_CLASSIFICATION"),
)
TASKS: Mapping[str, Task] = {task.name: task for task in _LISTED}
"""The tasks by their names."""


def task_of(config: Any, said: str = "auto") -> Task:
    """Return the task of a folder with `config`. "auto": that of the class which the config names
    (`architectures`), and of a family that has no other, its only one. Raises TaskError."""
    family = config.model_type
    could = [task for task in _LISTED if task.classes(family)]
    if said != "auto":
        if not isinstance(said, str) or said not in TASKS:
            near = meant(str(said), TASKS)
            raise TaskError(f'is "{said}": expected "auto", {_named(_LISTED)}{near}')
        if TASKS[said] not in could:
            have = f"has classes for {_named(could)}" if could else "has no class for any task here"
            raise TaskError(f'is "{said}", and transformers\' family {family} {have}')
        return TASKS[said]
    causal = TASKS["causal-lm"]
    if causal in could and getattr(config, "is_decoder", False):
        return causal
    for name in config.architectures or ():
        if found := [task for task in could if name in task.classes(family)]:
            return found[0]
    if causal in could and TASKS["masked-lm"] not in could:
        return causal
    if len(could) == 1:
        return could[0]
    named = ", ".join(config.architectures or ()) or "no class"
    raise TaskError(
        f'is "auto", and config.json names {named}, of which no task is known: expected '
        f"{_named(could) or 'a family that transformers has a class with a loss for'}"
    )


def task_of_module(module: nn.Module) -> Task | None:
    """Return the task of a model of transformers, or of a subclass; None where no table has it."""
    return next((task for task, _ in _known(module)), None)


def known_class(module: nn.Module) -> str | None:
    """Return the name of the class of transformers that a model is of, or a subclass of; None where
    no table has it."""
    return next((name for _, name in _known(module)), None)


def _known(module: nn.Module) -> Iterator[tuple[Task, str]]:
    """Yield tasks and classes of transformers that a model is of, the nearest class first."""
    family = getattr(getattr(module, "config", None), "model_type", "")
    for kind in type(module).__mro__:
        if kind.__module__.startswith("transformers."):
            name = kind.__name__
            yield from ((task, name) for task in _LISTED if name in task.classes(family))


def _named(tasks: Iterable[Task]) -> str:
    return ", ".join(f'"{task.name}"' for task in tasks)
