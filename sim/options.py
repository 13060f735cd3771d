"""What `shoal sim` was asked for, and what it then runs."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Literal

from ..job import Job
from ..job.settings import SettingsError, plain
from .named_files import mark_of
from .scenario.catalogue import DEFAULT, find
from .scenario.mishaps import Expectations
from .scenario.scenario import Scenario

__all__ = ["Setting", "SimOptions", "WorldName"]

BUILTIN = Path(__file__).parent / "builtin.toml"
LOOPBACK_PEERS = 4
COMPARE_S = 60.0
"""For `compare_s` of a simulation that nobody asked anything particular of: it ends within 90 s."""

WorldName = Literal["real", "virtual", "ghost"]


@dataclass(frozen=True, kw_only=True)
class SimOptions:
    """The flags of `shoal sim`."""

    scenario: str = ""
    """A file, or a name of the catalogue. Empty: the built-in WAN; with `peers` or `job` equal
    peers on loopback, nothing between them."""
    world: WorldName | None = None
    """None: the scenario's."""
    peers: int | None = None
    """How many, on loopback. None: LOOPBACK_PEERS; with a scenario it has to be."""
    steps: int | None = None
    """Steps instead of the job's."""
    seed: int | None = None
    """Instead of the scenario's and the job's."""
    job: Path | None = None
    """None: the scenario's, or the built-in job."""
    changes: tuple[str, ...] = ()
    """Keys of the job that are changed, each KEY=VALUE."""
    json: Path | None = None
    report: Path | None = None
    """Folder of page, pictures, events.jsonl and summary.json."""
    verify: bool = False
    baselines: int | None = None
    """Clients of a federated run, at most, that are also trained alone, beside one model of all
    samples; None: nothing is."""
    compare: bool = False
    """Measure what the plan is compared with, too: real processes over shaped links only."""
    compare_s: float = float("inf")
    """No comparison begins later than so many seconds after the start."""
    secure: bool = False
    """Real processes with identities and mutual TLS, as over the internet."""
    keep: Path | None = None
    """Where logs, state and outputs stay; None: in a temporary folder that is removed."""
    quiet: bool = False
    by_itself: bool = False
    """Whether scenario and comparisons are those that nobody had to ask for."""

    def completed(self) -> SimOptions:
        """With the built-in scenario where nothing else was asked for; its comparisons are
        measured then."""
        if self.scenario or self.peers is not None or self.job is not None:
            return self
        if self.compare:
            return replace(self, scenario=DEFAULT)
        real = self.world in (None, "real")
        return replace(self, scenario=DEFAULT, compare=real, compare_s=COMPARE_S, by_itself=True)

    def again(self) -> str:
        """The command that does the same again. Where files go is not part of it."""
        words = ["shoal", "sim"]
        words += [self.scenario] if self.scenario and not self.by_itself else []
        words += [f"--{self.world}"] if self.world else []
        for flag in ("job", "peers", "steps", "seed"):
            if (value := getattr(self, flag)) is not None:
                words += [f"--{flag}", str(value)]
        words += [word for change in self.changes for word in ("--set", change)]
        words += ["--verify"] if self.verify else []
        words += [] if self.baselines is None else ["--baselines", str(self.baselines)]
        words += ["--compare"] if self.compare and not self.by_itself else []
        return shlex.join(words)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A job and where it runs."""

    job: Job
    scenario: Scenario | None
    """None: equal peers on loopback."""
    world: WorldName
    peers: int
    seed: int

    @property
    def name(self) -> str:
        return self.scenario.name if self.scenario is not None else self.job.name

    def digest(self) -> str:
        """Return the SHA-256 of all that the files and flags say, and of what lies in the files
        that the job names (`mark_of`)."""
        scenario = None if self.scenario is None else plain(self.scenario)
        said = [plain(self.job), scenario, self.world, self.peers, self.seed, mark_of(self.job)]
        return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    @classmethod
    def of(cls, options: SimOptions) -> Setting:
        """Reads the files. Raises ValueError for what is wrong in them or does not go together,
        OSError for one that cannot be read."""
        if not options.scenario:
            cls._check_compares(options, shaped=False)
            if options.baselines is not None:
                raise SettingsError("", "--baselines needs a scenario with a federated job")
            return cls._on_loopback(options)
        if options.peers is not None:
            raise SettingsError(
                "", f"--peers {options.peers} says how many peers there are, and a scenario says it"
            )
        scenario = Scenario.from_toml(find(options.scenario), options.job)
        world = options.world or scenario.mode
        cls._check_compares(options, shaped=world == "real")
        changed: dict[str, object] = {"mode": world}
        if options.seed is not None:
            changed["seed"] = options.seed
        if world != "real" and scenario.mode == "real":
            changed["time_scale"] = 1.0  # slows what is real only
        job = scenario.adjusted(Job.from_toml(scenario.job_path))
        asked, whole = options.steps, job.train.known_steps
        if asked is not None and (whole is None or asked < whole):
            changed["expect"] = replace(scenario.expect, loss_below=None)  # of the whole length
        own, job = job, _changed(job, options)
        if options.changes and job != _changed(own, replace(options, changes=())):
            changed["expect"] = Expectations()  # of another job
        scenario = replace(scenario, **changed)  # type: ignore[arg-type]
        if options.baselines is not None:
            _check_baselines(job, ghost=world == "ghost")
        return cls(
            job=job,
            scenario=scenario,
            world=world,
            peers=len(scenario.peers),
            seed=scenario.seed,
        )

    @staticmethod
    def _check_compares(options: SimOptions, *, shaped: bool) -> None:
        if options.compare and not shaped:
            raise SettingsError(
                "",
                "--compare measures real processes over shaped links: expected a scenario, without "
                "--virtual or --ghost (all others show what is predicted)",
            )

    @classmethod
    def _on_loopback(cls, options: SimOptions) -> Setting:
        if options.world not in (None, "real"):
            raise SettingsError(
                "",
                f"--{options.world} needs a scenario that says what is between the peers: "
                "expected a file or a name of `shoal sim --list`",
            )
        job = _changed(Job.from_toml(options.job or BUILTIN), options)
        peers = LOOPBACK_PEERS if options.peers is None else options.peers
        if options.job is None:
            # One peer alone would be the best plan for a model this small; it is to be shared.
            job = replace(job, plan=replace(job.plan, stages=peers, pipelines=1))
        return cls(job=job, scenario=None, world="real", peers=peers, seed=job.seed)


def _changed(job: Job, options: SimOptions) -> Job:
    if options.steps is not None:
        job = replace(job, train=job.train.lasting(options.steps))
    if options.changes:
        job = job.with_changes(options.changes)
    return job if options.seed is None else replace(job, seed=options.seed)


def _check_baselines(job: Job, *, ghost: bool) -> None:
    """Raises SettingsError for a job, or a world, that has none."""
    why = ""
    partition = job.data.partition
    if job.sync.kind != "federated":
        why = f'sync.kind is "{job.sync.kind}": expected "federated"'
    elif partition is None:
        why = 'data.where is "peer", and nobody else may read the samples'
    elif not partition.held_out:
        why = "clients hold no samples out: expected data.partition.held_out above 0"
    elif ghost:
        why = "ghosts have no tensors: expected --virtual"
    if why:
        raise SettingsError("", f"--baselines: {why}")
