"""[train]: for how long, in which pieces and by which optimizer a model is trained."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from .plan_options import SkipScaling, steps_or_share
from .rounds import RoundSettings
from .settings import Settings, SettingsError, at_least, at_most, expect, json_object, plain
from .units import Duration

__all__ = ["LENGTHS", "MOST_CHOICES", "MOST_MICROBATCHES", "LossScale", "Stop", "Train", "Training"]

MOST_STEPS = 2**53
MOST_BATCH = 2**31
"""Samples of a step."""
MOST_CHOICES = 64
"""Microbatch sizes that the planner may choose among, beside the default."""
MOST_MICROBATCHES = 65_536
"""Of one step, and of one evaluation."""
LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**127
"""Of losses: the powers of two that float32 has among its normal numbers."""
LENGTHS = ("steps", "tokens", "passes", "rounds")
"""Keys of which exactly one says how long a run is."""


@dataclass(frozen=True, kw_only=True)
class Stop(Settings):
    """train.stop: what ends a run before its length does, whichever comes first."""

    loss: float | None = None
    """A held-out loss that is enough."""
    time: Duration | None = None
    """Since the first step could begin, pauses included."""
    no_better_for: int | None = None
    """So many evaluations in a row none of which is better than the best before."""

    def check(self) -> None:
        expect(self, "loss", self.loss is None or math.isfinite(self.loss), "a finite number")
        if self.time is not None and self.time <= 0:
            raise SettingsError("time", f"is {float(self.time):g} s: expected more than 0")
        if self.no_better_for is not None:
            at_least(self, 1, "no_better_for")

    @property
    def evaluates(self) -> bool:
        """Whether it goes by evaluations."""
        return self.loss is not None or self.no_better_for is not None

    def __bool__(self) -> bool:
        return self.evaluates or self.time is not None


@dataclass(frozen=True, kw_only=True)
class LossScale(Settings):
    """train.loss_scale: what losses are multiplied with under model.dtype = "fp16", so that small
    gradients are not lost; torch.amp.GradScaler with its factors of 2 and 0.5."""

    init_scale: float = 65536.0
    """At the first step; a power of two, so that scaling rounds nothing."""
    growth_interval: int = 2000
    """Steps in a row without an overflow behind which the scale is doubled."""

    def check(self) -> None:
        if math.frexp(self.init_scale)[0] != 0.5:  # which is also of what is not above 0
            raise SettingsError("init_scale", f"is {self.init_scale:g}: expected a power of two")
        if not LEAST_SCALE <= self.init_scale <= MOST_SCALE:
            raise SettingsError(
                "init_scale",
                f"is {self.init_scale:g}: expected {LEAST_SCALE:g} to {MOST_SCALE:g}",
            )
        at_least(self, 1, "growth_interval")


@dataclass(frozen=True, kw_only=True)
class Train(Settings):
    """[train]: how it is trained. Exactly one of steps, tokens, passes and rounds says how
    long."""

    OF_JOB: ClassVar[bool] = True

    steps: int | None = None
    """Optimizer updates."""
    tokens: int | None = None
    """Positions to train on, rounded up to whole steps."""
    passes: int | None = None
    """Passes over the training part of the data, rounded up to whole steps."""
    rounds: int | None = None
    """Of sync.kind = "federated": its rounds, each of which is one step of the run."""
    batch: int = 32
    """Samples of one step, over all microbatches."""
    microbatch: int | Literal["auto"] = "auto"
    """Samples of one microbatch, a divisor of batch. "auto": the planner chooses among
    `microbatch_choices`; its default is the largest divisor up to 8 that leaves at least 4
    microbatches (1 if none does), which is also what a model gets whose loss depends on how a batch
    is divided."""
    optimizer: Literal["adamw", "sgd", "muon", "adafactor", "lion", "adamw8bit"] = "adamw"
    """AdamW, SGD with momentum, or Muon for hidden matrices (`no_muon`) and AdamW for the rest, or
    Adafactor, all as torch has them; Lion (2302.06675, algorithm 2); or torch's AdamW with moments
    in 8 bits (2110.02861)."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment; Lion's two (its paper has 0.9 and 0.99)."""
    eps: float = 1e-8
    """AdamW's addend to the root of the second moment."""
    momentum: float = 0.9
    """SGD's, and Muon's (torch's own default for which is 0.95)."""
    no_muon: tuple[str, ...] | Literal["auto"] = "auto"
    """Globs of names of matrices that are none of Muon's. "auto": those that are not hidden, which
    a submitter finds (dag/analysis/hidden_matrices.py)."""
    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """What the optimizer's moments are kept in between two steps."""
    weight_decay: float = 0.1
    """Added to the gradient for SGD, decoupled for all others, as torch.optim does."""
    no_decay: tuple[str, ...] = ("*.bias", "*norm*")
    """Globs of parameter names without weight decay."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after the warm-up. wsd: constant, then linear over the last fifth."""
    warmup: int | str = "3%"
    """Steps of linear warm-up, or a share of all steps such as "3%"."""
    lr_final: float = 0.1
    """Learning rate at the end, times lr."""
    clip: float = 1.0
    """Largest global 2-norm of the gradient; 0: off."""
    eval_every: int = 100
    """Steps between evaluations on held-out data; 0: none."""
    eval_batches: int = 8
    """Held-out batches (of `batch` samples) in one evaluation; 0: none."""
    ema: float = 0.0
    """Decay of the exponential mean of weights that is evaluated and exported; 0: the weights."""
    loss_scale: LossScale = field(default_factory=LossScale)
    """With model.dtype = "fp16"."""
    stop: Stop = field(default_factory=Stop)
    """What ends it before its length does."""

    def check(self) -> None:
        given = [k for k in LENGTHS if getattr(self, k) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise SettingsError(
                given[1] if given else "",
                f"wants exactly one of {', '.join(LENGTHS)}; got {got}",
            )
        at_least(self, 1, given[0], "batch")
        at_most(self, MOST_STEPS, given[0])
        at_most(self, MOST_BATCH, "batch")
        at_least(self, 0, "lr", "eps", "momentum", "weight_decay", "lr_final", "clip")
        at_least(self, 0, "eval_every", "eval_batches")
        expect(self, "ema", 0.0 <= self.ema < 1.0, "a number in [0, 1)")
        for i, beta in enumerate(self.betas):
            if not 0.0 <= beta < 1.0:
                raise SettingsError(f"betas[{i}]", f"is {beta}: expected a number in [0, 1)")
        if self.whole and self.state_dtype != "fp32":
            raise SettingsError(
                "state_dtype",
                f'is "{self.state_dtype}" with optimizer = "{self.optimizer}", whose state is '
                'rounded for AdamW, SGD and Lion alone: expected "fp32"',
            )
        if self.stop.evaluates and not self.evaluated_batches:
            raise SettingsError(
                "stop",
                "goes by held-out losses, and the run has no evaluations: expected `eval_every` "
                "and `eval_batches` above 0, or `time` alone",
            )
        if self.microbatch != "auto":
            at_least(self, 1, "microbatch")
            if self.batch % self.microbatch:
                near = max(d for d in _divisors(self.batch) if d <= self.microbatch)
                raise SettingsError(
                    "microbatch",
                    f"is {self.microbatch}, and batch = {self.batch} is not divisible by it "
                    f"(remainder {self.batch % self.microbatch}): take e.g. {near}",
                )
        steps_or_share(self, "warmup", 1)

    def lasting(self, steps: int) -> Train:
        """Return the same for so many steps, whatever its length was given as."""
        lengths: dict[str, Any] = {**dict.fromkeys(LENGTHS), "steps": steps}
        return replace(self, **lengths)

    @property
    def known_steps(self) -> int | None:
        """Steps as far as they are known without the data."""
        return self.steps or self.rounds

    @property
    def whole(self) -> bool:
        """Whether a number's update follows from others of its parameter, so that no parameter may
        be cut into parts that are updated apart."""
        return self.optimizer in ("muon", "adafactor") or self.in_8_bits

    @property
    def in_8_bits(self) -> bool:
        """Whether moments of all but small parameters are in 8 bits, in blocks with a scale
        each."""
        return self.optimizer == "adamw8bit"

    @property
    def optimizer_slots(self) -> int:
        """Numbers that the optimizer keeps of each trained one, at most: Muon has one of a
        matrix and AdamW two of the rest; Adafactor one of a vector, and of a matrix its rows and
        columns."""
        if self.optimizer == "sgd":
            return int(self.momentum > 0)
        return 2 if self.optimizer in ("adamw", "adamw8bit", "muon") else 1

    @property
    def state_bytes(self) -> int:
        """Bytes that the optimizer keeps of each trained number of at most 32 bits, the mean of
        weights among them; of moments in 8 bits without what is beside them (`MemoryModel`)."""
        each = 1 if self.in_8_bits else 2 if self.state_dtype == "bf16" else 4
        return self.optimizer_slots * each + 4 * (self.ema > 0)

    @property
    def microbatch_size(self) -> int:
        """Samples of one microbatch; for "auto" the default."""
        if self.microbatch != "auto":
            return self.microbatch
        return max((d for d in _divisors(self.batch) if d <= 8 and self.batch // d >= 4), default=1)

    @property
    def microbatch_choices(self) -> tuple[int, ...]:
        """What the planner may take instead of microbatch_size, ascending: for "auto" the other
        divisors of batch, at most MOST_CHOICES of them, evenly from the smallest to the largest."""
        if self.microbatch != "auto":
            return ()
        most, default = MOST_MICROBATCHES // max(1, self.evaluated_batches), self.microbatch_size
        found = [d for d in _divisors(self.batch) if d != default and self.batch // d <= most]
        if len(found) <= MOST_CHOICES:
            return tuple(found)
        return tuple(found[i * (len(found) - 1) // (MOST_CHOICES - 1)] for i in range(MOST_CHOICES))

    @property
    def microbatches(self) -> int:
        """Microbatches of one step, of microbatch_size each."""
        return self.batch // self.microbatch_size

    @property
    def evaluation_microbatches(self) -> int:
        """Held-out microbatches of one evaluation; 0: the run has no evaluation."""
        return self.evaluated_batches * self.microbatches

    @property
    def evaluated_batches(self) -> int:
        """Held-out batches of one evaluation; 0: the run has no evaluation."""
        return self.eval_batches if self.eval_every else 0

    @property
    def warmup_steps(self) -> int:
        """Steps of warm-up. Needs `steps` (see Job.resolved)."""
        return steps_or_share(self, "warmup", self._resolved_steps)

    @property
    def _resolved_steps(self) -> int:
        assert self.steps is not None, "call Job.resolved first: the number of steps is not known"
        return self.steps


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """What a peer needs of a job: the `training` of an assignment, as JSON. How a batch is divided
    into microbatches is the plan's to say."""

    seed: int
    """Of masks and of the choice of samples."""
    train: Train
    """With `steps` known."""
    rebuilds: bool = False
    """Whether a lost stage may be made anew from its neighbours, for which the norms of gradients
    are kept."""
    rounds: RoundSettings | None = None
    """What replicas exchange between their steps; None: a run has one, or all step together."""
    skip_scaling: SkipScaling = "renormalise"
    """What is done about microbatches that leave a stage out (`PlanOptions`)."""
    scales_loss: bool = False
    """Whether losses are scaled, as `train.loss_scale` says."""

    @property
    def batch(self) -> int:
        """Samples of one step of one replica."""
        return self.train.batch // (self.rounds.replicas if self.rounds else 1)

    def to_json(self) -> str:
        return json.dumps(plain(self))

    @classmethod
    def from_json(cls, text: str) -> Training:
        """Read the table from JSON; raises SettingsError."""
        return cls.from_table(json_object(text))


def _divisors(n: int) -> list[int]:
    """Return the divisors in ascending order."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
