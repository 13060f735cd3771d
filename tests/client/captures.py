"""Captures of models that jobs of one session have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from shoal.client import submission
from shoal.dag.capture import capture as captures
from shoal.dag.capture.capture import Captured, capture
from shoal.job import LIVE, Job


class Captures:
    """Captures by model, dtype and shapes: a second job with the same model, of a file with the
    same text, gets the graph of the first one, with tensors of its own module. Live modules are
    captured each."""

    def __init__(self) -> None:
        self._known: dict[str, Captured] = {}
        self._traced: dict[str, Any] = {}

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Every submission that is made meanwhile takes part."""
        captured = submission._captured

        def of(job: Job, *more: Any) -> Captured:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(submission, "capture", partial(self._once, job))
                return captured(job, *more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(submission, "_captured", of)
            yield

    def _once(
        self, job: Job, module: nn.Module, inputs: Mapping[str, Tensor], **options: Any
    ) -> Captured:
        if job.model.factory.startswith(LIVE):  # two of a class may be of other parts
            return capture(module, inputs, **options)
        factory, loss = (_text(job.folder, n) for n in (job.model.factory, job.model.loss))
        model = replace(job.model, factory=factory, loss=loss)
        shapes = {name: (t.shape, t.dtype) for name, t in inputs.items()}
        told = {k: v for k, v in options.items() if k not in ("named", "samples")}
        key = f"{model} {shapes} {told}"
        if key not in self._known:
            traced = replace(model, dtype="fp32", frozen_dtype="", trained_dtype="")
            own = [(n, p.dtype, p.requires_grad) for n, p in module.named_parameters()]
            with self._traced_once(f"{traced} {shapes} {own}"):
                self._known[key] = capture(module, inputs, **options)
        found, named = self._known[key], options["named"]
        own = {named(n): p.detach() for n, p in module.named_parameters()}
        own |= {named(n): b.detach() for n, b in module.named_buffers()}
        return replace(found, tensors={n: own.get(n, t) for n, t in found.tensors.items()})

    @contextmanager
    def _traced_once(self, key: str) -> Iterator[None]:
        """What is traced has no dtypes yet, so that those of a job make no other trace."""
        whole = captures._whole

        def once(*given: Any) -> Any:
            if key not in self._traced:
                self._traced[key] = whole(*given)
            return self._traced[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(captures, "_whole", once)
            yield


def _text(folder: Path, name: str) -> str:
    """Return "text:fn" for "file.py:fn" of a folder; any other name stays."""
    path, _, function = name.rpartition(":")
    is_file = path.endswith(".py") and (folder / path).exists()
    return f"{(folder / path).read_text()}:{function}" if is_file else name
