"""From a job to a RunSpec: the module becomes a graph, the data a manifest, and what peers need is
uploaded by content hash.

    Job --models.build--> nn.Module --capture--> Graph (full) --lower--> Graph (core)
    [data] --resolve--> Manifest + shards
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..compression.codec import is_stateful, parse
from ..dag.analysis.samples import why_samples_meet
from ..dag.capture.capture import Captured, capture
from ..dag.capture.proof import Alone
from ..dag.ir.convert import graph_to_bytes
from ..dag.ir.graph import Graph, GraphError, Lowered
from ..dag.ir.recipe import Recipe
from ..dag.rounds.vector import blocks
from ..dag.transforms.lower_sizes import lower_for_sizes
from ..dag.transforms.precision import KeptDtypes
from ..job import Job, SettingsError
from ..job.rounds import method_of
from ..peer.data.survey import Ignored, not_finite, survey
from ..proto.broker_pb2 import RunSpec
from ..proto.common_pb2 import BlobRef
from .files.columns import check_names
from .files.hub import fetched
from .files.shards import Pretrained
from .files.uplink import starting_bytes, takes
from .files.weight_files import Stored
from .files.weight_writer import write_values
from .further_classes import with_feature_statistics, with_virtual_classes
from .job_data import (
    AskPeers,
    ClientSizes,
    JobData,
    check_tokenizer,
    client_sizes,
    example,
    read_data,
    reader_of,
    resolved,
    with_clients,
)
from .matrices import with_base, with_matrices
from .models import models
from .models.adapters import plain_name
from .models.division import why_it_depends
from .models.factories import is_hugging_face
from .models.fitting import fit, wanted_by
from .models.state_dicts import with_state
from .prepared import Prepared
from .privacy import check_hides, check_moves, check_sums, with_noise
from .sidecars import check_base, check_format, sidecars_of
from .stages_of_clients import with_stages

__all__ = ["Prepared", "draft", "prepare", "spec_of"]

Say = Callable[[str], None]

_TURN = threading.RLock()
"""Held by the thread that builds and captures: seeds, and what a capture puts in torch's place, are
the whole process's."""


class _Outlined(NamedTuple):
    """A captured job: with its length, its clients' stages and its matrices, as it is submitted."""

    job: Job
    data: JobData
    outline: models.ModelOutline
    module: nn.Module
    captured: Captured
    pretrained: Pretrained | None
    sizes: tuple[int, ...]
    clients: ClientSizes


def _outlined(job: Job, folder: Path, say: Say, ask: AskPeers | None) -> _Outlined:
    """Capture the model and resolve the data, into `folder`. Raises ValueError for what cannot
    run."""
    job.check_idle()
    _check_codecs(job)
    job = fetched(job, say)
    check_tokenizer(job)
    stored = models.starting_files(job)
    job, data = with_clients(job, read_data(job, folder, say, ask))
    sizes, job = job.train.microbatch_choices, with_noise(resolved(job, data.least, say))
    say("capturing the model")
    outline = models.outline(job, say)
    module = models.capturable(outline, job)
    check_tokenizer(job, module)
    clients = client_sizes(job, data)
    captured = _captured(job, data, module, sizes, clients.alone(job), say)
    graph, sizes = captured.graph, captured.right_sizes(sizes, say)
    pretrained = _pretrained(job, stored, outline, graph, say)
    ignoring = _surveyed(job, data, module, graph, say)
    sizes = _divisions(job, data, module, graph, ignoring, sizes, say)
    depends = partial(_depends, job, data, module, graph, ignoring)
    job = with_matrices(with_stages(job, graph, clients.trained, depends, say), graph, say)
    return _Outlined(job, data, outline, module, captured, pretrained, sizes, clients)


@contextmanager
def prepare(
    job: Job, say: Say = lambda line: None, ask: AskPeers | None = None
) -> Iterator[Prepared]:
    """Captures the model and resolves the data. Raises ValueError for what cannot run. `ask`: for
    data that stays with peers; without it, a job of such data cannot run."""
    with tempfile.TemporaryDirectory(prefix="shoal-submit-") as name:
        with _TURN:
            prepared = _prepared(job, Path(name), say, ask)
        yield prepared


