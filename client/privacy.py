"""How much noise hides clients of a federated run, and how much of the budget is spent, by Google's
dp-accounting.

A noisy sum is one Gaussian mechanism: whether a client moves what it does or nothing, the sum
differs by `clip` at most, and its noise has a standard deviation of noise times clip. All sums of a
run are put together exactly. Nothing is taken off for clients that were not asked in a round: who
is asked follows from a seed that all know, and from who is there.

Noise that peers add in shares is a sum of discrete Gaussians. Of that the exact composition of one
Gaussian is not known to hold, but that it has concentrated privacy of rho = 1 / (2 noise^2) is
(Kairouz, Liu, Steinke 2021, 2102.06387, theorem 1), and rho of all sums is put together. So it
takes a little more noise for the same budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..dag.ir.graph import Graph
from ..job import Job, SettingsError
from ..job.clients.client_privacy import ClientPrivacy, no_integers

__all__ = [
    "check_hides",
    "check_moves",
    "check_sums",
    "least_in_shares",
    "least_noise",
    "spent_epsilon",
    "with_noise",
]

_MARGIN = 1.0 + 1e-9
"""Of noise that a search found, whose last digits may be too small."""
_LEAST_EPSILON = 1e-6
"""Below it accountants have no digits left to tell what is spent from nothing, or find no end."""
_ORDERS = [1.0 + 0.011 * 1.02**i for i in range(800)]
"""Of Rényi divergences that the accountant of shares tries: 1.011 to 83,000."""


def check_hides(graph: Graph, privacy: ClientPrivacy) -> None:
    """Raises SettingsError for a model of which more than gradients moves, without noise, and for
    one that has too many numbers for the grid of the noise."""
    privacy.shortened(sum(p.spec.elements for p in graph.parameters if p.trainable))
    why = "that no noise can be added to"
    _check_steady(graph, "sync.privacy", "hides what clients move", why)


def check_moves(graph: Graph, method: str) -> None:
    """Raises SettingsError for a model of which more than gradients moves, where clients of one
    version began with several."""
    why = "of which nothing says what they are over clients that began with different versions"
    _check_steady(graph, "sync.method", f'is "{method}"', why)


def _check_steady(graph: Graph, key: str, what: str, why: str) -> None:
    updated = next((b.name for b in graph.buffers if b.update), "")
    if updated:
        raise SettingsError(
            key,
            f"{what}, and training changes {updated!r}, running statistics {why}: expected a "
            "model without them, such as with GroupNorm in place of BatchNorm",
        )


def check_sums(graph: Graph) -> None:
    """Raises SettingsError for a model of which a round makes more than sums, with masks."""
    integer = next((b.name for b in graph.buffers if b.update and not b.spec.is_floating), "")
    if integer:
        raise SettingsError("sync.secure", no_integers(integer))


def least_noise(epsilon: float, delta: float, sums: int) -> float:
    """Return the least standard deviation of noise, by clip, with which so many noisy sums together
    are (epsilon, delta) differentially private. Raises SettingsError where dp-accounting is not
    there."""
    common, accountant, _ = _library()
    budget = common.DifferentialPrivacyParameters(epsilon, delta)
    found: float = accountant.get_smallest_gaussian_noise(budget, sums, 1.0)
    return found * _MARGIN


def least_in_shares(epsilon: float, delta: float, sums: int) -> float:
    """As `least_noise`, of noise that is a sum of discrete Gaussians; rounded up to a part in a
    million."""
    return _least(lambda noise: _epsilon_in_shares(noise, delta, sums) <= epsilon)


def _least(is_enough: Callable[[float], bool]) -> float:
    """Return the least positive number that is enough, as all above it are, rounded up to a part in
    a million."""
    low, high = 0.0, 1.0
    while not is_enough(high):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _epsilon_in_shares(noise: float, delta: float, sums: int) -> float:
    """Return what so many sums come to, whose noise is a sum of discrete Gaussians."""
    events, accountants = _concentrated()
    accountant = accountants.RdpAccountant(_ORDERS)
    found: float = accountant.compose(events.ZCDpEvent(0.5 / noise**2), sums).get_epsilon(delta)
    return found


def spent_epsilon(privacy: ClientPrivacy, sums: int) -> float:
    """Return the epsilon that so many noisy sums have come to, at the delta of `privacy`, rounded
    up to a part in a million. Raises SettingsError where dp-accounting is not there."""
    if not sums:
        return 0.0
    if privacy.distributed:
        return _epsilon_in_shares(privacy.noise, privacy.delta, sums)
    _, _, mechanism = _library()
    loss = mechanism.GaussianPrivacyLoss(privacy.noise / math.sqrt(sums))
    return _least(lambda epsilon: loss.get_delta_for_epsilon(epsilon) <= privacy.delta)


def with_noise(job: Job) -> Job:
    """Return the job with the noise that its rounds need to hide clients; as it is where it hides
    none. Raises SettingsError for noise of the job's own that is too little, or more than rounds
    can have."""
    privacy = job.sync.privacy
    if privacy is None:
        return job
    assert job.train.steps is not None, "the job is resolved"
    if privacy.epsilon < _LEAST_EPSILON:
        raise SettingsError(
            "sync.privacy.epsilon",
            f"is {privacy.epsilon:g}: expected {_LEAST_EPSILON:g} or more, since what is spent of "
            "less cannot be told from nothing",
        )
    least_of = least_in_shares if privacy.distributed else least_noise
    least = least_of(privacy.epsilon, privacy.delta, privacy.sums(job.train.steps))
    if 0 < privacy.noise < least:
        raise SettingsError(
            "sync.privacy.noise",
            f"is {privacy.noise:g}: expected {least:g} or more for epsilon = {privacy.epsilon:g}, "
            f"delta = {privacy.delta:g} and {job.train.steps} rounds, or 0, which finds that",
        )
    made = replace(privacy, noise=privacy.noise or least)
    found = replace(job, sync=replace(job.sync, privacy=made))
    try:
        _ = found.rounds
    except SettingsError as error:
        raise error.inside("sync") from None
    return found


def _library() -> tuple[Any, Any, Any]:
    """Modules of dp-accounting for Gaussian noise."""
    try:
        from dp_accounting.pld import accountant, common, privacy_loss_mechanism
    except ImportError as error:
        raise _without(error) from None
    return common, accountant, privacy_loss_mechanism


def _concentrated() -> tuple[Any, Any]:
    """Modules of dp-accounting for concentrated privacy."""
    try:
        from dp_accounting import dp_event
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError as error:
        raise _without(error) from None
    return dp_event, rdp_privacy_accountant


def _without(error: ImportError) -> SettingsError:
    return SettingsError(
        "sync.privacy",
        f"needs dp-accounting to find how much noise that is ({error}): pip install "
        "'shoal[privacy]'",
    )
