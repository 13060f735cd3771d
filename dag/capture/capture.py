"""Capture: an ordinary `nn.Module` becomes a Graph (docs/architecture.md, "Two planes").

    module --shortened--> module with few of its equal blocks --torch.export--> fx program
    --functional--> fx program --convert--> Graph --repeated--> Graph of all blocks --infer-->
    Graph with grads

The eval form that `dag/transforms/evaluation.py` derives must be what the module does in eval mode.
Where that does not show on tensors without values (trace.py), the module is exported in eval mode,
too, and the capture is refused where the two forms differ. Weights are never computed with and
never copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ..ir.capture_errors import CaptureError, misfit
from ..ir.graph import Graph, GraphError, Lowered, Ref
from ..ir.infer import infer, with_grads
from ..ir.validate import validate
from ..transforms.evaluation import EvaluationError, check_evaluation, only_masks_change
from ..transforms.lower import lower
from ..transforms.precision import AS_MADE, KeptDtypes, mixed
from ..transforms.simplify import simplify
from .blocks import repeats, shortened
from .export import export, functional
from .from_fx import Converted, Names, convert
from .modes import differing_constant, in_mode, only_flags_differ, uncompiled
from .proof import NONE_ALONE, PROOF_S, Alone, Forward, prove
from .python_state import PythonState
from .repeat import DifferError, repeated
from .trace import same_in_eval
from .value_proof import Samples, prove_values

__all__ = [
    "REGISTERED",
    "CaptureError",
    "Captured",
    "capture",
    "check_memory",
    "check_parts",
    "check_tensors",
]

_log = logging.getLogger(__name__)
_PLAIN = tuple(
    getattr(k.__torch_function__, "__func__", k.__torch_function__) for k in (nn.Parameter, Tensor)
)
"""What torch's own classes of tensors do when an operator is called with one."""


class _DiffersInEvalError(CaptureError):
    """The module in eval mode is not the eval form of its graph."""


@dataclass(frozen=True)
class Captured:
    """A model as data. `tensors`: parameters, buffers and constants under the names that the graph
    has for them, each once; they are the module's own, not copies. `core`: the core form at the
    example's microbatch size, if it was asked for."""

    graph: Graph
    tensors: dict[str, Tensor]
    core: Lowered | None = None
    wrong_sizes: Mapping[int, str] = field(default_factory=dict)
    """Those of the `choices` with which the model computes something else, and what."""
    unproved: tuple[str, ...] = ()
    """What was not tried of this capture, and why; for people."""

    def right_sizes(self, sizes: Sequence[int], say: Callable[[str], None]) -> tuple[int, ...]:
        """Leaves the wrong ones out of some sizes of a microbatch, and says which; says too what
        was not tried."""
        for line in self.unproved:
            say(f"of the capture, {line}")
        for size in sizes:
            if size in self.wrong_sizes:
                say(f"no microbatches of {size}: {self.wrong_sizes[size]}")
        return tuple(size for size in sizes if size not in self.wrong_sizes)


