"""What must hold across the tables of a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...job.settings import SettingsError, meant
from .mishaps import BETWEEN, positive
from .naming import BROKER

if TYPE_CHECKING:
    from .scenario import Scenario

__all__ = ["check_faults", "check_places", "check_times"]


def check_times(scenario: Scenario) -> None:
    """Raises SettingsError for durations that cannot be."""
    positive(scenario, "limit", "time_scale")
    if scenario.time_scale != 1.0 and scenario.mode != "real":
        raise SettingsError(
            "time_scale",
            f'is {scenario.time_scale}: expected 1.0 where `mode` is "{scenario.mode}"',
        )
    for i, fault in enumerate(scenario.faults):
        if fault.at is not None and fault.at > scenario.limit:
            raise SettingsError(
                f"faults[{i}].at", f"is {fault.at}, after `limit` ({scenario.limit}): never"
            )


def check_faults(scenario: Scenario) -> None:
    """Raises SettingsError for a fault of nobody. Peers have names of their own already."""
    for i, fault in enumerate(scenario.faults):
        who = scenario.selected(fault.who, f"faults[{i}].who")
        others = scenario.selected(fault.with_, f"faults[{i}].with")
        if BROKER in who and fault.do not in BETWEEN:
            raise SettingsError(f"faults[{i}].who", f'names the broker: "{fault.do}" is for peers')
        if others and len({*who, *others}) == 1:
            raise SettingsError(
                f"faults[{i}].with", f'is "{others[0]}", as `who` is: expected another'
            )


def check_places(scenario: Scenario) -> None:
    """Raises SettingsError for an unknown place, and for no peer at all."""
    if not scenario.peers:
        raise SettingsError("peers", "is empty: expected at least one [[peers]]")
    known = dict.fromkeys(p.place for p in scenario.peers)
    for name in scenario.places:
        if name not in known and name != scenario.broker.place:
            raise SettingsError(
                f"places.{name}",
                f"describes a place where no peer is{meant(name, known)}",
            )
    allowed = {*known, *scenario.places}
    if scenario.network_set:
        allowed = {*scenario.topology().places, *scenario.places}
        for i, peer in enumerate(scenario.peers):
            if peer.place not in allowed:
                raise SettingsError(
                    f"peers[{i}].place",
                    f'is "{peer.place}", which is no place of "{scenario.network_set}" and none of '
                    f"[places]{meant(peer.place, sorted(allowed))}",
                )
    if scenario.broker.place and scenario.broker.place not in allowed:
        raise SettingsError(
            "broker.place",
            f'is "{scenario.broker.place}", where no peer is and which [places] does not name'
            f"{meant(scenario.broker.place, sorted(allowed))}",
        )
