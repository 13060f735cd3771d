"""Tests of plans that a broker asks for have its world, too."""

from shoal.tests.broker.conftest import make_world, world

__all__ = ["make_world", "world"]