@uncompiled()
def capture(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    loss: Callable[..., Any] | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    kept: KeptDtypes = AS_MADE,
    named: Callable[[str], str] = str,
    core: bool = False,
    sizes: Sequence[int] = (),
    choices: Sequence[int] = (),
    alone: Alone = NONE_ALONE,
    samples: Samples | None = None,
    clock: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: None,
) -> Captured:
    """The training graph of a module, for microbatches of any size.

    `inputs`: an example microbatch of at least two samples, by argument name of the forward; the
    first dimension of each is the batch. `loss(output, inputs)` makes the result where the forward
    does not; it returns what a forward may: a scalar loss, or a dict, dataclass or Hugging Face
    output with `loss`, optionally `weight`, and scalar metrics. `dtype`: the casts of mixed
    precision are operators of the graph; weights and the loss stay fp32, or what `kept` says.
    `named`: from the module's names to those of the graph. `core`: also the form for peers with the
    core operator set, at the example's microbatch size. `sizes`: numbers of samples that a
    microbatch will have, `choices`: those that it may have; `alone`: whether other batches
    have one. `samples`: of the data, to try the module with; without them random ones are taken.
    `clock`: gives seconds; the proof of the capture ends after PROOF_S of them, and `say` hears
    when it begins. Tensors on `meta` give the same graph. The module, and what its functions
    remember, are as they were afterwards. Raises CaptureError, and GraphError for an operator
    without core form.
    """
    batch = _batch_of(inputs)
    check_parts(module)
    check_tensors(module)
    with PythonState(module, loss).restored(), in_mode(module, train=True):
        names = _names(module, named)
        known = _tensors(module, named)
        try:
            graph, constants = _whole(module, inputs, loss, names, known)
        except _DiffersInEvalError:  # as two calls in one mode may do as well, which says more
            prove(Forward(module, inputs, loss, frozenset(names.buffers)), (), ())
            raise
    plain = graph
    if dtype != "fp32":
        graph = mixed(kept.applied(graph), batch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    _refuse_misshapen_states(graph)
    try:
        graph = validate(_checked(graph, batch))
    except GraphError as error:
        if advice := misfit(str(error)):
            raise CaptureError(f"{error}\n  {advice}") from None
        raise
    changing = {b.name for b in graph.buffers if b.update is not None}
    running = frozenset(n for n, name in names.buffers.items() if name in changing)
    forward = Forward(module, inputs, loss, running)
    say(f"checking the capture, for {PROOF_S:g} s at most")
    until = clock() + PROOF_S
    proved = prove(forward, sizes or (batch,), choices, late := lambda: clock() >= until, alone)
    size = min(2, *sizes, batch)
    untried = prove_values(forward, plain, names, constants, size, samples, late)
    known |= constants
    used = [p.name for p in graph.parameters] + [b.name for b in graph.buffers]
    tensors = {name: known[name] for name in used}
    unproved = tuple(filter(None, (proved.unproved, untried)))
    core_form = lower(graph.bind(batch)) if core else None
    return Captured(graph, tensors, core_form, proved.wrong, unproved)


def _whole(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Any] | None,
    names: Names,
    tensors: Mapping[str, Tensor],
) -> tuple[Graph, dict[str, Tensor]]:
    """The graph, and the constants that forward makes; blocks that repeat are exported once."""
    with PythonState(module, loss).restored():
        found = repeats(module, inputs, loss)
    if found:
        try:
            with shortened(module, found):
                graph, constants = _traced(module, inputs, loss, _names(module, names.named))
            return repeated(graph, found, names, tensors), constants
        except DifferError as error:
            _log.info("blocks are exported one by one: %s", error)
    return _traced(module, inputs, loss, names)


def _traced(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Any] | None,
    names: Names,
) -> tuple[Graph, dict[str, Tensor]]:
    state = PythonState(module, loss)
    with state.restored(), in_mode(module, train=True):
        trained = export(module, inputs, loss)
        converted = convert(functional(trained), names)
    graph = simplify(converted.graph)
    with state.restored():
        same = only_masks_change(graph) and same_in_eval(module, inputs, loss)
    if same:
        return graph, converted.constants
    with state.restored(), in_mode(module, train=False):
        evaluated = export(module, inputs, loss)
        if not only_flags_differ(trained, evaluated):
            in_eval = convert(functional(evaluated), names)
            _check_evaluation(graph, converted.constants, in_eval)
    return graph, converted.constants


def _refuse_misshapen_states(graph: Graph) -> None:
    """Up to torch 2.11, the last states of an LSTM have one dimension too many where nothing is
    computed, so what reads them was captured with another shape than it will see."""
    read = {value for op in graph.operators for value in op.reads}
    for op in graph.operators:
        if op.target != "aten.lstm.input" or not isinstance(op.args[1], tuple):
            continue
        for value, output, state in zip(op.values[1:], op.outputs[1:], op.args[1], strict=True):
            if not isinstance(state, Ref) or output.spec is None or value not in read:
                continue
            if output.spec.shape != (expected := graph.spec[state.value].shape):
                raise CaptureError(
                    f"module {op.module!r}: torch {torch.__version__} gives the last states of an "
                    f"LSTM the shape {list(output.spec.shape)} before they are computed, and "
                    f"{list(expected)} then: read its output instead, such as the last place of "
                    "each sequence, or use torch 2.12 or newer"
                )


def _batch_of(inputs: Mapping[str, Tensor]) -> int:
    """The example's number of samples; raises CaptureError unless all inputs agree on it."""
    if not inputs:
        raise CaptureError("no example inputs: expected a microbatch of at least two samples")
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise CaptureError(
                f"example input {name!r} is {type(tensor).__name__}: expected a tensor whose "
                "first dimension is the batch"
            )
    sizes = {name: tensor.shape[0] for name, tensor in inputs.items()}
    batch = next(iter(sizes.values()))
    if any(size != batch for size in sizes.values()) or batch < 2:
        raise CaptureError(
            f"example inputs have {sizes} samples: expected the same number, at least 2, as the "
            "first dimension of each"
        )
    return batch


