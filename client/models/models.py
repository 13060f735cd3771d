"""From the [model] of a job to a module: starting weights, and frozen parameters.

This runs on the submitter's machine only; peers see a graph and named tensors, never a factory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...dag.analysis.lookups import beyond
from ...dag.capture.capture import CaptureError, check_tensors
from ...dag.capture.modes import uncompiled, with_tensors
from ...dag.ir.graph import Graph
from ...dag.ir.recipe import Recipe
from ...job import LIVE, Job
from ..files.shards import Pretrained
from ..files.weight_files import WeightFilesError
from .adapters import AdapterError, adapted, check_kind, made_of_base, plain_name
from .factories import (
    ModelError,
    factory_of,
    is_hugging_face,
    story,
)
from .initialise import (
    TooLargeError,
    Within,
    check_seed,
    give_values,
    recording_of,
    replace_parameters,
)
from .losses import loss_function, with_own_loss, with_text_loss, with_weight
from .pretrained import changed as changed_by
from .pretrained import fit_options, fitted, loaded, starting_files
from .recording import Recording, recipe_of, record

__all__ = [
    "ModelError",
    "ModelOutline",
    "build",
    "capturable",
    "check_takes",
    "fit_options",
    "has_values",
    "is_small",
    "on_cpu",
    "outline",
    "ready",
    "starting_files",
]


SMALL = 64 << 20
"""Bytes of parameters up to which a model is tried with values at submission: a forward and
backward pass of a few samples then takes less time and memory than importing torch."""


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """A job's module as it is captured, with as few values as it can do with. What files begin
    (`starting_files`) is not in it.

    recording: what is known of its parameters, which lie on `meta`; None: it has all its values.
    recipe: how those begin that need no values; others: the parameters that do, by name. Names are
    those of the graph.
    live: whether the module is the user's own.
    changed: names that files have, of parameters that an adapter begins otherwise (as PiSSA does).
    """

    module: nn.Module
    recording: Recording | None = None
    recipe: Recipe | None = None
    others: Mapping[str, Tensor] = field(default_factory=dict)
    live: bool = False
    changed: frozenset[str] = frozenset()

    def is_made(self, name: str) -> bool:
        """Whether the recipe makes it, so that nobody sends it."""
        return self.recipe is not None and name in self.recipe.tensors

    def value(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, buffer or constant that the capture has as `tensor`, with its values."""
        tensor = self.others.get(name, tensor)
        if self.recording is not None and self.recording.has(tensor):
            return self.recording.value(tensor)
        return tensor


def build(job: Job) -> nn.Module:
    """The job's module with its starting weights; a live module with values is returned itself.

    Weights of a factory are made from its recipe under the job's seed, as peers make theirs. Raises
    ModelError, WeightFilesError.
    """
    found = outline(job)
    _fill(found, job)
    return found.module


def _fill(found: ModelOutline, job: Job) -> None:
    """Gives an outline its values: those of files, and of its recording."""
    module, plain = found.module, plain_name(found.module)
    files = fitted(module, job, found.changed)
    entries = files.entries if files else {}

    def read(name: str) -> Tensor | None:
        entry = entries.get(plain(name))
        return None if files is None or entry is None else files.stored.weights.read(entry)

    if found.recording is not None:
        give_values(module, found.recording, job.seed, read)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            is_given = found.recording is not None and isinstance(tensor, nn.Parameter)
            if not is_given and (value := read(name)) is not None:
                tensor.copy_(value)


