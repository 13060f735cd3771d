"""What cannot be beside clients that train by themselves."""

from __future__ import annotations

from collections.abc import Iterator

from ..clients.client_privacy import LEAST_MEMBERS, fewest_of
from ..job_tables import JobTables
from ..rounds import method_of

__all__ = ["not_federated", "not_in_pipelines"]


def not_federated(job: JobTables) -> Iterator[tuple[str, str]]:
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
            yield "sync.aggregate", f'"mean" is, {with_it}: others compare whole updates'
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


def _not_controlled(job: JobTables) -> Iterator[tuple[str, str]]:
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
        yield "sync.aggregate", f'"mean" is, {with_it}: c follows from the mean of all moves'
    if sync.compression not in ("none", "topk"):
        why = "clients that send more would count for more"
        yield "sync.compression", f'"none" and "topk" are, {with_it}: {why}'
    if sync.client_feedback != "none":
        why = "clients keep one thing from round to round"
        yield "sync.client_feedback", f'"none" is, {with_it}: {why}'
    if job.codec.sync != "none":
        yield "codec.sync", f'"none" is, {with_it}'
    if sync.virtual_data != "none":
        why = "no plain loop shows what that comes to"
        yield "sync.virtual_data", f'"none" is, {with_it}: {why}'
    if job.model.dtype != "fp32":
        yield "model.dtype", f'"fp32" is, {with_it}'
    if sync.privacy is not None or sync.secure:
        key = "secure" if sync.secure else "privacy"
        why = "a client's control variate is what it moved, and lies at a peer as it is"
        yield f"sync.{key}", f"it is not, {with_it}: {why}"


def _not_shared(job: JobTables) -> Iterator[tuple[str, str]]:
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


def _not_buffered(job: JobTables) -> Iterator[tuple[str, str]]:
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


def not_in_pipelines(job: JobTables) -> Iterator[tuple[str, str]]:
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


def _not_secure(job: JobTables) -> Iterator[tuple[str, str]]:
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


def _not_private(job: JobTables) -> Iterator[tuple[str, str]]:
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


def _not_clients(job: JobTables, kind: str) -> Iterator[tuple[str, str]]:
    """What cannot be of clients whose data is where the job says. kind: of their partition."""
    partition = job.data.partition
    if kind in ("dirichlet", "shards") and not job.data.targets:
        why = 'there are no labels to divide by, with data.targets = ""'
        yield "data.partition.kind", f'"iid" and "by-key" are, {why}'
    if partition is not None and partition.held_out:
        evaluated = job.train.evaluated_batches and job.data.holds_out
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
