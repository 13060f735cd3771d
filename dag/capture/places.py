"""Which line of the user's module made what, while torch.export traces it.

torch's own stack traces name the forward that was called, not the line in the function that it
called; these modes look at the frames themselves.
"""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Callable
from typing import Any

from torch.fx.traceback import annotate
from torch.overrides import TorchFunctionMode

from ..ir.capture_errors import PLACE, Place, user_place

__all__ = ["BatchSizeWatch", "Notes"]


class Notes(TorchFunctionMode):
    """Notes on every fx node the user's line that made it; `capture_errors.line_of` reads it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        place = user_place()
        if place is None:
            return func(*args, **(kwargs or {}))
        with annotate({PLACE: f"{place[0]}:{place[1]}: {place[2]}"}):
            return func(*args, **(kwargs or {}))


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
