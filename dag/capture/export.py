"""The call of torch.export: from a module to a functional ATen program, batch size free.

The module is wrapped so that its forward returns a flat tuple: loss, weight (if any), metrics.
What else it returns (logits, caches) is not an output and dies as dead code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.export import Dim, ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from ..ir.capture_errors import (
    CaptureError,
    Place,
    explain,
    line_of,
    refused,
    text_of,
    unfollowed,
)
from ..ir.fx_args import name_of
from ..ir.operators import allowed
from ..ir.torch_parts import instead_of
from .places import BatchSizeWatch, Notes, own_gradients

__all__ = ["ExportedModel", "bare", "export", "forward_of", "functional"]

PREFIX = "module."
"""What the wrapper puts before every name of the user's module."""


@dataclass
class ExportedModel:
    """A program; its first outputs are loss, then weight if `has_weight`, then the
    metrics in the order of their names. Names of values carry PREFIX."""

    program: ExportedProgram
    inputs: tuple[str, ...]
    has_weight: bool
    metrics: tuple[str, ...]


@dataclass
class _Seen:
    """What the wrapper found in the forward's return value."""

    has_weight: bool = False
    metrics: list[str] = field(default_factory=list)


class _Wrapper(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        loss: Callable[..., Any] | None,
        seen: _Seen,
    ) -> None:
        super().__init__()
        self.module = module
        self.names, self.loss, self.seen = names, loss, seen
        self.notes = Notes()
        self.train(module.training)

    def train(self, mode: bool = True) -> Self:
        """Leaves the flags of the wrapped module alone."""
        self.training = mode
        return self

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(self.names, inputs, strict=True))
        with self.notes:
            returned = _returned(self.module, given, self.loss)
        self.notes.check()
        return _results(returned, self.seen)


def _returned(
    module: nn.Module, given: Mapping[str, Tensor], loss: Callable[..., Any] | None
) -> Any:
    """What the forward returns, or the loss function of it."""
    if loss is None:
        return module(**given)
    taken = _taken(module, given)
    return loss(module(**{k: given[k] for k in taken}), given)


def forward_of(
    module: nn.Module, given: Mapping[str, Tensor], loss: Callable[..., Any] | None
) -> tuple[Tensor, ...]:
    """Loss, weight (if any) and metrics of a microbatch, run outside of an export. Raises
    CaptureError where an export would for what gradients are made of."""
    with _quiet(), own_gradients():
        return _results(_returned(module, given, loss), _Seen())


def _taken(module: nn.Module, given: Mapping[str, Tensor]) -> list[str]:
    """Names of the inputs that the forward takes."""
    takes = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in takes.values()):
        return list(given)
    return [name for name in given if name in takes]


