"""Which line of the user's module made what, while torch.export traces it, and which does what
torch.export does not see.

torch's own stack traces name the forward that was called, not the line in the function that it
called; these modes look at the frames themselves.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.nn.modules._functions import CrossMapLRN2d
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ..ir.capture_errors import PLACE, CaptureError, Place, refused, text_of, user_place

__all__ = ["BatchSizeWatch", "Notes", "own_gradients"]


_DERIVATIVES = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_FUNCTIONAL = ("Grad", "Jvp")
"""What torch.func.grad, vjp, jacrev and jvp, jacfwd put around tensors."""


class Notes(TorchFunctionMode):
    """Notes on every fx node the user's line that made it; `capture_errors.line_of` reads it.
    Keeps the first line with what torch.export does not follow: a derivative that forward itself
    takes (`derivative`, with whose), and `.data` (`unseen`)."""

    unseen: Place | None = None
    derivative: tuple[Place | None, str] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        place = user_place()
        self._look(func, place)
        if place is None:
            return func(*args, **(kwargs or {}))
        with annotate({PLACE: f"{place[0]}:{place[1]}: {place[2]}"}):
            return func(*args, **(kwargs or {}))

    def _look(self, func: Callable[..., Any], place: Place | None) -> None:
        outermost = torch._C._functorch.peek_interpreter_stack()
        functional = outermost is not None and outermost.key().name in _FUNCTIONAL
        if self.derivative is None and (functional or func in _DERIVATIVES):
            # Not raised from within: torch.func would be left in the middle of it.
            self.derivative = place, "torch.func" if functional else "torch.autograd"
        owner = getattr(getattr(func, "__self__", None), "__name__", "")
        if owner == "data" and self.unseen is None:
            self.unseen = place

    def check(self) -> None:
        """Raises CaptureError where forward took a derivative."""
        if self.derivative is None:
            return
        place, what = self.derivative
        raise refused(
            text_of(place),
            f"forward takes a derivative itself ({what}), which a graph of operators cannot hold",
            "write the derivative with torch operations (that of a linear layer is its weight), or "
            "leave the term out; the gradient of the loss is taken by the peers",
        )


class BatchSizeWatch(TorchFunctionMode):
    """Finds the first line of the user's after which the batch size is no longer free."""

    place: Place | None = None

    def __init__(self) -> None:
        super().__init__()
        self._last: Place | None = None
        self._guards = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A guard that came since the last call came from Python between the two calls.
        self._look(args, self._last)
        here = user_place()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._look(args, here)
            self._last = here

    def _look(self, args: tuple[Any, ...], place: Place | None) -> None:
        for arg in args:
            env = getattr(getattr(arg, "fake_mode", None), "shape_env", None)
            if env is not None:
                if len(env.guards) > self._guards and self.place is None:
                    self.place = _noted(env.guards[self._guards :], place) or place
                self._guards = len(env.guards)
                return


def _noted(guards: Any, last: Place | None) -> Place | None:
    """The place that torch noted for a guard, if it is in the file that ran last (torch keeps only
    the end of the path)."""
    for guard in guards:
        noted = re.match(r"\(?(\S+):(\d+) in", str(guard.sloc))
        if noted and last and last[0].endswith(os.sep + noted[1].split("/")[-1]):
            line = int(noted[2])
            return last[0], line, linecache.getline(last[0], line).strip()
    return None


def _is_users(frame: FrameType) -> bool:
    """Whether the call comes from outside of torch."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] != "torch"


@contextmanager
def own_gradients() -> Iterator[None]:
    """While a module is traced, refuses a gradient of the user's own making: torch.export sees only
    the operators of its forward, so a graph would train with another gradient and say nothing."""
    apply = torch.autograd.Function.__dict__["apply"]
    hook, inference = torch.Tensor.register_hook, torch.inference_mode.__init__

    def watched(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            raise CaptureError(
                f"{text_of(user_place())}\n  reentrant checkpointing runs this part without "
                "gradients, so it would not be trained: write "
                "checkpoint(…, use_reentrant=False), or leave it out (plan.recompute does the same "
                "for any model; a Hugging Face model: gradient_checkpointing_disable())"
            )
        if cls is CrossMapLRN2d:
            raise refused(
                text_of(user_place()),
                "nn.CrossMapLRN2d goes from channel to channel in place, for one batch size",
                "use nn.LocalResponseNorm, which has its formula for any number of samples",
            )
        if not cls.__module__.startswith("torch."):  # torch's own (checkpoint) change no gradient
            raise refused(
                text_of(user_place()),
                f"torch.autograd.Function {cls.__name__} has a backward of its own, which a graph "
                "of operators cannot hold",
                "write the forward so that autograd gives this gradient, e.g. x + (y - x).detach() "
                "for a straight-through estimate",
            )
        return apply.__get__(None, cls)(*args, **kwargs)

    def hooked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_users(sys._getframe(1)):
            raise refused(
                text_of(user_place()),
                "a hook changes the gradient of a tensor, which a graph of operators cannot hold",
                "write the forward so that autograd gives this gradient, e.g. x + (y - x).detach()",
            )
        return hook(tensor, *args, **kwargs)  # type: ignore[no-untyped-call]

    def entered(mode: Any, *args: Any, **kwargs: Any) -> None:
        if _is_users(sys._getframe(1)):
            raise refused(
                text_of(user_place()),
                "torch.inference_mode() is not seen by the capture, and gradients would go through "
                "what is in it",
                "use torch.no_grad()",
            )
        inference(mode, *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(watched))  # noqa: B010 (mypy)
    setattr(torch.Tensor, "register_hook", hooked)  # noqa: B010 (mypy)
    setattr(torch.inference_mode, "__init__", entered)  # noqa: B010 (mypy)
    try:
        yield
    finally:
        setattr(torch.Tensor, "register_hook", hook)  # noqa: B010 (mypy)
        setattr(torch.inference_mode, "__init__", inference)  # noqa: B010 (mypy)
        setattr(torch.autograd.Function, "apply", apply)  # noqa: B010 (mypy)
