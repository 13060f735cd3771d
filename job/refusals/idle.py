"""Keys of a job that would change nothing beside the rest of it."""

from __future__ import annotations

from collections.abc import Iterator

from ..job_tables import JobTables
from ..tables import CODEC_ROLES, Codec, Data, Output
from ..training import Train

__all__ = ["idle"]

_KEEPS = {
    "momentum": ("sgd", "muon"),  # 0, which is none, is said with any
    "betas": ("adamw", "adamw8bit", "muon", "lion"),
    "eps": ("adamw", "adamw8bit", "muon"),
    "no_muon": ("muon",),
}
"""Keys of [train] that some optimizers alone read."""


def idle(job: JobTables) -> Iterator[tuple[str, str]]:
    """(key, with what) for every key that says something else than its default, and of which
    nothing would come: whoever wrote it believes that it is trained so."""
    train, usual, codec, kind = job.train, Train(steps=1), job.codec, job.sync.kind
    data, output = job.data, job.output
    for key, optimizers in _KEEPS.items():
        said = getattr(train, key)
        if said and said != getattr(usual, key) and train.optimizer not in optimizers:
            yield f"train.{key}", f'optimizer = "{train.optimizer}"'
    if train.schedule == "constant" and train.lr_final not in (1, usual.lr_final):
        yield "train.lr_final", 'schedule = "constant"'
    if train.no_decay != usual.no_decay and not train.weight_decay:
        yield "train.no_decay", "weight_decay = 0"
    if train.state_dtype != usual.state_dtype and not train.optimizer_slots:
        yield "train.state_dtype", f'optimizer = "{train.optimizer}" without momentum'
    evaluates = data.holds_out or data.where == "peer"
    own = data.partition is not None and data.partition.held_out
    if train.eval_every not in (0, usual.eval_every) and not evaluates and not own:
        yield "train.eval_every", "data.holdout = 0, which leaves nothing to evaluate"
    if train.eval_batches not in (0, usual.eval_batches) and not evaluates and not own:
        yield "train.eval_batches", "data.holdout = 0, which leaves nothing to evaluate"
    if train.eval_every not in (0, usual.eval_every) and not train.eval_batches:
        yield "train.eval_every", "eval_batches = 0, of which each evaluation would be"
    if data.validation and data.holdout not in (0, Data.holdout):
        yield "data.holdout", "data.validation, which stands in its place"
    if data.kind == "arrays" and data.length != Data.length:
        yield "data.length", 'kind = "arrays", whose samples are as long as they are'
    if output.every == 0 and output.keep != Output.keep:
        yield "output.keep", "output.every = 0, which makes no checkpoints"
    asked = {codec.of(role) for role in CODEC_ROLES}
    if codec.ratio != Codec.ratio and "adatopk" not in asked:
        yield "codec.ratio", 'no role that is "adatopk" (a codec has its own: "topk:ratio=50")'
    if codec.error_budget != Codec.error_budget and "auto" not in asked:
        yield "codec.error_budget", 'no role that is "auto"'
    rungs = job.recovery.ladder
    for key, none in (("snapshot_every", "auto"), ("warm_spares", 0)):
        if "snapshot" not in rungs and getattr(job.recovery, key) not in ("auto", none):
            yield f"recovery.{key}", 'a ladder without "snapshot", in which none are taken'
    yield from _unshared(job)
    in_round = job.sync.per_round if data.where == "peer" else job.plan.replicas
    yield from ((f"sync.{key}", what) for key, what in job.sync.idle(in_round))
    divided = data.partition.idle() if data.partition is not None else ()
    yield from ((f"data.partition.{key}", what) for key, what in divided)
    if kind == "federated":
        if data.where == "peer" and job.plan.replicas != "auto":
            yield "plan.replicas", 'data.where = "peer", where each host with the data is a replica'
        for role in ("activation", "activation_grad", "grad"):
            if codec.of(role) not in ("none", "lossless"):
                what = "one peer, or a pipeline that takes it not (codec.sync is for updates)"
                key = role if getattr(codec, role) is not None else "default"
                yield f"codec.{key}", f'sync.kind = "federated", where a client has {what}'
    one = kind in ("allreduce", "federated")  # of others nothing is said of holders
    if one and codec.feedback not in ("ef", "none") and codec.of("grad") in ("none", "lossless"):
        yield "codec.feedback", f'codec.grad = "{codec.of("grad")}", which loses nothing'
    if kind == "allreduce" and codec.sync != Codec.sync:
        yield "codec.sync", 'sync.kind = "allreduce" (codec.grad is what carries gradients)'


def _unshared(job: JobTables) -> Iterator[tuple[str, str]]:
    """Keys of links that a plan of one stage, or with one holder of each, has not. Stages that
    share a parameter add its gradients up through codec.grad, however few hold each."""
    codec, plan, lossless = job.codec, job.plan, ("none", "lossless")
    if plan.stages == 1:
        for role in ("activation", "activation_grad"):
            if getattr(codec, role) not in (None, "none"):
                yield f"codec.{role}", "plan.stages = 1, in which nothing goes from stage to stage"
    if plan.pipelines != 1:
        return
    if job.sync.within not in ("exact", "demo"):
        yield "sync.method", "plan.pipelines = 1, in which no stage has a second holder"
    if plan.stages != 1:
        return
    alone = "plan.stages = 1 and pipelines = 1, in which nobody exchanges gradients"
    if codec.grad not in (None, "none"):
        yield "codec.grad", alone
    if codec.feedback not in ("ef", "none"):
        yield "codec.feedback", alone
    if job.sync.collective != "auto":
        yield "sync.collective", alone
    if codec.default not in lossless and job.sync.kind == "allreduce":
        yield "codec.default", alone
