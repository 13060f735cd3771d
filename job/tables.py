"""The tables of job.toml as frozen dataclasses, key by key, but for [train] (`training.py`),
[plan] (`plan_options.py`) and [sync] (`sync.py`); `spec.py` puts them together."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from .clients.partitioning import Partitioning
from .settings import Settings, SettingsError, at_least, expect, plain
from .units import Duration

__all__ = ["CODEC_ROLES", "LIVE", "Codec", "Data", "Model", "Output", "Recovery"]

LIVE = "live:"
"""Start of the factory that stands for a live module; it names the module's class, for people."""

CODEC_ROLES = ("activation", "activation_grad", "grad", "snapshot")
"""Keys of [codec] that fall back to its default."""
MOST_NAMES = 200
"""Characters of data.inputs and of data.targets, as in a manifest."""
OF_PACKING = ("positions", "documents")
"""What a batch of packed records has beside inputs and targets."""
_CODEC = re.compile(r"[a-z]\w*(\+[a-z]\w*)*(/\d+)?(:[a-z]\w*=[\w.+-]+(,[a-z]\w*=[\w.+-]+)*)?", re.A)

MOST_MANIFEST_BYTES = 64 << 20
"""Of a data set's manifest: 300,000 shards, over a terabyte of text."""


@dataclass(frozen=True, kw_only=True)
class Model(Settings):
    """[model]: what is trained."""

    OF_JOB: ClassVar[bool] = True

    factory: str
    """ "pkg.mod:fn", "file.py:fn" (looked up in the job's folder first), "hf:DIR", or
    "hf://ORG/NAME" (@REVISION), which is fetched from a Hub."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""
    weights: str | tuple[str, ...] = "init"
    """Starting weights: "init" (what the factory gives), or safetensors: a file, a folder (with an
    index, or of files), a URL of either, or a list of these."""
    where: Literal["submitter", "url"] = "submitter"
    """Who reads them: the submitter, who uploads what the broker lacks, or each peer its own from
    the web ("url": the weights are URLs, and only peers whose owners allow it take part)."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """Text in the names of the model's parameters = what stands there in those of the weights."""
    fresh: tuple[str, ...] = ()
    """Globs of parameter names that the weights need not have: they begin as the factory makes
    them."""
    loss: str = "forward"
    """Who computes the loss: "forward" (the module's own), or "pkg:fn" with fn(output, batch),
    where batch has the tensors of a microbatch by name."""
    freeze: tuple[str, ...] = ()
    """Globs of parameter names that get no gradient and no optimizer state."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the operators that autocast covers; weights stay fp32. Under "fp16" losses are
    scaled (`train.loss_scale`)."""
    frozen_dtype: Literal["", "bf16", "int8"] = ""
    """What frozen weights are kept in; "": what the factory made them in. "int8": those of linear
    layers and embeddings, with a scale for each output, rounded by peers as they load them."""
    trained_dtype: Literal["", "bf16"] = ""
    """What trained weights are kept in, with no fp32 copy beside; "": what the factory made them
    in."""
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of peft's LoraConfig: all else is frozen; empty: no adapter."""
    sidecars: tuple[str, ...] = ()
    """Files kept beside exported weights; empty: for "hf:" models their config and tokenizer."""

    def check(self) -> None:
        for key in ("frozen_dtype", "trained_dtype"):
            if getattr(self, key) == "bf16" and self.dtype != "bf16":
                raise SettingsError(
                    key,
                    f'is "bf16", and dtype = "{self.dtype}": every product would keep another copy '
                    'of its weight for each microbatch. Expected dtype = "bf16" with it',
                )
        if not self.factory.startswith((LIVE, "hf:")) and ":" not in self.factory:
            raise SettingsError(
                "factory",
                f'is "{self.factory}": expected "pkg.mod:fn", "file.py:fn", "hf:DIR" or '
                "hf://ORG/NAME",
            )
        if not self.weights or "" in self.weight_names:
            raise SettingsError("weights", 'is empty: expected "init", or where they are')
        if "init" in self.weight_names and self.weights != "init":
            raise SettingsError("weights", 'has "init" among others: expected it alone')
        if self.where == "url":
            for name in self.weight_names:
                if not name.startswith(("http://", "https://")):
                    raise SettingsError(
                        "where", f'is "url", and weights has "{name}": expected http(s):// of all'
                    )
        for key, value in self.rename.items():
            if not key or not isinstance(value, str):
                raise SettingsError(
                    f"rename.{key}", f"is {value!r}: expected texts of names, not empty on the left"
                )

    @property
    def weight_names(self) -> tuple[str, ...]:
        """`weights` as a list."""
        return (self.weights,) if isinstance(self.weights, str) else self.weights


