"""What of a submitted RunSpec is out of bounds, or at odds with itself, as it stands: without its
job (`requirements.py`) and its graph."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...dag.ir.convert import MAX_GRAPH_BYTES, MAX_RECIPE_BYTES
from ...dag.schedule.convert_plan import microbatches_of
from ...job import MOST_CHOICES, MOST_MANIFEST_BYTES, MOST_MICROBATCHES
from ...job.spec import MOST_NAME
from ...proto.broker_pb2 import RunSpec
from ...proto.common_pb2 import BlobRef

__all__ = ["HASH", "MOST_HOSTS", "MOST_LOCAL", "RunSpecError", "check_size", "problems"]

HASH = re.compile(r"[0-9a-f]{64}")
"""SHA-256 as it is written in every BlobRef."""

MOST_SPEC_BYTES = 3 << 20
"""A spec has 2 to 20 KB. A checkpoint of 1,000 holders adds 150 KB, and a plan that was written by
hand 21 to 25 bytes for each visit: 32,768 microbatches over four peers take 2.7 MiB."""
MOST_JOB_BYTES = 256 << 10
"""Of its job as JSON, and that of its checkpoint: a few KB, with a table of a model's arguments."""
MOST_SIZE = 2**31
MOST_STEPS = 10**12
MOST_LOCAL = 64
"""Inputs of a model whose data stays with its peers."""
MOST_HOSTS = 1024
"""Clients of a run whose data stays with peers."""


class RunSpecError(ValueError):
    """A RunSpec that cannot become a run; the message names the field, what it is and must be."""


def check_size(spec: RunSpec) -> None:
    """Raises RunSpecError for one that is larger than what is kept for a run. Asked at the door
    only: what the journal has, was let in."""
    if (size := spec.ByteSize()) > MOST_SPEC_BYTES:
        raise RunSpecError(
            f"the spec of the run has {size} bytes: expected at most {MOST_SPEC_BYTES}. Its plan "
            f"takes {spec.plan.ByteSize()} of them, its checkpoint {spec.resumed.ByteSize()}, and "
            f"its job {len(spec.job)}"
        )
    for what, ref, most in (
        ("graph", spec.graph, MAX_GRAPH_BYTES),
        ("core_graph", spec.core_graph, MAX_GRAPH_BYTES),
        ("data", spec.data, MOST_MANIFEST_BYTES),
        *(("weights", f.blob, MOST_MANIFEST_BYTES) for f in spec.weights if f.sharded),
        ("recipe", spec.recipe, MAX_RECIPE_BYTES),
        *(("client_data", ref, MOST_MANIFEST_BYTES) for ref in spec.client_data),
    ):
        if ref.size_bytes > most:
            raise RunSpecError(
                f"{what} of the run is a blob of {ref.size_bytes} bytes: expected at most {most}"
            )
    for what, text in (("the run", spec.job), ("the checkpoint of the run", spec.resumed.job)):
        if (size := len(text.encode())) > MOST_JOB_BYTES:
            raise RunSpecError(
                f"the job of {what} has {size} bytes: expected at most {MOST_JOB_BYTES}"
            )


def problems(spec: RunSpec) -> Iterator[str]:
    """For its submitter."""
    if spec.version != 1:
        yield f"version of the run is {spec.version}: expected 1"
    if len(spec.name) > MOST_NAME or not spec.name.isprintable():
        yield f"name of the run: expected at most {MOST_NAME} printable characters"
    for name, value, most in (
        ("steps", spec.steps, MOST_STEPS),
        ("microbatches", spec.microbatches, MOST_MICROBATCHES),
        ("microbatch_size", spec.microbatch_size, MOST_SIZE),
    ):
        if not 1 <= value <= most:
            yield f"{name} of the run is {value}: expected 1 to {most}"
    if len(spec.microbatch_sizes) > MOST_CHOICES:
        yield (
            f"microbatch_sizes of the run has {len(spec.microbatch_sizes)} sizes: expected at most "
            f"{MOST_CHOICES}"
        )
    if len(spec.local) > MOST_LOCAL or any(len(n) > 200 or not n.isprintable() for n in spec.local):
        yield (
            f"local of the run has {len(spec.local)} names: expected at most {MOST_LOCAL}, each of "
            "at most 200 printable characters"
        )
    yield from _odd_clients(spec)
    sizes = [spec.microbatch_size, *spec.microbatch_sizes]
    for size in sizes[1:]:
        if not 1 <= size <= MOST_SIZE:
            yield f"microbatch_sizes of the run has {size}: expected 1 to {MOST_SIZE}"
        if sizes.count(size) > 1:
            yield (
                f"microbatch_sizes of the run has {size}, which is there twice or is "
                "microbatch_size: expected each other size once"
            )
    if spec.HasField("resumed"):
        yield from _odd_checkpoint(spec)
    for name, ref in _refs(spec):
        if not HASH.fullmatch(ref.hash):
            yield (
                f"{name} of the run has the hash {ref.hash[:80]!r}: expected 64 lowercase "
                "hexadecimal digits"
            )
    if not spec.HasField("plan"):
        return
    if not spec.plan.stages:
        yield "the plan of the run has no stage: expected at least one, or no plan at all"
    if spec.plan.microbatch_size not in sizes:
        yield (
            f"the plan of the run is for microbatches of {spec.plan.microbatch_size}, the run has "
            f"microbatches of {' or '.join(map(str, sizes))}"
        )
        return
    # What does not divide evenly here is refused with its job.
    wanted = spec.microbatches * spec.microbatch_size // spec.plan.microbatch_size
    if (count := microbatches_of(spec.plan)) != wanted:
        yield (
            f"the plan of the run has {count} routes: expected one for each of "
            f"{wanted} microbatches"
        )


