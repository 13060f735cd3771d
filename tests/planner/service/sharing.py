"""One process that imports torch to plan, for all brokers of a test process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.planner.service import children
from shoal.planner.service.children import ForkServer

__all__ = ["SHARING"]


class _Kept(ForkServer):
    """Stays when who uses it is closed; `end` closes it."""

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


class _Sharing:
    def __init__(self) -> None:
        self._kept: _Kept | None = None

    def get(self) -> ForkServer:
        if self._kept is not None and not self._kept.alive:
            self._end()
        if self._kept is None:
            self._kept = _Kept()
        return self._kept

    def _end(self) -> None:
        if self._kept is not None:
            self._kept.end()
            self._kept = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(children, "ForkServer", self.get)
            yield
        self._end()


SHARING = _Sharing()
