"""What a job asks for that this version cannot do, and what it can do instead."""

from __future__ import annotations

from collections.abc import Iterator

from ..job_tables import JobTables
from ..methods import METHODS
from ..training import LossScale
from .of_clients import not_federated

__all__ = ["unsupported"]

_CHAINED = '"auto", "gpipe" and "1f1b" are'
_TIMED = ("listed", "zero-bubble")
"""Schedules that only one planner lists."""


def _not_listed(job: JobTables) -> Iterator[tuple[str, str]]:
    """What says how deep a pipeline is, where nobody asks the planner that lists visits."""
    plan, why = job.plan, ""
    if plan.scheduler != "auto":
        why = f'with scheduler = "{plan.scheduler}"'
    elif job.sync.kind != "allreduce":
        why = f'with sync.kind = "{job.sync.kind}"'
    elif job.recovery.swaps:
        why = 'with "neighbour+" in recovery.ladder'
    if why and plan.schedule in _TIMED:
        yield "plan.schedule", f"{_CHAINED}, {why}"
    if not why and plan.schedule not in ("auto", *_TIMED):
        why = f'with schedule = "{plan.schedule}"'
    if why and plan.in_flight != "auto":
        yield "plan.in_flight", f'"auto" is, {why}'


def _not_rerouted(job: JobTables) -> Iterator[tuple[str, str]]:
    """What cannot be beside microbatches that leave stages out or visit them in another order."""
    plan = job.plan
    if not plan.reroutes:
        return
    key, none = ("plan.skip", "0") if plan.skip != 0 else ("plan.reorder", "false")

    def beside(what: str, instead: str) -> tuple[str, str]:
        return key, f"{none} is, with {what}; to keep {key}, {instead}"

    if job.sync.kind != "allreduce":
        yield beside(f'sync.kind = "{job.sync.kind}"', 'set sync.kind = "allreduce"')
    if job.recovery.swaps:
        ladder = "recovery.ladder"
        what = f'"neighbour+" in {ladder}, which has routes of its own'
        yield beside(what, f'take "neighbour+" out of {ladder}')
    if plan.scheduler == "swarm":
        yield beside('scheduler = "swarm"', 'set plan.scheduler = "auto"')
    if job.data.where == "peer":
        yield beside('data.where = "peer"', 'set data.where = "submitter"')
    if plan.pipelines not in (1, "auto"):
        keep = f"to keep {plan.pipelines}, leave {key} out"
        yield "plan.pipelines", f'1 and "auto" are, with {key}; {keep}'
    if plan.schedule == "interleaved":
        allowed = f'{_CHAINED}, and "listed" and "zero-bubble", with {key}'
        yield "plan.schedule", f'{allowed}; to keep "interleaved", leave {key} out'


_BEAR_OVERFLOW = ("none", "auto", "lossless", "bf16", "fp16", "int8", "int6", "int4", "int2")
"""Codecs that remember nothing, and of an infinity make what is not finite either."""


def _not_scaled(job: JobTables) -> Iterator[tuple[str, str]]:
    """What cannot be where a step whose scaled gradients overflow is as if it had not been."""
    if job.model.dtype != "fp16":
        if job.train.loss_scale != LossScale():
            yield "train.loss_scale", f'it is with model.dtype = "fp16", here "{job.model.dtype}"'
        return
    with_it = 'with model.dtype = "fp16"'
    method = job.sync.of_rounds
    if method is not None and (method.normalises or method.controls):
        why = "it divides what clients moved by steps, and does not know which were skipped"
        yield "sync.method", f"any but {job.sync.chosen!r} is, {with_it}: {why}"
    if method is not None and method.features:
        why = "the loss of its features is not scaled"
        yield "sync.method", f"any but {job.sync.chosen!r} is, {with_it}: {why}"
    if job.sync.within != "exact":
        why = "a method that keeps what it did not send would keep infinities of a skipped step"
        yield "sync.method", f'"exact" is, {with_it}: {why}'
    if job.recovery.rebuilds:
        yield "recovery.ladder", f'all rungs but "neighbour" are, {with_it}'
    for role in ("activation", "activation_grad", "grad"):
        text = job.codec.of(role)
        if text.partition(":")[0].partition("/")[0] not in _BEAR_OVERFLOW:
            key = f"codec.{role}" if getattr(job.codec, role) is not None else "codec.default"
            why = "others refuse the infinities of a step that overflows, or remember them"
            yield key, f"{', '.join(_BEAR_OVERFLOW)} are, {with_it}: {why}"
    lossy = job.codec.of("grad") not in ("none", "lossless")
    if lossy and job.codec.feedback != "none":
        why = "what a codec holds back of a skipped step would come in a later one"
        yield "codec.feedback", f'"none" is, {with_it} and a codec.grad that loses something: {why}'


