"""What a job asks for that this version cannot do, and what it can do instead; and what it says
that would change nothing beside the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from .clients.client_privacy import LEAST_MEMBERS, fewest_of
from .methods import METHODS
from .plan_options import PlanOptions
from .rounds import method_of
from .sync import Sync
from .tables import CODEC_ROLES, Codec, Data, Model, Output, Recovery
from .training import LossScale, Train

__all__ = ["idle", "not_in_pipelines", "unsupported"]


class _Tables(Protocol):
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


_CHAINED = '"auto", "gpipe" and "1f1b" are'
_TIMED = ("listed", "zero-bubble")
"""Schedules that only one planner lists."""


def _not_listed(job: _Tables) -> Iterator[tuple[str, str]]:
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


def _not_rerouted(job: _Tables) -> Iterator[tuple[str, str]]:
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


def _not_federated(job: _Tables) -> Iterator[tuple[str, str]]:
    """What cannot be beside clients that train by themselves."""
    partition, federated = job.data.partition, 'with sync.kind = "federated"'
    if job.sync.kind != "federated":
        if job.train.rounds is not None:
            yield "train.rounds", f"it is {federated}; here, steps, tokens or passes"
        if partition is not None:
            yield "data.partition", f"it is {federated}; leave it out, or set the kind"
        return
    if job.data.kind != "arrays":
        yield "data.kind", f'"arrays" is, {federated}'
    for key in ("passes", "tokens"):
        if getattr(job.train, key) is not None:
            why = "what a run sees of the data hangs on who is in which round"
            yield f"train.{key}", f"it is not, {federated}: {why}; expected rounds"
    if job.sync.collective != "auto":
        why = "no stage of a client has a second holder"
        yield "sync.collective", f'"auto" is, {federated}: {why}'
    yield from _not_clients(job, partition.kind if partition is not None else "by-peer")
    if job.plan.pipelines not in (1, "auto"):
        yield "plan.pipelines", f"1 is, {federated}: a client is trained by one"
    if job.plan.stages not in (1, "auto"):
        yield from not_in_pipelines(job)
    if job.sync.aggregate != "mean":
        with_it = f'with sync.aggregate = "{job.sync.aggregate}"'
        if job.codec.sync != "none":
            yield "codec.sync", f'"none" is, {with_it}'
        if method_of(job.sync.chosen).normalises:
            yield "sync.method", f"all others are, {with_it}: fednova is a mean of scaled moves"
    if job.sync.client_compression.sparse:
        with_it = f'with sync.compression = "{job.sync.compression}"'
        if job.sync.aggregate != "mean":
            yield "sync.aggregate", f'"mean" is, {with_it}'
        if method_of(job.sync.chosen).normalises:
            yield "sync.method", f"all others are, {with_it}: fednova scales moves by itself"
    if job.sync.virtual_data == "vhl" and job.model.dtype != "fp32":
        yield "model.dtype", '"fp32" is, with sync.virtual_data = "vhl"'
    if job.sync.privacy is not None:
        yield from _not_private(job)
    if job.sync.secure:
        yield from _not_secure(job)
    if job.sync.has_controls:
        yield from _not_controlled(job)
    if method_of(job.sync.chosen).buffered:
        yield from _not_buffered(job)
    if method_of(job.sync.chosen).features:
        yield from _not_shared(job)


def _not_controlled(job: _Tables) -> Iterator[tuple[str, str]]:
    """What cannot be beside control variates, the mean of which is to be that of all clients."""
    sync, train, with_it = job.sync, job.train, f'with sync.method = "{job.sync.chosen}"'
    if not sync.local.steps:
        yield "sync.local", f"{{ steps = N }} is, {with_it}: all clients make as many"
    if sync.weight != "equal":
        yield "sync.weight", f'"equal" is, {with_it}, whose means are over clients'
    if train.optimizer != "sgd" or train.momentum:
        why = "what a client moved is its mean gradient only then"
        yield "train.optimizer", f'"sgd" with momentum 0 is, {with_it}: {why}'
    if sync.aggregate != "mean":
        yield "sync.aggregate", f'"mean" is, {with_it}'
    if sync.compression not in ("none", "topk"):
        why = "clients that send more would count for more"
        yield "sync.compression", f'"none" and "topk" are, {with_it}: {why}'
    if sync.client_feedback != "none":
        why = "clients keep one thing from round to round"
        yield "sync.client_feedback", f'"none" is, {with_it}: {why}'
    if job.codec.sync != "none":
        yield "codec.sync", f'"none" is, {with_it}'
    if sync.virtual_data != "none":
        yield "sync.virtual_data", f'"none" is, {with_it}'
    if job.model.dtype != "fp32":
        yield "model.dtype", f'"fp32" is, {with_it}'
    if sync.privacy is not None or sync.secure:
        key = "secure" if sync.secure else "privacy"
        why = "a client's control variate is what it moved, and lies at a peer as it is"
        yield f"sync.{key}", f"it is not, {with_it}: {why}"


def _not_shared(job: _Tables) -> Iterator[tuple[str, str]]:
    """What cannot be beside statistics of features, which are sums over clients."""
    sync, with_it = job.sync, f'with sync.method = "{job.sync.chosen}"'
    if sync.aggregate != "mean":
        why = "means of features are made of sums, and the middle of several is the sum of nobody's"
        yield "sync.aggregate", f'"mean" is, {with_it}: {why}'
    if sync.privacy is not None:
        why = "statistics of clients' features are told without noise"
        yield "sync.privacy", f"none is, {with_it}: {why}"
    if sync.secure:
        why = "sums of squares of features are larger than what masked integers hold"
        yield "sync.secure", f"false is, {with_it}: {why}"
    if job.codec.sync != "none":
        why = "a variance is a small difference of sums, of which a codec rounds each"
        yield "codec.sync", f'"none" is, {with_it}: {why}'
    if sync.virtual_data != "none":
        why = "noise has no labels that its features could be statistics of"
        yield "sync.virtual_data", f'"none" is, {with_it}: {why}'
    if job.model.dtype != "fp32":
        yield "model.dtype", f'"fp32" is, {with_it}'


def _not_buffered(job: _Tables) -> Iterator[tuple[str, str]]:
    """What cannot be where a version is of whoever has come, from whichever version."""
    sync, with_it = job.sync, f'with sync.method = "{job.sync.chosen}"'
    if sync.aggregate != "mean":
        why = "clients are compared by what they moved, and here not all begin with one version"
        yield "sync.aggregate", f'"mean" is, {with_it}: {why}'
    if sync.client_compression.sparse:
        why = "what each sends and weighs is found for a cohort that ends together"
        yield "sync.compression", f'"none" is, {with_it}: {why}'
    if sync.privacy is not None:
        why = "its mean is over per_round clients, and here a version is of as many as come"
        yield "sync.privacy", f"none is, {with_it}: {why}"
    if sync.secure:
        why = "masks are of one round's keys, and what a peer gives may be for a later round"
        yield "sync.secure", f"false is, {with_it}: {why}"
    if sync.select:
        why = "whoever is chosen may still be training for an older version"
        yield "sync.select", f"none is, {with_it}: {why}"
    if sync.over_select != 1:
        yield "sync.over_select", f"1 is, {with_it}: who is late counts for a later version"
    if sync.quorum != "100%":
        yield "sync.quorum", f'"100%" is, {with_it}: options.buffer says who makes a version'
    if sync.virtual_data != "none":
        why = "no plain loop has its noise for clients that began with older versions"
        yield "sync.virtual_data", f'"none" is, {with_it}: {why}'


def not_in_pipelines(job: _Tables) -> Iterator[tuple[str, str]]:
    """(key, what to do) for all that cannot be where a client is trained by several peers, each of
    which has a part of the model, and of what a client came to."""
    sync, partition, stages = job.sync, job.data.partition, job.plan.stages
    with_it = "with clients that are pipelines"
    if stages != "auto":
        with_it = f'with plan.stages = {stages} and sync.kind = "federated"'
    method = method_of(sync.chosen)
    if method.controls:
        why = "what a client keeps is with the one peer that trains it"
        yield "sync.method", f"any but {sync.chosen!r} is, {with_it}: {why}"
    if method.features:
        why = "features of all classes are in no stage by itself"
        yield "sync.method", f"any but {sync.chosen!r} is, {with_it}: {why}"
    if method.buffered:
        why = "versions are made in the middle of its clients, which are added up from one version"
        yield "sync.method", f"any but {sync.chosen!r} is, {with_it}: {why}"
    for key, value, only, why in (
        ("aggregate", sync.aggregate, "mean", "a stage keeps the sum of clients, not each one's"),
        ("compression", sync.compression, "none", "what is largest of an update no peer knows"),
        ("virtual_data", sync.virtual_data, "none", "its loss compares all samples of a batch"),
    ):
        if value != only:
            yield f"sync.{key}", f'"{only}" is, {with_it}: {why}'
    if sync.privacy is not None:
        yield "sync.privacy", f"none is, {with_it}: no peer knows the norm of what a client moved"
    if sync.secure:
        why = "snapshots, which other peers keep, have sums of what clients came to"
        yield "sync.secure", f"false is, {with_it}: {why}"
    if partition is not None and partition.held_out:
        yield "data.partition.held_out", f"0 is, {with_it}: no peer has the model to try it on them"
    kept = {"model.dtype": job.model.dtype, "train.state_dtype": job.train.state_dtype}
    for key, dtype in kept.items():
        if dtype != "fp32":
            yield key, f'"fp32" is, {with_it}: what is rounded would be rounded otherwise'
    for role in ("activation", "activation_grad"):
        if job.codec.of(role) not in ("none", "lossless"):
            yield f"codec.{role}", f'"none" and "lossless" are, {with_it}'
    if job.plan.scheduler == "swarm":
        yield "plan.scheduler", f'all but "swarm" are, {with_it}'


def _not_secure(job: _Tables) -> Iterator[tuple[str, str]]:
    """What sums with masks cannot be of."""
    if job.sync.client_compression.sparse and job.sync.virtual_data != "none":
        why = "no plain loop shows what that comes to"
        yield "sync.virtual_data", f'"none" is, with sync.secure and sync.compression: {why}'
    if job.codec.sync != "none":
        why = "what is masked are the 64 bits of integers, of which a codec may lose none"
        yield "codec.sync", f'"none" is, with sync.secure: {why}'
    fewest = fewest_of(job.sync.privacy)
    if job.plan.replicas != "auto" and job.plan.replicas < fewest:
        why = "of the sum of two each knows the other's part"
        if fewest > LEAST_MEMBERS:
            why = "sync.privacy.fewest says so"
        yield "plan.replicas", f'{fewest} or more are, or "auto", with sync.secure: {why}'


def _not_private(job: _Tables) -> Iterator[tuple[str, str]]:
    """What would tell of clients beside the noisy sums, or more than their noise hides."""
    if method_of(job.sync.chosen).normalises:
        why = "fednova scales moves by clients' numbers of samples, which no noise hides"
        yield "sync.method", f"all others are, with sync.privacy: {why}"
    if job.sync.client_compression.sparse:
        why = "clients' largest numbers are chosen by what they moved, which no noise hides"
        yield "sync.compression", f'"none" is, with sync.privacy: {why}'
    if job.codec.sync != "none":
        why = "a codec rounds what was clipped, and so may make it longer"
        yield "codec.sync", f'"none" is, with sync.privacy: {why}'
    if job.sync.virtual_data != "none":
        why = "clip and noise would go to the further classes too, which no export has"
        yield "sync.virtual_data", f'"none" is, with sync.privacy: {why}'
    if job.sync.over_select != 1:
        yield "sync.over_select", "1 is, with sync.privacy, whose mean is over per_round clients"
    if job.output.every not in (0, "auto"):
        why = "a run that went on from a checkpoint would begin with a new budget"
        yield "output.every", f'with sync.privacy, only 0 is, as "auto" stands for there: {why}'
    if job.data.partition is not None and job.data.partition.held_out:
        why = "what single clients come to on their own samples is told without noise"
        yield "data.partition.held_out", f"0 is, with sync.privacy: {why}"
    if job.data.where == "peer" and job.data.holdout:
        why = "what versions come to on the hosts' own data is told without noise"
        yield "data.holdout", f'0 is, with sync.privacy and data.where = "peer": {why}'


def _not_clients(job: _Tables, kind: str) -> Iterator[tuple[str, str]]:
    """What cannot be of clients whose data is where the job says. kind: of their partition."""
    partition = job.data.partition
    if kind in ("dirichlet", "shards") and not job.data.targets:
        why = 'there are no labels to divide by, with data.targets = ""'
        yield "data.partition.kind", f'"iid" and "by-key" are, {why}'
    if partition is not None and partition.held_out:
        evaluated = job.train.evaluated_batches and job.data.holdout
        why = "samples that clients hold out are tried where the version is evaluated"
        if not evaluated:
            yield (
                "data.partition.held_out",
                f"0 is, without evaluations: {why}; to have some, set data.holdout, "
                "train.eval_every and train.eval_batches above 0",
            )
    where = f'with sync.kind = "federated" and data.where = "{job.data.where}"'
    if job.data.where != "peer" and kind == "by-peer":
        yield "data.partition.kind", f'"iid", "dirichlet", "shards" and "by-key" are, {where}'
    if job.data.where == "peer" and kind != "by-peer":
        yield "data.partition", f"none is, {where}: each host that has the data is a client"
    if job.data.where != "peer" and job.sync.over_select != 1:
        why = "peers train the clients of a partition by turns, so that none is there first"
        yield "sync.over_select", f"1 is, {where}: {why}"
    method = job.sync.of_rounds
    if job.data.where == "peer" and method is not None and method.normalises:
        why = "no host knows how many samples others have, which its move is brought to"
        yield "sync.method", f"any but {job.sync.chosen!r} is, {where}: {why}"


_BEAR_OVERFLOW = ("none", "auto", "lossless", "bf16", "fp16", "int8", "int6", "int4", "int2")
"""Codecs that remember nothing, and of an infinity make what is not finite either."""


def _not_scaled(job: _Tables) -> Iterator[tuple[str, str]]:
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


def unsupported(job: _Tables) -> Iterator[tuple[str, str]]:
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
    yield from _not_federated(job)
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


_KEEPS = {
    "momentum": ("sgd", "muon"),  # 0, which is none, is said with any
    "betas": ("adamw", "adamw8bit", "muon", "lion"),
    "eps": ("adamw", "adamw8bit", "muon"),
    "no_muon": ("muon",),
}
"""Keys of [train] that some optimizers alone read."""


def idle(job: _Tables) -> Iterator[tuple[str, str]]:
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
    evaluates = data.holdout or data.validation or data.where == "peer"
    own = data.partition is not None and data.partition.held_out
    if train.eval_every not in (0, usual.eval_every) and not evaluates and not own:
        yield "train.eval_every", "data.holdout = 0, which leaves nothing to evaluate"
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
    in_round = job.sync.per_round if data.where == "peer" else job.plan.replicas
    yield from ((f"sync.{key}", what) for key, what in job.sync.idle(in_round))
    divided = data.partition.idle() if data.partition is not None else ()
    yield from ((f"data.partition.{key}", what) for key, what in divided)
    if kind == "federated":
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