def _said(value: Any) -> str:
    """A value in an error: dtype and shape of a tensor (batch: the size that may vary)."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    shape = ", ".join(str(d) if isinstance(d, int) else "batch" for d in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"


def _results(returned: Any, seen: _Seen) -> tuple[Tensor, ...]:
    """(loss, weight?, metrics…); fills `seen`. Raises CaptureError where no scalar loss is."""
    if isinstance(returned, Tensor):
        entries: Mapping[str, Any] = {"loss": returned}
    elif isinstance(returned, Mapping):
        entries = returned
    elif dataclasses.is_dataclass(returned) and not isinstance(returned, type):
        entries = {f.name: getattr(returned, f.name) for f in dataclasses.fields(returned)}
    else:
        raise CaptureError(
            f"the model's forward returned {type(returned).__name__}: expected a scalar loss, or a "
            'dict or dataclass with "loss" and optionally "weight" and scalar metrics'
        )
    loss = entries.get("loss")
    if not isinstance(loss, Tensor):
        raise CaptureError(
            "the model's forward returned no loss "
            f"(it has {', '.join(map(str, entries)) or 'nothing'}): return a scalar loss, or a "
            'dict with "loss"; a Hugging Face model needs `labels` among its inputs'
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise CaptureError(
            f"the loss is {_said(loss)}: expected a floating scalar; reduce it, e.g. with .mean()"
        )
    found = [loss]
    weight: Any = entries.get("weight")
    if isinstance(weight, (int, float, torch.SymInt)):
        weight = torch.full((), cast(Any, weight), dtype=torch.float32, device=loss.device)
    if weight is not None:
        if not isinstance(weight, Tensor) or weight.dim() != 0:
            raise CaptureError(f"the weight is {_said(weight)}: expected a scalar, e.g. mask.sum()")
        seen.has_weight = True
        found.append(weight.float())
    for name, value in entries.items():
        scalar = isinstance(value, Tensor) and value.dim() == 0 and not value.is_complex()
        if scalar and name not in ("loss", "weight"):
            seen.metrics.append(str(name))
            found.append(value.float().clone())  # a parameter as metric: a value of its own
    return tuple(found)


def export(
    module: nn.Module,
    inputs: Mapping[str, Tensor],
    loss: Callable[..., Any] | None,
) -> ExportedModel:
    """The module in its present mode as torch.export gives it, in-place operators and views
    included. Raises CaptureError. The module's tensors are not changed."""
    if loss is None and len(_taken(module, inputs)) < len(inputs):
        raise CaptureError(
            f"the model's forward takes {inspect.signature(module.forward)}, the example inputs "
            f"are {', '.join(inputs)}: name the inputs (data.inputs, data.targets) as the "
            "arguments of forward, or give a loss function that takes the others"
        )
    seen = _Seen()
    wrapper = _Wrapper(module, tuple(inputs), loss, seen)
    # Two names for one tensor would become one input of the program.
    given = tuple(t.detach().clone() for t in inputs.values())
    batch = Dim("batch", min=2)
    with _quiet(), _right_losses(), own_gradients():
        try:
            with preserve_node_meta():
                program = torch.export.export(
                    wrapper, given, dynamic_shapes={"inputs": tuple({0: batch} for _ in given)}
                )
        except CaptureError:
            raise
        except Exception as error:  # whatever torch.export raises is explained to the user
            wrapper.notes.check()
            if "fake tensor in the exported program" in str(error):
                raise unfollowed(wrapper.notes.unseen) from error
            place, part = _where_fixed(wrapper, given, error)
            if part is not None:
                raise refused(text_of(place), *part) from error
            raise explain(error, place) from error
        _detach_no_grad(program)
    # The forward ran more than once if torch asked for it; the names of one pass are enough.
    metrics = tuple(dict.fromkeys(seen.metrics))
    return ExportedModel(program, tuple(inputs), seen.has_weight, metrics)


def functional(exported: ExportedModel) -> ExportedModel:
    """The program without in-place operators; what is no view stays composite.
    Raises CaptureError."""
    with _quiet(), _right_losses():
        try:
            # Each pass traces everything again, so what is seen now is not left for a second one.
            rules = _unlisted(exported.program, set())
            program = exported.program.run_decompositions(rules)
            if _checks_values(program):
                rules = {}
                program = exported.program.run_decompositions(rules)
            tried: set[Any] = set(rules)
            while rules := _unlisted(program, tried):
                plainer = program.run_decompositions(rules)
                if _checks_values(plainer):
                    break
                program = plainer
                tried |= rules.keys()
            return dataclasses.replace(exported, program=program)
        except Exception as error:  # whatever torch.export raises is explained to the user
            raise explain(error) from error


def _checks_values(program: ExportedProgram) -> bool:
    """Whether it checks values at run time (the decomposition of linalg.inv does)."""
    return any(spec.kind is InputKind.TOKEN for spec in program.graph_signature.input_specs)


def _unlisted(program: ExportedProgram, tried: set[Any]) -> dict[Any, Callable[..., Any]]:
    """torch's own decompositions of the operators of the program that no peer would run, apart from
    those tried before: so the allow-list need not name every alias and composite that there is."""
    targets = [n.target for n in program.graph_module.graph.nodes if n.op == "call_function"]
    missing = {
        t: None  # in their order
        for t in targets
        if isinstance(t, torch._ops.OpOverload)
        and t not in tried
        and torch.Tag.nondeterministic_seeded not in t.tags  # these get masks of ours
        and not t._schema.is_mutable  # these become functional first
        and not allowed(name_of(t), "full")
    }
    known = default_decompositions() if missing else {}
    return {t: known[t] for t in missing if t in known}


