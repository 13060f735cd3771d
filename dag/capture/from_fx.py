"""From a functional fx program to a Graph: names, arguments, specs, random operators, batch norms.

Only what the results need is converted, so dead code (logits that nobody reads, assertions) need
not be capturable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from ..ir import operators
from ..ir.capture_errors import CaptureError, line_of, refused
from ..ir.fx_args import arg_of, is_plain, module_of, name_of, size_of, spec_of
from ..ir.graph import Buffer, Graph, Input, Operator, Output, Parameter, Ref, TensorSpec
from ..ir.torch_parts import BY_MASK, instead_of
from ..transforms.norm import counter_step, with_updates
from .export import PREFIX, ExportedModel
from .rewrite import Rewrite, rewrite

__all__ = ["Converted", "Names", "convert"]


@dataclass(frozen=True)
class Names:
    """Canonical names of the user's tensors: the first name of each in the module, as `named`
    says it."""

    parameters: dict[str, str]
    """Every name in the state dict → canonical name."""
    buffers: dict[str, str]
    trainable: frozenset[str]
    persistent: frozenset[str]
    named: Callable[[str], str] = str

    def parameters_of(self, specs: Mapping[str, TensorSpec]) -> tuple[Parameter, ...]:
        """The parameters of a graph, by the specs of them."""
        tied: dict[str, list[str]] = {name: [] for name in self.parameters.values()}
        for name, canonical in self.parameters.items():
            if (plain := self.named(name)) != canonical:
                tied[canonical].append(plain)
        return tuple(
            Parameter(name, specs[name], name in self.trainable, tuple(also))
            for name, also in tied.items()
        )


@dataclass
class Converted:
    """A graph whose `Output.grad` is not filled yet, and its constants."""

    graph: Graph
    constants: dict[str, Tensor]


@dataclass
class _State:
    env: dict[Node, Any] = field(default_factory=dict)
    """fx node → Arg, or the list of value names of an operator that returns a tuple."""
    operators: list[Operator] = field(default_factory=list)
    randoms: int = 0


def convert(exported: ExportedModel, names: Names) -> Converted:
    """Raises CaptureError with the user's line for what no graph can express."""
    nodes = list(exported.program.graph_module.graph.nodes)
    by_name = {n.name: n for n in nodes}
    state = _State()
    inputs, buffers, constants = _inputs(exported, names, by_name, state)
    outputs, mutated = _outputs(exported, names, by_name)
    steps = {
        name: counter_step(node, lambda n, name=name: state.env.get(n) == Ref(f"buffer:{name}"))  # type: ignore[misc]
        for name, node in mutated.items()
    }
    statistics = [n for name, n in mutated.items() if steps[name] is None]
    live = _live([*outputs, *statistics])
    for node in nodes:
        if node in live and node.op == "call_function":
            _convert_node(node, live[node], state)
        elif node in live and node.op not in ("placeholder", "output"):
            user = next(iter(node.users), node)
            raise refused(
                line_of(user),
                f"{user.target} runs a graph of its own inside (torch.cond, while_loop, scan, map)",
                "use torch.where for a choice, and a Python loop of a fixed length",
            )
    values = [str(state.env[n].value) for n in outputs]
    graph = Graph(
        inputs=inputs,
        parameters=_parameters(exported, names, by_name),
        buffers=tuple(Buffer(b, spec, b in names.persistent) for b, spec in buffers.items()),
        operators=tuple(state.operators),
        loss=values[0],
        weight=values[1] if exported.has_weight else "",
        metrics=tuple(zip(exported.metrics, values[1 + exported.has_weight :], strict=True)),
    )
    new_values = {
        name: state.env[node] if steps[name] is None else steps[name]
        for name, node in mutated.items()
    }
    graph = with_updates(graph, new_values, {n: line_of(node) for n, node in mutated.items()})
    read = {v for op in graph.operators for v in op.reads}
    kept = tuple(b for b in graph.buffers if b.persistent or f"buffer:{b.name}" in read)
    return Converted(replace(graph, buffers=kept), constants)


def _strip(name: str) -> str:
    return name.removeprefix(PREFIX)


def _inputs(
    exported: ExportedModel, names: Names, by_name: dict[str, Node], state: _State
) -> tuple[tuple[Input, ...], dict[str, Any], dict[str, Tensor]]:
    """Fills the environment with the placeholders; returns inputs, specs of buffers, constants."""
    inputs: list[Input] = []
    buffers: dict[str, Any] = {}
    constants: dict[str, Tensor] = {}
    program = exported.program
    data = iter(exported.inputs)
    for spec in program.graph_signature.input_specs:
        node = by_name.get(getattr(spec.arg, "name", ""))
        if spec.kind is InputKind.USER_INPUT and node is not None:
            name = next(data)
            inputs.append(Input(name, spec_of(node.meta["val"], node)))
            state.env[node] = Ref(f"in:{name}")
        elif spec.kind is InputKind.PARAMETER and node is not None:
            state.env[node] = Ref(f"param:{names.parameters[_strip(str(spec.target))]}")
        elif spec.kind is InputKind.BUFFER and node is not None:
            name = names.buffers[_strip(str(spec.target))]
            buffers[name] = spec_of(node.meta["val"], node)
            state.env[node] = Ref(f"buffer:{name}")
        elif spec.kind is InputKind.CONSTANT_TENSOR and node is not None:
            name = _strip(str(spec.target))
            buffers[name] = spec_of(node.meta["val"], node)
            constants[name] = program.constants[str(spec.target)]
            state.env[node] = Ref(f"buffer:{name}")
        else:
            raise CaptureError(f"the model takes a {spec.kind.name}, which cannot be captured")
    return tuple(inputs), buffers, constants