@dataclass(frozen=True, kw_only=True)
class Data(Settings):
    """[data]: what it is trained on."""

    OF_JOB: ClassVar[bool] = True

    kind: Literal["text", "tokens", "arrays", "chat", "instructions"] = "text"
    """Bytes of files, token ids, named arrays (npz, safetensors), or records of what was said."""
    source: str = ""
    """Path, glob or URL; empty: the sources of Python's standard library."""
    holdout: float = 0.05
    """Share of the samples that is never trained on, in [0, 1)."""
    where: Literal["submitter", "peer"] = "submitter"
    """Where the data lies when the run is submitted."""
    keep_local: Literal["none", "inputs", "labels"] = "none"
    """What never leaves the peer that owns it."""
    tokenizer: str = "auto"
    """What makes ids of text and of records: the folder of a tokenizer, or "auto", that of the
    model's folder; of text also "bytes", each byte its own, as "auto" is where there is none."""
    template: str = "auto"
    """Of records: file of the jinja template that makes text of them; "auto": the tokenizer's."""
    pack: bool = True
    """Of records: whether several lie in one sample, none of which attends to another."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Of records: whose tokens are learned."""
    bad_records: Literal["refuse", "skip"] = "refuse"
    """What becomes of a record that cannot be used."""
    validation: str = ""
    """Source of what is never trained on, in place of `holdout`."""
    length: int = 128
    """Positions in one sample of text or tokens."""
    inputs: str = "x"
    """Argument of the model's forward that takes the inputs; of arrays several, with commas."""
    partition: Partitioning | None = None
    """How samples are divided among clients, of sync.kind = "federated" ([data.partition])."""
    targets: str = "y"
    """Argument of the model's forward that takes the targets; empty: none."""

    def check(self) -> None:
        expect(self, "holdout", 0.0 <= self.holdout < 1.0, "a share in [0, 1)")
        at_least(self, 1, "length")
        self._check_records()
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
        self._check_names()
        if self.partition is not None:
            self._check_key(self.partition)

    @property
    def holds_out(self) -> bool:
        """Whether something of it is never trained on."""
        return bool(self.holdout or self.validation)

    @property
    def is_records(self) -> bool:
        """Whether a chat template makes text of what the files have."""
        return self.kind in ("chat", "instructions")

    @property
    def positions(self) -> int:
        """Tokens of a sample; one of arrays counts as one."""
        return 1 if self.kind == "arrays" else self.length

    def _check_records(self) -> None:
        if self.is_records:
            self._check_of_records()
            return
        for key, default in (
            *(("template", "auto"), ("pack", True), ("loss_on", "assistant")),
            ("bad_records", "refuse"),
        ):
            if (value := getattr(self, key)) != default:
                raise SettingsError(
                    key,
                    f'is {value!r} with kind = "{self.kind}": expected "chat" or "instructions"',
                )
        if self.validation and self.where == "peer":
            raise SettingsError(
                "validation",
                f'is "{self.validation}" with where = "peer": expected holdout, a share of the '
                "data that stays with its host",
            )
        if self.tokenizer != "auto" and self.kind != "text":
            raise SettingsError(
                "tokenizer", f'is "{self.tokenizer}", and {self.kind} are numbers already: leave it'
            )
        if self.tokenizer not in ("auto", "bytes") and self.where == "peer":
            raise SettingsError(
                "tokenizer",
                f'is "{self.tokenizer}" with where = "peer", whose text is bytes: expected "auto" '
                'or "bytes", or ids that its host has made, with kind = "tokens"',
            )

    def _check_of_records(self) -> None:
        of_kind = f'with kind = "{self.kind}"'
        if not self.source:
            raise SettingsError("source", f"is empty {of_kind}: expected a path or a glob")
        if self.where == "peer":
            raise SettingsError("where", f'is "peer" {of_kind}: expected "submitter"')
        if self.tokenizer == "bytes":
            raise SettingsError(
                "tokenizer", f'is "bytes" {of_kind}: expected "auto" or the folder of a tokenizer'
            )
        if "," in self.inputs or not self.targets:
            raise SettingsError(
                "inputs" if "," in self.inputs else "targets",
                f"must be one name {of_kind}: inputs and targets are one sequence each",
            )
        if taken := {self.inputs.strip(), self.targets.strip()} & set(OF_PACKING):
            raise SettingsError(
                "inputs", f"and targets have {sorted(taken)}, which are names of packed samples"
            )

    def _check_key(self, partition: Partitioning) -> None:
        if partition.kind == "by-key" and not partition.key:
            raise SettingsError(
                "partition.key",
                "is missing: expected the name of an array of the source that says whose each "
                "sample is",
            )
        if (size := len(partition.key)) > MOST_NAMES:
            raise SettingsError(
                "partition.key", f"has {size} characters: expected at most {MOST_NAMES}"
            )
        if partition.key in (*self.input_names, self.targets) and partition.key:
            raise SettingsError(
                "partition.key",
                f'is "{partition.key}", which the model takes: expected an array of its own',
            )

    @property
    def way(self) -> str:
        """How a peer shall read its data, as JSON: the table without who is which client."""
        return json.dumps(plain(replace(self, partition=None)))

    def _check_names(self) -> None:
        """Names are normalised here, once: whoever reads them later compares them as they are."""
        inputs = tuple(name.strip() for name in self.inputs.split(","))
        targets = self.targets.strip()
        for key, names in (("inputs", inputs), ("targets", (targets,) if targets else ())):
            if (size := len(getattr(self, key))) > MOST_NAMES:
                raise SettingsError(key, f"has {size} characters: expected at most {MOST_NAMES}")
            for name in names:
                if not name.isidentifier():
                    raise SettingsError(
                        key,
                        f"is {getattr(self, key)!r}, where {name!r} cannot be an argument of the "
                        "model's forward: expected a name of letters, digits and underscores"
                        + (", or several with commas between them" if key == "inputs" else ""),
                    )
        if targets in inputs:
            raise SettingsError("targets", f'is "{targets}" as inputs is: expected another name')
        if len(set(inputs)) < len(inputs):
            raise SettingsError("inputs", f'is "{self.inputs}": expected each name once')
        if len(inputs) > 1 and self.kind in ("text", "tokens"):
            raise SettingsError(
                "inputs", f'is "{self.inputs}": expected one name, for {self.kind} is one sequence'
            )
        object.__setattr__(self, "inputs", ",".join(inputs))
        object.__setattr__(self, "targets", targets)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Arguments of the model's forward that take inputs, in order."""
        return tuple(self.inputs.split(","))


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
    sync: str = "none"
    """Of what replicas exchange in rounds: "none", or a codec's text."""
    snapshot: str | None = None
    """Of snapshots, "none" or "lossless"; None: "lossless" unless the default is "none"."""
    ratio: float = 100.0
    """How many times fewer bytes "adatopk" sends on the slowest link, at least 1."""
    error_budget: float = 0.0
    """Relative L2 error that "auto" may make in a tensor that crosses a link; 0: none at all."""
    feedback: Literal["none", "ef", "ef21", "dgc", "ahead"] = "ef"
    """Error feedback of the codec of grad; lossless ones have no error to feed back. "ef21": of
    changes against what both ends have; "dgc": of momentum in place of gradients; "ahead": of
    updates in their place, each holder training where its unsent ones would bring it."""

    def check(self) -> None:
        for key in ("default", "sync", *CODEC_ROLES):
            text = getattr(self, key)
            if text is not None and not _CODEC.fullmatch(text):
                raise SettingsError(
                    key,
                    f'is "{text}": expected "none", "lossless", "adatopk", "auto" or the text of a '
                    'codec such as "bf16", "int8:block=128", "ef+topk:ratio=50"',
                )
        at_least(self, 1, "ratio")
        at_least(self, 0, "error_budget")

    @property
    def snapshots(self) -> Literal["none", "lossless"]:
        """How snapshots are written. They are exact, whatever other tensors lose on their way:
        where those are compressed at all, snapshots are losslessly."""
        return "none" if self.of("snapshot") == "none" else "lossless"

    def of(self, role: str) -> str:
        """Return the text that is asked for one of CODEC_ROLES."""
        own: str | None = getattr(self, role)
        return self.default if own is None else own