def outline(job: Job, say: Callable[[str], None] = lambda line: None) -> ModelOutline:
    """The job's module without its weights, where it can be made so. Raises ModelError.

    A factory that cannot do without values is run as it is, which is said, with the memory; where
    that is more than this machine has, ModelError is raised before it is taken.
    """
    changed = frozenset[str]()
    if job.module is not None:
        if not isinstance(job.module, nn.Module):
            raise ModelError(
                f"model is a {type(job.module).__name__}: expected a torch.nn.Module, a table, or "
                'a factory such as "file.py:fn"'
            )
        if job.model.lora:
            raise ModelError(
                "`model.lora` is for models that a factory makes: put the adapter into a live "
                "module yourself (peft.inject_adapter_in_model)"
            )
        module, recording = job.module, recording_of(job.module)
    elif job.model.factory.startswith(LIVE):
        raise ModelError(
            f"the job names the live module {job.model.factory.removeprefix(LIVE)}, which is not "
            "in a job that was read back: pass Job(model=module, …)"
        )
    else:
        module, recording, files = _made(factory_of(job), job, say)
        changed = changed_by(module, recording, files)
    check_kind(module)
    setting = "" if job.model.lora else made_of_base(module)
    if setting and starting_files(job) is not None:
        raise ModelError(
            f"the adapter of the model ({setting}) was made of weights that are replaced "
            "afterwards (model.weights): load them in the factory before the adapter is made, "
            "or let `model.lora` make it"
        )
    if recording is None:
        return ModelOutline(module=module, changed=changed)
    try:
        check_seed(recording, job.seed)
        recipe, others, empty = recipe_of(module, recording, job.seed)
    except ValueError as error:
        raise ModelError(str(error)) from None
    if empty and starting_files(job) is None:
        rest = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        say(f'nothing gives parameter "{empty[0]}"{rest} a value: it begins at 0')
    plain = plain_name(module)
    recipe = Recipe(recipe.seed, {plain(n): i for n, i in recipe.tensors.items()})
    others = {plain(n): t for n, t in others.items()}
    return ModelOutline(
        module=module,
        recording=recording,
        recipe=recipe,
        others=others,
        live=job.module is not None,
        changed=changed,
    )


def capturable(found: ModelOutline, job: Job) -> nn.Module:
    """The module of an outline as it is captured, on the CPU; a live one is copied and stays as it
    is. One of at most SMALL bytes gets its values, so that it can be tried; parameters of a larger
    one are fake: they have shape, dtype and place, and no values. Raises ModelError, and
    CaptureError for hooks on what gets other tensors here."""
    check_tensors(found.module)
    if found.recording is None:
        return on_cpu(found.module)
    try:
        module = _copied(found.module, lambda tensor: tensor) if found.live else found.module
    except Exception as error:  # a copy runs the user's code
        raise ModelError(f"the model cannot be copied ({story(error)})") from error
    if sum(p.nbytes for p in module.parameters()) <= SMALL:
        _fill(replace(found, module=module), job)
        return module
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def faked(name: str, parameter: nn.Parameter) -> Tensor | None:
        if not parameter.is_meta:
            return None
        with fake:
            shape, strides = parameter.shape, parameter.stride()
            return torch.empty_strided(shape, strides, dtype=parameter.dtype, device="cpu")

    replace_parameters(module, faked)
    return module


def has_values(module: nn.Module) -> bool:
    """Whether the module could be run."""
    return not any(isinstance(p, FakeTensor) or p.is_meta for p in module.parameters())


def _made(
    factory: Callable[[], nn.Module], job: Job, say: Callable[[str], None]
) -> tuple[nn.Module, Recording | None, Pretrained | None]:
    """The factory's module, without values if it can do without them, with the adapter that the job
    wants; and the files that its base begins with, if an adapter was made over them."""
    base: list[Pretrained] = []

    def with_adapter(module: nn.Module, recording: Recording | None) -> nn.Module:
        if not job.model.lora:
            return module
        if (found := fitted(module, job)) is not None:
            loaded(module, found, recording)
            base[:] = [found]
        return adapted(module, job.model.lora, job.model.factory.removeprefix("hf:"), say)

    try:
        module, recording = record(factory, job.seed, with_adapter)
        return module, recording, next(iter(base), None)
    except (AdapterError, CaptureError, WeightFilesError):
        raise
    except Exception as error:  # the user's code, on tensors that it does not expect
        why = error
    name = job.model.factory
    try:
        with torch.random.fork_rng(devices=[]), Within() as within:
            torch.manual_seed(job.seed)
            module = with_adapter(factory(), None)
    except ModelError as error:
        if isinstance(error.__cause__, TooLargeError):
            raise ModelError(
                f'factory "{name}" needs values ({why}), and they do not fit here: '
                f"{error.__cause__}; let it make its tensors without looking into them, or run it "
                "on a machine with more memory"
            ) from error
        raise
    say(
        f'factory "{name}" needs values ({why}): its weights are made here, '
        f"{within.taken / 2**30:.2f} GiB in memory, and uploaded"
    )
    return module, None, next(iter(base), None)


