"""Faults as sentences.

    kill("peer-3", at_step=20, phase="backward")
    cut_off(["eu"], ["us"], at_s=60, for_s=30)
    slow("a", "b", factor=10)                       # from the start, for good

Each sentence gives a `Fault`, the same record that a [[faults]] table of a scenario gives. Whom it
concerns is said by selectors (`naming.py`); one without a time happens at the start. `sim/faults/`
lets them happen.

A phase is forward (F), backward (B), clip (N: the norm over all gradients) or update (U).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...dag.plan.action import TRAITS, Action, ExchangeContent
from ...job.units import Duration
from .mishaps import FaultTable as Fault

__all__ = [
    "PHASES",
    "Fault",
    "broker_restart",
    "corrupt",
    "cut_off",
    "flap",
    "join",
    "kill",
    "leave",
    "sentence",
    "slow",
    "stop",
]

PHASES: dict[str, Callable[[Action], bool]] = {
    "forward": lambda action: TRAITS[action.kind].word == "forward",
    "backward": lambda action: TRAITS[action.kind].word == "backward",
    "weight": lambda action: TRAITS[action.kind].word == "weight",
    "clip": lambda action: action.content is ExchangeContent.NORM,
    "update": lambda action: TRAITS[action.kind].word == "update",
    "any": lambda action: True,
}
"""Which actions begin a phase."""


Who = str | Sequence[str]
"""Selectors of peers, or one."""


# -------------------------------------------------------------------- sentences


def kill(who: Who, **when: Any) -> Fault:
    """The processes of these peers are gone, without a word."""
    return _fault("kill", who, **when)


def stop(who: Who, *, for_s: float = 0.0, **when: Any) -> Fault:
    """Freeze them; they go on afterwards as if nothing had been."""
    return _fault("stop", who, for_s=for_s, **when)


def leave(who: Who, **when: Any) -> Fault:
    """Their owners press Ctrl-C."""
    return _fault("leave", who, **when)


def join(who: Who, **when: Any) -> Fault:
    """Peers that are gone, or were not there yet, come."""
    return _fault("join", who, **when)


def cut_off(
    who: Who, others: Who = (), *, for_s: float = 0.0, both: bool = True, **when: Any
) -> Fault:
    """Nothing passes between these and the others; no others: everyone else, and the broker.
    `both=False`: what the others send still comes."""
    return _fault("cut-off", who, others, for_s=for_s, both=both, **when)


def slow(
    who: Who,
    others: Who = (),
    *,
    factor: float,
    for_s: float = 0.0,
    both: bool = True,
    **when: Any,
) -> Fault:
    """What passes between them takes `factor` times as long. `both=False`: only what these send."""
    return _fault("slow", who, others, for_s=for_s, factor=factor, both=both, **when)


def flap(who: Who, others: Who = (), *, for_s: float = 0.0, **when: Any) -> Fault:
    """Break what is open between them, again and again."""
    return _fault("flap", who, others, for_s=for_s, **when)


def corrupt(who: Who, others: Who = (), **when: Any) -> Fault:
    """The next message from each of these to each of the others arrives with a byte changed."""
    return _fault("corrupt", who, others, **when)


def broker_restart(**when: Any) -> Fault:
    """The broker's process is gone, without a word, and another one begins with its journal."""
    return _fault("broker_restart", (), **when)


def _fault(
    do: str,
    who: Who,
    others: Who = (),
    *,
    at_s: float | None = None,
    for_s: float = 0.0,
    **more: Any,
) -> Fault:
    if at_s is None and more.get("at_step") is None and more.get("at_round") is None:
        at_s = 0.0
    return Fault(
        do=do,  # type: ignore[arg-type]  # checked when it is made, as everything here
        who=(who,) if isinstance(who, str) else tuple(who),
        with_=(others,) if isinstance(others, str) else tuple(others),
        at=None if at_s is None else Duration(f"{at_s!r}s"),
        for_s=Duration(f"{float(for_s)!r}s"),
        **more,
    )


def sentence(fault: Fault) -> str:
    """The fault in words, on one line: `kill peer-3 at step 20 (backward)`."""
    words = [fault.do, ", ".join(fault.who)]
    words += ["and" if fault.do in ("cut-off", "flap") else "to", ", ".join(fault.with_)][
        : 2 * bool(fault.with_)
    ]
    words += [f"{fault.factor:g} times"] * (fault.do == "slow")
    words += ["one way"] * (not fault.both)
    if fault.at is not None:
        words.append(f"at {fault.at:g} s")
    elif fault.at_round is not None:
        words.append(f"at round {fault.at_round}")
    else:
        words.append(f"at step {fault.at_step}")
        words += [f"({fault.phase})"] * (fault.phase != "any")
    words += [f"for {fault.for_s:g} s"] * (fault.for_s > 0)
    return " ".join(word for word in words if word)
