"""What snapshots cost a local step: between nothing and all of it on half of the line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shoal.dag.cost.network import Network
from shoal.planner.base.interface import PlanRequest
from shoal.planner.replicas.copies import CopyingPaces
from shoal.planner.replicas.form import form
from shoal.planner.replicas.pace import Paces
from shoal.tests.planner.replicas.chains import request_in_places


def behind(up: float) -> PlanRequest:
    """A strong peer, and two weak ones that hold the model together, each behind a line."""
    request = request_in_places([0, 0, 0], [2, 0.6, 0.6], [4, 1, 1])
    network, n = request.network, len(request.offers)
    return replace(request, links=replace(network, up=np.full(n, up)))


def halved(network: Network) -> Network:
    return replace(network, up=network.up / 2)


def test_a_pipeline_is_as_slow_as_half_of_its_line_half_of_the_time() -> None:
    request = behind(1e4)
    paces = Paces(request)
    whole = paces.of([1, 2], 8)
    copying = CopyingPaces(paces, 0.5).of([1, 2], 8)
    assert whole is not None
    assert copying is not None
    slower = Paces(replace(request, links=halved(request.network)))
    half = slower.judge.with_microbatches(8).seconds(whole.candidate)
    assert half > 1.2 * whole.seconds
    # Copies take longer than the pause, so that they are on their way half of the time.
    assert copying.seconds == pytest.approx((whole.seconds + half) / 2, rel=0.02)
    assert copying.candidate == whole.candidate


def test_who_sends_nothing_in_a_step_is_held_up_by_copying_alone() -> None:
    paces = Paces(behind(1e4))
    whole = paces.of([0], 8)
    assert whole is not None
    often, seldom = (CopyingPaces(paces, pause).copying(whole).seconds for pause in (0.0, 1e9))
    assert whole.seconds < often < 1.2 * whole.seconds
    assert seldom == pytest.approx(whole.seconds)


def test_of_a_formation_less_is_promised_with_them() -> None:
    """Of two replicas, one with a pipeline behind a slow line."""
    request = behind(3e3)
    before = form(request, 2, 50, 4.0).samples_per_s
    assert form(request, 2, 50, 4.0, pause_s=0.5).samples_per_s < before
