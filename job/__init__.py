"""The job as plain data: every key of job.toml, read strictly, with units and refusals by name."""

from .settings import SettingsError
from .spec import Job
from .tables import (
    LIVE,
    MOST_MANIFEST_BYTES,
    Codec,
    Data,
    Federated,
    Model,
    Outer,
    Output,
    Partition,
    PlanOptions,
    Recovery,
    Sync,
)
from .training import MOST_CHOICES, MOST_MICROBATCHES, Stop, Train, Training

__all__ = [
    "LIVE",
    "MOST_CHOICES",
    "MOST_MANIFEST_BYTES",
    "MOST_MICROBATCHES",
    "Codec",
    "Data",
    "Federated",
    "Job",
    "Model",
    "Outer",
    "Output",
    "Partition",
    "PlanOptions",
    "Recovery",
    "SettingsError",
    "Stop",
    "Sync",
    "Train",
    "Training",
]