@dataclass(frozen=True, kw_only=True)
class Recovery(Settings):
    """[recovery]: what may be done when a peer is lost."""

    ladder: tuple[str, ...] = ("sibling", "snapshot", "checkpoint")
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
    def spares(self) -> int:
        """How many peers of the pool keep copies, if there are so many."""
        return 1 if self.warm_spares == "auto" else self.warm_spares

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
        known = ("sibling", "snapshot", "neighbour", "neighbour+", "checkpoint")
        for rung in self.ladder:
            if rung not in known:
                raise SettingsError("ladder", f"has {rung!r}: expected some of {', '.join(known)}")
        if self.snapshot_every != "auto":
            at_least(self, 1, "snapshot_every")
        if self.warm_spares != "auto":
            at_least(self, 0, "warm_spares")
        if self.lease is not None and not 0 < self.lease < math.inf:
            raise SettingsError("lease", f'is "{self.lease}": expected more than no time')


@dataclass(frozen=True, kw_only=True)
class Output(Settings):
    """[output]: what is left afterwards."""

    OF_JOB: ClassVar[bool] = True

    to: str = "runs/"
    """Folder; the run's own folder in it is called after its id."""
    every: int | Literal["auto"] = "auto"
    """Steps between checkpoints, from which `shoal resume` goes on; 0: none, weights at the end;
    "auto": as many as take half an hour."""
    keep: int = 2
    """How many checkpoints are kept, with the broker and in the run's folder."""
    format: Literal["safetensors", "hf", "peft"] = "safetensors"
    """One safetensors file, a folder that `from_pretrained` takes ("hf:" models), or the adapter
    alone as peft's does."""
    push: str = ""
    """Where on a Hub the end goes besides, "hf://ORG/NAME"; empty: nowhere."""

    def check(self) -> None:
        if self.push and not self.push.startswith("hf://"):
            raise SettingsError("push", f'is "{self.push}": expected hf://ORG/NAME')
        if self.every != "auto":
            at_least(self, 0, "every")
        at_least(self, 1, "keep")
