"""The job as plain data: every key of job.toml, read strictly, with units and refusals by name."""

from .plan_options import PlanOptions
from .settings import SettingsError
from .spec import Job
from .sync import Sync
from .tables import (
    LIVE,
    MOST_MANIFEST_BYTES,
    Codec,
    Data,
    Model,
    Output,
    Recovery,
)
from .training import MOST_CHOICES, MOST_MICROBATCHES, Train, Training

__all__ = [
    "LIVE",
    "MOST_CHOICES",
    "MOST_MANIFEST_BYTES",
    "MOST_MICROBATCHES",
    "Codec",
    "Data",
    "Job",
    "Model",
    "Output",
    "PlanOptions",
    "Recovery",
    "SettingsError",
    "Sync",
    "Train",
    "Training",
]
