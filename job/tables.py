"""The tables of job.toml as frozen dataclasses, key by key; `job.py` puts them together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .settings import Settings, SettingsError, plain
from .units import Duration

__all__ = [
    "CODEC_ROLES",
    "LIVE",
    "MOST_CHOICES",
    "MOST_MICROBATCHES",
    "Codec",
    "Data",
    "Federated",
    "Model",
    "Outer",
    "Output",
    "Partition",
    "PlanOptions",
    "Recovery",
    "Stop",
    "Sync",
    "Train",
    "Training",
    "json_object",
]

LIVE = "live:"
"""Start of the factory that stands for a live module; it names the module's class, for people."""

CODEC_ROLES = ("activation", "activation_grad", "grad", "sync", "snapshot")
"""Keys of [codec] that fall back to its default."""
_CODEC = re.compile(r"[a-z]\w*(\+[a-z]\w*)*(/\d+)?(:[a-z]\w*=[\w.+-]+(,[a-z]\w*=[\w.+-]+)*)?", re.A)

MOST_STEPS = 2**53
MOST_BATCH = 2**31
"""Samples of a step."""
MOST_CHOICES = 64
"""Microbatch sizes that the planner may choose among, beside the default."""
MOST_MICROBATCHES = 65_536
"""Of one step, and of one evaluation."""