def unsupported(job: JobTables) -> Iterator[tuple[str, str]]:
    """(key, what to do) for every key that asks for what this version cannot do."""
    yield from _not_scaled(job)
    if job.sync.kind == "allreduce" and job.plan.replicas not in (1, "auto"):
        kinds = 'sync.kind = "local" and "gossip"'
        yield "plan.replicas", f"several are with {kinds}; here, plan.pipelines"
    if job.sync.kind == "auto" and job.plan.replicas != "auto":
        yield "plan.replicas", '"auto" is, with sync.kind = "auto"'
    if job.sync.kind != "allreduce":
        with_it = f'with sync.kind = "{job.sync.kind}"'
        if job.recovery.rebuilds:
            yield "recovery.ladder", f'{with_it}, all rungs but "neighbour" are'
        kept = job.sync.kind in ("local", "federated") and not job.sync.apart
        if job.output.every not in (0, "auto") and not kept:
            also = f' and method = "{job.sync.chosen}"' if job.sync.apart else ""
            yield "output.every", f'{with_it}{also}, only 0 is, as "auto" stands for there'
        if job.data.where == "peer" and job.sync.kind != "federated":
            yield "data.where", f'{with_it}, "submitter" is'
        if job.train.microbatches % job.divided:
            yield (
                "plan.replicas",
                f"a divisor of the {job.train.microbatches} microbatches of a step is",
            )
    if job.train.ema and job.sync.kind != "allreduce":
        yield "train.ema", f'with sync.kind = "{job.sync.kind}", whose versions are means, 0 is'
    if job.train.ema and job.recovery.rebuilds:
        yield "recovery.ladder", 'with train.ema, all rungs but "neighbour" are'
    if job.train.stop and "snapshot" not in job.recovery.ladder:
        yield "recovery.ladder", 'with train.stop, one with "snapshot" is'
    yield from not_federated(job)
    yield from _not_listed(job)
    yield from _not_rerouted(job)
    if job.plan.scheduler == "swarm":
        if job.plan.pipelines != "auto":
            yield "plan.pipelines", '"auto" is, with scheduler = "swarm"'
        if job.plan.schedule == "interleaved":
            yield "plan.schedule", f'{_CHAINED}, with scheduler = "swarm"'
        if job.recovery.swaps:
            yield "recovery.ladder", 'with scheduler = "swarm", all rungs but "neighbour+" are'
    if job.recovery.swaps and job.plan.pipelines not in (1, "auto"):
        yield "plan.pipelines", '1 is, with "neighbour+" in recovery.ladder'
    stages = job.plan.stages
    if job.recovery.swaps and stages != "auto" and stages < 4:
        yield "plan.stages", '4 or more are, with "neighbour+" in recovery.ladder'
    if job.recovery.swaps and job.plan.schedule == "interleaved":
        yield "plan.schedule", f'{_CHAINED}, with "neighbour+" in recovery.ladder'
    if job.recovery.swaps and job.data.where == "peer":
        yield "recovery.ladder", '"neighbour" is, where data stays with a peer'
    codec = job.codec
    if job.sync.within != "exact":
        own = METHODS[job.sync.within].COLLECTIVE
        if own and job.sync.collective not in ("auto", own):
            yield "sync.collective", f'"auto" is, for "{job.sync.within}" exchanges by {own} alone'
        with_it = f'"none" is, for sync.method = "{job.sync.within}" encodes gradients itself'
        if codec.grad not in (None, "none"):
            yield "codec.grad", with_it
        if codec.feedback not in ("ef", "none"):
            yield "codec.feedback", with_it
        if job.sync.within == "demo" and (job.train.optimizer, job.train.momentum) != ("sgd", 0):
            yield (
                "train.optimizer",
                '"sgd" with momentum 0 is, for sync.method = "demo" steps itself',
            )
    if codec.feedback == "dgc" and (job.train.optimizer, job.train.momentum > 0) != ("sgd", True):
        yield "codec.feedback", '"dgc" keeps the momentum of SGD: it is with optimizer = "sgd"'
    if codec.snapshot not in (None, "none", "lossless", codec.default):
        yield "codec.snapshot", 'snapshots are exact: "none" and "lossless" are'
