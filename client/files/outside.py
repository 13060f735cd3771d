"""Whether a job's numbers and weights can go where it says, outside Shoal."""

from __future__ import annotations

from importlib.util import find_spec

from ...job import Job, SettingsError
from .hub import can_push

__all__ = ["check_logs", "check_outside"]


def check_outside(job: Job) -> None:
    """Raise SettingsError where the job names a log that nothing here can write, or a Hub that it
    may not push to."""
    check_logs(job)
    can_push(job)


def check_logs(job: Job) -> None:
    """Raise SettingsError where nothing here can tell those that `[log]` names."""
    if job.log.wandb is None:
        return
    if find_spec("wandb") is None:
        raise SettingsError(
            "log.wandb", "needs the package wandb, which is not here: pip install wandb"
        )
    import wandb

    settings = wandb.Settings()
    online = (job.log.wandb.mode or settings.mode) == "online"
    if online and not wandb.api.api_key:
        raise SettingsError(
            "log.wandb",
            "has no key to write with: expected `wandb login`, WANDB_API_KEY, or mode = "
            '"offline", and `wandb sync` later',
        )
