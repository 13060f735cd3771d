"""What is known of the clients in a version, for the submitter's rule of who is in a round to come.
Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ...dag.rounds.cohorts import places_of
from ...proto.broker_pb2 import ClientReports
from .round_view import RoundView
from .uploads import Update

__all__ = ["client_reports"]


def client_reports(
    view: RoundView,
    numbers: Sequence[int],
    clients: Callable[[Sequence[int]], Sequence[int]],
    update: Update,
    *,
    told: bool,
) -> ClientReports:
    """Return that of the clients that these replicas have. `clients`: by places of the round, their
    numbers. `update`: what each moves. `told`: whether peers may tell what single clients come
    to."""
    found = ClientReports()
    for n in numbers:
        work = view.rounds.work.given[n]
        places = places_of(work.cohort)
        losses, seconds = _said(view, n, len(places)) if told else _nothing(len(places))
        kept = np.array(work.kept or [update.elements] * len(places), np.int64)
        found.clients.extend(clients(places))
        found.losses.extend(losses)
        found.seconds.extend([seconds] * len(places))
        found.bytes.extend(update.bytes(kept).tolist())
    return found


def _said(view: RoundView, number: int, clients: int) -> tuple[Sequence[float], float]:
    """Return what a replica says of so many clients: the loss of each, and for how long all of them
    trained; NaN where it says nothing that could be so."""
    for said in view.made.get(number, {}).values():
        if len(said.losses) == clients:
            seconds = said.local_s if 0 <= said.local_s < math.inf else math.nan
            return [x if math.isfinite(x) else math.nan for x in said.losses], seconds
    return _nothing(clients)


def _nothing(clients: int) -> tuple[Sequence[float], float]:
    return [math.nan] * clients, math.nan
