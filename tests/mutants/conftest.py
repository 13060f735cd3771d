"""The laboratory of tests/sim, for worlds with planted bugs."""

from __future__ import annotations

from shoal.tests.sim.conftest import laboratory

__all__ = ["laboratory"]
