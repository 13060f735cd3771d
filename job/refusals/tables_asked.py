"""What of a job a refusal looks at."""

from __future__ import annotations

from typing import Protocol

from ..plan_options import PlanOptions
from ..sync import Sync
from ..tables import Codec, Data, Model, Output, Recovery
from ..training import Train

__all__ = ["Tables"]


class Tables(Protocol):
    """Tables of a job, and the number of replicas that its batch is divided among."""

    @property
    def model(self) -> Model: ...
    @property
    def data(self) -> Data: ...
    @property
    def train(self) -> Train: ...
    @property
    def plan(self) -> PlanOptions: ...
    @property
    def codec(self) -> Codec: ...
    @property
    def sync(self) -> Sync: ...
    @property
    def recovery(self) -> Recovery: ...
    @property
    def output(self) -> Output: ...
    @property
    def divided(self) -> int: ...