def _prepared(job: Job, folder: Path, say: Say, ask: AskPeers | None) -> Prepared:
    """Return what a submission uploads, with its files in `folder`. Raises as `prepare`."""
    found = _outlined(job, folder / "data", say, ask)
    job, data, outline, module, captured, pretrained, sizes, clients = found
    graph = with_base(job, captured.graph, say)
    core, sizes = _core(graph, job.train.microbatch_size, sizes, say)
    there = pretrained.entries if pretrained else {}
    tensors = {n: t for n, t in captured.tensors.items() if n not in there}
    weights = folder / "weights.safetensors"
    sent = {n: t for n, t in _as_kept(captured).items() if n in tensors}
    sent = {n: t for n, t in sent.items() if not outline.is_made(n)}
    write_values(weights, sent, lambda n: outline.value(n, tensors[n]).to(sent[n].dtype))
    return Prepared(
        job=job,
        graph=graph,
        core=core,
        manifest=data.manifest,
        shards=data.shards,
        weights=weights,
        recipe=_recipe_for(outline, captured, pretrained),
        sidecars=sidecars_of(module, job, folder / "sidecars"),
        microbatch_sizes=sizes,
        local=data.local,
        pretrained=pretrained,
        client_sizes=clients.trained,
        client_data=data.of_clients,
    )


def draft(
    job: Job, say: Say = lambda line: None, ask: AskPeers | None = None
) -> tuple[RunSpec, Graph]:
    """What a preview needs of a job: a spec that names no weights, and the graph. Raises ValueError
    as `prepare` does."""
    with _TURN, tempfile.TemporaryDirectory(prefix="shoal-preview-") as name:
        found = _outlined(job, Path(name), say, ask)
    job, data, outline, _, captured, pretrained, sizes, clients = found
    graph = captured.graph
    read = pretrained.entries if pretrained and job.model.where == "url" else {}
    if words := takes(starting_bytes(graph, lambda n: n in read or outline.is_made(n))):
        say(f"submitting it uploads the weights that it begins with: {words}")
    graph = with_base(job, graph, say)
    spec = spec_of(job, graph, sizes, clients.trained)
    spec.graph.CopyFrom(_ref(graph_to_bytes(graph)))
    spec.data.CopyFrom(_ref(data.manifest.to_json().encode()))
    spec.client_data.extend(_ref(m.to_json().encode()) for m in data.of_clients)
    spec.local.extend(data.local)
    return spec, graph


def _pretrained(
    job: Job, stored: Stored | None, outline: models.ModelOutline, graph: Graph, say: Say
) -> Pretrained | None:
    if stored is None:
        for key in ("rename", "fresh"):
            if said := getattr(job.model, key):
                raise SettingsError(
                    f"model.{key}",
                    f"is {said if key == 'rename' else [*said]}, and no weights are read that it "
                    "could be of: name them (model.weights), or leave it out",
                )
        return None
    options = models.fit_options(outline.module, job, outline.changed)
    found = fit(stored, wanted_by(graph), **options, say=say)
    known = {*found.entries, *outline.changed, *options.get("unsaved", ())}
    check_base(job, graph, known, say)
    return found


def _check_codecs(job: Job) -> None:
    """Raises SettingsError for the text of a codec that there is not, or of one that rounds cannot
    have: broker and peers would say so after the upload."""
    for role in ("default", "activation", "activation_grad", "grad", "sync"):
        text, key = getattr(job.codec, role), f"codec.{role}"
        if text in (None, "none") or (text in ("adatopk", "auto") and role != "sync"):
            continue
        try:
            codec = parse(text)
        except ValueError as error:
            raise SettingsError(key, f'is "{text}", which is no codec: {error}') from None
        if role == "sync" and is_stateful(codec):
            raise SettingsError(
                key,
                f'is "{text}", which remembers what it encoded, and an exchange of a round may be '
                "done again: expected a codec without ef, efd, delta and lowrank",
            )


