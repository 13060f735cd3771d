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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.traceback import annotate
from torch.nn.modules._functions import CrossMapLRN2d
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
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
        outermost: Any = torch._C._functorch.peek_interpreter_stack()
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


class _Context:
    """What a Function's forward leaves for its backward. One that changes its input in place finds
    no `mark_dirty`."""

    def __init__(self, takes: tuple[bool, ...]) -> None:
        self.needs_input_grad = takes
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def _both(
    function: type[torch.autograd.Function], args: Sequence[Any], grad: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """A Function's result, and what its backward makes of a gradient (None: of ones)."""
    given: Any = function
    takes = tuple(isinstance(a, Tensor) and a.is_floating_point() for a in args)
    context = _Context(takes)
    if given.setup_context is torch.autograd.Function.setup_context:
        value = given.forward(context, *args)
    else:
        value = given.forward(*args)
        given.setup_context(context, tuple(args), value)
    back = given.backward(context, torch.ones_like(value) if grad is None else grad)
    grads = list(back) if isinstance(back, (tuple, list)) else [back]
    return value, [g if take else None for g, take in zip(grads, takes, strict=True)]


def _written_out(function: type[torch.autograd.Function], args: Sequence[Any]) -> Tensor | None:
    """The result of a Function whose backward multiplies each element of the gradient by a factor,
    by operators that autograd finds these factors in: y + d(y)/d(x) * (x - x), where the first x is
    the only one that a gradient goes to. None for any other backward."""
    if not _has_factors(function, args):
        return None
    value, factors = _both(function, [_detached(a) for a in args], None)
    value = value.detach()
    for x, factor in zip(args, factors, strict=True):
        if factor is not None:
            value = value + factor.detach() * (x - x.detach())
    return value


def _detached(arg: Any) -> Any:
    return arg.detach() if isinstance(arg, Tensor) else arg


def _has_factors(function: type[torch.autograd.Function], args: Sequence[Any]) -> bool:
    """Whether a Function of numbers of these shapes has a result that no chance has a part in, and
    a backward that gives a gradient times what it gives ones, element by element: tried with
    gradients of very different sizes."""
    random = torch.Generator().manual_seed(0)
    try:
        with (
            _disable_current_modes(),
            torch._C.DisableTorchFunction(),
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
        ):
            for size in (0.1, 1.0, 10.0):
                drawn = [_drawn(a, size, random) for a in args]
                value, factors = _both(function, drawn, None)
                for most in (1e-3, 1.0, 1e3):
                    grad = most * torch.randn(value.shape, generator=random, dtype=value.dtype)
                    again, grads = _both(function, drawn, grad)
                    if not _same(again, value, 1.0):
                        return False
                    for one, factor in zip(grads, factors, strict=True):
                        if (one is None) != (factor is None):
                            return False
                        if factor is not None and not _same(one, grad * factor, most):
                            return False
    except Exception:  # whatever the user's code raises, or asks of torch's own context
        return False
    return True


def _same(a: Tensor | None, b: Tensor, size: float) -> bool:
    return (
        a is not None
        and a.shape == b.shape
        and torch.allclose(a, b, rtol=1e-4, atol=1e-6 * size, equal_nan=True)
    )


def _drawn(arg: Any, size: float, random: torch.Generator) -> Any:
    """A tensor of the same shape with values of its own, or the argument itself; a size that
    follows the batch is that of the example."""
    if isinstance(arg, torch.SymInt):
        return arg.node.hint
    if not isinstance(arg, Tensor):
        return arg
    shape = [d if isinstance(d, int) else d.node.hint for d in arg.shape]
    if not arg.is_floating_point():
        return torch.zeros(shape, dtype=arg.dtype)
    return (size * torch.randn(shape, generator=random)).to(arg.dtype)


def _has_values(args: Sequence[Any]) -> bool:
    """Whether all tensors are ordinary ones, as in a loop of the user's."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    return all(type(t) in (Tensor, nn.Parameter) and not t.is_meta for t in tensors)


@contextmanager
def own_gradients() -> Iterator[None]:
    """While a module is traced, writes out a gradient of the user's own making where that is a
    factor for each element, and refuses any other: torch.export sees only the operators of its
    forward, so a graph would train with another gradient and say nothing. With values, the user's
    own code runs."""
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
            if not kwargs and _has_values(args):
                return apply.__get__(None, cls)(*args)
            written = None if kwargs else _written_out(cls, args)
            if written is not None:
                return written
            raise refused(
                text_of(user_place()),
                f"torch.autograd.Function {cls.__name__} has a backward of its own, which a graph "
                "of operators cannot hold unless it multiplies each element of the gradient",
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