def _parameters(
    exported: ExportedModel, names: Names, by_name: dict[str, Node]
) -> tuple[Parameter, ...]:
    specs: dict[str, Any] = {}
    for spec in exported.program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER:
            node = by_name[spec.arg.name]
            specs[names.parameters[_strip(str(spec.target))]] = spec_of(node.meta["val"], node)
    return names.parameters_of(specs)


def _outputs(
    exported: ExportedModel, names: Names, by_name: dict[str, Node]
) -> tuple[list[Node], dict[str, Node]]:
    """Nodes of loss, weight, metrics; and for each mutated buffer the node of its new value."""
    outputs: list[Node] = []
    mutated: dict[str, Node] = {}
    for spec in exported.program.graph_signature.output_specs:
        node = by_name.get(getattr(spec.arg, "name", ""))
        if node is None:
            raise CaptureError("the loss does not depend on the model: it is a constant")
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append(node)
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            mutated[names.buffers[_strip(str(spec.target))]] = node
        else:
            reason = "the forward changes one of its inputs or parameters in place"
            target = node.target
            part = instead_of(name_of(target)) if isinstance(target, OpOverload) else None
            raise refused(line_of(node), *(part or (reason, "work on a copy, e.g. x = x.clone()")))
    return outputs, mutated


def _live(roots: list[Node]) -> dict[Node, Rewrite]:
    """What the roots need, each node as it is written in the graph."""
    live: dict[Node, Rewrite] = {}
    todo = list(roots)
    while todo:
        node = todo.pop()
        if node not in live:
            live[node] = rewrite(node)
            todo.extend(_nodes((live[node].args, live[node].kwargs)))
    return live


def _nodes(arg: Any) -> list[Node]:
    if isinstance(arg, Node):
        return [arg]
    items = arg.values() if isinstance(arg, dict) else arg
    if isinstance(arg, (tuple, list, dict)):
        return [n for item in items for n in _nodes(item)]
    return []


def _convert_node(node: Node, as_: Rewrite, state: _State) -> None:
    value = node.meta.get("val")
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)):
        state.env[node] = size_of(value, node)
        return
    if node.target is operator.getitem:
        made, item = state.env[node.args[0]], int(str(node.args[1]))  # type: ignore[index]
        if not isinstance(made, list) or item >= len(made):
            raise CaptureError(
                f"{line_of(node)}\n  result {item} of {node.args[0]} has no counterpart in the "
                "graph: do not use the mask of a dropout"
            )
        state.env[node] = Ref(made[item])
        return
    _refuse(node, as_.target)
    is_tuple = isinstance(value, (tuple, list)) and not as_.first_only
    args = tuple(arg_of(a, state.env, node) for a in as_.args)
    if operators.takes_key(as_.target):
        args += (state.randoms,)
        state.randoms += 1
    values = value if isinstance(value, (tuple, list)) else (value,)
    made_op = Operator(
        name=node.name,
        target=as_.target,
        args=args,
        kwargs=tuple(
            (k, arg_of(a, state.env, node)) for k, a in as_.kwargs.items() if not is_plain(k, a)
        ),
        outputs=tuple(
            Output(None if v is None else spec_of(v, node))
            for v in (values if is_tuple else values[:1])
        ),
        returns_tuple=is_tuple,
        module=module_of(node, PREFIX),
    )
    state.operators.append(made_op)
    from_tuple = is_tuple or as_.first_only
    state.env[node] = list(made_op.values) if from_tuple else Ref(made_op.name)


def _is_mask(index: Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _refuse(node: Node, target: str) -> None:
    """Raises CaptureError for an operator that no peer may run."""
    if target == "aten.index.Tensor" and any(map(_is_mask, _nodes(node.args[1]))):
        raise refused(line_of(node), *BY_MASK)
    if operators.allowed(target, "full"):
        return
    reason = f"operator {target} is not on the allow-list"
    advice = "write it with other torch operators"
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        reason = f"random operator {target} has no counter-based form"
        advice = "use dropout, torch.rand, torch.randn or torch.bernoulli"
    if part := instead_of(target):
        reason, advice = part
    elif target in ("aten.item.default", "aten._local_scalar_dense.default"):
        reason, advice = "`.item()` makes a Python number of a tensor", "keep the value a tensor"
    raise refused(line_of(node), reason, advice)