def _ref(data: bytes) -> BlobRef:
    return BlobRef(hash=hashlib.sha256(data).hexdigest(), size_bytes=len(data))


def _captured(
    job: Job,
    data: JobData,
    module: nn.Module,
    choices: tuple[int, ...],
    alone: Alone,
    say: Say,
) -> Captured:
    check_format(job, module)
    with models.ready(module, job):
        kept = {"": "", "bf16": "bfloat16", "int8": ""}
        captured = capture(
            module,
            example(data.manifest),
            dtype=job.model.dtype,
            kept=KeptDtypes(kept[job.model.frozen_dtype], kept[job.model.trained_dtype]),
            named=plain_name(module),
            sizes=(job.train.microbatch_size,),
            choices=choices,
            alone=alone,
            samples=None if data.local else lambda m, n: reader_of(job, data).batch(0, m, n),
            say=say,
        )
        check_names(name for name, _ in captured.graph.metrics)
        captured = with_state(captured, module)
        if not data.local:
            # Its shapes were captured; ids beyond an embedding or a table of positions are values.
            first = reader_of(job, data).batch(0, 0, max(2, min(4, job.train.microbatch_size)))
            models.check_takes(module, captured.graph, first, say)
        captured = with_virtual_classes(captured, job, reader_of(job, data))
        captured = with_feature_statistics(captured, job)
    _check_narrow(job, captured)
    if job.model.frozen_dtype == "bf16" and all(p.trainable for p in captured.graph.parameters):
        raise SettingsError(
            "model.frozen_dtype",
            'is "bf16", and nothing is frozen: expected model.lora, model.freeze, or no '
            "frozen_dtype",
        )
    narrow = (p for p in captured.graph.parameters if p.trainable and p.spec.dtype == "bfloat16")
    if job.codec.feedback == "ahead" and (one := next(narrow, None)) is not None:
        raise SettingsError(
            "codec.feedback",
            f'is "ahead", and "{one.name}" is trained in {one.spec.dtype}: what holders step '
            'ahead by is less than its digits. Expected "ef", or weights in fp32',
        )
    stages = job.plan.stages
    if stages != "auto" and stages > len(captured.graph.operators):
        raise SettingsError(
            "plan.stages",
            f"is {stages}, and the model has {len(captured.graph.operators)} operators: "
            "expected at most one stage per operator",
        )
    of, names = job.rounds, [p.name for p in captured.graph.parameters if p.trainable]
    if of is not None and of.fragments > max(1, blocks(names)):
        raise SettingsError(
            "sync.options.fragments",
            f"is {of.fragments}, and the model has {blocks(names)} blocks: expected at most one "
            "fragment for each, and 1 where there is none",
        )
    if of is not None and of.privacy is not None:
        check_hides(captured.graph, of.privacy)
    if of is not None and method_of(of.method).buffered:
        check_moves(captured.graph, of.method)
    if of is not None and of.secure:
        check_sums(captured.graph)
    return captured


def _check_narrow(job: Job, captured: Captured) -> None:
    """Raises SettingsError for weights whose gradients or products float16 has not: of losses that
    nobody scales, and of AdamW's eps, it makes 0, and a plain loop NaN."""
    for p in captured.graph.parameters:
        lossy = p.trainable and p.spec.dtype == "float16"
        if job.model.dtype == "fp16" and (lossy or p.spec.dtype == "bfloat16"):
            kept = "trained" if p.trainable else "kept"
            raise SettingsError(
                "model.dtype",
                f'is "fp16", and "{p.name}" is {kept} in {p.spec.dtype}: expected weights in '
                'float32 (frozen ones may be float16), or dtype = "bf16"',
            )
        if lossy:
            raise SettingsError(
                "model.factory",
                f'makes "{p.name}", which is trained, in float16, where small gradients are 0: '
                'expected float32, with model.dtype = "fp16" for products in float16',
            )