def _refs(spec: RunSpec) -> Iterator[tuple[str, BlobRef]]:
    yield "graph", spec.graph
    yield "data", spec.data
    if spec.HasField("core_graph"):
        yield "core_graph", spec.core_graph
    if spec.HasField("recipe"):
        yield "recipe", spec.recipe
    for i, ref in enumerate(spec.client_data):
        yield f"client_data[{i}]", ref
    for i, file in enumerate(spec.weights):
        yield f"weights[{i}]", file.blob
    for i, saved in enumerate(spec.resumed.files):
        yield f"resumed.files[{i}]", saved.blob


def _odd_clients(spec: RunSpec) -> Iterator[str]:
    """Say what is wrong with clients whose data stays with peers."""
    hashes = [ref.hash for ref in spec.client_data]
    if not hashes:
        return
    if len(hashes) > MOST_HOSTS or len({*hashes}) < len(hashes) or hashes[0] != spec.data.hash:
        yield (
            f"client_data of the run has {len(hashes)} manifests: expected at most {MOST_HOSTS}, "
            "each once, and `data` first"
        )
    if len(spec.client_sizes) != len(hashes):
        yield (
            f"client_sizes of the run has {len(spec.client_sizes)} numbers, and client_data "
            f"{len(hashes)} manifests: expected as many"
        )


def _odd_checkpoint(spec: RunSpec) -> Iterator[str]:
    found = spec.resumed
    for what, hash, before in (
        ("model", spec.graph.hash, found.graph.hash),
        ("data", spec.data.hash, found.data.hash),
    ):
        if hash != before:
            yield (
                f"the checkpoint of the run is of another {what}: expected the {what} with the "
                f"hash {before[:12]}, got {hash[:12]}. It may not change"
            )
    if not 1 <= found.step < spec.steps:
        yield (
            f"the checkpoint of the run has {found.step} steps, and train.steps is {spec.steps}: "
            "expected more steps than the checkpoint has"
        )
    if not found.term:
        yield "the checkpoint of the run has no term"
    if found.inexact_from > found.step:
        yield (
            f"the checkpoint of the run has {found.step} steps and is not exact from step "
            f"{found.inexact_from} on: expected no later one"
        )
    if found.HasField("rounds"):
        yield from _odd_rounds(spec)
    sizes = (spec.microbatch_size, *spec.microbatch_sizes)
    if found.microbatch_size not in sizes:
        yield (
            f"train.microbatch of the run allows {' or '.join(map(str, sizes))} samples, and its "
            f"checkpoint was made with {found.microbatch_size}: it may not change"
        )
    at = 0
    for start, stop in sorted((s.start, s.stop) for f in found.files for s in f.spans):
        if start > at or stop <= start:
            break
        at = max(at, stop)
    else:
        if at and at == found.operators:
            return
    yield "the files of the checkpoint do not have every operator of the graph"


def _odd_rounds(spec: RunSpec) -> Iterator[str]:
    """A checkpoint may have passed through a stranger's folder."""
    at, step = spec.resumed.rounds, spec.resumed.step
    whole = 1 if spec.client_sizes else spec.microbatches  # of federated training, a round
    if at.committed // whole != step:
        yield (
            f"the checkpoint of the run has {step} steps and {at.committed} microbatches of "
            f"{whole} in each: expected {step} times that, or less than one step more"
        )
    end = back = 0
    for samples in at.returned:
        if samples.first < end or not samples.count:
            yield "the checkpoint of the run has samples to hand out again that are not in order"
            return
        end, back = samples.first + samples.count, back + samples.count
    if end > at.next or at.next - back != at.committed:
        yield (
            f"the checkpoint of the run has {at.next} microbatches handed out and {back} of them "
            f"come back: expected {at.committed} to be left, which are committed"
        )