@contextlib.contextmanager
def _right_losses() -> Iterator[None]:
    """While a loss stays composite, torch (2.13) takes its shape from a Python reference whose
    `reduction` is text, and hands it the operator's number: an unreduced loss gets the shape of a
    scalar, or an error. Without the reference it takes the shape from the operator itself."""
    aten = torch.ops.aten
    losses = (aten.nll_loss, aten.margin_ranking_loss, aten.hinge_embedding_loss)
    kept = {x.default: decomposition_table.pop(x.default, None) for x in losses}
    try:
        yield
    finally:
        decomposition_table.update({k: f for k, f in kept.items() if f is not None})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences what torch says about its own insides while it traces: errors reach the user through
    CaptureError, and nothing else here is the user's doing."""
    loggers = [
        logging.getLogger(name)
        for name in (
            "torch.fx.experimental.symbolic_shapes",
            "torch._subclasses.fake_tensor",
            "torch.export",
            "torch._export",
        )
    ]
    levels = [x.level for x in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\..*")
        warnings.filterwarnings("ignore", module=r"copyreg")
        warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*")
        # An LSTM keeps its weights in a list besides; torch takes it for state of the user's.
        warnings.filterwarnings("ignore", message=r".*_flat_weights\[")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # torch prints the graph so far to stderr when a branch depends on data.
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def _where_fixed(
    wrapper: nn.Module, given: tuple[Tensor, ...], error: BaseException
) -> tuple[Place | None, tuple[str, str] | None]:
    """Where the batch size was fixed, and why and what to write instead where that is a part of
    torch that no graph has: the export again, with sizes free to be fixed, watched."""
    if "Constraints violated" not in str(error):
        return None, None
    watch, part = BatchSizeWatch(), None
    with watch, contextlib.suppress(Exception):  # only these are wanted
        program = torch.export.export(
            wrapper, given, dynamic_shapes={"inputs": tuple({0: Dim.AUTO} for _ in given)}
        )
        called = (n for n in program.graph.nodes if n.op == "call_function")
        part = next(filter(None, (instead_of(str(n.target)) for n in called)), None)
    return watch.place, part


def _detach_no_grad(program: ExportedProgram) -> None:
    """Inserts a `detach` behind every `torch.no_grad()` region: the decomposition inlines the
    region, and without the mark a gradient would flow through it."""
    grad_mode = torch.ops.higher_order.wrap_with_set_grad_enabled
    graph = program.graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not grad_mode:
            continue
        body = getattr(program.graph_module, str(node.args[1].target))
        _check_no_grad(body, node)
        for item in list(node.users):
            if not isinstance(item.meta.get("val"), Tensor):
                continue
            with graph.inserting_after(item):
                detach = graph.call_function(torch.ops.aten.detach.default, (item,))
            detach.meta = dict(item.meta)
            item.replace_all_uses_with(detach, delete_user_cb=lambda user, d=detach: user is not d)
    program.graph_module.recompile()


def _check_no_grad(body: GraphModule, outer: Node) -> None:
    """Refuses what a `detach` behind the region cannot express."""
    for node in body.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0]:
            raise refused(
                line_of(node),
                "torch.enable_grad() inside torch.no_grad() cannot be captured",
                "move it out of the no_grad region",
            )
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        changed = _memory(node.args[0])
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        sources = [s for n, s in zip(inputs, outer.args[2:], strict=True) if _memory(n) == changed]
        if sources and all(isinstance(s, Node) and s.op != "placeholder" for s in sources):
            raise refused(
                line_of(node),
                "an in-place operator under torch.no_grad() changes a tensor made outside of it",
                "write it out of place, or change a copy (.clone())",
            )


def _memory(value: Any) -> int | None:
    """The memory of a traced value: views of one tensor have the same."""
    traced = value.meta.get("val") if isinstance(value, Node) else None
    return traced.untyped_storage()._cdata if isinstance(traced, Tensor) else None


def bare(tensor: Tensor, device: str) -> Tensor:
    """A tensor of the same shape, strides and dtype on a device, without values."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made