def on_cpu(module: nn.Module) -> nn.Module:
    """The module itself, or a copy on the CPU of one that lies on another device: it is captured
    with microbatches of the CPU, and a live module stays where the user has it.

    Raises ModelError for a module on `meta` of which nothing else is known, and for one that cannot
    be copied.
    """
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    elsewhere = {name: t for name, t in tensors.items() if t.device.type != "cpu"}
    for name, tensor in elsewhere.items():
        if tensor.is_meta:
            raise ModelError(
                f'"{name}" is on the meta device, where weights have no values: make the model on '
                "the CPU, make it with shoal.deferred_init(factory), or give it values first "
                '(module.to_empty(device="cpu"), then load them)'
            )
    if not elsewhere:
        return module
    try:
        return _copied(module, lambda tensor: tensor.cpu())
    except Exception as error:  # a copy runs the user's code
        where = next(iter(elsewhere.values())).device
        raise ModelError(
            f"the model is on {where} and cannot be copied to the CPU ({story(error)}): pass "
            "it on the CPU (module.cpu())"
        ) from error


def _copied(module: nn.Module, change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy with changed parameters and buffers; what is tied stays tied."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(change(p.detach()), p.requires_grad) for p in module.parameters()
    }
    memo |= {id(b): change(b.detach()) for b in module.buffers()}
    return copy.deepcopy(module, memo)


# ---------------------------------------------------------------- for the capture


@contextmanager
def ready(module: nn.Module, job: Job) -> Iterator[nn.Module]:
    """The module as it is captured: it takes a microbatch and gives its loss, by the job's own loss
    function or, for a Hugging Face model, one over text; `freeze` is applied, and nothing of it is
    compiled. Afterwards it is as it was: a live module stays the user's own.

    Raises ModelError for a freeze glob that matches nothing, and a loss that is not there.
    """
    loss = loss_function(job)
    chosen = _to_freeze(module, job.model.freeze)
    kind = type(module)
    data = job.data
    try:
        for parameter in chosen:
            parameter.requires_grad_(False)
        # Only the class changes: a wrapper around the module would change every name.
        if data.is_records and (loss is not None or not is_hugging_face(module)):
            raise ModelError(
                f'`data.kind` is "{data.kind}", whose samples count by their tokens: expected a '
                'causal language model of transformers, and model.loss = "forward"'
            )
        if loss is not None:
            module.__class__ = with_own_loss(kind, loss)
        elif is_hugging_face(module) and data.kind != "arrays":
            module.__class__ = with_text_loss(module, job)
        elif is_hugging_face(module):
            module.__class__ = with_weight(kind)
        with uncompiled():
            yield module
    finally:
        module.__class__ = kind
        for parameter in chosen:
            parameter.requires_grad_(True)


def check_takes(
    module: nn.Module, graph: Graph, batch: Mapping[str, Tensor], say: Callable[[str], None]
) -> None:
    """Whether a module that is `ready` takes the first samples of the data. That their shapes go
    through it the capture has seen; here it is their values: the rows that they ask for must be
    there. A module of at most SMALL bytes also runs forward; it is as it was afterwards.

    Raises ModelError for data that it does not take. What is the machine's fault (memory, an
    operator that a CPU has not) is said.
    """
    what = ", ".join(
        f"{k} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for k, t in batch.items()
    )

    def refused(why: str) -> ModelError:
        return ModelError(
            f"the first samples of the data ({what}) do not go through the model: {why}; check "
            "data.length, and that the model knows every value of inputs and targets"
        )

    samples = len(next(iter(batch.values())))
    if missing := beyond(graph.bind(samples), {f"in:{k}": t for k, t in batch.items()}):
        raise refused(missing)
    if not is_small(module):
        return
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            with_tensors(module, buffers),
        ):
            module(**batch)
    except Exception as error:  # whatever the user's code raises
        text = str(error)
        if isinstance(error, MemoryError | NotImplementedError) or "allocate memory" in text:
            say(f"no batch could be tried here ({type(error).__name__}: {text})")
            return
        raise refused(story(error)) from error


def is_small(module: nn.Module) -> bool:
    """Whether the module has values, and so few of them that trying a batch costs nothing."""
    return has_values(module) and sum(p.nbytes for p in module.parameters()) <= SMALL


def _to_freeze(module: nn.Module, globs: tuple[str, ...]) -> list[nn.Parameter]:
    """The trainable parameters that a glob names, by any of their names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for glob in globs:
        if not any(fnmatch(name, glob) for name in parameters):
            raise ModelError(f'`model.freeze` has "{glob}", which matches no parameter')
    chosen = [
        p
        for name, p in parameters.items()
        if p.requires_grad and any(fnmatch(name, glob) for glob in globs)
    ]
    return list({id(p): p for p in chosen}.values())