def _surveyed(job: Job, data: JobData, module: nn.Module, graph: Graph, say: Say) -> Ignored:
    """Look through all of the data that is here (peer/data/survey.py). Raises DataError; ModelError
    for a Hugging Face model with labels that are ignored, whose means cannot be weighed."""
    if data.local:
        return Ignored()
    reader = reader_of(job, data)
    for line in not_finite(reader):
        say(line)
    found = survey(graph, reader)
    if found.seen and not graph.weight and job.train.microbatches > 1:
        why = "the data has labels that the loss ignores, and the model returns no weight: each"
        why += " microbatch counts the same, however few of its labels count"
        if job.model.loss == "forward" and is_hugging_face(module):
            raise models.ModelError(
                f'{why}. Expected a model.loss that returns {{"loss", "weight"}}, where weight is '
                "what its mean is over; or train.microbatch = train.batch"
            )
        say(f'{why} (return {{"loss": …, "weight": number of labels}} to have them weighed)')
    return found


def _divisions(
    job: Job,
    data: JobData,
    module: nn.Module,
    graph: Graph,
    ignoring: Ignored,
    sizes: tuple[int, ...],
    say: Say,
) -> tuple[int, ...]:
    """The microbatch sizes that the planner may take instead of the job's."""
    if not sizes:
        return ()
    if data.local:
        say(
            f"microbatches of {job.train.microbatch_size}, whatever the plan: whether the loss "
            "depends on them cannot be tried on data that stays with its peer"
        )
        return ()
    why = _depends(job, data, module, graph, ignoring)
    if why:
        say(f"microbatches of {job.train.microbatch_size}, whatever the plan: {why}")
    return () if why else sizes


def _depends(job: Job, data: JobData, module: nn.Module, graph: Graph, ignoring: Ignored) -> str:
    if data.local:  # hosts look at their labels (`check_labels`)
        return why_samples_meet(graph, lambda op: True)
    ignored = {*ignoring.seen, *ignoring.unknown}
    return why_it_depends(module, job, graph, reader_of(job, data), ignored)


def spec_of(job: Job, graph: Graph, sizes: tuple[int, ...], clients: Sequence[int] = ()) -> RunSpec:
    """The spec of a run without its blobs. `clients`: as in RunSpec.client_sizes."""
    return RunSpec(
        version=1,
        name=job.name,
        job=job.to_json(),
        microbatches=job.train.microbatches,
        microbatch_size=job.train.microbatch_size,
        microbatch_sizes=sizes,
        steps=job.train.steps or 0,
        client_sizes=clients,
        update_elements=graph.trained_elements if clients else 0,
    )


def _core(
    graph: Graph, default: int, sizes: tuple[int, ...], say: Say
) -> tuple[Lowered | None, tuple[int, ...]]:
    """The core form for the default microbatch size and as many others as it has, and those."""
    # A single sample is where decompositions take short cuts that fit no other size.
    for allowed in dict.fromkeys((sizes, tuple(s for s in sizes if s > 1), ())):
        try:
            core = lower_for_sizes(graph, (default, *allowed))
        except GraphError as error:
            problem = error
            continue
        if allowed != sizes:
            left = " or ".join(map(str, (default, *allowed)))
            say(f"the planner may choose microbatches of {left} only: the core form differs")
        return core, allowed
    say(f"peers with the core operator set cannot take part: {problem}")
    return None, sizes


def _recipe_for(
    outline: models.ModelOutline, captured: Captured, pretrained: Pretrained | None
) -> Recipe | None:
    """The recipe of what the graph has and files do not; None where nothing is made by one."""
    if outline.recipe is None:
        return None
    there = pretrained.entries if pretrained else {}
    names = [n for n in captured.tensors if outline.is_made(n) and n not in there]
    found = {n: outline.recipe.tensors[n] for n in names}
    return Recipe(outline.recipe.seed, found) if found else None


def _as_kept(captured: Captured) -> dict[str, Tensor]:
    """Shapes and dtypes of all that the graph begins with, as it keeps them."""
    graph = captured.graph
    specs = {p.name: p.spec for p in graph.parameters} | {b.name: b.spec for b in graph.buffers}
    return {
        name: torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype), device="meta")
        for name, spec in specs.items()
    }