@dataclass(frozen=True, kw_only=True)
class Model(Settings):
    """[model]: what is trained."""

    factory: str
    """ "pkg.mod:fn", "file.py:fn" (looked up in the job's folder first) or "hf:DIR"."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    weights: str = "init"
    """Starting weights: "init" (what the factory gives) or the path of a safetensors file."""
    loss: str = "forward"
    """Who computes the loss: "forward" (the module's own), or "pkg:fn" with fn(output, batch),
    where batch has the tensors of a microbatch by name."""
    freeze: tuple[str, ...] = ()
    """Globs of parameter names that get no gradient and no optimizer state."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of the operators that autocast covers; weights stay fp32."""
    sidecars: tuple[str, ...] = ()
    """Files kept beside exported weights; empty: for "hf:" models their config and tokenizer."""

    def check(self) -> None:
        if not self.factory.startswith((LIVE, "hf:")) and ":" not in self.factory:
            raise SettingsError(
                "factory",
                f'is "{self.factory}": expected "pkg.mod:fn", "file.py:fn" or "hf:DIR"',
            )


@dataclass(frozen=True, kw_only=True)
class Partition(Settings):
    """data.partition: how a federated run splits data over its clients."""

    kind: Literal["iid", "dirichlet", "by-peer"] = "by-peer"
    """Who gets which samples."""
    alpha: float = 0.1
    """Concentration of the Dirichlet split; smaller is more uneven."""
    clients: int = 0
    """Number of clients; 0: one per peer."""


@dataclass(frozen=True, kw_only=True)
class Data(Settings):
    """[data]: what it is trained on."""

    kind: Literal["text", "tokens", "arrays", "module"] = "text"
    """Bytes of files, token ids, or named arrays (npz, safetensors)."""
    source: str = ""
    """Path, glob or URL; empty: the sources of Python's standard library."""
    holdout: float = 0.05
    """Share of the samples that is never trained on, in [0, 1)."""
    where: Literal["url", "submitter", "broker", "peer"] = "submitter"
    """Where the data lies when the run is submitted."""
    keep_local: Literal["none", "inputs", "labels"] = "none"
    """What never leaves the peer that owns it."""
    tokenizer: str = "bytes"
    """ "bytes" or the path of a tokenizer."""
    length: int = 128
    """Positions in one sample of text or tokens."""
    inputs: str = "x"
    """Argument of the model's forward that takes the inputs."""
    targets: str = "y"
    """Argument of the model's forward that takes the targets."""
    partition: Partition = field(default_factory=Partition)
    """Federated runs only."""

    def check(self) -> None:
        if not 0.0 <= self.holdout < 1.0:
            raise SettingsError("holdout", f"is {self.holdout}: expected a share in [0, 1)")
        _at_least(self, 1, "length")
        if self.where == "peer" and not self.source:
            raise SettingsError(
                "source", 'is empty: with where = "peer" it is the name of a data set of a peer'
            )
        if self.where != "peer" and self.keep_local != "none":
            raise SettingsError(
                "keep_local",
                f'is "{self.keep_local}" with where = "{self.where}": only data of a peer can stay '
                'there (where = "peer")',
            )
        if self.inputs == self.targets:
            raise SettingsError(
                "targets", f'is "{self.targets}" as inputs is: expected another name'
            )


@dataclass(frozen=True, kw_only=True)
class Stop(Settings):
    """train.stop: end before the last step."""

    loss: float | None = None
    """Held-out loss at which the run ends; None: never."""
    time: Duration | None = None
    """Time after which the run ends; None: never."""


@dataclass(frozen=True, kw_only=True)
class Train(Settings):
    """[train]: how it is trained. Exactly one of steps, tokens and passes says how long."""

    steps: int | None = None
    """Optimizer updates."""
    tokens: int | None = None
    """Positions to train on, rounded up to whole steps."""
    passes: int | None = None
    """Passes over the training part of the data, rounded up to whole steps."""
    batch: int = 32
    """Samples of one step, over all microbatches."""
    microbatch: int | Literal["auto"] = "auto"
    """Samples of one microbatch, a divisor of batch. "auto": the planner chooses among
    `microbatch_choices`; its default is the largest divisor up to 8 that leaves at least 4
    microbatches (1 if none does), which is also what a model gets whose loss depends on how a batch
    is divided."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum."""
    lr: float = 3e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay of the first and second moment."""
    eps: float = 1e-8
    """AdamW's addend to the root of the second moment."""
    momentum: float = 0.9
    """SGD's."""
    weight_decay: float = 0.1
    """Decoupled for AdamW, added to the gradient for SGD, as torch.optim does."""
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
    stop: Stop = field(default_factory=Stop)
    """End early."""

    def check(self) -> None:
        lengths = {k: getattr(self, k) for k in ("steps", "tokens", "passes")}
        given = [k for k, v in lengths.items() if v is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none of them"
            raise SettingsError(
                given[1] if given else "",
                f"wants exactly one of steps, tokens, passes; got {got}",
            )
        _at_least(self, 1, given[0], "batch")
        _at_most(self, MOST_STEPS, given[0])
        _at_most(self, MOST_BATCH, "batch")
        _at_least(self, 0, "lr", "eps", "momentum", "weight_decay", "lr_final", "clip")
        _at_least(self, 0, "eval_every", "eval_batches")
        for i, beta in enumerate(self.betas):
            if not 0.0 <= beta < 1.0:
                raise SettingsError(f"betas[{i}]", f"is {beta}: expected a number in [0, 1)")
        if self.microbatch != "auto":
            _at_least(self, 1, "microbatch")
            if self.batch % self.microbatch:
                near = max(d for d in _divisors(self.batch) if d <= self.microbatch)
                raise SettingsError(
                    "microbatch",
                    f"is {self.microbatch}, and batch = {self.batch} is not divisible by it "
                    f"(remainder {self.batch % self.microbatch}): take e.g. {near}",
                )
        self._warmup(1)

    @property
    def optimizer_slots(self) -> int:
        """Tensors that the optimizer keeps of each parameter."""
        return 2 if self.optimizer == "adamw" else int(self.momentum > 0)

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
        return self._warmup(self._resolved_steps)

    @property
    def _resolved_steps(self) -> int:
        assert self.steps is not None, "call Job.resolved first: the number of steps is not known"
        return self.steps

    def _warmup(self, steps: int) -> int:
        if isinstance(self.warmup, int):
            _at_least(self, 0, "warmup")
            return self.warmup
        try:
            share = float(self.warmup.removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not self.warmup.endswith("%") or not 0.0 <= share <= 1.0:
            raise SettingsError(
                "warmup", f'is "{self.warmup}": expected a number of steps, or a share such as "3%"'
            )
        return round(share * steps)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Settings):
    """[plan]: what the scheduler may do."""

    scheduler: Literal["auto", "uniform", "equal-compute", "op-fence", "exact"] = "auto"
    """Which planner decides."""
    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zero-bubble"] = "auto"
    """Order of forward and backward; "auto": the planner chooses."""
    stages: int | Literal["auto"] = "auto"
    """Number of stages; "auto": the planner chooses."""
    pipelines: int | Literal["auto"] = "auto"
    """Number of disjoint pipelines (data parallelism); "auto": the planner chooses."""
    peers: tuple[str, ...] = ("*",)
    """Selectors of peers that may take part."""
    exclude: tuple[str, ...] = ()
    """Selectors of peers that may not."""
    pin: Mapping[str, str] = field(default_factory=dict)
    """Module glob = selector: where these modules must be."""
    recompute: bool | Literal["auto"] = "auto"
    """Whether activations are computed again in the backward pass to save memory; "auto": the
    planner chooses, stage by stage."""
    replan: bool = True
    """Whether the plan may change during the run."""
    skip: float = 0.0
    """Share of visits that routes may leave out."""
    swap: int = 0
    """How many stages routes may swap."""

    def check(self) -> None:
        for key in ("stages", "pipelines"):
            if getattr(self, key) != "auto":
                _at_least(self, 1, key)


@dataclass(frozen=True, kw_only=True)
class Codec(Settings):
    """[codec]: how tensors are compressed on links.

    Of each role "none", "lossless", "adatopk" (ratios by how slow a link is), "auto" (what the
    planner finds to shorten the step within error_budget), or a codec's text for all links, such as
    "bf16", "int8:block=128" or "topk:ratio=50".
    """

    default: str = "none"
    """Codec of every role without its own."""
    activation: str | None = None
    """Of forward values; None: default."""
    activation_grad: str | None = None
    """Of their gradients; None: default."""
    grad: str | None = None
    """Of parameter gradients; None: default."""
    sync: str | None = None
    """Of what synchronisation exchanges; None: default."""
    snapshot: str | None = None
    """Of snapshots, "none" or "lossless"; None: "lossless" unless the default is "none"."""
    ratio: float = 100.0
    """How many times fewer bytes "adatopk" sends on the slowest link, at least 1."""
    error_budget: float = 0.0
    """Relative L2 error that "auto" may make in a tensor that crosses a link; 0: none at all."""
    feedback: Literal["none", "ef", "ahead", "ef21", "dgc"] = "ef"
    """Error feedback of grad and sync codecs; lossless ones have no error to feed back. "ahead":
    of updates in place of gradients, each holder training where its unsent ones would bring it."""

    def check(self) -> None:
        for key in ("default", *CODEC_ROLES):
            text = getattr(self, key)
            if text is not None and not _CODEC.fullmatch(text):
                raise SettingsError(
                    key,
                    f'is "{text}": expected "none", "lossless", "adatopk", "auto" or the text of a '
                    'codec such as "bf16", "int8:block=128", "ef+topk:ratio=50"',
                )
        _at_least(self, 1, "ratio")
        _at_least(self, 0, "error_budget")

    @property
    def snapshots(self) -> Literal["none", "lossless"]:
        """How snapshots are written. They are exact, whatever other tensors lose on their way:
        where those are compressed at all, snapshots are losslessly."""
        return "none" if self.of("snapshot") == "none" else "lossless"

    def of(self, role: str) -> str:
        """What is asked for one of CODEC_ROLES."""
        own: str | None = getattr(self, role)
        return self.default if own is None else own


@dataclass(frozen=True, kw_only=True)
class Outer(Settings):
    """sync.outer: what happens at the end of a round of local steps."""

    kind: Literal["average", "nesterov"] = "average"
    """How the averaged difference is applied."""
    lr: float = 1.0
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum (nesterov)."""


@dataclass(frozen=True, kw_only=True)
class Federated(Settings):
    """sync.federated: rounds with sampled clients and an aggregator."""

    method: str = "fedavg"
    """Name of the method."""
    per_round: float = 1.0
    """Share of the clients in one round."""
    local_passes: int = 1
    """Passes of a client over its data in one round."""
    aggregate: str = "mean"
    """How updates are combined."""
    deadline: Duration | Literal["auto"] = "auto"
    """How long a round waits for a client."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method."""


@dataclass(frozen=True, kw_only=True)
class Sync(Settings):
    """[sync]: what the holders of one stage exchange, and when."""

    kind: Literal["allreduce", "local", "gossip", "federated"] = "allreduce"
    """allreduce: the mean gradient, exactly, before every update."""
    every: int = 1
    """Steps of one round."""
    outer: Outer = field(default_factory=Outer)
    """For local steps."""
    federated: Federated = field(default_factory=Federated)
    """For federated rounds."""


@dataclass(frozen=True, kw_only=True)
class Recovery(Settings):
    """[recovery]: what may be done when a peer is lost."""

    ladder: tuple[str, ...] = ("replica", "snapshot", "checkpoint")
    """The allowed rungs, best first."""
    snapshot_every: int | Literal["auto"] = "auto"
    """Steps between snapshots."""
    warm_spares: int | Literal["auto"] = "auto"
    """Pool peers that hold a snapshot already."""
    lease: Duration | None = None
    """Silence after which one of its peers counts as lost; the broker's own by default: 10 s."""
    when_short: Literal["pause", "fail"] = "pause"
    """What a run does while too few peers are there."""

    @property
    def rebuilds(self) -> bool:
        """Whether a lost stage may be made anew from its neighbours."""
        return "neighbour" in self.ladder or self.swaps

    @property
    def swaps(self) -> bool:
        """Whether the first two and the last two stages change places in half the microbatches, so
        that each can stand in for the other."""
        return "neighbour+" in self.ladder

    def check(self) -> None:
        known = ("replica", "snapshot", "neighbour", "neighbour+", "checkpoint")
        for rung in self.ladder:
            if rung not in known:
                raise SettingsError("ladder", f"has {rung!r}: expected some of {', '.join(known)}")
        if self.snapshot_every != "auto":
            _at_least(self, 1, "snapshot_every")
        if self.warm_spares != "auto":
            _at_least(self, 0, "warm_spares")
        if self.lease is not None and not 0 < self.lease < math.inf:
            raise SettingsError("lease", f'is "{self.lease}": expected more than no time')


@dataclass(frozen=True, kw_only=True)
class Output(Settings):
    """[output]: what is left afterwards."""

    to: str = "runs/"
    """Folder; the run's own folder in it is called after its id."""
    every: int = 0
    """Steps between checkpoints, from which `shoal resume` goes on; 0: none, weights at the end."""
    keep: int = 3
    """How many checkpoints are kept, with the broker and in the run's folder."""
    format: Literal["safetensors", "hf"] = "safetensors"
    """One safetensors file, or a folder that `from_pretrained` takes ("hf:" models)."""

    def check(self) -> None:
        _at_least(self, 0, "every")
        _at_least(self, 1, "keep")


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

    def to_json(self) -> str:
        return json.dumps(plain(self))

    @classmethod
    def from_json(cls, text: str) -> Training:
        """Raises SettingsError."""
        return cls.from_table(json_object(text))


def json_object(text: str) -> dict[str, Any]:
    """The object in a JSON text; raises SettingsError for anything else."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise SettingsError("", f"not valid JSON: {error}") from None
    except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
        raise SettingsError("", f"is no readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise SettingsError("", f"is a JSON {type(value).__name__}: expected an object")
    return value


def _at_least(settings: Settings, least: int, *keys: str) -> None:
    for key in keys:
        if not getattr(settings, key) >= least:  # not >=: NaN is refused too
            raise SettingsError(key, f"is {getattr(settings, key)}: expected {least} or more")


def _at_most(settings: Settings, most: int, *keys: str) -> None:
    for key in keys:
        if getattr(settings, key) > most:
            raise SettingsError(key, f"is {getattr(settings, key)}: expected at most {most}")


def _divisors(n: int) -> list[int]:
    """Ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})