def _names(module: nn.Module, named: Callable[[str], str]) -> Names:
    first: dict[int, str] = {id(p): named(n) for n, p in module.named_parameters()}
    parameters = {n: first[id(p)] for n, p in module.named_parameters(remove_duplicate=False)}
    first = {id(b): named(n) for n, b in module.named_buffers()}
    buffers = {n: first[id(b)] for n, b in module.named_buffers(remove_duplicate=False)}
    return Names(
        parameters,
        buffers,
        frozenset(named(n) for n, p in module.named_parameters() if p.requires_grad),
        frozenset(map(named, module.state_dict(keep_vars=True))),
        named,
    )


class _Held(NamedTuple):
    """A tensor of a module, by where it lies: bytes from `begin` to `end` of a memory."""

    memory: tuple[str, int]
    begin: int
    end: int
    name: str
    tensor: Tensor
    changes: bool

    @classmethod
    def of(cls, name: str, t: Tensor, changes: bool = False) -> _Held:
        """`changes`: whether training changes it."""
        bare = t.is_meta or isinstance(t, FakeTensor)  # without memory, but not without a storage
        memory = (str(t.device), t.untyped_storage()._cdata if bare else 0)
        begin = int(t.storage_offset()) * t.itemsize if bare else t.data_ptr()
        last = sum((n - 1) * by for n, by in zip(t.shape, t.stride(), strict=True))
        return cls(memory, begin, begin + (last + 1) * t.itemsize, name, t, changes)

    def overlaps(self, later: _Held) -> bool:
        """Whether an element of both is the same; `later` begins no earlier, in the same memory."""
        size, apart = self.tensor.itemsize, later.begin - self.begin
        if later.tensor.itemsize != size or apart % size:
            return self.end > later.begin
        taken = torch.zeros((max(self.end, later.end) - self.begin) // size, dtype=torch.bool)
        taken.as_strided(self.tensor.shape, self.tensor.stride()).fill_(True)
        there = taken.as_strided(later.tensor.shape, later.tensor.stride(), apart // size)
        return bool(there.any())


def check_memory(module: nn.Module) -> None:
    """Raise CaptureError for a tensor in the memory of another one that training changes: a graph
    has two, of which one would stay as it is. It is lost where a tensor gets another one's values:
    look before."""
    found: list[_Held] = []
    for name, p in module.named_parameters():
        found += [_Held.of(f"parameter {name!r}", p, p.requires_grad)] if _lies(p) else []
    for name, part in module.named_modules():
        prefix = f"{name}." if name else ""
        running = isinstance(part, nn.modules.batchnorm._NormBase)
        for key, b in part.named_buffers(recurse=False):
            found += [_Held.of(f"buffer {prefix + key!r}", b, running)] if _lies(b) else []
        for key, value in vars(part).items():
            if key in REGISTERED or f"{key}_orig" in part._parameters:  # a hook makes it anew
                continue
            held = tree_leaves(value) if isinstance(value, (Tensor, list, tuple, dict)) else []
            own = (t for t in held if _lies(t) and not isinstance(t, nn.Parameter))
            found += [_Held.of(f"attribute {prefix + key!r}", t) for t in own]
    before: list[_Held] = []
    for b in sorted(found, key=lambda held: held[:3]):
        before = [a for a in before if a.memory == b.memory and a.end > b.begin]
        for a in before:
            both = isinstance(a.tensor, nn.Parameter) and isinstance(b.tensor, nn.Parameter)
            if (both or a.changes or b.changes) and a.overlaps(b):
                raise CaptureError(_shared(*((a, b) if both or a.changes else (b, a)), both))
        before.append(b)


REGISTERED = ("_parameters", "_buffers", "_modules")
"""What a module keeps its tensors and parts in."""


def _lies(tensor: Any) -> bool:
    """Whether it is a tensor in some memory."""
    strided = isinstance(tensor, Tensor) and not is_lazy(tensor) and tensor.layout == torch.strided
    return strided and tensor.numel() > 0


def _shared(first: _Held, other: _Held, both_parameters: bool) -> str:
    if both_parameters:
        a, b = (held.name.removeprefix("parameter ") for held in (first, other))
        return (
            f"parameters {a} and {b} are two Parameters over the same memory: tie them by "
            "assigning the same Parameter object to both"
        )
    return (
        f"{other.name} lies in the memory of {first.name}, which changes as it is trained, and "
        f"peers would have it as it begins: take it from there in forward (.detach() for no "
        "gradient), or keep a copy (.clone()) if it shall stay as it is"
    )


_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def check_parts(module: nn.Module) -> None:
    """Raise CaptureError for modules that are no Python to follow, that divide the work themselves,
    or whose weights have no shape yet."""
    for path, part in module.named_modules():
        where = f"module {path!r}" if path else "the model"
        if isinstance(part, torch.jit.ScriptModule):
            raise CaptureError(
                f"{where} is compiled by torch.jit, and holds no Python that a capture could "
                "follow: give the nn.Module that it was made from"
            )
        if type(part).__name__ in _PARALLEL and type(part).__module__.startswith("torch."):
            raise CaptureError(
                f"{where} is a {type(part).__name__}, which divides batches or weights itself: "
                "give what it holds (its .module); Shoal divides both among peers"
            )
        if any(map(nn.parameter.is_lazy, part._parameters.values())):
            raise CaptureError(
                f"{where} is lazy: its weights have no shape before its first call. Name its sizes "
                "(nn.Linear for nn.LazyLinear), or call the model once in the factory"
            )


def check_tensors(module: nn.Module) -> None:
    """Raise CaptureError for what is Python of the module's tensors, which no peer runs: hooks that
    change gradients, and classes that say what operators do. It is lost where a parameter is given
    another tensor: look before."""
    _refuse_classes(module)
    check_memory(module)
    hooked = [
        f"parameter {n!r}"
        for n, p in module.named_parameters()
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    ]
    hooked += [
        f"module {n!r}"
        for n, m in module.named_modules()
        if m._backward_hooks or m._backward_pre_hooks
    ]
    if hooked:
        raise CaptureError(
            f"{hooked[0]} has a backward hook, which no peer would run: remove it, and write what "
            "it does to the gradient into the forward"
        )


def _refuse_classes(module: nn.Module) -> None:
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        kind = type(tensor)
        if isinstance(tensor, FakeTensor) or is_lazy(tensor):
            continue
        function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
        if function not in _PLAIN or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise CaptureError(
                f"{name!r} is a {kind.__name__}, whose class says what operators do with it, and a "
                "graph has plain tensors: make it an nn.Parameter or a Tensor, and write what the "
                "class does into the forward"
            )


def _tensors(module: nn.Module, named: Callable[[str], str]) -> dict[str, Tensor]:
    found = {named(n): p.detach() for n, p in module.named_parameters()}
    return found | {named(n): b.detach() for n, b in module.named_buffers()}


def _check_evaluation(graph: Graph, constants: Mapping[str, Tensor], in_eval: Converted) -> None:
    """Raises CaptureError where the module in eval mode is not the eval form of the graph."""
    try:
        check_evaluation(graph, in_eval.graph)
    except EvaluationError as error:
        raise _DiffersInEvalError(str(error)) from None
    read = {v.removeprefix("buffer:"): op for op in graph.operators for v in op.reads}
    used = {n: t for n, t in constants.items() if n in read}
    if name := differing_constant(used, in_eval.constants):
        raise CaptureError(
            f"module {read[name].module!r} makes a tensor with other values in eval mode: let "
            "forward do the same in both modes, apart from dropout and batch norm"
        )


def _checked(graph: Graph, batch: int) -> Graph:
    """The graph with its gradients, after its specs were found right at another batch size."""
    bound = graph.bind(batch + 1)
    inferred = infer(bound)
    # What nobody reads may differ between devices (the saved statistics of a batch norm do).
    read = {v for op in bound.operators for v in op.reads} | set(bound.results)
    for value in sorted(read):
        spec = bound.spec[value]
        if inferred[value][0] != spec:
            raise CaptureError(
                f"value {value} is {inferred[value][0]} at batch size {batch + 1}, the capture at "
                f"{batch} says {spec}: write the model for a batch dimension of any size"
            )
    if not inferred[graph.loss][1]:
        raise CaptureError(
            "the loss depends on no trainable parameter: check requires_grad, detach() and no_grad"
        )
    return with_grads(graph, inferred)
