"""The strategies inside a step, by the names that plans have."""

from __future__ import annotations

from collections.abc import Mapping

from .ahead import StepAheadEF
from .demo import DeMo
from .dgc import DGC
from .gtopk import GTopK
from .lags import LAGS
from .low_rank import ACPSGD, PowerSGD
from .strategy import Strategy

__all__ = ["STRATEGIES"]

STRATEGIES: Mapping[str, type[Strategy]] = {
    "mean": Strategy,
    "ahead": StepAheadEF,
    "dgc": DGC,
    "demo": DeMo,
    "gtopk": GTopK,
    "lags": LAGS,
    "powersgd": PowerSGD,
    "acp-sgd": ACPSGD,
}
